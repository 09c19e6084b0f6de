"""Fetch a snapshot from all of its holders, in several streams, straight into a slot.

Each stream is a thread that receives a part into the mapped slot and computes each piece's CRC32 while the
piece is still in the CPU cache. The first stream starts with the whole snapshot. An idle stream takes over
half of what remains of another stream's part, so faster holders send more. If a holder dies or stops sending,
the other holders send the rest of its part. Parts from several holders are combined only if their seals
match, because silently diverged replicas must never be mixed.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias
from urllib.parse import urlsplit

from holdfast.fileio.checksum import CHUNK_BYTES
from holdfast.fileio.safetensors import Malformed
from holdfast.protocol.member_messages import StateSource
from holdfast.snapshot.arena import Arena, CorruptSnapshot, IncomingSnapshot
from holdfast.snapshot.commit_records import CommitRecord
from sidecar.state.snapshot_send import ANSWER_S, SLOWEST_BYTES_S, SUM, crc32

STREAMS = max(2, min(4, os.cpu_count() or 1))
MAX_SLOT_BYTES = 1 << 42
MAX_HEAD_BYTES = 16 << 10
MAX_WHY_BYTES = 500
PIECE_BYTES = 512 << 10  # received at a time; small enough to stay in the cache until it is hashed
CONNECT_S = 2.0
HEAD_S = 2.0  # how long to wait for the header of a response if another member also holds the snapshot
STALLED_S = 1.0  # a part that receives no byte for this long is passed to another stream, if one is idle
LEAST_BYTES = 4 * CHUNK_BYTES  # the smallest part that justifies a separate connection


_Asker: TypeAlias = "Callable[[StateSource, int, int, float], _Connection]"  # _ask


@dataclass(frozen=True, slots=True)
class FetchManner:
    """How to fetch: as fast as possible, or at a rate that the holder limits so as to spare the training.

    The fetch fails soon after `wanted` begins to return False.
    """

    route: str = "slot"  # a route of the holder's server, see `sidecar.state.peers.application`
    streams: int = STREAMS
    wanted: Callable[[], bool] = lambda: True


AS_FAST_AS_POSSIBLE = FetchManner()


class FetchFailed(Exception):
    """A peer did not send the requested state. The message contains the URL and the reason."""


@dataclass(slots=True, eq=False)
class _Part:
    """The part of the snapshot that one stream receives.

    `at` is the next byte to receive. `end` decreases when another stream takes over half of the remainder.
    """

    at: int
    end: int
    line: _Connection | None = None
    moved_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Connection:
    """A connection whose response header has been read, so that the requested bytes come next."""

    source: StateSource
    url: str
    socket: socket.socket
    total_bytes: int
    world_size: int
    seal: int | None

    def close(self) -> None:
        self.socket.close()


def fetch(
    arena: Arena,
    sources: Sequence[StateSource],
    token: str,
    silence_s: float,
    tls: ssl.SSLContext | None = None,
    keep: frozenset[tuple[int, int]] | None = None,
    manner: FetchManner = AS_FAST_AS_POSSIBLE,
) -> CommitRecord:
    """Fetch the snapshot that all of `sources` hold into the arena. Blocks, so call it in a thread.

    For `keep`, see `Arena.begin`.

    Raises:
        ArenaBusy: No slot of the arena is free.
        FetchFailed: None of the sources sent the snapshot.
        OSError: The memory volume has no room for the snapshot.
    """
    left = list(sources)
    ask = partial(_ask, token=token, tls=tls, route=manner.route)
    while True:
        first = _first(left, ask, silence_s)
        try:
            return _from(first, arena, left, ask, silence_s, keep, manner)
        except FetchFailed:
            # Try the other holders again, because some may only have been slow to answer. If the snapshot has
            # no seal, they were not asked, because all parts of an unsealed snapshot must come from one
            # holder.
            left = [each for each in left if each is not first.source]
            if not left:
                raise


def _from(
    first: _Connection,
    arena: Arena,
    sources: Sequence[StateSource],
    ask: _Asker,
    silence_s: float,
    keep: frozenset[tuple[int, int]] | None,
    manner: FetchManner,
) -> CommitRecord:
    """Receive the snapshot, beginning with the response `first`. Raises the same exceptions as `fetch`."""
    wanted = first.source
    try:
        incoming = arena.receive(wanted.generation, wanted.step, first.world_size, first.total_bytes, keep)
    except CorruptSnapshot as error:
        first.close()
        raise FetchFailed(f"{first.url}: {error}") from None
    except BaseException:
        first.close()
        raise
    holders = sources if first.seal is not None else (wanted,)
    try:
        return _Transfer(incoming, first, holders, ask, silence_s, manner).run()
    except (CorruptSnapshot, Malformed) as error:
        raise FetchFailed(f"{first.url}: {error}") from None
    except OSError as error:
        needed = f"{first.total_bytes:,} bytes are needed for the snapshot of step {wanted.step}"
        raise OSError(error.errno, f"{error.strerror or error}: {needed}") from None
    finally:
        incoming.abandon()


def _first(sources: Sequence[StateSource], ask: _Asker, silence_s: float) -> _Connection:
    why = FetchFailed("no member holds it")
    for number, source in enumerate(sources):
        limit_s = silence_s if number == len(sources) - 1 else min(HEAD_S, silence_s)
        try:
            return ask(source, 0, 0, limit_s)
        except FetchFailed as error:
            why = error
    raise why


class _Transfer:
    """The transfer of one snapshot to this member."""

    def __init__(
        self,
        incoming: IncomingSnapshot,
        first: _Connection,
        sources: Sequence[StateSource],
        ask: _Asker,
        silence_s: float,
        manner: FetchManner,
    ) -> None:
        self._manner = manner
        self._incoming = incoming
        self._first = first
        self._sources = sources
        self._ask = ask
        self._silence_s = silence_s
        self._crcs = [0] * -(-first.total_bytes // CHUNK_BYTES)
        self._change = threading.Condition()
        now_s = time.monotonic()
        self._give_up_at = now_s + ANSWER_S + first.total_bytes / SLOWEST_BYTES_S
        whole = _Part(0, first.total_bytes, first, now_s)
        self._left: list[_Part] = []  # parts without a stream
        self._active: list[_Part] = [whole]
        self._broken: OSError | None = None  # an error of this member's memory volume, not of a peer
        self._why: FetchFailed = FetchFailed(f"{first.url}: no data received")

    def run(self) -> CommitRecord:
        """Transfer the snapshot, commit and seal it, and return its record.

        Raises `CorruptSnapshot`, `Malformed`, `FetchFailed` or `OSError`.
        """
        most = max(self._manner.streams, len(self._sources))
        count = min(most, max(1, self._first.total_bytes // LEAST_BYTES))
        holders = sorted(self._sources, key=lambda source: source is not self._first.source)
        streams = [
            threading.Thread(target=self._stream, args=(holders[n % len(holders)], n == 0), daemon=True)
            for n in range(count)
        ]
        for each in streams:
            each.start()
        try:
            self._watch(streams)
        finally:
            self._stop()
            for each in streams:
                each.join()
        if self._broken is not None:
            raise self._broken
        if self._left or self._active:
            raise self._why
        return self._incoming.finish_with(self._crcs, self._first.seal)

    def _watch(self, streams: list[threading.Thread]) -> None:
        """Wait until the transfer ends.

        If a part stalls, shut down its connection, so that its stream gives up the part.
        """
        while any(each.is_alive() for each in streams):
            with self._change:
                if self._broken is None and (self._left or self._active):
                    self._change.wait(STALLED_S / 4)
                now_s = time.monotonic()
                if now_s > self._give_up_at:
                    self._why = FetchFailed(f"{self._first.url}: too slow")
                    return
                if not self._manner.wanted():
                    self._why = FetchFailed(f"{self._first.url}: no longer wanted")
                    return
                idle = len(self._active) < sum(each.is_alive() for each in streams)
                for part in self._active:
                    limit_s = min(STALLED_S, self._silence_s) if idle else self._silence_s
                    if part.line is not None and now_s - part.moved_s > limit_s:
                        _shut_down(part.line)
                done = not self._left and not self._active
            if done or self._broken is not None:
                return

    def _stop(self) -> None:
        with self._change:
            for part in self._active:
                if part.line is not None:
                    _shut_down(part.line)
            self._give_up_at = 0.0
            self._change.notify_all()

    def _stream(self, holder: StateSource, first: bool) -> None:
        """Receive parts from one holder until no part is left or the holder fails."""
        part = self._active[0] if first else self._next()
        while part is not None:
            try:
                self._receive(part, holder)
            except FetchFailed as error:
                self._return_part(part, error)
                return
            except (OSError, ValueError) as error:
                self._return_part(part, FetchFailed(f"{holder.url}: {error!r}"))
                return
            self._end(part)
            part = self._next()

    def _next(self) -> _Part | None:
        """Return a part without a stream, or half of another stream's remainder; None if nothing is left."""
        with self._change:
            while time.monotonic() < self._give_up_at and self._broken is None:
                part = self._left.pop() if self._left else self._half()
                if part is not None:
                    part.moved_s = time.monotonic()
                    self._active.append(part)
                    return part
                if not self._active:
                    return None
                self._change.wait(STALLED_S)
        return None

    def _half(self) -> _Part | None:
        most = max(self._active, key=lambda part: part.end - part.at, default=None)
        if most is None or most.end - most.at < 2 * LEAST_BYTES:
            return None
        middle = (most.at + (most.end - most.at) // 2) // CHUNK_BYTES * CHUNK_BYTES
        part = _Part(middle, most.end)
        most.end = middle
        return part

    def _return_part(self, part: _Part, why: FetchFailed) -> None:
        with self._change:
            self._active.remove(part)
            if part.at < part.end:
                self._left.append(_Part(part.at, part.end))
            self._why = why
            self._change.notify_all()
        if part.line is not None:
            part.line.close()

    def _end(self, part: _Part) -> None:
        with self._change:
            self._active.remove(part)
            self._change.notify_all()
        if part.line is not None:
            part.line.close()

    def _receive(self, part: _Part, holder: StateSource) -> None:
        """Receive the remainder of a part. Raises `FetchFailed`, `OSError` or `CorruptSnapshot`."""
        if part.line is None:
            line = self._ask(holder, part.at, part.end, min(HEAD_S, self._silence_s))
            first = self._first
            if (line.total_bytes, line.seal) != (first.total_bytes, first.seal):
                line.close()
                raise FetchFailed(
                    f"{line.url}: its snapshot of step {holder.step} differs from the one at {first.url}"
                )
            part.line = line
        line = part.line
        line.socket.settimeout(self._silence_s)
        with memoryview(self._incoming.memory) as memory:
            while part.at < part.end:
                end = min((part.at // CHUNK_BYTES + 1) * CHUNK_BYTES, self._first.total_bytes)
                self._back(part.at, end)
                with memory[part.at : end] as chunk:
                    self._crcs[part.at // CHUNK_BYTES] = self._receive_chunk(part, line, chunk)
                with self._change:
                    part.at = end

    def _back(self, begin: int, end: int) -> None:
        try:
            self._incoming.back(begin, end)
        except OSError as error:
            self._broken = error
            raise

    def _receive_chunk(self, part: _Part, line: _Connection, chunk: memoryview) -> int:
        at, crc = 0, 0
        while at < len(chunk):
            with chunk[at : at + PIECE_BYTES] as piece:
                count = line.socket.recv_into(piece)
                if not count:
                    raise FetchFailed(f"{line.url}: the connection was closed at byte {part.at + at}")
                with piece[:count] as come:
                    crc = crc32(come, crc)
            at += count
            part.moved_s = time.monotonic()
        if line.seal is None:
            (announced,) = SUM.unpack(_exactly(line.socket, SUM.size))
            if announced != crc:
                raise FetchFailed(f"{line.url}: checksum {crc:08x}, expected {announced:08x}")
        return crc


def _ask(
    source: StateSource,
    begin: int,
    end: int,
    limit_s: float,
    *,
    token: str,
    tls: ssl.SSLContext | None,
    route: str,
) -> _Connection:
    """Request the snapshot's bytes from `begin` to `end`; return the connection that delivers them.

    An `end` of 0 means the end of the snapshot. Raises `FetchFailed`.
    """
    path = f"/v1/{route}/{source.generation}/{source.step}"
    url = f"{source.url}{path}"
    place = urlsplit(source.url)
    last = str(end - 1) if end else ""
    request = (
        f"GET {path} HTTP/1.1\r\nHost: {place.netloc}\r\n"
        f"Authorization: Bearer {token}\r\nRange: bytes={begin}-{last}\r\n\r\n"
    )
    try:
        line = socket.create_connection((place.hostname or "", place.port or 80), min(CONNECT_S, limit_s))
    except (OSError, ValueError) as error:
        raise FetchFailed(f"{url}: {error!r}") from None
    try:
        line.settimeout(limit_s)
        if place.scheme == "https":
            line = (tls or ssl.create_default_context()).wrap_socket(line, server_hostname=place.hostname)
        line.sendall(request.encode())
        return _begun(source, url, line, begin)
    except (OSError, ValueError, KeyError) as error:
        line.close()
        raise FetchFailed(f"{url}: {error!r}") from None
    except BaseException:
        line.close()
        raise


def _begun(source: StateSource, url: str, line: socket.socket, begin: int) -> _Connection:
    """Read the header of a response. Raises `FetchFailed`, `OSError`, `ValueError` or `KeyError`."""
    raw = b""
    # Do not read any byte of the body here, because the body must be received into the slot.
    while not raw.endswith(b"\r\n\r\n"):
        room = 1 if raw.endswith(b"\r\n\r") or len(raw) >= MAX_HEAD_BYTES else _until_end(line)
        piece = line.recv(room)
        if not piece or len(raw) + len(piece) > MAX_HEAD_BYTES:
            raise ValueError("the response is not from a Holdfast sidecar")
        raw += piece
    first, *rest = raw.decode("latin-1").split("\r\n")
    status = first.split(" ", 2)[1]
    if status != "206":
        why = line.recv(MAX_WHY_BYTES).decode(errors="replace")
        raise FetchFailed(f"{url}: {status[:3]} {why}")
    fields = {name.lower(): value.strip() for name, _, value in (each.partition(":") for each in rest)}
    offset, _, total = fields["content-range"].removeprefix("bytes ").partition("/")
    if int(offset.partition("-")[0]) != begin or not 0 < int(total) <= MAX_SLOT_BYTES:
        raise ValueError(f"the response announces bytes {offset[:40]} of a snapshot of {total[:20]} bytes")
    seal = fields["x-holdfast-seal"]
    world_size = int(fields["x-holdfast-world-size"])
    return _Connection(source, url, line, int(total), world_size, None if seal == "none" else int(seal, 16))


def _until_end(line: socket.socket) -> int:
    """Return how many bytes can be received that certainly belong to the header and not to the body."""
    if isinstance(line, ssl.SSLSocket):  # the TLS socket does not support MSG_PEEK
        return 1
    seen = line.recv(MAX_HEAD_BYTES, socket.MSG_PEEK)
    end = seen.find(b"\r\n\r\n")
    if end >= 0:
        return end + 4
    return max(1, len(seen) - 3)


def _exactly(line: socket.socket, size: int) -> bytes:
    raw = b""
    while len(raw) < size:
        piece = line.recv(size - len(raw))
        if not piece:
            raise FetchFailed("the connection was closed")
        raw += piece
    return raw


def _shut_down(line: _Connection) -> None:
    try:
        # SSLSocket.shutdown would discard the TLS layer first, and the receiving thread would then read
        # ciphertext as content.
        socket.socket.shutdown(line.socket, socket.SHUT_RDWR)
    except OSError:
        return
