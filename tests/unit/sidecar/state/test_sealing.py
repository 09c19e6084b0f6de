from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.fileio.checksum import CHUNK_BYTES
from holdfast.protocol.member_messages import MAX_SEALS
from holdfast.snapshot.arena import Arena
from holdfast.snapshot.commit_records import CommitRecord
from sidecar.state.sealing import LINGER_S, SHARE, SnapshotSealer
from tests.unit.sidecar.memory import flip, holdings, member, snapshot


@pytest.fixture
def here() -> Iterator[Path]:
    with member() as path:
        yield path


@pytest.fixture
def arena(here: Path) -> Arena:
    return holdings(here).arena


def slow(arena: Arena, every: int, unit: int = 0) -> SnapshotSealer:
    """Return a sealer that takes so long that it may seal only every `every` steps."""
    sealing = SnapshotSealer(arena, lambda: (unit, 0.1))
    sealing._took_s = SHARE * 0.1 * every
    return sealing


async def test_at_first_the_newest_snapshot_is_sealed_once_and_reported(here: Path, arena: Arena) -> None:
    sealing = SnapshotSealer(arena, lambda: (0, 0.1))
    await sealing.seal_due(0.0)
    assert not sealing.seals
    older, newest = snapshot(here, 1, 5), snapshot(here, 1, 6)
    await sealing.seal_due(0.0)
    assert (arena.sealed(older), arena.sealed(newest)) == (False, True)
    told = sealing.seals[0]
    assert (told.generation, told.step, told.total_bytes) == (1, 6, newest.total_bytes)
    assert told.crc == arena.checksum(newest)


async def test_equal_states_have_equal_seals_on_every_member(here: Path) -> None:
    with member() as there:
        told = []
        for path in (here, there):
            snapshot(path, 1, 8)
            sealing = SnapshotSealer(holdings(path).arena, lambda: (0, 0.1))
            await sealing.seal_due(0.0)
            told.append(sealing.seals)
        assert told[0] == told[1] != ()


async def test_an_expensive_seal_is_delayed_until_it_is_due(here: Path, arena: Arena) -> None:
    sealing = slow(arena, 5)
    assert sealing.every() == 8
    early, due = snapshot(here, 1, 12), snapshot(here, 1, 16)
    await sealing.seal_due(0.0)
    assert (arena.sealed(early), arena.sealed(due)) == (False, True)


async def test_a_snapshot_that_is_not_replaced_is_sealed_anyway(here: Path, arena: Arena) -> None:
    sealing = slow(arena, 5)
    record = snapshot(here, 1, 12)
    await sealing.seal_due(100.0)
    await sealing.seal_due(100.0 + LINGER_S - 0.01)
    assert not arena.sealed(record)
    await sealing.seal_due(100.0 + LINGER_S)
    assert arena.sealed(record)


async def test_until_a_snapshot_is_due_the_arena_is_read_only_if_a_new_one_has_been_taken(
    here: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealing, read = slow(arena, 5), 0
    records = arena.records

    def counted() -> tuple[CommitRecord, ...]:
        nonlocal read
        read += 1
        return records()

    monkeypatch.setattr(arena, "records", counted)
    for step in (12, 13):
        snapshot(here, 1, step)
        for more_s in (0.0, 0.5, LINGER_S - 0.01):
            await sealing.seal_due(100.0 + step + more_s)
    assert read == 2
    await sealing.seal_due(113.0 + LINGER_S)
    assert [each.step for each in sealing.seals] == [13]


async def test_a_new_snapshot_has_its_own_deadline(here: Path, arena: Arena) -> None:
    sealing = slow(arena, 5)
    snapshot(here, 1, 12)
    await sealing.seal_due(100.0)
    newer = snapshot(here, 1, 13)
    await sealing.seal_due(100.0 + LINGER_S)
    assert not arena.sealed(newer)


async def test_the_whole_time_of_a_seal_counts_whatever_the_size_of_the_state(
    here: Path, arena: Arena
) -> None:
    sealing = SnapshotSealer(arena, lambda: (0, 0.1))
    record = snapshot(here, 1, 5, size=2 * CHUNK_BYTES)
    began = time.thread_time()
    zlib.crc32(record.path.read_bytes())
    alone_s = time.thread_time() - began
    await sealing.seal_due(0.0)
    assert sealing._took_s > alone_s / 3


def test_members_of_any_speed_seal_common_steps(arena: Arena) -> None:
    paces = [slow(arena, every).every() for every in (1, 3, 8, 100)]
    assert paces == [1, 4, 8, 128]
    assert [slow(arena, every, unit=50).every() for every in (1, 99, 101)] == [50, 100, 200]


async def test_the_last_seals_of_the_newest_generation_are_reported(here: Path, arena: Arena) -> None:
    sealing = SnapshotSealer(arena, lambda: (0, 0.0))
    for step in range(1, MAX_SEALS + 3):
        snapshot(here, 1, step)
        await sealing.seal_due(0.0)
    assert [seal.step for seal in sealing.seals] == list(range(3, MAX_SEALS + 3))
    snapshot(here, 2, 4)
    await sealing.seal_due(0.0)
    assert [(seal.generation, seal.step) for seal in sealing.seals] == [(2, 4)]


async def test_a_change_of_the_sealed_steps_is_detected(here: Path, arena: Arena) -> None:
    record = snapshot(here, 1, 5)
    await SnapshotSealer(arena, lambda: (0, 0.1)).seal_due(0.0)
    assert holdings(here).good(record)
    flip(record)
    assert not holdings(here).good(record)


async def test_a_snapshot_that_the_script_may_still_change_is_not_sealed(here: Path, arena: Arena) -> None:
    changing = {8}
    sealing = SnapshotSealer(arena, lambda: (8, 0.1), lambda record: record.step not in changing)
    newest = snapshot(here, 1, 8)
    await sealing.seal_due(0.0)
    assert not arena.sealed(newest)
    changing.clear()
    await sealing.seal_due(0.0)
    assert [each.step for each in sealing.seals] == [8]
