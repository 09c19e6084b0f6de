from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from aiohttp import web

from nodeagent.server import http_api
from nodeagent.server.http_api import CannotListen, HttpServer


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
