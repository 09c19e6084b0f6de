"""A sidecar looks for another supervisor soon after the host of its supervisor has fallen silent."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from aiohttp import web

from holdfast.process import event_loop, network
from holdfast.protocol.member_messages import MEMBER_PATH
from sidecar import clients
from sidecar.clients import SupervisorClient
from tests.unit.dropped_packets import drop_all
from tests.unit.supervisor.job_views import report

LIMIT_S = 20.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    with here, there:
        yield here, there


def silence_s(connection: socket.socket, limit_s: float) -> float:
    """Wait until the other host counts as silent, for at most `limit_s`, and return for how long it has."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        if found := network.unanswered_s(connection):
            return found
        time.sleep(0.01)
    return 0.0


def test_a_host_that_drops_all_packets_is_silent(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    here.send(b"x")
    time.sleep(0.05)
    assert network.unanswered_s(here) == 0.0
    drop_all(there)
    here.send(b"x")
    assert silence_s(here, LIMIT_S) > 0.5, "it is resent after 0.2 and 0.6 s"


def test_a_host_whose_process_reads_nothing_is_not_silent(pair: tuple[socket.socket, socket.socket]) -> None:
    """The report of a large job may wait for its turn for a long time."""
    here, _ = pair
    here.setblocking(False)
    with suppress(BlockingIOError):  # until both buffers are full
        while True:
            here.send(b"x" * 65536)
    assert silence_s(here, 1.0) == 0.0


def test_only_tcp_connections_can_be_silent() -> None:
    here, there = socket.socketpair()
    with here, there:
        assert network.unanswered_s(here) == 0.0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the certificate is made by openssl")
async def test_a_sidecar_leaves_a_supervisor_whose_host_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait until the kernel gives up, which takes `UNREACHABLE_S`."""
    monkeypatch.setattr(clients, "SILENT_S", 0.8)
    monkeypatch.setattr(clients, "UNREACHABLE_S", LIMIT_S)
    key, made = tmp_path / "key.pem", tmp_path / "made.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=s"
    words += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {made}"
    subprocess.run(words.split(), check=True, capture_output=True)  # noqa: ASYNC221
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    came: asyncio.Queue[asyncio.Transport] = asyncio.Queue()

    async def serve(request: web.Request) -> web.WebSocketResponse:
        line = web.WebSocketResponse()
        await line.prepare(request)
        await line.receive()
        assert request.transport is not None
        came.put_nowait(request.transport)
        await asyncio.Event().wait()
        return line

    app = web.Application()
    app.router.add_get(MEMBER_PATH, serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    (address,) = runner.addresses

    async def obey(_: object) -> None: ...

    link = SupervisorClient(
        f"https://127.0.0.1:{address[1]}",
        lambda: "secret",
        lambda: report("m0", None),
        obey,
        0.1,
        tls=ssl.create_default_context(cafile=str(made)),
    )
    running = asyncio.create_task(link.run())
    try:
        first = await asyncio.wait_for(came.get(), LIMIT_S)
        await asyncio.sleep(0.3)
        assert link.connections == 1
        drop_all(first.get_extra_info("socket")._sock)
        began_s = time.monotonic()
        await asyncio.wait_for(came.get(), LIMIT_S)
        assert link.connections == 2
        assert time.monotonic() - began_s < LIMIT_S / 2
        first.abort()  # it has received nothing since then, not even the end of the connection
    finally:
        await event_loop.end([running])
        await runner.cleanup()
