"""The record page of an arena, byte by byte: records, seals and costs are read, and damaged ones ignored."""

from __future__ import annotations

import errno
import math
import os
import stat
import struct
import zlib
from pathlib import Path

import pytest

from holdfast.snapshot.commit_records import PAGE_BYTES, CommitRecord, CommitRecords
from tests.sandbox import flip, in_child, limit_file_size

COST_AT, COST_BODY = 1024, 24


def record(
    records: CommitRecords, slot: int = 0, generation: int = 3, step: int = 40, sequence: int = 7
) -> CommitRecord:
    return CommitRecord(slot, generation, step, 8, 5000, records.paths[slot], sequence)


def page_of(directory: Path) -> bytes:
    return (directory / "records").read_bytes()


def put(directory: Path, at: int, body: bytes) -> None:
    """Write `body` and its right checksum at an offset of the page."""
    with open(directory / "records", "r+b") as file:
        file.seek(at)
        file.write(body + struct.pack("<I", zlib.crc32(body)))


def put_cost(directory: Path, known_bytes: int, seconds: float, magic: bytes = b"HFCOST01") -> None:
    put(directory, COST_AT, struct.pack("<8sQd", magic, known_bytes, seconds))


def test_the_bytes_of_the_page_are_pinned(memory: Path) -> None:
    records = CommitRecords(memory)
    records.write(record(records, 0))
    records.write(record(records, 1, step=41, sequence=8))
    records.seal(record(records, 1, step=41, sequence=8), 0xABCDEF01)
    records.note_cost(5000, 0.25)

    def signed(body: bytes) -> bytes:
        return body + struct.pack("<I", zlib.crc32(body))

    expected = bytearray(PAGE_BYTES)
    expected[0:128] = signed(struct.pack("<8sQQQQII76x", b"HFSNAP01", 3, 40, 5000, 7, 8, 0))
    expected[128:256] = signed(struct.pack("<8sQQQQII76x", b"HFSNAP01", 3, 41, 5000, 8, 8, 1))
    expected[320:384] = signed(struct.pack("<8sQQQQI16x", b"HFSEAL01", 3, 41, 5000, 8, 0xABCDEF01))
    expected[1024:1052] = signed(struct.pack("<8sQd", b"HFCOST01", 5000, 0.25))
    assert page_of(memory) == expected


def test_the_record_page_is_one_page_that_only_its_user_may_open(memory: Path) -> None:
    before = os.umask(0)
    try:
        CommitRecords(memory)
    finally:
        os.umask(before)
    status = (memory / "records").stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == 4096


def test_the_page_leaves_no_descriptor_open(memory: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    records = [CommitRecords(memory) for _ in range(3)]
    after = len(list(Path("/proc/self/fd").iterdir()))
    assert after <= before + len(records)  # Python's mmap keeps its own descriptor


def test_lack_of_space_for_the_page_is_an_error(memory: Path) -> None:
    def child() -> None:
        limit_file_size(PAGE_BYTES - 1)
        with pytest.raises(OSError, match=r".*") as caught:
            CommitRecords(memory)
        assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)

    assert in_child(child) == 0


def test_the_slot_files_are_named_by_slot(memory: Path) -> None:
    assert CommitRecords(memory).paths == (memory / "slot-0.safetensors", memory / "slot-1.safetensors")


def test_a_record_is_read_by_every_process_that_maps_the_page(memory: Path) -> None:
    writer, reader = CommitRecords(memory), CommitRecords(memory)
    assert [reader.read(slot) for slot in range(2)] == [None, None]

    for step in (40, 41):  # the earlier reading is not cached
        written = record(writer, step=step)
        writer.write(written)
        assert [each.read(0) for each in (writer, reader, CommitRecords(memory))] == [written] * 3
        assert reader.read(1) is None
    assert reader.read(0) is reader.read(0)  # the same bytes are unpacked once


def test_a_record_with_any_flipped_bit_does_not_exist(memory: Path) -> None:
    records = CommitRecords(memory)
    records.write(record(records))
    for bit in range(128 * 8):
        flip(memory / "records", bit)
        assert records.read(0) is None
        flip(memory / "records", bit)
    assert records.read(0) == record(records)


@pytest.mark.parametrize(("magic", "slot"), [(b"HFSNAP02", 0), (b"HFSEAL01", 0), (b"HFSNAP01", 1)])
def test_a_whole_record_of_another_kind_or_slot_does_not_exist(memory: Path, magic: bytes, slot: int) -> None:
    records = CommitRecords(memory)
    put(memory, 0, struct.pack("<8sQQQQII76x", magic, 3, 40, 5000, 7, 8, slot))
    assert records.read(0) is None


def test_the_raw_bytes_change_with_each_commit_and_with_nothing_else(memory: Path) -> None:
    records = CommitRecords(memory)
    assert records.raw() == bytes(256)
    records.write(record(records))
    committed = records.raw()
    assert committed != bytes(256)
    records.seal(record(records), 1)
    records.note_cost(1, 1.0)
    assert records.raw() == committed


def test_the_next_sequence_is_above_that_of_both_slots(memory: Path) -> None:
    records = CommitRecords(memory)
    assert records.next_sequence() == 1
    records.write(record(records, 0, sequence=7))
    assert records.next_sequence() == 8
    records.write(record(records, 1, sequence=30))
    assert records.next_sequence() == 31
    records.forget(1)
    assert records.next_sequence() == 31


