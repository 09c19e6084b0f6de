"""Frozen parameters are copied once into each slot, and a snapshot always holds the current state."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.snapshot import written_pages
from holdfast.training.protection.frozen_tensors import FrozenTensors
from holdfast.training.protection.snapshot_writer import SnapshotWriter
from tests.sandbox import in_child
from tests.torch.holdfast.training.test_snapshot_writer import contents

torch.set_num_threads(1)

WIDE = 256  # its square is beyond `frozen.LEAST_BYTES`


@pytest.fixture(params=[True, False], ids=["the kernel tells of writes", "it does not"])
def told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a test with the kernel's report of writes, if this kernel has one, and without it."""
    if not request.param:
        monkeypatch.setattr(written_pages, "watch", lambda ranges: None)
    elif written_pages.watch([]) is None:
        pytest.skip("this kernel, or a filter of system calls, does not report writes")
    return bool(request.param)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDE, WIDE).requires_grad_(False)
        self.other = nn.Linear(WIDE, WIDE).requires_grad_(False)
        self.head = nn.Linear(WIDE, 3)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the bytes of each copy."""
    sizes: list[int] = []
    init, run = frozen_copying()

    def counted(self: Any, *given: Any) -> None:
        sizes.append(sum(source.nbytes for _, source in self._held))
        run(self, *given)

    monkeypatch.setattr(init, "run", counted)
    return sizes


def frozen_copying() -> tuple[Any, Callable[..., None]]:
    from holdfast.snapshot.tensor_copy import ParallelCopy

    return ParallelCopy, ParallelCopy.run


def group() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    return {"model": model, "optimizer": torch.optim.AdamW(trained, lr=0.1)}


def train(objects: dict[str, Any]) -> None:
    model = objects["model"]
    model.head(model.other(model.base(torch.ones(2, WIDE)))).sum().backward()
    objects["optimizer"].step()
    objects["optimizer"].zero_grad()


def is_what_there_is(snapshots: SnapshotWriter, objects: dict[str, Any], folder: Path, step: int) -> bool:
    anew = SnapshotWriter(folder, objects, 1)
    anew.write(1, step)
    found, expected = contents(snapshots), contents(anew)
    return {k: v.rstrip() for k, v in found.items()} == {k: v.rstrip() for k, v in expected.items()}


def test_frozen_tensors_are_copied_once_into_each_slot(memory: Path, copied: list[int], told: bool) -> None:
    objects = group()
    train(objects)
    snapshots = SnapshotWriter(memory / "a", objects, 1)
    for step in range(6):
        train(objects)
        snapshots.write(1, step)
    whole = sum(p.nbytes for p in objects["model"].parameters())
    assert copied[0] == copied[1] > whole
    frozen = copied[0] - copied[3]
    edges = 2 * 2 * mmap.PAGESIZE  # these pages also hold other data, which may be written
    compared = copied[2::2]
    assert compared[0] == frozen  # the first slot was filled before the watch began
    assert all(size <= edges for size in compared[1:]) if told else compared == [frozen] * 4
    assert snapshots.was_read < 0.2 if told else snapshots.was_read == 1.0
    assert snapshots.frozen.coming == pytest.approx(snapshots.was_read)
    assert copied[3::2] == [copied[0] - copied[2]] * 4  # compared first, then the rest is copied
    assert copied[3] < whole / 20
    assert snapshots.frozen.share < 0.05
    assert is_what_there_is(snapshots, objects, memory / "b", 5)


def in_place(objects: dict[str, Any]) -> None:
    with torch.no_grad():
        objects["model"].base.weight[3, 5] += 1


def through_data(objects: dict[str, Any]) -> None:
    objects["model"].base.weight.data.mul_(1.01)


def other_memory(objects: dict[str, Any]) -> None:
    objects["model"].base.weight.data = objects["model"].base.weight.data + 1


def another(objects: dict[str, Any]) -> None:
    objects["model"].base.weight = nn.Parameter(torch.randn(WIDE, WIDE), requires_grad=False)


def thawed(objects: dict[str, Any]) -> None:
    base = objects["model"].base.requires_grad_(True)
    objects["optimizer"].add_param_group({"params": list(base.parameters())})
    train(objects)


def one_row_through_data(objects: dict[str, Any]) -> None:
    """A write that only the comparison detects: no counter moves, and no sampled byte changes."""
    objects["model"].base.weight.data[100] += 1


def where(objects: dict[str, Any]) -> int:
    """Return the address of a value that is not sampled."""
    weight = objects["model"].base.weight
    return int(weight.data_ptr()) + 101 * WIDE * 4 + 12


def through_numpy(objects: dict[str, Any]) -> None:
    objects["model"].base.weight.detach().numpy()[101, 3] = 5


def through_a_buffer(objects: dict[str, Any]) -> None:
    torch.frombuffer((ctypes.c_float * 8).from_address(where(objects)), dtype=torch.float32).fill_(5)


def in_c(objects: dict[str, Any]) -> None:
    ctypes.memmove(where(objects), b"12345678", 8)


def by_the_kernel(objects: dict[str, Any]) -> None:
    read, write = os.pipe()
    os.write(write, b"12345678")
    os.readv(read, [(ctypes.c_ubyte * 8).from_address(where(objects))])
    os.close(read)
    os.close(write)


def other_memory_there(objects: dict[str, Any]) -> None:
    """Move the values to new memory, free the old memory, and then write a row."""
    base = objects["model"].base.weight
    base.data = base.data.clone()
    base.data[100] += 1


CHANGES = [
    in_place,
    through_data,
    other_memory,
    another,
    thawed,
    one_row_through_data,
    through_numpy,
    through_a_buffer,
    in_c,
    by_the_kernel,
    other_memory_there,
]


@pytest.mark.parametrize("when", [1, 2, 3, 4, 5], ids=lambda when: f"after {when} copies")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_frozen_tensors_that_change_are_copied(
    memory: Path, change: Callable[[dict[str, Any]], None], when: int, told: bool
) -> None:
    objects = group()
    train(objects)
    snapshots = SnapshotWriter(memory / "a", objects, 1)
    for step in range(when):
        snapshots.write(1, step)
    change(objects)
    for step in range(when, when + 3):
        snapshots.write(1, step)
        assert is_what_there_is(snapshots, objects, memory / f"b{step}", step)


def test_tensors_that_were_written_once_are_always_compared(memory: Path, told: bool) -> None:
    """The kernel reports only the first write to a page."""
    objects = group()
    train(objects)
    snapshots = SnapshotWriter(memory / "a", objects, 1)
    for step in range(4):
        snapshots.write(1, step)
    objects["model"].base.weight.data[100] += 0  # equal to every slot
    for step in range(4, 8):
        snapshots.write(1, step)
    assert not snapshots.was_whole
    objects["model"].base.weight.data[100] += 1
    for step in range(8, 11):
        snapshots.write(1, step)
        assert is_what_there_is(snapshots, objects, memory / f"b{step}", step)


def test_each_slot_gets_all_writes_since_its_own_snapshot(
    memory: Path, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a checkpoint is written from one slot, the other slot gets all snapshots."""
    objects = group()
    train(objects)
    snapshots = SnapshotWriter(memory / "a", objects, 1)
    for step in range(6):
        snapshots.write(1, step)
    objects["model"].base.weight.data[100] += 1
    monkeypatch.setattr(FrozenTensors, "distrust", lambda self: None)  # each slot must be updated
    for step in (6, 7, 8):
        snapshots.write(1, step, over=snapshots.arena.records()[0])
    assert {record.step for record in snapshots.arena.records()} == {4, 8}
    snapshots.write(1, 9)
    assert {record.step for record in snapshots.arena.records()} == {9, 8}
    assert is_what_there_is(snapshots, objects, memory / "b", 9)


