"""Connections to a TLS port are bounded, whatever they send or do not send."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from holdfast.process import event_loop, network
from holdfast.process.network import Door

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="the certificate is made by openssl")

MOST = 8
LIMIT_S = 20.0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with a key and a certificate for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("certificate")
    key, made = folder / "key.pem", folder / "made.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x"
    words += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {made}"
    subprocess.run(words.split(), check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text(key.read_text() + made.read_text())
    return both


class Echo(asyncio.Protocol):
    """Answers each line with the same line. As with aiohttp, `transport` is None at first and at last."""

    def __init__(self, door: Door) -> None:
        self.transport: asyncio.Transport | None = None
        self._door = door

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: BaseException | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        with self._door.answering(self, trusted=data == b"trusted"):
            self.transport.write(data)


@asynccontextmanager
async def listening(certificate: Path) -> AsyncIterator[tuple[Door, tuple[str, int]]]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    door = Door(MOST)
    listener = network.listen_everywhere(0, network.SERVER_BACKLOG)
    accepting = asyncio.create_task(door.accept(listener, lambda: Echo(door), context))
    try:
        yield door, ("127.0.0.1", listener.getsockname()[1])
    finally:
        await event_loop.end([accepting])
        listener.close()


async def until(holds: Callable[[], object]) -> None:
    for _ in range(int(LIMIT_S / 0.01)):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not in time")


def sockets_of(port: int) -> int:
    """Return how many established connections this process has accepted on `port`."""
    found = 0
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            found += local.endswith(f":{port:04X}") and state == "01"
    return found


async def test_connections_that_never_begin_a_handshake_are_bounded(certificate: Path) -> None:
    async with listening(certificate) as (_, address):
        silent = [await asyncio.open_connection(*address) for _ in range(5 * MOST)]
        await until(lambda: sockets_of(address[1]) <= MOST)
        reader, writer = await asyncio.open_connection(*address, ssl=trusting(certificate))
        writer.write(b"hello")
        assert await asyncio.wait_for(reader.read(5), LIMIT_S) == b"hello", "the others do not keep it out"
        for _, each in (*silent, (reader, writer)):
            each.close()


async def test_a_handshake_that_takes_too_long_ends(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "HANDSHAKE_S", 0.1)
    async with listening(certificate) as (_, address):
        reader, writer = await asyncio.open_connection(*address)
        assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        writer.close()


async def test_a_connection_is_watched_from_the_end_of_its_handshake(certificate: Path) -> None:
    """However long the handshake took."""
    async with listening(certificate) as (door, address):
        raw = socket.create_connection(address)
        await asyncio.sleep(0)
        door.sweep(1e12)
        reader, writer = await asyncio.open_connection(
            sock=raw, ssl=trusting(certificate), server_hostname="127.0.0.1"
        )
        await until(lambda: door._idle)
        door.sweep(1e12)
        assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        writer.close()


async def test_a_trusted_connection_whose_first_request_comes_with_the_handshake_is_kept(
    certificate: Path,
) -> None:
    async with listening(certificate) as (door, address):
        reader, writer = await asyncio.open_connection(*address, ssl=trusting(certificate))
        writer.write(b"trusted")
        assert await asyncio.wait_for(reader.read(7), LIMIT_S) == b"trusted"
        door.sweep(1e12)
        writer.write(b"again")
        assert await asyncio.wait_for(reader.read(5), LIMIT_S) == b"again"
        writer.close()


async def test_what_is_no_tls_client_is_disconnected(certificate: Path) -> None:
    async with listening(certificate) as (_, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(reader.read(), LIMIT_S)
        writer.close()


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))
