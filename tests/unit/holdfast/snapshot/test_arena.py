from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.snapshot.arena import Arena, SnapshotGone
from tests.samples.snapshots import ages, assert_whole, layout, snapshot, take_in
from tests.sandbox import in_child, memory_directory


def test_a_committed_snapshot_is_a_safetensors_file_and_other_processes_find_it(memory: Path) -> None:
    record = snapshot(Arena(memory), 1, 7)

    other = Arena(memory)
    assert other.records() == (record,)
    assert (record.generation, record.step, record.world_size) == (1, 7, 2)
    assert record.path.stat().st_size == record.total_bytes == layout().total_bytes
    assert_whole(other, record)


def test_the_newest_snapshot_is_never_the_one_that_is_overwritten(memory: Path) -> None:
    arena = Arena(memory)
    for step in range(10):
        snapshot(arena, 1, step)
        assert ages(arena) == [(1, held) for held in (step, step - 1) if held >= 0]


def test_a_newer_generation_is_newer_whatever_its_step(memory: Path) -> None:
    arena = Arena(memory)
    snapshot(arena, 1, 90)
    snapshot(arena, 2, 40)

    assert ages(arena) == [(2, 40), (1, 90)]


def test_the_protected_snapshot_is_kept_even_if_a_newer_one_must_be_overwritten(memory: Path) -> None:
    arena = Arena(memory)
    snapshot(arena, 1, 1)
    snapshot(arena, 1, 2)

    draft = arena.begin(layout(), 2, 2, 2, keep=frozenset({(1, 1)}))

    assert draft is not None
    draft.commit()
    assert ages(arena) == [(2, 2), (1, 1)]
    assert arena.begin(layout(), 2, 3, 2, keep=frozenset({(1, 1), (2, 2)})) is None
    assert ages(arena) == [(2, 2), (1, 1)]


def test_protecting_a_missing_snapshot_still_protects_the_newest(memory: Path) -> None:
    arena = Arena(memory)
    snapshot(arena, 1, 1)
    snapshot(arena, 1, 2)
    draft = arena.begin(layout(), 1, 3, 2, keep=frozenset({(9, 9)}))

    assert draft is not None
    assert ages(arena) == [(1, 2)]


ALL_AGES = [(1, 1), (1, 2), (2, 1)]


@given(
    held=st.lists(st.sampled_from(ALL_AGES), max_size=2),
    keep=st.none() | st.frozensets(st.sampled_from([*ALL_AGES, (9, 9)])),
    over=st.none() | st.integers(0, 1),
)
def test_the_snapshot_that_is_said_to_be_overwritten_next_is_the_one_that_a_writer_overwrites(
    held: list[tuple[int, int]], keep: frozenset[tuple[int, int]] | None, over: int | None
) -> None:
    with memory_directory() as memory:
        arena = Arena(memory / "arena")
        source = Arena(memory / "source")
        record = snapshot(source, 1, 1)
        content, seal = record.path.read_bytes(), source.seal(record)
        for generation, step in held:  # as a peer's: a writer refuses to write a state twice
            take_in(arena, generation, step, [content], len(content), seal)
        records = arena.records()
        requested = records[over] if over is not None and over < len(records) else None
        usual = arena.next_overwritten(keep)

        draft = arena.begin(layout(), 3, 3, 2, keep, requested)

        if len(records) < 2:
            assert (usual, draft is None) == (None, False)
        elif requested is not None:
            assert draft is not None
            assert draft.before == requested
        else:
            assert (draft and draft.before) == usual
        assert usual is None or usual in records
        if draft is not None:
            draft.abandon()
        arena.close()
        source.close()


def test_without_the_snapshot_to_be_overwritten_the_usual_one_is(memory: Path) -> None:
    arena = Arena(memory)
    gone = snapshot(arena, 1, 1)
    for step in (2, 3):
        snapshot(arena, 1, step)

    draft = arena.begin(layout(), 1, 4, 2, over=gone)

    assert draft is not None
    assert ages(arena) == [(1, 3)]


def test_an_abandoned_draft_leaves_no_snapshot_and_no_lock(memory: Path) -> None:
    arena = Arena(memory)
    with arena.begin(layout(), 1, 1, 2) or pytest.fail("no draft"):
        pass

    assert arena.records() == ()
    assert snapshot(Arena(memory), 1, 2).step == 2


def test_a_draft_ends_only_once(memory: Path) -> None:
    draft = Arena(memory).begin(layout(), 1, 1, 2)
    assert draft is not None
    draft.commit()

    with pytest.raises(RuntimeError, match="ended"):
        draft.commit()


def test_the_mapping_is_kept_while_the_layout_is_unchanged(memory: Path) -> None:
    arena = Arena(memory)
    views: list[memoryview] = []
    for step in range(6):
        draft = arena.begin(layout(), 1, step, 2)
        assert draft is not None
        views.append(draft.data)
        draft.commit()

    assert views[0] is views[2] is views[4]
    assert views[1] is views[3] is views[5]


