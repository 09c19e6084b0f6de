"""A snapshot on its way between members: its bytes, and behind them their checksum.

The checksum comes last: who sends knows it only when all has been read, and of a large state a receiver would
take the wait before the first byte for silence.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from holdfast.arena import Arena, Corrupt, Incoming, Record

PIECE_BYTES = 1 << 20
_TRAILER = struct.Struct("<I")
TRAILER_BYTES = _TRAILER.size


async def send(arena: Arena, record: Record, path: Path, write: Callable[[bytes], Awaitable[None]]) -> None:
    """Give `write` a pinned snapshot in pieces, and its checksum; one without a seal gets it meanwhile.

    What is sealed is sent with its seal, so that the receiver finds what has changed since. Raises `Gone`,
    `OSError`, and what `write` raises.
    """
    sealing = asyncio.ensure_future(_checksum(arena, record))
    try:
        with path.open("rb") as file:
            while piece := file.read(PIECE_BYTES):
                await write(piece)
        await write(_TRAILER.pack(await sealing))
    finally:
        sealing.cancel()


async def _checksum(arena: Arena, record: Record) -> int:
    known = arena.checksum(record)
    if known is not None:
        return known
    return await asyncio.get_running_loop().run_in_executor(None, arena.seal, record)


async def receive(incoming: Incoming, pieces: AsyncIterator[bytes]) -> Record:
    """Take in what `send` has sent. On raise nothing was committed, and the caller abandons.

    Raises:
        Corrupt: it is not what was sent.
        Malformed: no safetensors file.
    """
    left, trailer = incoming.total_bytes, b""
    async for piece in pieces:
        incoming.write(piece[:left])
        trailer += piece[left:]
        left -= min(left, len(piece))
    if len(trailer) != TRAILER_BYTES:
        raise Corrupt(f"{incoming.total_bytes - left} of the announced {incoming.total_bytes} bytes came")
    return incoming.finish(_TRAILER.unpack(trailer)[0])
