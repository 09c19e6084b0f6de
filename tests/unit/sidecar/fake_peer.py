"""Members connected over real loopback sockets, and peers that misbehave."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from holdfast.process.network import Door
from sidecar.state import peers, snapshot_send
from sidecar.state.peers import PeerClient
from tests.unit.sidecar.memory import holdings

TOKEN = "secret"


@asynccontextmanager
async def serving(
    path: Path, silence_s: float = 5.0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Serve the member at `path` to its peers; yield its URL."""
    runner = web.AppRunner(
        peers.application(holdings(path), lambda: TOKEN, Door(), silence_s),
        access_log=None,
        handle_signals=False,
    )
    await runner.setup()
    site = web.SockSite(runner, snapshot_send.listener("127.0.0.1"), ssl_context=tls)
    await site.start()
    try:
        scheme = "http" if tls is None else "https"
        yield f"{scheme}://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def fetching(
    path: Path, token: str = TOKEN, silence_s: float = 5.0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[PeerClient]:
    fetcher = PeerClient(holdings(path), lambda: token, silence_s, tls)
    try:
        yield fetcher
    finally:
        await fetcher.close()


@asynccontextmanager
async def answering(*pieces: bytes, then: str = "close") -> AsyncIterator[str]:
    """Serve a peer that answers every request with these bytes, then disconnects or falls silent."""
    over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
        await writer.drain()
        if then == "silence":
            await over.wait()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        over.set()
        server.close()
        await server.wait_closed()
