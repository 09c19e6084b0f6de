"""A member that helps with a checkpoint receives an order: whether it still writes, and what it pins."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.checkpoint.sharing import ShareRefused
from holdfast.fileio.checksum import CHUNK_BYTES
from holdfast.fileio.safetensors import plan
from holdfast.protocol.member_messages import MemberOrder
from holdfast.snapshot.arena import Arena
from sidecar.state import piece_writer
from sidecar.state.piece_writer import READ_BYTES, PinnedReader
from tests.unit.sidecar.memory import WORLD_SIZE, holdings, member, snapshot
from tests.unit.sidecar.sharing.group import (
    GENERATION,
    RUN,
    STEP,
    Member,
    SlowFiles,
    Staged,
    assert_saved,
    helper,
    hold,
    post,
    saved,
    small_states_pay,
    unhurried,
    until,
)

LIMIT_S = 20.0
SECURE = MemberOrder("secure", GENERATION)
SAVE = replace(SECURE, save_step=STEP, save_generation=GENERATION)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    small_states_pay(monkeypatch)
    with member() as path:
        hold(path)
        yield path


class Hanging(SlowFiles):
    """Files of which the first write hangs until `go_on` is set."""

    def __init__(self) -> None:
        super().__init__(self._wait)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def _wait(self) -> None:
        if not self.begun.is_set():
            self.begun.set()
            assert self.go_on.wait(LIMIT_S)

    async def in_progress(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, LIMIT_S)


def is_pinned(path: Path) -> bool:
    """Return whether a reader keeps the slot of the snapshot of `STEP` from writers."""
    record = holdings(path).record(GENERATION, STEP)
    assert record is not None
    slot = holdings(path).arena._slots[record.slot]
    if not slot.acquire():
        return True
    slot.release()
    return False


def assert_right(staged: Staged, chunks: int) -> None:
    """The first `chunks` chunks are written as they are in the snapshot, and no other byte."""
    content, end = staged.file.read_bytes(), chunks * CHUNK_BYTES
    assert content[:end] == staged.content[:end]
    assert content[end:].strip(b"\0") == b""


@pytest.mark.parametrize(
    "order",
    [
        SECURE,
        replace(SAVE, save_step=STEP - 1),
        SAVE,  # the writer may have begun before the supervisor chose this snapshot
        MemberOrder("idle", GENERATION),
        MemberOrder("stop", GENERATION),
        replace(RUN, generation=GENERATION + 1),
    ],
    ids=lambda order: f"{order.do} {order.generation} {order.save_step}",
)
async def test_an_order_ends_a_piece_whose_storage_hangs(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: MemberOrder
) -> None:
    monkeypatch.setattr(piece_writer, "POLL_S", 3600.0)
    staged, files = Staged(tmp_path, here), Hanging()
    async with helper(DirectoryStorage(tmp_path, files), path=here) as peer:
        asking = asyncio.create_task(post(peer.url, staged.right))
        await files.in_progress()
        assert is_pinned(here)
        peer.pieces.note_order(order)
        assert not is_pinned(here)
        status, text = await asyncio.wait_for(asking, LIMIT_S)
        assert (status, text) == (
            409,
            f"this member's order is now {order.do!r}, generation {order.generation}",
        )
        files.go_on.set()
        await until(lambda: not peer.pieces._active)
        assert not is_pinned(here)
    assert_right(staged, 1)


async def test_an_order_releases_a_snapshot_that_no_piece_uses_at_the_moment(
    here: Path, tmp_path: Path
) -> None:
    """The next request usually follows; until then, the snapshot stays pinned."""
    staged = Staged(tmp_path, here)
    async with helper(DirectoryStorage(tmp_path), path=here) as peer:
        assert (await post(peer.url, staged.right))[0] == 200
        assert is_pinned(here)
        peer.pieces.note_order(SECURE)
        assert not is_pinned(here)


async def test_a_newer_snapshot_finds_a_slot_while_a_piece_hangs(here: Path, tmp_path: Path) -> None:
    staged, files = Staged(tmp_path, here), Hanging()
    snapshot(here, GENERATION, STEP + 1)
    ranks = Arena(here / "arena")
    layout = plan([("w", "U8", (1000,))], {})
    async with helper(DirectoryStorage(tmp_path, files), path=here) as peer:
        asking = asyncio.create_task(post(peer.url, staged.right))
        await files.in_progress()
        assert ranks.begin(layout, GENERATION, STEP + 2, WORLD_SIZE) is None
        peer.pieces.note_order(SECURE)
        draft = ranks.begin(layout, GENERATION, STEP + 2, WORLD_SIZE)
        assert draft is not None
        with draft:
            draft.commit()
        assert (await asyncio.wait_for(asking, LIMIT_S))[0] == 409
        files.go_on.set()
        await until(lambda: not peer.pieces._active)
        assert (await post(peer.url, staged.right))[0] == 410, "the snapshot has been replaced"
    ranks.close()
    assert_right(staged, 1)


async def test_a_snapshot_that_is_being_read_is_released_by_the_thread_that_reads_it(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop does not wait for the thread, whose priority is the lowest."""
    staged, preadv = Staged(tmp_path, here), os.preadv
    begun, go_on = threading.Event(), threading.Event()
    sizes = []

    def read(descriptor: int, buffers: list[memoryview], at: int) -> int:
        sizes.append(sum(map(len, buffers)))
        begun.set()
        assert go_on.wait(LIMIT_S)
        return preadv(descriptor, buffers, at)

    monkeypatch.setattr(os, "preadv", read)
    async with helper(DirectoryStorage(tmp_path), path=here) as peer:
        asking = asyncio.create_task(post(peer.url, staged.right))
        assert await asyncio.to_thread(begun.wait, LIMIT_S)
        peer.pieces.note_order(SECURE)
        assert (await asyncio.wait_for(asking, LIMIT_S))[0] == 409
        assert is_pinned(here)
        go_on.set()
        await until(lambda: not is_pinned(here))
        await until(lambda: not peer.pieces._active)
    assert sizes == [READ_BYTES]
    assert_right(staged, 0)


