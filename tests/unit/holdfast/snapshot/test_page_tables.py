"""The pages of slots are mapped before a copy needs them, without changing the slots' content."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from pathlib import Path

import pytest

from holdfast.fileio.safetensors import Layout, plan
from holdfast.snapshot import page_tables, tensor_copy
from holdfast.snapshot.arena import Arena

BYTES = 4 << 20
PAGES = BYTES // mmap.PAGESIZE


def layout(size: int = BYTES) -> Layout:
    return plan([("w", "U8", (size,))], {})


def fill(arena: Arena, step: int, size: int = BYTES) -> int:
    """Write a snapshot, and return the number of page faults."""
    content = bytes([step]) * size
    draft = arena.begin(layout(size), 1, step, 2)
    assert draft is not None
    with draft:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        ctypes.memmove(ctypes.addressof(ctypes.c_ubyte.from_buffer(draft.data)), content, size)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        draft.commit()
    return after - before


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_tables, "LEAST_BYTES", 0)
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        if not tensor_copy.populate(tensor_copy.address_of(page), mmap.PAGESIZE):
            pytest.skip("the kernel does not populate")


def test_the_first_copy_of_a_process_causes_no_page_faults(memory: Path) -> None:
    earlier = Arena(memory)
    for step in (1, 2):
        fill(earlier, step)
    arena = Arena(memory)
    thread = page_tables.populate_ahead(arena, layout().total_bytes)
    assert thread is not None
    thread.join()
    assert [set(record.path.read_bytes()[-BYTES:]) for record in arena.records()] == [{2}, {1}]
    assert [fill(arena, step) < PAGES // 4 for step in (3, 4)] == [True, True]
    assert [fill(Arena(memory), step) >= PAGES // 4 for step in (5, 6)] == [True, True]


def test_slots_that_would_have_to_change_are_not_touched(memory: Path) -> None:
    arena = Arena(memory)
    fill(arena, 1, 1000)
    assert page_tables.populate_ahead(arena, layout().total_bytes) is None
    (memory / "slot-1.safetensors").write_bytes(b"")
    os.truncate(memory / "slot-1.safetensors", layout().total_bytes)  # of the same length, but empty
    assert page_tables.populate_ahead(arena, layout().total_bytes) is None
    assert (memory / "slot-1.safetensors").stat().st_blocks == 0
    assert [record.step for record in arena.records()] == [1]


def test_a_slot_that_another_process_truncates_ends_the_preparation(memory: Path) -> None:
    arena = Arena(memory)
    fill(arena, 1)
    [mapping] = arena.whole(layout().total_bytes)
    os.truncate(memory / "slot-0.safetensors", 4096)
    page_tables._populate_slots([mapping])
    assert (memory / "slot-0.safetensors").stat().st_size == 4096


def test_a_small_state_is_not_prepared(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_tables, "LEAST_BYTES", layout().total_bytes + 1)
    arena = Arena(memory)
    fill(arena, 1)
    assert page_tables.populate_ahead(arena, layout().total_bytes) is None
