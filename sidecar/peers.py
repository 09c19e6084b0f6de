"""Give other members what this one holds, and fetch what they hold: snapshots and private states."""

from __future__ import annotations

import asyncio
import hmac
import zlib
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import aiohttp
from aiohttp import web

from holdfast.arena import Corrupt, Gone, Record
from holdfast.door import Door
from holdfast.messages import Source
from holdfast.private import MAX_CAPACITY_BYTES
from holdfast.safetensors import Malformed
from sidecar import transfer
from sidecar.holdings import Holdings

SILENCE_S = 10.0  # a peer that sends nothing for this long is gone
MAX_SLOT_BYTES = 1 << 42
MAX_WHY_BYTES = 500
PATIENCE_S = 60.0  # for a whole answer, beyond what its size allows: a peer that trickles is gone too
SLOWEST_BYTES_S = 4 << 20
_WORLD = "X-Holdfast-World-Size"
_CRC = "X-Holdfast-Crc32"


Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Unfetched(Exception):
    """A peer did not give what it should; the message says what and why."""


def application(holdings: Holdings, token: str, door: Door, silence_s: float = SILENCE_S) -> web.Application:
    """Return the peer's side. Every request carries the run's token; nothing can be changed."""
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="replace")
        known = hmac.compare_digest(given, expected)
        with door.answering(request.protocol, trusted=known):
            if not known:
                raise web.HTTPUnauthorized(text="the run's token is needed")
            return await handler(request)

    async def slot(request: web.Request) -> web.StreamResponse:
        generation, step = int(request.match_info["generation"]), int(request.match_info["step"])
        record = holdings.record(generation, step)
        if record is None:
            raise web.HTTPNotFound(text=f"no snapshot of generation {generation}, step {step}")
        try:
            return await _send_slot(request, holdings, record, silence_s)
        except Gone as error:
            raise web.HTTPGone(text=str(error)) from None

    async def private(request: web.Request) -> web.Response:
        rank, generation, step = (int(request.match_info[n]) for n in ("rank", "generation", "step"))
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(None, holdings.private, rank, generation, step)
        if found is None:
            raise web.HTTPNotFound(text=f"no private state of rank {rank}, step {step}")
        crc = await loop.run_in_executor(None, zlib.crc32, found.data)
        return web.Response(body=found.data, headers={_CRC: f"{crc:08x}"})

    app = web.Application(middlewares=[guard], client_max_size=1024)
    app.router.add_get(r"/v1/slot/{generation:\d{1,18}}/{step:\d{1,18}}", slot)
    app.router.add_get(r"/v1/private/{rank:\d{1,9}}/{generation:\d{1,18}}/{step:\d{1,18}}", private)
    return app


async def _send_slot(
    request: web.Request, holdings: Holdings, record: Record, silence_s: float
) -> web.StreamResponse:
    """Stream a snapshot that stays as it is meanwhile.

    One who takes nothing for `silence_s` is given up: the slot is needed for the next snapshot.
    """
    size = record.total_bytes + transfer.TRAILER_BYTES
    response = web.StreamResponse(
        headers={_WORLD: str(record.world_size), "Content-Length": str(size)},
    )

    async def write(piece: bytes) -> None:
        await asyncio.wait_for(response.write(piece), silence_s)

    with holdings.arena.pin(record) as path:
        await response.prepare(request)
        try:
            await transfer.send(holdings.arena, record, path, write)
        except (asyncio.TimeoutError, ConnectionError, Gone):  # it may have no room, and asks again
            if request.transport is not None:
                request.transport.abort()
            return response
        await response.write_eof()
    return response


class Fetcher:
    """The other side: one HTTP session for the life of the sidecar."""

    def __init__(self, holdings: Holdings, token: str, silence_s: float = SILENCE_S) -> None:
        self._holdings = holdings
        self._silence_s = silence_s
        self._headers = {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession | None = None

    async def snapshot(self, source: Source) -> Record:
        """Take a peer's snapshot into our arena. Raises `Unfetched`, or `Busy` when no slot of it is free."""
        url = f"{source.url}/v1/slot/{source.generation}/{source.step}"
        try:
            async with self._client().get(url, allow_redirects=False) as response:
                await _check(url, response)
                limit_s = PATIENCE_S + (response.content_length or 0) / SLOWEST_BYTES_S
                return await asyncio.wait_for(self._receive(source, response), limit_s)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise Unfetched(f"{url}: {error!r}") from None
        except (Corrupt, Malformed, ValueError, KeyError) as error:
            raise Unfetched(f"{url}: {error}") from None

    async def _receive(self, source: Source, response: aiohttp.ClientResponse) -> Record:
        total = (response.content_length or 0) - transfer.TRAILER_BYTES
        if not 0 < total <= MAX_SLOT_BYTES:
            raise Corrupt(f"a snapshot of {total} bytes was announced")
        incoming = self._holdings.arena.receive(
            source.generation,
            source.step,
            int(response.headers[_WORLD]),
            total,
        )
        try:
            return await transfer.receive(incoming, response.content.iter_chunked(transfer.PIECE_BYTES))
        finally:
            incoming.abandon()

    async def private(self, source: Source) -> bytes:
        """Return a peer's copy of a rank's private state. Raises `Unfetched`."""
        url = f"{source.url}/v1/private/{source.rank}/{source.generation}/{source.step}"
        try:
            async with self._client().get(url, allow_redirects=False) as response:
                await _check(url, response)
                limit_s = PATIENCE_S + (response.content_length or 0) / SLOWEST_BYTES_S
                found = await asyncio.wait_for(_read_bounded(response, MAX_CAPACITY_BYTES), limit_s)
                crc = await asyncio.get_running_loop().run_in_executor(None, zlib.crc32, found)
                if f"{crc:08x}" != response.headers.get(_CRC):
                    raise Corrupt(f"checksum {crc:08x}, announced was {response.headers.get(_CRC)}")
                return found
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise Unfetched(f"{url}: {error!r}") from None
        except Corrupt as error:
            raise Unfetched(f"{url}: {error}") from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=2.0, sock_read=self._silence_s)
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        return self._session


async def _check(url: str, response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        why = (await response.content.read(MAX_WHY_BYTES)).decode(errors="replace")
        raise Unfetched(f"{url}: {response.status} {why}")


async def _read_bounded(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Return the body. Raises `Corrupt` when there is more of it, whatever was announced."""
    pieces, size = [], 0
    async for piece in response.content.iter_chunked(transfer.PIECE_BYTES):
        size += len(piece)
        if size > most_bytes:
            raise Corrupt(f"more than {most_bytes} bytes")
        pieces.append(piece)
    return b"".join(pieces)
