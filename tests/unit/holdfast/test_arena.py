from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.arena import Arena, Busy, Corrupt, Gone
from holdfast.checksum import checksum
from holdfast.safetensors import Malformed, plan
from tests.expendable import flip, in_child, limit_file_size
from tests.samples.snapshots import ages, assert_whole, layout, snapshot


def test_a_committed_snapshot_is_a_safetensors_file_and_is_found_by_others(memory: Path) -> None:
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


def test_what_is_to_be_kept_is_kept_even_if_a_newer_snapshot_must_go(memory: Path) -> None:
    arena = Arena(memory)
    snapshot(arena, 1, 1)
    snapshot(arena, 1, 2)

    draft = arena.begin(layout(), 2, 2, 2, keep=frozenset({(1, 1)}))

    assert draft is not None
    draft.commit()
    assert ages(arena) == [(2, 2), (1, 1)]
    assert arena.begin(layout(), 2, 3, 2, keep=frozenset({(1, 1), (2, 2)})) is None
    assert ages(arena) == [(2, 2), (1, 1)]


def test_keeping_what_is_not_there_still_keeps_the_newest(memory: Path) -> None:
    arena = Arena(memory)
    snapshot(arena, 1, 1)
    snapshot(arena, 1, 2)
    draft = arena.begin(layout(), 1, 3, 2, keep=frozenset({(9, 9)}))

    assert draft is not None
    assert ages(arena) == [(1, 2)]


def test_an_abandoned_draft_leaves_no_snapshot_and_no_lock(memory: Path) -> None:
    arena = Arena(memory)
    with arena.begin(layout(), 1, 1, 2) or pytest.fail("no draft"):
        pass

    assert arena.records() == ()
    assert snapshot(Arena(memory), 1, 2).step == 2


def test_a_draft_ends_once(memory: Path) -> None:
    draft = Arena(memory).begin(layout(), 1, 1, 2)
    assert draft is not None
    draft.commit()

    with pytest.raises(RuntimeError, match="ended"):
        draft.commit()


def test_the_mapping_stays_while_the_layout_does(memory: Path) -> None:
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


def test_of_many_threads_with_one_arena_each_slot_has_one_writer(memory: Path) -> None:
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


def test_a_pin_on_a_snapshot_that_was_overwritten_says_gone(memory: Path) -> None:
    arena = Arena(memory)
    older = snapshot(arena, 1, 1)
    snapshot(arena, 1, 2)
    draft = arena.begin(layout(), 1, 3, 2)

    assert draft is not None
    with pytest.raises(Gone, match="step 1"), arena.pin(older):
        pass
    draft.commit()
    with pytest.raises(Gone, match="step 1"), arena.pin(older):
        pass


def test_the_same_step_written_again_is_another_snapshot(memory: Path) -> None:
    arena = Arena(memory)
    first = snapshot(arena, 1, 1)
    arena.seal(first)
    snapshot(arena, 2, 1)
    again = snapshot(arena, 1, 1)

    assert (first.generation, first.step, first.slot) == (again.generation, again.step, again.slot)
    assert not arena.sealed(again)
    with pytest.raises(Gone):
        arena.seal(first)


def test_a_snapshot_whose_file_is_gone_or_cut_does_not_exist(memory: Path) -> None:
    arena = Arena(memory)
    one, two = snapshot(arena, 1, 1), snapshot(arena, 1, 2)
    one.path.unlink()
    os.truncate(two.path, 100)

    assert arena.records() == ()
    with pytest.raises(Gone), arena.pin(one):
        pass
    with pytest.raises(Gone), arena.pin(two):
        pass
    assert_whole(arena, snapshot(arena, 1, 3))
    assert_whole(arena, snapshot(arena, 1, 4))


def test_a_seal_holds_for_its_snapshot_and_finds_a_flipped_bit(memory: Path) -> None:
    arena = Arena(memory)
    record = snapshot(arena, 1, 1, values=20_000)
    assert not arena.sealed(record)
    assert arena.checksum(record) is None
    assert arena.verify(record)
    assert arena.sealed(record)
    assert arena.checksum(record) == checksum(memoryview(record.path.read_bytes()))
    assert arena.verify(record)

    for _ in range(20):
        flip(record.path, chance.randrange(record.total_bytes * 8))
        assert not Arena(memory).verify(record)
        arena.seal(record)


