"""Serve this member's snapshots and private states to other members, and fetch theirs.

On both sides, threads transfer snapshot bytes, bypassing the event loop: see `sidecar.state.snapshot_send`
and `sidecar.state.snapshot_fetch`.

Standbys also copy snapshots while the group trains (`sidecar.standby_copy`). Such a transfer is slow on
purpose. It ends as soon as another reader needs a snapshot, or this member can no longer spare one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
import zlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeAlias

import aiohttp
from aiohttp import web

from holdfast.checkpoint.sharing import ShareRefused
from holdfast.fileio.checksum import CHUNK_BYTES
from holdfast.process.network import Door, has_token
from holdfast.protocol import codec
from holdfast.protocol.member_messages import StateSource
from holdfast.snapshot.arena import CorruptSnapshot, SnapshotGone
from holdfast.snapshot.commit_records import CommitRecord
from holdfast.snapshot.private_store import MAX_CAPACITY_BYTES
from sidecar.state import background, snapshot_fetch, snapshot_send
from sidecar.state.holdings import HeldStates, Holdings
from sidecar.state.piece_writer import PieceRequest, PieceWriter, WrittenPiece
from sidecar.state.snapshot_fetch import AS_FAST_AS_POSSIBLE, MAX_WHY_BYTES, FetchFailed, FetchManner
from sidecar.state.snapshot_send import ANSWER_S, SLOWEST_BYTES_S, ChunkRange, UnalignedRange

log = logging.getLogger(__name__)

SILENCE_S = 10.0  # a peer that transfers no data for this long is treated as lost
PIECE_BYTES = 1 << 20
MAX_BODY_BYTES = 1024
WRITE_S = 300.0  # limit for a piece of a checkpoint; the writer also writes the piece itself, much sooner
CONNECT_S = 2.0
SENDERS = 16  # ranges sent at the same time: a few to each of a few peers
_CRC = "X-Holdfast-Crc32"
MAX_HELD_BYTES = 1 << 20
# The rate of transfers to standbys. They take a tenth of a core, in threads of the lowest priority.
SPARE_BYTES_S = 256 << 20


_Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
_senders = ThreadPoolExecutor(SENDERS, "send")
_gatherers = ThreadPoolExecutor(2, "gather")


def application(
    holdings: Holdings,
    token: Callable[[], str],
    door: Door,
    silence_s: float = SILENCE_S,
    pieces: PieceWriter | None = None,
    may_spare: Callable[[], bool] = lambda: False,
) -> web.Application:
    """Return the server for other members. Requests must carry the run's token.

    All requests are read-only, except that `pieces` writes to storage for a member that stages a checkpoint
    there. Without a token, every request is refused. While `may_spare` returns True, standbys may copy
    snapshots.
    """

    @web.middleware
    async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
        secret = token()
        known = bool(secret) and has_token(request.headers.get("Authorization", ""), secret)
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
        except SnapshotGone as error:
            raise web.HTTPGone(text=str(error)) from None

    async def held(_: web.Request) -> web.StreamResponse:
        return web.Response(body=codec.encode(holdings.states()))

    async def spare(request: web.Request) -> web.StreamResponse:
        generation, step = int(request.match_info["generation"]), int(request.match_info["step"])
        record = holdings.record(generation, step)
        if record is None:
            raise web.HTTPNotFound(text=f"no snapshot of generation {generation}, step {step}")
        try:
            return await _send_spare(request, holdings, record, silence_s, may_spare)
        except SnapshotGone as error:
            raise web.HTTPGone(text=str(error)) from None

    async def private(request: web.Request) -> web.StreamResponse:
        rank, generation, step = (int(request.match_info[n]) for n in ("rank", "generation", "step"))
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(None, holdings.private, rank, generation, step)
        if found is None:
            raise web.HTTPNotFound(text=f"no private state of rank {rank}, step {step}")
        crc = await loop.run_in_executor(None, zlib.crc32, found.data)
        return await _send_private(request, found.data, crc, silence_s)

    app = web.Application(middlewares=[guard], client_max_size=MAX_BODY_BYTES)
    app.router.add_get(r"/v1/slot/{generation:\d{1,18}}/{step:\d{1,18}}", slot)
    app.router.add_get(r"/v1/spare/{generation:\d{1,18}}/{step:\d{1,18}}", spare)
    app.router.add_get("/v1/held", held)
    app.router.add_get(r"/v1/private/{rank:\d{1,9}}/{generation:\d{1,18}}/{step:\d{1,18}}", private)
    if pieces is not None:
        app.on_cleanup.append(pieces.close)
        app.router.add_post(r"/v1/piece/{generation:\d{1,18}}/{step:\d{1,18}}", partial(_write_piece, pieces))
    return app


async def _write_piece(pieces: PieceWriter, request: web.Request) -> web.StreamResponse:
    """Write a piece of the requester's checkpoint, and answer when it is durable."""
    generation, step = int(request.match_info["generation"]), int(request.match_info["step"])
    try:
        raw = await asyncio.wait_for(request.read(), SILENCE_S)
        asked = codec.decode(PieceRequest, raw)
    except (codec.InvalidMessage, asyncio.TimeoutError) as error:
        raise web.HTTPBadRequest(text=str(error)) from None
    try:
        written = await pieces.write(generation, step, asked, lambda: _is_gone(request))
    except ShareRefused as error:
        raise web.HTTPConflict(text=str(error)) from None
    except SnapshotGone as error:
        raise web.HTTPGone(text=str(error)) from None
    except OSError as error:
        raise web.HTTPServiceUnavailable(text=error.strerror or str(error)) from None
    return web.Response(body=codec.encode(written))


