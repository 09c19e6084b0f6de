from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.fileio.checksum import checksum
from holdfast.snapshot.arena import Arena, SnapshotGone
from tests.crash.killing import killed_at_every_line
from tests.samples.snapshots import ages, assert_whole, content, layout, snapshot, take_in


@pytest.mark.parametrize(("held", "values"), [(0, 500), (1, 500), (3, 500), (2, 9000), (2, 10)])
def test_a_writer_killed_at_any_line_leaves_one_complete_newest_snapshot(
    memory: Path, held: int, values: int
) -> None:
    template = memory / "template"
    arena = Arena(template)
    for step in range(1, held + 1):
        snapshot(arena, 1, step)

    def check(work: Path, finished: bool) -> None:
        after = Arena(work)
        newest = next(iter(after.records()), None)
        if newest is None:
            assert held == 0
            assert not finished
        else:
            assert newest.step == held + 1 if finished else newest.step in (held, held + 1)
            for record in after.records():
                assert_whole(after, record)
        assert_whole(after, snapshot(after, 1, held + 2, values))

    def act(arena: Arena) -> None:
        snapshot(arena, 1, held + 1, values)

    assert killed_at_every_line(template, Arena, act, check) >= 4


def test_a_transfer_killed_at_any_line_leaves_one_complete_newest_snapshot(memory: Path) -> None:
    template = memory / "template"
    arena = Arena(template)
    snapshot(arena, 1, 1)
    raw = snapshot(arena, 1, 2).path.read_bytes()
    crc = checksum(memoryview(raw))
    pieces = [raw[:100], raw[100:]]

    def check(work: Path, finished: bool) -> None:
        after = Arena(work)
        newest = after.records()[0]
        assert newest.generation == 2 if finished else newest.generation in (1, 2)
        assert_whole(after, newest)

    def install(arena: Arena) -> None:
        take_in(arena, 2, 2, pieces, len(raw), crc)

    killed_at_every_line(template, Arena, install, check)


def test_an_arena_can_be_opened_after_a_kill_at_any_line_of_its_creation(memory: Path) -> None:
    template = memory / "template"
    template.mkdir()

    def check(work: Path, finished: bool) -> None:
        arena = Arena(work)
        assert arena.records() == ()
        assert_whole(arena, snapshot(arena, 1, 1))

    killed_at_every_line(template, lambda work: work, Arena, check)


def test_concurrent_readers_see_only_complete_snapshots(memory: Path) -> None:
    arena = Arena(memory)
    for step in range(2):
        snapshot(arena, 1, step, 3000)
    writer = os.fork()
    if writer == 0:
        written = 2
        mine = Arena(memory)
        while written < 400:
            draft = mine.begin(layout(3000 + written // 100), 1, written, 2)
            if draft is not None:
                draft.data[:] = content(written, len(draft.data))
                draft.commit()
                written += 1
        os._exit(0)
    while os.waitpid(writer, os.WNOHANG)[0] == 0:
        for record in arena.records():
            with suppress(SnapshotGone):
                assert_whole(arena, record)
    assert ages(arena) == [(1, 399), (1, 398)]
