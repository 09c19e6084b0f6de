"""The file of a private store, byte by byte: header, entries, size, and the place of each step."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import pytest

from holdfast.snapshot import private_store
from holdfast.snapshot.private_store import PrivateReader, PrivateStore, StoredEntry
from tests.samples.privates import put


def signed(body: bytes) -> bytes:
    return body + struct.pack("<I", zlib.crc32(body))


def header(magic: bytes = b"HFPRIV03", capacity: int = 512) -> bytes:
    return signed(struct.pack("<8sIIQ", magic, 5, 10, capacity)).ljust(4096, b"\0")


def test_the_bytes_of_the_file_are_pinned(memory: Path) -> None:
    store = PrivateStore(memory / "rank", 5, capacity_bytes=512, every=10)
    store.put(2, 7, b"seven")
    store.put(2, 4, b"four", final=False)

    def entry(flags: int, step: int, blob: bytes) -> bytes:
        body = struct.pack("<IIQQQI24x", 0x50524956, flags, 2, step, len(blob), zlib.crc32(blob))
        return signed(body) + blob

    stride = 64 + 512
    expected = bytearray(4096 + (41 + 4 + 4) * stride)
    expected[:4096] = header()
    for place, raw in ((2, entry(1, 7, b"seven")), (5, entry(0, 4, b"four"))):
        begin = 4096 + place * stride
        expected[begin : begin + len(raw)] = raw
    assert (memory / "rank").read_bytes() == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (header(), True),
        (header(magic=b"HFPRIV02"), False),
        (header(capacity=0), False),
        (header(capacity=2**30 + 64), False),
        (header()[:20] + b"\1" + header()[21:], False),
    ],
)
def test_a_file_with_a_foreign_or_damaged_header_is_not_a_store(
    memory: Path, raw: bytes, expected: bool
) -> None:
    store = PrivateStore(memory / "rank", 5, capacity_bytes=512, every=10)
    store.put(1, 1, b"one")
    store.close()
    with open(memory / "rank", "r+b") as file:
        file.write(raw)
    assert bool(PrivateReader(memory / "rank").held()) is expected


def test_an_entry_is_found_only_if_its_slot_holds_that_step_or_a_later_one(memory: Path) -> None:
    store = PrivateStore(memory / "rank", 0)
    reader = PrivateReader(memory / "rank")
    assert reader.stored(1, 7) is None
    put(store, range(8))
    assert reader.stored(1, 7) == StoredEntry(1, 7, True, 300)
    assert reader.stored(1, 5) == StoredEntry(1, 5, True, 300)
    assert reader.stored(1, 3) == StoredEntry(1, 7, True, 300)  # it has taken the place
    assert reader.stored(2, 7) is None
    assert reader.stored(0, 7) is None
    assert reader.stored(1, 11) is None  # its place still contains step 7
    put(store, range(8, 12))
    assert reader.stored(1, 11) == StoredEntry(1, 11, True, 300)


def test_a_missing_store_has_no_entry_for_a_step(memory: Path) -> None:
    assert PrivateReader(memory / "rank").stored(1, 7) is None


def test_the_slot_of_a_step_is_computed_from_the_size_of_a_store_that_grew(memory: Path) -> None:
    store, reader = PrivateStore(memory / "rank", 0, capacity_bytes=64), PrivateReader(memory / "rank")
    store.put(1, 1, b"one")
    assert reader.stored(1, 1) is not None
    store.put(1, 2, bytes(5000))
    assert reader.stored(1, 2) == StoredEntry(1, 2, True, 5000)


def test_an_existing_entry_is_found_without_checking_the_path(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, reader = PrivateStore(memory / "rank", 0), PrivateReader(memory / "rank")
    store.put(1, 1, b"one")
    assert reader.stored(1, 1) is not None
    store.put(1, 2, b"two")

    def no_stat(path: Path) -> None:
        raise AssertionError(f"stat of {path}")

    monkeypatch.setattr(Path, "stat", no_stat)
    assert reader.stored(1, 2) == StoredEntry(1, 2, True, 3)


def test_a_closed_store_is_mapped_again_by_the_next_query(memory: Path) -> None:
    store, reader = PrivateStore(memory / "rank", 0), PrivateReader(memory / "rank")
    store.put(1, 1, b"one")
    for _ in range(2):
        assert reader.stored(1, 1) == StoredEntry(1, 1, True, 3)
        reader.close()


@pytest.mark.parametrize(("length", "capacity"), [(1000, 1280), (65, 128), (5000, 6272)])
def test_a_state_beyond_the_capacity_gets_a_quarter_more_space(
    memory: Path, length: int, capacity: int
) -> None:
    store = PrivateStore(memory / "rank", 0, capacity_bytes=64)
    store.put(1, 1, bytes(length))
    assert store.capacity_bytes == capacity


@pytest.mark.parametrize(("asked", "capacity"), [(1, 64), (64, 64), (65, 128)])
def test_a_capacity_is_a_multiple_of_a_cache_line(memory: Path, asked: int, capacity: int) -> None:
    assert PrivateStore(memory / "rank", 0, capacity_bytes=asked).capacity_bytes == capacity


def test_the_space_added_for_growth_is_limited_to_that_of_a_state_that_is_not_large(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_store, "FEW_BYTES", 512)
    store = PrivateStore(memory / "rank", 0, capacity_bytes=64)
    store.put(1, 1, bytes(6400))
    assert store.capacity_bytes == 6400 + 512


def test_the_largest_state_is_accepted_and_one_byte_more_is_an_error(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_store, "MAX_CAPACITY_BYTES", 1024)
    store = PrivateStore(memory / "rank", 0, capacity_bytes=64)
    store.put(1, 1, bytes(1024))
    assert store.capacity_bytes == 1024
    before = store.held()
    with pytest.raises(ValueError, match="expected") as caught:
        store.put(1, 2, bytes(1025))
    assert str(caught.value) == "a private state of 1025 bytes, expected 1 to 2^30"
    assert store.held() == before


@pytest.mark.parametrize(("capacity", "places"), [(512, 41 + 4), (576, 4 + 4)])
def test_only_large_states_have_few_slots(
    memory: Path, monkeypatch: pytest.MonkeyPatch, capacity: int, places: int
) -> None:
    monkeypatch.setattr(private_store, "FEW_BYTES", 512)
    PrivateStore(memory / "rank", 0, capacity_bytes=capacity)
    assert (memory / "rank").stat().st_size == 4096 + places * (64 + capacity)


def test_a_state_of_exactly_the_capacity_is_held(memory: Path) -> None:
    store = PrivateStore(memory / "rank", 0, capacity_bytes=512)
    store.put(1, 3, b"x" * 512)
    assert store.capacity_bytes == 512, "the file must not grow"
    assert store.held() == PrivateReader(memory / "rank").held() == (StoredEntry(1, 3, True, 512),)


def test_the_entry_of_a_step_is_found_in_a_store_with_few_slots(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_store, "FEW_BYTES", 512)
    store, reader = PrivateStore(memory / "rank", 0, capacity_bytes=576), PrivateReader(memory / "rank")
    for step in range(12):
        put(store, range(step, step + 1))
        assert reader.stored(1, step) == StoredEntry(1, step, True, 300)


def test_a_pinned_step_that_is_stored_again_is_held_once(memory: Path) -> None:
    store = PrivateStore(memory / "rank", 0, capacity_bytes=512, pins=lambda: (3,))
    store.put(1, 3, b"first", final=False)
    store.put(1, 3, b"second time")
    assert store.held() == (StoredEntry(1, 3, True, 11),)