def test_a_slot_grows_and_shrinks_with_the_layout_also_by_another_process(memory: Path) -> None:
    arenas = Arena(memory), Arena(memory)
    for step, values in enumerate((10, 5000, 5000, 10, 10, 70000, 3, 3)):
        assert_whole(arenas[0], snapshot(arenas[step // 2 % 2], 1, step, values))


def test_two_writers_exclude_each_other(memory: Path) -> None:
    one, other = Arena(memory), Arena(memory)
    draft = one.begin(layout(), 1, 1, 2)

    assert draft is not None
    assert other.begin(layout(), 1, 1, 2) is None
    assert one.begin(layout(), 1, 1, 2) is None
    draft.commit()
    assert other.begin(layout(), 1, 2, 2) is not None


def test_of_many_threads_that_begin_at_once_one_gets_the_slot(memory: Path) -> None:
    arena = Arena(memory)
    together = threading.Barrier(8)
    drafts = []

    def begin() -> None:
        together.wait()
        drafts.append(arena.begin(layout(), 1, 1, 2))

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sum(draft is not None for draft in drafts) == 1


def test_a_forked_child_does_not_share_the_lock_of_its_parent(memory: Path) -> None:
    arena = Arena(memory)
    draft = arena.begin(layout(), 1, 1, 2)
    assert draft is not None

    def child() -> None:
        assert Arena(memory).begin(layout(), 1, 1, 2) is None
        inherited = Arena.__new__(Arena)
        inherited.__dict__.update(arena.__dict__)
        assert inherited.begin(layout(), 1, 1, 2) is None

    assert in_child(child) == 0
    draft.commit()


def test_a_pinned_snapshot_is_not_overwritten(memory: Path) -> None:
    arena = Arena(memory)
    older = snapshot(arena, 1, 1)
    snapshot(arena, 1, 2)

    with arena.pin(older), Arena(memory).pin(older):
        assert arena.begin(layout(), 1, 3, 2) is None
    assert arena.begin(layout(), 1, 3, 2) is not None


def test_the_older_snapshot_counts_as_being_read_while_only_readers_hold_it(memory: Path) -> None:
    arena, other = Arena(memory), Arena(memory)
    older = snapshot(arena, 1, 1)
    with other.pin(older):
        assert arena.being_read() is None, "the other slot is empty"
    newest = snapshot(arena, 1, 2)
    assert arena.being_read() is None
    with other.pin(newest):
        assert arena.being_read() is None, "the slot of the older snapshot is free"
    with other.pin(older):
        assert arena.being_read() == older
    draft = arena.begin(layout(), 1, 3, 2)
    assert draft is not None
    assert other.being_read() is None, "that slot is being written"
    draft.abandon()


def test_a_snapshot_protected_by_name_is_kept_and_the_newer_one_is_overwritten(memory: Path) -> None:
    arena = Arena(memory)
    older = snapshot(arena, 1, 1)
    snapshot(arena, 1, 2)
    with Arena(memory).pin(older) as path:
        before = path.read_bytes()
        incoming = arena.receive(1, 9, 2, 1000, frozenset({(1, 1)}))
        assert arena.records() == (older,)
        incoming.abandon()
        assert path.read_bytes() == before


def test_a_pin_on_an_overwritten_snapshot_reports_that_it_is_gone(memory: Path) -> None:
    arena = Arena(memory)
    older = snapshot(arena, 1, 1)
    snapshot(arena, 1, 2)
    draft = arena.begin(layout(), 1, 3, 2)

    assert draft is not None
    with pytest.raises(SnapshotGone, match="step 1"), arena.pin(older):
        pass
    draft.commit()
    with pytest.raises(SnapshotGone, match="step 1"), arena.pin(older):
        pass


def test_the_same_step_written_again_is_a_different_snapshot(memory: Path) -> None:
    arena = Arena(memory)
    first = snapshot(arena, 1, 1)
    arena.seal(first)
    snapshot(arena, 2, 1)
    again = snapshot(arena, 1, 1)

    assert (first.generation, first.step, first.slot) == (again.generation, again.step, again.slot)
    assert not arena.sealed(again)
    with pytest.raises(SnapshotGone):
        arena.seal(first)


def test_a_snapshot_whose_file_is_removed_or_truncated_does_not_exist(memory: Path) -> None:
    arena = Arena(memory)
    one, two = snapshot(arena, 1, 1), snapshot(arena, 1, 2)
    one.path.unlink()
    os.truncate(two.path, 100)

    assert arena.records() == ()
    with pytest.raises(SnapshotGone), arena.pin(one):
        pass
    with pytest.raises(SnapshotGone), arena.pin(two):
        pass
    assert_whole(arena, snapshot(arena, 1, 3))
    assert_whole(arena, snapshot(arena, 1, 4))
