"""Have other members write pieces of this member's checkpoint.

For each peer, tasks take a piece, have this member's own copy of it checksummed, and send the checksums with
a request to write the piece. A peer that refuses, fails, or answers with different checksums gets no more
pieces of this checkpoint, and another member writes the piece that it had.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from holdfast.checkpoint.sharing import LEAST_BYTES, SharedFile, SharedPiece, StagingPlace
from holdfast.process import event_loop
from holdfast.protocol.member_messages import StateSource
from holdfast.snapshot.commit_records import CommitRecord
from sidecar.fencing import OrderVersion
from sidecar.state.background import yield_to_all
from sidecar.state.peers import PeerClient
from sidecar.state.piece_writer import PieceRequest
from sidecar.state.snapshot_fetch import FetchFailed

log = logging.getLogger(__name__)

MOST_PEERS = 15  # with this many peers, a single network connection is rarely the bottleneck
REQUESTS = 2  # to each peer at a time, so that it does not have to wait for the next request
OBJECT_REQUESTS = 4  # the same for object storage, where a single connection is slow
_hashing = ThreadPoolExecutor(2, "share-sums", initializer=yield_to_all)


class CheckpointSharing:
    """Finds the peers that may help with a checkpoint."""

    def __init__(
        self, client: PeerClient, node: str, url: Callable[[], str], newest: Callable[[], OrderVersion]
    ) -> None:
        """`url` is the address of this member; `newest` returns the newest order that it obeys."""
        self.client, self.node, self.newest = client, node, newest
        self._url = url
        self._refusals: dict[str, str] = {}  # the last refusal of each peer, so that it is logged only once
        self._is_trusted = True  # False once storage has lost what peers wrote

    def helpers(self, record: CommitRecord, sources: Iterable[StateSource]) -> PeerHelpers | None:
        """Return the peers for the snapshot `record`; None if sharing would not pay off.

        Call this on the event loop.

        The peers come from the order's sources: first the members that have ranks, whose sources have no
        generation, then the members that held a state.
        """
        ordered = sorted(sources, key=lambda source: source.generation != 0)
        urls = dict.fromkeys(each.url for each in ordered if each.url and each.url != self._url())
        count = min(MOST_PEERS, len(urls), record.total_bytes // LEAST_BYTES - 1)
        if count < 1 or not self._is_trusted:
            return None
        return PeerHelpers(self, tuple(urls)[:count], record)

    def distrust(self, why: str) -> None:
        """Write all later checkpoints alone. Safe in any thread."""
        log.warning("checkpoints are no longer shared", extra={"error": why})
        self._is_trusted = False

    def note_refusal(self, url: str, why: str) -> None:
        if self._refusals.get(url) != why:
            log.info("peer refused to help with the checkpoint", extra={"error": why})
        self._refusals[url] = why


class PeerHelpers:
    """The peers that may help with one checkpoint. Call `close` on the event loop when done."""

    def __init__(self, sharing: CheckpointSharing, urls: tuple[str, ...], record: CommitRecord) -> None:
        self._sharing, self._urls, self._record = sharing, urls, record
        self._version = sharing.newest()  # peers that obey a newer order no longer help
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._left = set(urls)  # the peers that have not failed
        self.written = 0  # bytes written by all peers

    def distrust(self, why: str) -> None:
        self._sharing.distrust(why)

    @contextmanager
    def helping(self, place: StagingPlace, work: SharedFile) -> Iterator[None]:
        self._call(lambda: self._begin(place, work))
        try:
            yield
        finally:
            work.end()
            self._call(self._stop)

    async def close(self) -> None:
        """Wait until no task of this checkpoint is left."""
        await event_loop.end(tuple(self._tasks))
        log.debug("checkpoint shared", extra={"step": self._record.step, "bytes": self.written})

    def _call(self, what: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended, and this process will end soon
            self._loop.call_soon_threadsafe(what)

    def _begin(self, place: StagingPlace, work: SharedFile) -> None:
        for _ in range(OBJECT_REQUESTS if place.part_bytes else REQUESTS):
            for url in self._urls:
                self._tasks.add(asyncio.create_task(self._help(url, place, work)))

    def _stop(self) -> None:
        for each in self._tasks:
            each.cancel()  # this closes the connection, so the peer knows that the writer no longer waits

    async def _help(self, url: str, place: StagingPlace, work: SharedFile) -> None:
        while url in self._left and (piece := work.take()) is not None:
            try:
                crcs = await self._written(url, place, work, piece)
                work.finish(piece, crcs)
                self.written += piece.end - piece.begin
            except (FetchFailed, OSError) as error:
                if url in self._left:
                    self._left.remove(url)
                    self._sharing.note_refusal(url, str(error))
            finally:
                work.give_back(piece)  # no-op if it is done

    async def _written(
        self, url: str, place: StagingPlace, work: SharedFile, piece: SharedPiece
    ) -> tuple[int, ...]:
        """Have a peer write a piece; return its checksums. Raises `FetchFailed`, `OSError`."""
        crcs = await self._loop.run_in_executor(_hashing, work.checksums, piece)
        asked = PieceRequest(
            self._version.epoch,
            self._version.generation,
            self._sharing.node,
            work.size,
            piece.begin,
            piece.end,
            place.folder,
            place.token,
            place.part_bytes,
            crcs,
        )
        found = await self._sharing.client.write_piece(url, self._record, asked)
        if found.crc32 != crcs:
            raise FetchFailed(f"{url}: the bytes that it wrote differ from this member's")
        return crcs
