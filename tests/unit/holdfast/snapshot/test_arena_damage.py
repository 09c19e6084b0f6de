"""An arena detects flipped bits, full disks and bad transfers."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.fileio.checksum import checksum
from holdfast.fileio.safetensors import Malformed, plan
from holdfast.snapshot.arena import Arena, ArenaBusy, CorruptSnapshot
from tests.samples.snapshots import ages, assert_whole, layout, snapshot, take_in
from tests.sandbox import flip, in_child, limit_file_size


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


def test_a_flipped_bit_in_the_record_page_never_yields_a_wrong_snapshot(memory: Path) -> None:
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


def test_lack_of_space_is_an_error_at_begin_and_the_newest_snapshot_is_kept(memory: Path) -> None:
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

    def child() -> None:  # on a file system without a size limit of its own, the file size limit refuses
        if status.f_blocks == 0 or memory.parent != Path("/dev/shm"):
            limit_file_size(1 << 20)
        with pytest.raises(OSError, match=r".*") as caught:
            arena.begin(plan([("huge", "U8", (too_much,))], {}), 1, 1, 2)
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)

    assert in_child(child) == 0
    snapshot(arena, 1, 1)


def test_a_snapshot_from_a_peer_is_installed_and_sealed(memory: Path) -> None:
    source, target = Arena(memory / "a"), Arena(memory / "b")
    record = snapshot(source, 3, 9)
    raw = record.path.read_bytes()
    pieces = [raw[at : at + 700] for at in range(0, len(raw), 700)]

    installed = take_in(target, 3, 9, pieces, len(raw), source.seal(record))

    assert target.sealed(installed)
    assert_whole(target, installed)
    assert ages(target) == [(3, 9)]


@pytest.mark.parametrize("fault", ["short", "flipped", "announced", "not a file", "broken"])
def test_a_failed_transfer_leaves_nothing(memory: Path, fault: str) -> None:
    arena = Arena(memory)
    newest = snapshot(arena, 1, 1)
    raw = newest.path.read_bytes()
    expected = checksum(memoryview(raw))
    total, sent = len(raw), raw
    error: type[Exception] = CorruptSnapshot
    if fault == "short":
        sent = raw[:-1]
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
        take_in(arena, 2, 2, source(), total, expected)
    assert arena.records() == (newest,)
    assert_whole(arena, newest)
    assert snapshot(arena, 2, 2).step == 2


@pytest.mark.parametrize("numbers", [(-1, 1, 1), (1, 2**63, 1), (1, 1, 0), (1, 1, 2**31)])
def test_numbers_that_a_record_cannot_hold_are_refused_and_change_nothing(
    memory: Path, numbers: tuple[int, int, int]
) -> None:
    arena = Arena(memory)
    held = {snapshot(arena, 1, 1), snapshot(arena, 1, 2)}
    with pytest.raises(ValueError, match="expected 0 to"):
        arena.begin(layout(), *numbers)
    with pytest.raises(CorruptSnapshot, match="expected 0 to"):
        arena.receive(*numbers, 1000)
    assert set(arena.records()) == held


def test_a_transfer_finds_no_free_slot_while_readers_hold_it(memory: Path) -> None:
    arena = Arena(memory)
    older = snapshot(arena, 1, 1)
    snapshot(arena, 1, 2)
    with arena.pin(older), pytest.raises(ArenaBusy):
        arena.receive(1, 3, 2, 1000)


chance = random.Random(3)
