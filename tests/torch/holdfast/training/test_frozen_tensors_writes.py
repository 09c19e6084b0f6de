"""Frozen tensors in many kinds of memory are written in many random ways. Each slot gets the content."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.training.protection.frozen_tensors import FrozenTensors
from holdfast.training.protection.snapshot_writer import SnapshotWriter
from tests.sandbox import in_child
from tests.torch.holdfast.training.test_snapshot_writer import contents

torch.set_num_threads(1)

STEPS = 40
DONTNEED = 4  # MADV_DONTNEED
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def tensor(chance: random.Random) -> torch.Tensor:
    """Return a tensor in torch's memory or in a mapping. Pages may be small or huge, touched and aligned."""
    count = chance.choice([16_384, 40_000, 300_000, 1 << 20])
    if chance.random() < 0.5:
        return torch.randn(count)
    size = -(-count * 4 // mmap.PAGESIZE) * mmap.PAGESIZE + chance.choice([0, 4 << 20])
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if chance.random() < 0.5:
        memory.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(memory, dtype=torch.float32)[chance.choice([0, 5]) :][: count - 16]
    return found.copy_(torch.randn(count - 16)) if chance.random() < 0.8 else found


def by_us(address: int, content: bytes) -> None:
    ctypes.memmove(address, content, len(content))


def by_a_thread(address: int, content: bytes) -> None:
    thread = threading.Thread(target=by_us, args=(address, content))
    thread.start()
    thread.join()


def by_the_kernel(address: int, content: bytes) -> None:
    read, write = os.pipe()
    os.write(write, content)
    os.readv(read, [(ctypes.c_ubyte * len(content)).from_address(address)])
    os.close(read)
    os.close(write)


def by_a_debugger(address: int, content: bytes) -> None:
    file = os.open("/proc/self/mem", os.O_RDWR)
    os.pwrite(file, content, address)
    os.close(file)


def by_a_child(address: int, content: bytes) -> None:
    """Write in a child to its own copy, which has no effect here. Then write here to the same pages."""
    assert in_child(lambda: by_us(address, content)) == 0
    by_us(address, content)


WAYS: list[Callable[[int, bytes], None]] = [by_us, by_a_thread, by_the_kernel, by_a_debugger, by_a_child]


def write_somewhere(chance: random.Random, each: torch.Tensor) -> None:
    address, size = each.data_ptr(), each.nbytes
    at = chance.randrange(size - 4)
    if chance.random() < 0.1:
        begin = -(-(address + at) // mmap.PAGESIZE) * mmap.PAGESIZE
        room = (address + size - begin) // mmap.PAGESIZE * mmap.PAGESIZE
        if room > 0:
            assert _madvise(begin, min(room, chance.choice([mmap.PAGESIZE, 2 << 20])), DONTNEED) == 0
        return
    content = chance.randbytes(min(chance.choice([1, 64, 5_000]), size - at))
    chance.choice(WAYS)(address + at, content)


@pytest.mark.parametrize("seed", range(4))
def test_a_slot_holds_the_current_content_after_any_writes(
    memory: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    # Otherwise no tensor would be skipped after the first difference.
    monkeypatch.setattr(FrozenTensors, "distrust", lambda self: None)
    chance = random.Random(seed)
    torch.manual_seed(seed)
    frozen = [nn.Parameter(tensor(chance), requires_grad=False) for _ in range(8)]
    head = nn.Parameter(torch.randn(100))
    objects = {"model": nn.ParameterList([*frozen, head]), "optimizer": torch.optim.SGD([head], lr=0.1)}
    snapshots = SnapshotWriter(memory, objects, 1)
    left_out = 0
    for step in range(STEPS):
        for _ in range(chance.choice([0, 0, 0, 1, 2])):
            write_somewhere(chance, chance.choice(frozen).detach())
        snapshots.write(1, step)
        left_out += not snapshots.was_whole
        found = contents(snapshots)
        for n, each in enumerate(frozen):
            assert found[f"model.{n}"] == ctypes.string_at(each.data_ptr(), each.nbytes), (step, n)
    assert left_out == STEPS - 2
