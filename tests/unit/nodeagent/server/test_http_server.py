from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from nodeagent.server import http_api, listening
from nodeagent.server.http_api import CannotListen, HttpServer
from nodeagent.server.listening import HeldByOther
from nodeagent.server.retrying import RetryingServer
from tests.unit.nodeagent.server.test_http_api import Shown


async def hello(_: web.Request) -> web.Response:
    return web.Response(text="hello")


def made(port: int = 0) -> HttpServer:
    app = web.Application()
    app.router.add_get("/", hello)
    return HttpServer(app, "127.0.0.1", port)


@pytest.fixture
def server() -> Iterator[HttpServer]:
    found = made()
    found.start()
    yield found
    found.stop()


def asked(connection: socket.socket, headers: str = "") -> bytes:
    connection.settimeout(10)
    connection.sendall(f"GET / HTTP/1.1\r\nHost: here\r\n{headers}\r\n".encode())
    return connection.recv(1000)


def test_idle_connections_make_room_for_one_with_a_request(server: HttpServer) -> None:
    def one() -> socket.socket:
        return opened.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))

    with ExitStack() as opened:
        silent = [one() for _ in range(2 * http_api.MAX_IDLE)]
        for each in silent:
            each.settimeout(10)
        assert b"200 OK" in asked(one())
        for each in silent[: http_api.MAX_IDLE]:
            with suppress(ConnectionResetError):
                assert each.recv(1) == b"", "the oldest connections must be closed"
        assert b"200 OK" in asked(silent[-1])
        assert b"200 OK" in asked(silent[-1], "Connection: close\r\n")


def test_an_address_in_use_is_named(server: HttpServer) -> None:
    with pytest.raises(CannotListen, match=f"127.0.0.1:{server.port}: .*in use"):
        made(server.port).start()


def test_idle_connections_and_long_polls_do_not_make_a_probe_fail() -> None:
    shown = Shown()
    app = http_api.application(lambda: shown.now, dict, lambda: shown.time_s)
    server = HttpServer(app, "127.0.0.1", 0)
    server.start()

    def one(request: str) -> socket.socket:
        made = opened.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
        made.sendall(request.encode())
        return made

    with ExitStack() as opened:
        opened.callback(server.stop)
        for _ in range(64):
            one("GET /v1/events?after=5&wait_s=30 HTTP/1.1\r\nHost: here\r\n\r\n")
            one("GET /healthz HTTP/1.1\r\nHost: he")  # headers that never end
            one("")
            assert b"200 OK" in one("GET /healthz HTTP/1.1\r\nHost: here\r\n\r\n").recv(1000)


async def test_at_most_a_few_requests_wait_and_the_others_are_answered_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_api, "MAX_WAITING", 2)
    shown = Shown()
    async with TestClient(TestServer(http_api.application(lambda: shown.now, dict, lambda: 0.0))) as client:
        waiting = [asyncio.create_task(client.get("/v1/events?after=5&wait_s=30")) for _ in range(2)]
        assert (await client.get("/healthz")).status == 200  # the requests before it have begun to wait
        found = await client.get("/v1/events?after=5&wait_s=30")
        assert (await found.json())["events"] == []
        assert not any(each.done() for each in waiting)
        for each in waiting:
            each.cancel()


def test_a_listener_for_probes_serves_nothing_else() -> None:
    shown = Shown()
    server = HttpServer(http_api.probes(lambda: shown.now, lambda: shown.time_s), "127.0.0.1", 0)
    server.start()
    try:
        for path, status in (("/healthz", 200), ("/readyz", 200), ("/v1/health", 404), ("/metrics", 404)):
            with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
                assert f" {status} ".encode() in connection.recv(1000)
    finally:
        server.stop()


def answered(listener: socket.socket, body: bytes = b"ok\n") -> None:
    """Answer all connections in a thread, as a living agent does."""

    def answer() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + body)

    threading.Thread(target=answer, daemon=True).start()


def test_an_address_whose_process_does_not_answer_is_taken_over() -> None:
    with ExitStack() as opened:
        [stale] = listening.listen("127.0.0.1", 0)
        opened.enter_context(stale)
        port = stale.getsockname()[1]
        [second] = listening.listen("127.0.0.1", port, 0.05)
        opened.enter_context(second)
        [third] = listening.listen("127.0.0.1", port, 0.05)
        opened.enter_context(third)
        answered(third)
        for _ in range(30):  # by chance, a third of them would reach each socket
            assert b"200 OK" in asked(opened.enter_context(socket.create_connection(("127.0.0.1", port), 10)))
        with pytest.raises(OSError, match="in use") as caught:
            listening.listen("127.0.0.1", port)
        assert not isinstance(caught.value, HeldByOther)


def test_an_address_of_a_foreign_process_is_never_shared() -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign, pytest.raises(HeldByOther, match="in use"):
        listening.listen("127.0.0.1", foreign.getsockname()[1], 0.05)


@pytest.mark.parametrize(
    ("body", "owners", "refused"),
    [
        (b"ok\n", {os.geteuid()}, True),
        (b"ok\n", {0}, True),
        (b"ok\n", set(), True),  # unknown
        (b"ok\n", {os.geteuid(), 65533}, False),
        (b"no cycle for 20 s\n", {os.geteuid()}, False),
        (b"", {os.geteuid()}, False),
    ],
)
def test_only_a_healthy_agent_of_this_user_or_of_root_keeps_an_agent_from_starting(
    body: bytes, owners: set[int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_owners", lambda _: owners)
    with socket.create_server(("127.0.0.1", 0)) as other:
        answered(other, body)
        with pytest.raises(OSError, match="in use") as caught:
            listening.listen("127.0.0.1", other.getsockname()[1])
    assert isinstance(caught.value, HeldByOther) is not refused


def test_the_owner_of_a_port_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as four, socket.create_server(("", 0)) as other:
        assert listening._owners(four.getsockname()[1]) == {os.geteuid()}
        port = other.getsockname()[1]
    assert listening._owners(port) == set()


def test_a_server_whose_address_is_taken_listens_once_it_is_free() -> None:
    notes: list[Mapping[str, Any]] = []
    noted = threading.Event()

    def note(each: Mapping[str, Any]) -> None:
        notes.append(each)
        noted.set()

    with socket.create_server(("127.0.0.1", 0)) as other:
        answered(other, b"something else")
        port = other.getsockname()[1]
        server = RetryingServer("--probe-listen", made(port), note, retry_s=0.02)
        server.start()
        assert f"--probe-listen 127.0.0.1:{port}: " in server.problem
        assert "Address already in use; the agent runs without it" in server.problem
        assert (server.address, noted.wait(0.1)) == ("", False)
        other.shutdown(socket.SHUT_RDWR)
    assert noted.wait(10)
    assert (server.problem, server.address) == ("", f"127.0.0.1:{port}")
    assert notes == [{"event": "listening", "probe_listen": server.address}]
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        assert b"200 OK" in asked(connection)
    server.stop()


def test_a_server_that_never_listened_can_be_stopped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        answered(other, b"")
        server = RetryingServer("--listen", made(other.getsockname()[1]), lambda _: None, retry_s=30.0)
        server.start()
        server.stop()
    assert not server._thread.is_alive()
