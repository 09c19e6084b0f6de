"""Members of a group that hold the same snapshot, connected over loopback, with one storage."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from holdfast.checkpoint import directory, sharing
from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.checkpoint.storage import CheckpointStorage
from holdfast.fileio import durable
from holdfast.fileio.checksum import CHUNK_BYTES, stretch_crc
from holdfast.fileio.range_writer import RangeWriter
from holdfast.fileio.safetensors import plan
from holdfast.process.network import Door
from holdfast.protocol import codec
from holdfast.protocol.member_messages import MemberOrder, StateSource
from holdfast.snapshot.arena import Arena
from holdfast.snapshot.commit_records import CommitRecord
from sidecar.fencing import OrderVersion
from sidecar.state import peers, piece_sharing, snapshot_send
from sidecar.state.checkpointing import CheckpointSaver
from sidecar.state.peers import PeerClient
from sidecar.state.piece_sharing import CheckpointSharing
from sidecar.state.piece_writer import PieceRequest, PieceWriter, WrittenPiece
from tests.samples.checkpoints import names, newest_whole
from tests.unit.sidecar.fake_peer import TOKEN
from tests.unit.sidecar.memory import WORLD_SIZE, holdings, member, private

GENERATION, STEP = 2, 7
NAME = f"step-{STEP:08d}"
NEWEST = OrderVersion(3, GENERATION)
RUN = MemberOrder("run", GENERATION)
MIB = 1 << 20
SIZE = 44 * MIB + 12_345  # six pieces of one chunk each


class CountingWriter(PieceWriter):
    """Counts the pieces that it was asked for, and that it has written."""

    asked = 0
    written = 0

    async def write(
        self, generation: int, step: int, asked: PieceRequest, is_gone: Callable[[], bool]
    ) -> WrittenPiece:
        self.asked += 1
        found = await super().write(generation, step, asked, is_gone)
        self.written += 1
        return found


@dataclass
class Member:
    path: Path
    url: str
    pieces: CountingWriter
    version: list[OrderVersion] = field(default_factory=lambda: [NEWEST])


def hold(path: Path, size: int = SIZE, seed: int = 1, flipped: int = -1) -> CommitRecord:
    """Write a snapshot of random bytes; `flipped` is the offset of a byte that differs."""
    arena = Arena(path / "arena")
    draft = arena.begin(plan([("w", "U8", (size,))], {}), GENERATION, STEP, WORLD_SIZE)
    assert draft is not None
    with draft:
        filler = random.Random(seed).randbytes(MIB)
        for at in range(0, size, MIB):  # no two pieces are equal
            draft.data[at : at + MIB] = (at.to_bytes(8, "little") + filler[8:])[: size - at]
        if flipped >= 0:
            draft.data[flipped] ^= 1
        record = draft.commit()
    arena.close()
    for rank in range(WORLD_SIZE):
        private(path, rank, GENERATION, STEP, b"rank %d" % rank)
    return record


@asynccontextmanager
async def helper(
    storage: CheckpointStorage,
    node: str = "n1",
    size: int = SIZE,
    flipped: int = -1,
    path: Path | None = None,
) -> AsyncIterator[Member]:
    """Serve a member that helps others. It holds the snapshot at `path`, or one of its own."""
    async with AsyncExitStack() as stack:
        if path is None:
            path = stack.enter_context(member())
            hold(path, size, flipped=flipped)
        version = [NEWEST]
        pieces = CountingWriter(holdings(path), storage, node, lambda: version[0])
        pieces.note_order(RUN)
        app = peers.application(holdings(path), lambda: TOKEN, Door(), pieces=pieces)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, snapshot_send.listener("127.0.0.1")).start()
        yield Member(path, f"http://127.0.0.1:{runner.addresses[0][1]}", pieces, version)


@asynccontextmanager
async def writer(
    path: Path, storage: CheckpointStorage, version: OrderVersion = NEWEST
) -> AsyncIterator[CheckpointSaver]:
    """Give what writes the checkpoints of the member at `path`."""
    client = PeerClient(holdings(path), lambda: TOKEN)
    sharing = CheckpointSharing(client, "n0", lambda: "http://own", lambda: version)
    try:
        yield CheckpointSaver(holdings(path), client, storage, sharing)
    finally:
        await client.close()


async def saved(
    path: Path, storage: CheckpointStorage, *urls: str, version: OrderVersion = NEWEST
) -> CheckpointSaver:
    """Save the snapshot at `path` with these peers."""
    async with writer(path, storage, version) as saver:
        (record,) = holdings(path).arena.records()
        await saver.save(record, [StateSource(url, rank) for rank, url in enumerate(urls)], {}, asked=1)
        return saver


def small_states_pay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(piece_sharing, "LEAST_BYTES", MIB)
    patch.setattr(directory, "PIECE_BYTES", CHUNK_BYTES)


class SlowFiles:
    """Opens files of which each write waits first."""

    def __init__(self, before: Callable[[], object] = lambda: time.sleep(0.05)) -> None:
        self._before = before

    def __call__(self, name: str, folder: int) -> RangeWriter:
        before = self._before

        class Slow(RangeWriter):
            def write(self, content: memoryview, at: int) -> None:
                before()
                super().write(content, at)

        return Slow(name, folder)


def unhurried(root: Path) -> DirectoryStorage:
    """Return storage that gives peers the time to take pieces, too."""
    return DirectoryStorage(root, SlowFiles())


class Staged:
    """A folder as a writer makes it, with nothing written yet."""

    def __init__(self, root: Path, here: Path) -> None:
        (self.record,) = holdings(here).arena.records()
        self.folder = durable.temporary_path(root, NAME)
        self.folder.mkdir()
        self.token = sharing.new_token()
        (self.folder / sharing.TOKEN).write_text(self.token)
        self.file = self.folder / "replicated.safetensors"
        self.file.touch()
        os.truncate(self.file, self.record.total_bytes)
        self.content = self.record.path.read_bytes()
        with open(self.record.path, "rb") as source:
            crcs = [stretch_crc(source.fileno(), at, at + CHUNK_BYTES) for at in (0, CHUNK_BYTES)]
        self.right = PieceRequest(
            NEWEST.epoch,
            NEWEST.generation,
            "n0",
            self.record.total_bytes,
            0,
            2 * CHUNK_BYTES,
            self.folder.name,
            self.token,
            0,
            tuple(crcs),
        )


def assert_saved(saver: CheckpointSaver, here: Path, root: Path) -> None:
    """The checkpoint is the one that a single writer makes, and nothing else is left."""
    assert saver.durable.error == ""
    found, notes = newest_whole(root)
    assert found is not None
    assert (found.step, found.generation, notes) == (STEP, GENERATION, ())
    (record,) = holdings(here).arena.records()
    assert (found.path / "replicated.safetensors").read_bytes() == record.path.read_bytes()
    assert names(root) == {NAME, "latest"}
    assert names(found.path) == {
        "manifest.json",
        "replicated.safetensors",
        "rank-00000.bin",
        "rank-00001.bin",
    }


async def post(
    url: str, asked: PieceRequest | bytes, token: str = TOKEN, step: int = STEP
) -> tuple[int, str]:
    raw = asked if isinstance(asked, bytes) else codec.encode(asked)
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{url}/v1/piece/{GENERATION}/{step}", data=raw) as answer,
    ):
        return answer.status, await answer.text()


async def until(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    give_up_at = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.02)