def test_the_next_sequence_wraps_at_64_bits(memory: Path) -> None:
    records = CommitRecords(memory)
    records.write(record(records, 1, sequence=2**64 - 2))
    assert records.next_sequence() == 2**64 - 1
    records.write(record(records, 1, sequence=2**64 - 1))
    assert records.next_sequence() == 0


@pytest.mark.parametrize("checksum", [0, 1, 2**32 - 1])
def test_a_seal_is_found_for_its_record(memory: Path, checksum: int) -> None:
    records = CommitRecords(memory)
    for slot in range(2):
        assert records.sealed(record(records, slot)) is None
    records.seal(record(records, 0), checksum)
    assert records.sealed(record(records, 0)) == checksum
    assert CommitRecords(memory).sealed(record(records, 0)) == checksum
    assert records.sealed(record(records, 1)) is None


def test_a_seal_does_not_apply_to_another_snapshot_of_its_slot(memory: Path) -> None:
    records = CommitRecords(memory)
    sealed = record(records)
    records.seal(sealed, 5)
    for other in (
        sealed._replace(generation=4),
        sealed._replace(step=41),
        sealed._replace(total_bytes=5001),
        sealed._replace(sequence=8),
    ):
        assert records.sealed(other) is None
    put(memory, 256, struct.pack("<8sQQQQI16x", b"HFSNAP01", 3, 40, 5000, 7, 5))
    assert records.sealed(sealed) is None


def test_a_seal_with_any_flipped_bit_does_not_exist(memory: Path) -> None:
    records = CommitRecords(memory)
    records.seal(record(records), 5)
    for bit in range(256 * 8, 320 * 8):
        flip(memory / "records", bit)
        assert records.sealed(record(records)) is None
        flip(memory / "records", bit)
    assert records.sealed(record(records)) == 5


@pytest.mark.parametrize("slot", [0, 1])
def test_a_forgotten_slot_has_neither_record_nor_seal_and_the_other_slot_keeps_both(
    memory: Path, slot: int
) -> None:
    records, other = CommitRecords(memory), 1 - slot
    for each in range(2):
        records.write(record(records, each))
        records.seal(record(records, each), each)
    before = page_of(memory)

    records.forget(slot)
    records.forget(slot)  # a retry changes nothing

    for page in (records, CommitRecords(memory)):
        assert page.read(slot) is None
        assert page.sealed(record(records, slot)) is None
        assert page.read(other) == record(records, other)
        assert page.sealed(record(records, other)) == other
    checksums = {*range(128 * slot + 124, 128 * slot + 128), *range(316 + 64 * slot, 320 + 64 * slot)}
    changed = {at for at, (old, new) in enumerate(zip(before, page_of(memory), strict=True)) if old != new}
    assert changed == checksums


def test_an_empty_slot_can_be_forgotten(memory: Path) -> None:
    records = CommitRecords(memory)
    records.forget(0)
    assert records.read(0) is None
    assert records.sealed(record(records)) is None


def test_no_cost_is_known_before_one_was_recorded(memory: Path) -> None:
    assert CommitRecords(memory).cost_s(5000) == 0.0


@pytest.mark.parametrize(
    ("total_bytes", "cost_s"), [(1000, 2.0), (1001, 2.002), (4000, 8.0), (999, 2.0), (1, 2.0), (0, 2.0)]
)
def test_a_cost_grows_with_the_bytes_and_is_never_less_than_the_recorded_one(
    memory: Path, total_bytes: int, cost_s: float
) -> None:
    CommitRecords(memory).note_cost(1000, 2.0)
    assert CommitRecords(memory).cost_s(total_bytes) == pytest.approx(cost_s)


def test_the_last_recorded_cost_counts(memory: Path) -> None:
    records = CommitRecords(memory)
    records.note_cost(1000, 2.0)
    records.note_cost(1000, 0.5)
    assert records.cost_s(1000) == 0.5


@pytest.mark.parametrize(
    ("known_bytes", "seconds", "cost_s"),
    [
        (1, 2.0, 2.0),
        (1, 0.0, 0.0),
        (1, 999_999.0, 999_999.0),
        (1, math.nextafter(1e6, 0), math.nextafter(1e6, 0)),
        (1, 1e6, 0.0),
        (1, -1e-9, 0.0),
        (1, math.inf, 0.0),
        (1, math.nan, 0.0),
        (0, 2.0, 0.0),
    ],
)
def test_a_cost_out_of_bounds_is_not_known(
    memory: Path, known_bytes: int, seconds: float, cost_s: float
) -> None:
    records = CommitRecords(memory)
    put_cost(memory, known_bytes, seconds)
    assert records.cost_s(1) == cost_s


def test_a_cost_with_another_magic_number_is_not_known(memory: Path) -> None:
    records = CommitRecords(memory)
    put_cost(memory, 1000, 2.0, b"HFCOST02")
    assert records.cost_s(1000) == 0.0


def test_a_torn_cost_is_not_known(memory: Path) -> None:
    records = CommitRecords(memory)
    records.note_cost(1000, 2.0)
    for bit in range(COST_AT * 8, (COST_AT + COST_BODY + 4) * 8):
        flip(memory / "records", bit)
        assert records.cost_s(1000) == 0.0
        flip(memory / "records", bit)
    assert records.cost_s(1000) == 2.0