def test_memory_that_another_process_may_write_is_compared_completely(memory: Path) -> None:
    objects = group()
    objects["model"].base.share_memory()
    train(objects)
    snapshots = SnapshotWriter(memory / "a", objects, 1)
    for step in range(5):
        snapshots.write(1, step)
    assert in_child(lambda: ctypes.memmove(where(objects), b"12345678", 8)) == 0
    snapshots.write(1, 5)
    assert is_what_there_is(snapshots, objects, memory / "b", 5)


def test_memory_that_is_mapped_from_a_file_is_compared_completely(memory: Path) -> None:
    objects = group()
    weight = objects["model"].base.weight
    torch.save(weight.detach(), memory / "weight.pt")
    weight.data = torch.load(memory / "weight.pt", mmap=True)
    train(objects)
    snapshots = SnapshotWriter(memory / "a", objects, 1)
    for step in range(5):
        snapshots.write(1, step)
    content = (memory / "weight.pt").read_bytes()
    at = content.index(weight.detach().numpy().tobytes()) + 101 * WIDE * 4 + 12
    with (memory / "weight.pt").open("rb+") as file:
        file.seek(at)
        file.write(b"12345678")
    assert ctypes.string_at(where(objects), 8) == b"12345678"
    snapshots.write(1, 5)
    assert is_what_there_is(snapshots, objects, memory / "b", 5)