def test_a_flipped_bit_in_the_record_page_never_makes_a_wrong_snapshot(memory: Path) -> None:
    arena = Arena(memory)
    snapshot(arena, 1, 1)
    arena.seal(snapshot(arena, 1, 2))
    whole = {(record, arena.checksum(record)) for record in arena.records()}
    for bit in range(0, (2 * 128 + 2 * 64) * 8, 7):
        flip(memory / "records", bit)
        found = {(record, arena.checksum(record)) for record in arena.records()}
        assert {record for record, _ in found} <= {record for record, _ in whole}
        assert len(found & whole) >= 1
        flip(memory / "records", bit)
    assert {(record, arena.checksum(record)) for record in arena.records()} == whole


def test_no_room_is_an_error_at_begin_and_the_newest_snapshot_stays(memory: Path) -> None:
    arena = Arena(memory)
    snapshot(arena, 1, 1)
    newest = snapshot(arena, 1, 2)

    def child() -> None:
        limit_file_size(100_000)
        with pytest.raises(OSError, match=r".*") as caught:
            Arena(memory).begin(layout(values=1_000_000), 1, 3, 2)
        assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)

    assert in_child(child) == 0
    assert arena.records() == (newest,)
    assert_whole(arena, newest)
    snapshot(arena, 1, 3)


def test_a_full_tmpfs_is_an_error_at_begin(memory: Path) -> None:
    status = os.statvfs(memory)
    too_much = 2 * status.f_blocks * status.f_frsize or 1 << 40
    arena = Arena(memory)

    def child() -> None:  # on a file system without a size of its own the limit says no
        if status.f_blocks == 0 or memory.parent != Path("/dev/shm"):
            limit_file_size(1 << 20)
        with pytest.raises(OSError, match=r".*") as caught:
            arena.begin(plan([("huge", "U8", (too_much,))], {}), 1, 1, 2)
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)

    assert in_child(child) == 0
    snapshot(arena, 1, 1)


def test_a_peers_snapshot_is_installed_and_sealed(memory: Path) -> None:
    source, target = Arena(memory / "a"), Arena(memory / "b")
    record = snapshot(source, 3, 9)
    raw = record.path.read_bytes()
    pieces = [raw[at : at + 700] for at in range(0, len(raw), 700)]

    installed = target.install(3, 9, 2, pieces, len(raw), source.seal(record))

    assert target.sealed(installed)
    assert_whole(target, installed)
    assert ages(target) == [(3, 9)]


@pytest.mark.parametrize("fault", ["short", "long", "flipped", "announced", "not a file", "broken"])
def test_a_bad_transfer_leaves_nothing(memory: Path, fault: str) -> None:
    arena = Arena(memory)
    newest = snapshot(arena, 1, 1)
    raw = newest.path.read_bytes()
    expected = checksum(memoryview(raw))
    total, sent = len(raw), raw
    error: type[Exception] = Corrupt
    if fault == "short":
        sent = raw[:-1]
    elif fault == "long":
        sent = raw + b"x"
    elif fault == "flipped":
        sent = raw[:-1] + bytes([raw[-1] ^ 1])
    elif fault == "announced":
        total = 3
    elif fault == "not a file":
        error, sent = Malformed, b"\xff" * total
        expected = checksum(memoryview(sent))
    else:
        error = ConnectionError

    def source() -> Iterator[bytes]:
        yield sent[:50]
        if fault == "broken":
            raise ConnectionError
        yield sent[50:]

    with pytest.raises(error):
        arena.install(2, 2, 2, source(), total, expected)
    assert arena.records() == (newest,)
    assert_whole(arena, newest)
    assert snapshot(arena, 2, 2).step == 2


@pytest.mark.parametrize("numbers", [(-1, 1, 1), (1, 2**63, 1), (1, 1, 0), (1, 1, 2**31)])
def test_numbers_that_no_record_can_hold_are_refused_and_change_nothing(
    memory: Path, numbers: tuple[int, int, int]
) -> None:
    arena = Arena(memory)
    held = {snapshot(arena, 1, 1), snapshot(arena, 1, 2)}
    with pytest.raises(ValueError, match="accepted are"):
        arena.begin(layout(), *numbers)
    with pytest.raises(Corrupt, match="accepted are"):
        arena.receive(*numbers, 1000)
    assert set(arena.records()) == held


def test_a_transfer_finds_no_free_slot_while_readers_hold_it(memory: Path) -> None:
    arena = Arena(memory)
    older = snapshot(arena, 1, 1)
    snapshot(arena, 1, 2)
    with arena.pin(older), pytest.raises(Busy):
        arena.receive(1, 3, 2, 1000)


chance = random.Random(3)