def _is_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


async def _send_slot(
    request: web.Request, holdings: Holdings, record: CommitRecord, silence_s: float
) -> web.StreamResponse:
    """Pin a snapshot and send a range of it from a thread, which writes directly to the socket.

    A peer that reads no data for `silence_s` is disconnected, because the next snapshot needs the slot.
    """
    try:
        part = ChunkRange.parse(request.headers.get("Range", "bytes=0-"), record.total_bytes)
    except UnalignedRange as error:
        raise web.HTTPBadRequest(text=str(error)) from None
    transport = request.transport
    line = None if transport is None else transport.get_extra_info("socket")
    if not isinstance(transport, asyncio.Transport) or line is None:
        raise web.HTTPGone(text="the connection is gone")
    async with holdings.pinned(record) as path:
        seal = holdings.arena.checksum(record)
        if transport.get_extra_info("ssl_object") is not None:
            content = partial(_read_chunk, path, part, seal is None)
            return await _send_through(request, record, part, seal, silence_s, content)
        first = snapshot_send.head(record, part, seal)
        transport.pause_reading()  # from now on, only the thread uses the socket
        try:
            work = partial(
                snapshot_send.send_range, os.dup(line.fileno()), path, first, part, seal is None, silence_s
            )
            await asyncio.get_running_loop().run_in_executor(_senders, work)
        except OSError as error:  # for example, the peer ran out of memory or needs no more of this range
            log.debug("range not sent", extra={"step": record.step, "error": str(error)})
        finally:
            transport.abort()
    return web.Response()  # never sent, because the connection is closed


async def _read_chunk(path: Path, part: ChunkRange, sums: bool, chunk: int) -> bytes:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_senders, snapshot_send.read, path, part, chunk, sums)


async def _send_spare(
    request: web.Request,
    holdings: Holdings,
    record: CommitRecord,
    silence_s: float,
    may_spare: Callable[[], bool],
) -> web.StreamResponse:
    """Send a range of a snapshot to a standby, at `SPARE_BYTES_S`.

    Stop as soon as another reader pins a snapshot, because if both slots were pinned, no snapshot could be
    taken.
    """
    try:
        part = ChunkRange.parse(request.headers.get("Range", "bytes=0-"), record.total_bytes)
    except UnalignedRange as error:
        raise web.HTTPBadRequest(text=str(error)) from None
    if holdings.pins or not may_spare():
        raise web.HTTPServiceUnavailable(text="this member can spare no snapshot at the moment")
    async with holdings.pinned(record) as path:
        seal = holdings.arena.checksum(record)
        began_s = time.monotonic()

        async def content(chunk: int) -> bytes:
            due_s = began_s + (chunk - part.chunks[0]) * CHUNK_BYTES / SPARE_BYTES_S
            await asyncio.sleep(due_s - time.monotonic())
            if holdings.pins > 1 or not may_spare():
                raise ConnectionAbortedError("this member can no longer spare the snapshot")
            return await background.run_in_background(snapshot_send.read, path, part, chunk, seal is None)

        return await _send_through(request, record, part, seal, silence_s, content)


async def _send_through(
    request: web.Request,
    record: CommitRecord,
    part: ChunkRange,
    seal: int | None,
    silence_s: float,
    content_of: Callable[[int], Awaitable[bytes]],
) -> web.StreamResponse:
    """Send a range in pieces through the transport, which encrypts them if the connection uses TLS."""
    response = web.StreamResponse(status=206, headers=dict(snapshot_send.fields(record, part, seal)))
    try:
        await asyncio.wait_for(response.prepare(request), silence_s)
        for chunk in part.chunks:
            content = await content_of(chunk)
            for at in range(0, len(content), PIECE_BYTES):
                await asyncio.wait_for(response.write(content[at : at + PIECE_BYTES]), silence_s)
        await asyncio.wait_for(response.write_eof(), silence_s)
    except (OSError, asyncio.TimeoutError) as error:  # see `_send_slot`
        log.debug("range not sent", extra={"step": record.step, "error": str(error)})
        if request.transport is not None:
            request.transport.abort()
    return response