@contextmanager
def closed_before(line: int, reader: PinnedReader) -> Iterator[None]:
    """Close `reader` before it executes its line number `line`.

    `close` never waits, so it does the same there as in another thread at that moment.
    """
    left, before = line, sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_locals.get("self") is not reader:
            return None
        left -= event == "line"
        if not left:
            sys.settrace(before)
            reader.close()
        return trace if left else None

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_a_snapshot_is_released_at_whatever_line_of_a_read_the_order_comes(here: Path) -> None:
    (record,) = holdings(here).arena.records()
    into = memoryview(bytearray(2 * READ_BYTES))
    for line in range(1, 1000):
        reader = PinnedReader(holdings(here).arena, record)
        with suppress(ShareRefused), closed_before(line, reader):
            reader.read(0, into)
        if not reader._is_closed:
            break  # the read has fewer lines
        assert not is_pinned(here), f"closed before line {line}"
        with pytest.raises(ShareRefused):
            reader.read(0, into)
        assert not is_pinned(here)
    assert line > 10
    assert is_pinned(here), "nothing has closed the last reader"
    reader.close()
    assert not is_pinned(here)


async def test_a_group_that_runs_again_within_milliseconds_has_its_pieces_written(
    here: Path, tmp_path: Path
) -> None:
    """The thread of the stopped piece still hangs in storage, and then writes only what belongs there."""
    staged, files = Staged(tmp_path, here), Hanging()
    async with helper(DirectoryStorage(tmp_path, files), path=here) as peer:
        asking = asyncio.create_task(post(peer.url, staged.right))
        await files.in_progress()
        for order in (SECURE, RUN, SECURE, RUN):
            peer.pieces.note_order(order)
        assert (await asyncio.wait_for(asking, LIMIT_S))[0] == 409
        for _ in range(2):
            assert (await asyncio.wait_for(post(peer.url, staged.right), LIMIT_S))[0] == 200
        assert_right(staged, 2)
        files.go_on.set()
        await until(lambda: not peer.pieces._active)
        peer.pieces.note_order(SECURE)
        assert not is_pinned(here)
    assert_right(staged, 2)