def test_the_first_watch_is_closed_once_the_tensors_are_replaced(memory: Path, told: bool) -> None:
    others = _watches()
    objects = group()
    snapshots = SnapshotWriter(memory / "a", objects, 1)
    counts = []
    for step in range(12):
        if step % 4 == 0:
            objects["model"].other.weight = nn.Parameter(torch.randn(WIDE, WIDE), requires_grad=False)
        snapshots.write(1, step)
        counts.append(_watches())
    assert counts[11] == counts[7] == counts[3]
    assert (counts[11] > others) is told


def _watches() -> int:
    """Count the open watches of this process, without those of writers of other tests that are garbage."""
    gc.collect()
    links = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum("userfaultfd" in link for link in links)


def test_everything_that_is_not_copied_is_compared_in_each_copy(memory: Path, told: bool) -> None:
    """A row of a memory bank larger than any cache is written through `.data` before each snapshot."""
    objects = group()
    model = objects["model"]
    model.bank = nn.Parameter(torch.zeros(12_288, 512), requires_grad=False)  # 24 MiB
    train(objects)
    snapshots = SnapshotWriter(memory / "a", objects, 1)
    for step in range(4):
        snapshots.write(1, step)
    assert not snapshots.was_whole
    for step in range(4, 8):
        model.bank.data[100 + 37 * step] = step  # no sampled byte
        snapshots.write(1, step)
        assert is_what_there_is(snapshots, objects, memory / f"b{step}", step)
    assert snapshots.was_whole


def test_an_average_without_gradients_does_not_count_as_frozen(memory: Path) -> None:
    objects = group()
    average = Adapted().requires_grad_(False)
    objects["average"] = average
    train(objects)
    snapshots = SnapshotWriter(memory / "a", objects, 1)
    for step in range(5):
        for mean, parameter in zip(average.parameters(), objects["model"].parameters(), strict=True):
            mean.data.mul_(0.9).add_(parameter.data, alpha=0.1)
        snapshots.write(1, step)
        assert is_what_there_is(snapshots, objects, memory / f"b{step}", step)


def test_a_slot_that_another_process_wrote_is_filled_completely(
    memory: Path, copied: list[int], told: bool
) -> None:
    objects, others = group(), group()
    for each in (objects, others):
        train(each)
    mine, theirs = (SnapshotWriter(memory, each, 1) for each in (objects, others))
    with torch.no_grad():
        others["model"].base.weight.add_(1)
    for step in range(3):
        mine.write(1, step)
    theirs.write(1, 3)
    mine.write(1, 4)
    mine.write(1, 5)
    assert copied[-1] == copied[0]
    assert is_what_there_is(mine, objects, memory / "b", 5)


def test_a_slot_that_was_restored_from_need_not_be_filled_again(memory: Path, copied: list[int]) -> None:
    objects = group()
    train(objects)
    before = SnapshotWriter(memory, objects, 1)
    before.write(1, 4)
    [record] = before.arena.records()
    after = SnapshotWriter(memory, objects, 1, base=(1, 4))
    after.restored(record.path, 1, 4, bytes(before._targets[record.slot].layout.header))
    with torch.no_grad():
        objects["model"].base.weight.data[100] += 0
    for step in (5, 6):
        after.write(2, step)
    assert copied[1] == copied[0]
    assert copied[3] < copied[0] / 20