async def _send_private(
    request: web.Request, content: bytes, crc: int, silence_s: float
) -> web.StreamResponse:
    """Send a private state in pieces, because copying it in one piece would block the event loop.

    A peer that reads no data for `silence_s` is disconnected.
    """
    response = web.StreamResponse(headers={_CRC: f"{crc:08x}"})
    response.content_length = len(content)
    try:
        await asyncio.wait_for(response.prepare(request), silence_s)
        for at in range(0, len(content), PIECE_BYTES):
            await asyncio.wait_for(response.write(content[at : at + PIECE_BYTES]), silence_s)
        await asyncio.wait_for(response.write_eof(), silence_s)
    except (OSError, asyncio.TimeoutError) as error:
        log.debug("private state not sent", extra={"error": str(error)})
        if request.transport is not None:
            request.transport.abort()
    return response


class PeerClient:
    """Fetches state from other members, over one HTTP session that lasts as long as the sidecar."""

    def __init__(
        self,
        holdings: Holdings,
        token: Callable[[], str],
        silence_s: float = SILENCE_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`token` returns the run's token. `tls` verifies peers whose URL begins with https."""
        self._tls = tls
        self._holdings = holdings
        self._silence_s = silence_s
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def held(self, url: str) -> HeldStates:
        """Return what a peer holds. Raises `FetchFailed`."""
        target = f"{url}/v1/held"
        try:
            async with self._client().get(target, allow_redirects=False, headers=self._headers()) as response:
                await _check(target, response)
                found = await asyncio.wait_for(_read_bounded(response, MAX_HELD_BYTES), ANSWER_S)
                return codec.decode(HeldStates, found)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise FetchFailed(f"{target}: {error!r}") from None

    async def snapshot(
        self,
        source: StateSource,
        *others: StateSource,
        keep: frozenset[tuple[int, int]] | None = None,
        manner: FetchManner = AS_FAST_AS_POSSIBLE,
    ) -> CommitRecord:
        """Fetch the snapshot that all of these peers hold into the arena. For `keep`, see `Arena.begin`.

        Raises `FetchFailed`, `ArenaBusy` if no slot is free, or `OSError` if the memory volume is full.
        """
        arena, sources = self._holdings.arena, (source, *others)
        began_s = time.monotonic()
        work = partial(
            snapshot_fetch.fetch, arena, sources, self._token(), self._silence_s, self._tls, keep, manner
        )
        record = await asyncio.get_running_loop().run_in_executor(_gatherers, work)
        took_s = round(time.monotonic() - began_s, 3)
        log.info(
            "snapshot fetched", extra={"step": record.step, "bytes": record.total_bytes, "took_s": took_s}
        )
        return record

    async def private(self, source: StateSource) -> bytes:
        """Return a peer's copy of a rank's private state. Raises `FetchFailed`."""
        url = f"{source.url}/v1/private/{source.rank}/{source.generation}/{source.step}"
        try:
            async with self._client().get(url, allow_redirects=False, headers=self._headers()) as response:
                await _check(url, response)
                limit_s = ANSWER_S + (response.content_length or 0) / SLOWEST_BYTES_S
                found = await asyncio.wait_for(_read_bounded(response, MAX_CAPACITY_BYTES), limit_s)
                crc = await asyncio.get_running_loop().run_in_executor(None, zlib.crc32, found)
                if f"{crc:08x}" != response.headers.get(_CRC):
                    raise CorruptSnapshot(f"checksum {crc:08x}, expected {response.headers.get(_CRC)}")
                return found
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise FetchFailed(f"{url}: {error!r}") from None
        except CorruptSnapshot as error:
            raise FetchFailed(f"{url}: {error}") from None

    async def write_piece(self, url: str, record: CommitRecord, asked: PieceRequest) -> WrittenPiece:
        """Have a peer write a piece of this member's checkpoint of `record`. Raises `FetchFailed`.

        After a failure, the piece may have been written, or may still be written later.
        """
        target = f"{url}/v1/piece/{record.generation}/{record.step}"
        limit = aiohttp.ClientTimeout(total=WRITE_S, sock_connect=CONNECT_S)
        try:
            async with self._client().post(
                target,
                data=codec.encode(asked),
                timeout=limit,
                allow_redirects=False,
                headers=self._headers(),
            ) as response:
                await _check(target, response)
                return codec.decode(WrittenPiece, await _read_bounded(response, MAX_BODY_BYTES))
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise FetchFailed(f"{target}: {error!r}") from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self._silence_s)
            self._session = aiohttp.ClientSession(
                timeout=timeout, connector=aiohttp.TCPConnector(ssl=self._tls or True)
            )
        return self._session

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token()}"}


async def _check(url: str, response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        why = (await response.content.read(MAX_WHY_BYTES)).decode(errors="replace")
        raise FetchFailed(f"{url}: {response.status} {why}")


async def _read_bounded(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Return the body. Raises `CorruptSnapshot` if it exceeds `most_bytes`. Ignores Content-Length."""
    pieces, size = [], 0
    async for piece in response.content.iter_chunked(PIECE_BYTES):
        size += len(piece)
        if size > most_bytes:
            raise CorruptSnapshot(f"more than {most_bytes} bytes")
        pieces.append(piece)
    return b"".join(pieces)