async def test_a_thread_that_storage_keeps_does_not_keep_this_member_from_helping_the_next_writer(
    here: Path, tmp_path: Path
) -> None:
    """The supervisor has the same snapshot saved, perhaps by another member."""
    first, second, files = Staged(tmp_path, here), Staged(tmp_path, here), Hanging()
    async with helper(DirectoryStorage(tmp_path, files), path=here) as peer:
        asking = asyncio.create_task(post(peer.url, first.right))
        await files.in_progress()
        peer.pieces.note_order(SECURE)
        assert (await asyncio.wait_for(asking, LIMIT_S))[0] == 409
        peer.pieces.note_order(SAVE)
        assert (await asyncio.wait_for(post(peer.url, second.right), LIMIT_S))[0] == 200
        assert peer.pieces._active == 1
        files.go_on.set()
        await until(lambda: not peer.pieces._active)
    assert_right(first, 1)
    assert_right(second, 2)


@pytest.mark.parametrize("again", [SAVE, replace(SAVE, suspects=(1,), void=(STEP + 1,))])
async def test_an_order_that_comes_again_stops_nothing(
    here: Path, tmp_path: Path, again: MemberOrder
) -> None:
    staged, files = Staged(tmp_path, here), Hanging()
    async with helper(DirectoryStorage(tmp_path, files), path=here) as peer:
        peer.pieces.note_order(SAVE)
        asking = asyncio.create_task(post(peer.url, staged.right))
        await files.in_progress()
        peer.pieces.note_order(again)
        assert is_pinned(here)
        files.go_on.set()
        assert (await asyncio.wait_for(asking, LIMIT_S))[0] == 200
    assert_right(staged, 2)


@pytest.mark.parametrize(
    ("order", "status"),
    [
        (RUN, 200),
        (replace(RUN, save_step=STEP - 1), 200),
        (SAVE, 200),
        (replace(SAVE, generation=GENERATION + 1), 200),
        (SECURE, 409),
        (replace(SAVE, save_step=STEP + 1), 409),
        (replace(SAVE, save_generation=GENERATION - 1), 409),
        (MemberOrder("idle", GENERATION), 409),
        (MemberOrder("stop", GENERATION), 409),
    ],
)
async def test_unless_the_group_trains_a_member_helps_only_to_save_what_its_order_names(
    here: Path, tmp_path: Path, order: MemberOrder, status: int
) -> None:
    """A piece of a periodic checkpoint may be requested at any time, also after the order."""
    staged = Staged(tmp_path, here)
    async with helper(DirectoryStorage(tmp_path), path=here) as peer:
        peer.pieces.note_order(order)
        assert (await post(peer.url, staged.right))[0] == status
        assert is_pinned(here) == (status == 200)
    assert_right(staged, 2 if status == 200 else 0)


async def stopped_in_the_middle(peer: Member, files: Hanging) -> None:
    await files.in_progress()
    peer.pieces.note_order(SECURE)
    await until(lambda: not is_pinned(peer.path))  # a thread may be reading for the second request


@pytest.mark.parametrize("hangs", [False, True], ids=["writes on", "hangs for good"])
async def test_the_writer_completes_a_checkpoint_whose_helper_is_stopped(
    here: Path, tmp_path: Path, hangs: bool
) -> None:
    files = Hanging()
    async with helper(DirectoryStorage(tmp_path, files)) as peer:
        stopping = asyncio.create_task(stopped_in_the_middle(peer, files))
        saving = asyncio.create_task(saved(here, unhurried(tmp_path), peer.url))
        await asyncio.wait_for(stopping, LIMIT_S)
        if not hangs:
            files.go_on.set()
        assert_saved(await asyncio.wait_for(saving, LIMIT_S), here, tmp_path)
        assert not is_pinned(peer.path)
        files.go_on.set()
        await until(lambda: not peer.pieces._active)
        assert not is_pinned(peer.path)
    assert_saved(await saving, here, tmp_path)
