"""Make the state to copy, snapshots of it, and the plain copies that snapshots are compared with."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.snapshot.report import ANONYMOUS, BY_TENSOR, SHARED
from bench.text import size
from holdfast.snapshot import tensor_copy
from holdfast.state import capture
from holdfast.training.protection.snapshot_writer import SnapshotWriter
from trainer.gpt.__main__ import build
from trainer.gpt.options import make_parser, read

TENSORS_PER_PARAMETER = 3  # the parameter itself, and Adam's two moments
LINE_BYTES = 64
LINE = LINE_BYTES // 4  # float32 numbers per cache line; the size of a tensor is a multiple of it


@dataclass(slots=True)
class ProtectedObjects:
    """The objects that a script protects, and the tensors of its replicated state."""

    title: str
    objects: dict[str, Any]
    sources: list[torch.Tensor]
    nbytes: int


def make(total_bytes: int, parameters: int) -> ProtectedObjects:
    """Return a model of `parameters` same-sized tensors that takes about `total_bytes` with AdamW's state."""
    count = max(1, total_bytes // (4 * TENSORS_PER_PARAMETER * parameters * LINE)) * LINE
    model = torch.nn.ParameterList(torch.randn(count) for _ in range(parameters))
    return _held("", {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-4)})


def bundled() -> ProtectedObjects:
    """Return the state of the bundled GPT with default options."""
    model, optimizer, scheduler = build(read(make_parser(), []))
    return _held("the bundled GPT, ", {"model": model, "optimizer": optimizer, "scheduler": scheduler})


def _held(title: str, objects: dict[str, Any]) -> ProtectedObjects:
    optimizer = objects["optimizer"]
    for parameter in objects["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    sources = [tensor for _, tensor in capture.collect(objects).tensors]
    nbytes = sum(tensor.nbytes for tensor in sources)
    return ProtectedObjects(f"{title}{size(nbytes)} in {len(sources)} tensors", objects, sources, nbytes)


def snapshotter(held: ProtectedObjects, folder: Path) -> Callable[[], float | None]:
    """Return a call that makes a complete snapshot as a rank does, and returns the seconds it took."""
    snapshots = SnapshotWriter(folder, held.objects, 1)
    steps = iter(range(1 << 60))

    def take() -> float | None:
        began = time.perf_counter()
        if snapshots.write(1, next(steps)) is None:
            return None
        return time.perf_counter() - began

    return take


def copier(held: ProtectedObjects, memory: mmap.mmap) -> Callable[[], float | None]:
    """Return a call that does only the copy of a snapshot, into `memory` with a snapshot's layout."""
    tensors = capture.collect(held.objects).tensors
    places = capture.views(capture.layout_of(tensors, 0), memory)
    copying = tensor_copy.ParallelCopy([places[name] for name, _ in tensors], held.sources)
    return _timed(copying.run)


def elsewhere(megabytes: float) -> Callable[[], object]:
    """Return a call that writes to `megabytes` of other memory, as training does between snapshots."""
    memory = torch.zeros(int(megabytes * 1e6), dtype=torch.uint8)
    return lambda: memory.add_(1)


def shared(folder: Path, nbytes: int) -> mmap.mmap:
    """Return a mapping of a new file whose memory is fully allocated."""
    descriptor = os.open(folder / "plain", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)


def plain_copies(held: ProtectedObjects, memory: mmap.mmap) -> dict[str, Callable[[], float | None]]:
    """Return plain copies of the same number of bytes, by name, between buffers that were already touched."""
    whole = torch.ones(held.nbytes, dtype=torch.uint8)
    anonymous = torch.zeros(held.nbytes, dtype=torch.uint8)
    mapped = torch.frombuffer(memory, dtype=torch.uint8, count=held.nbytes)
    mapped.zero_()
    pieces = list(_pieces(held.sources, mapped))
    return {
        BY_TENSOR: _timed(lambda: _move(pieces)),
        f"torch copy_, {ANONYMOUS}": _timed(lambda: anonymous.copy_(whole)),
        f"torch copy_, {SHARED}": _timed(lambda: mapped.copy_(whole)),
        f"memmove, {ANONYMOUS}": _timed(
            lambda: ctypes.memmove(anonymous.data_ptr(), whole.data_ptr(), held.nbytes)
        ),
        f"memmove, {SHARED}": _timed(
            lambda: ctypes.memmove(mapped.data_ptr(), whole.data_ptr(), held.nbytes)
        ),
    }


def _pieces(sources: list[torch.Tensor], target: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield the target, source and size of each tensor's copy, aligning tensors of whole cache lines."""
    at = target.data_ptr()
    for source in sorted(sources, key=lambda each: each.nbytes % LINE_BYTES != 0):
        yield at, source.data_ptr(), source.nbytes
        at += source.nbytes


def _move(pieces: list[tuple[int, int, int]]) -> None:
    for target, source, nbytes in pieces:
        ctypes.memmove(target, source, nbytes)


def _timed(copy: Callable[[], Any]) -> Callable[[], float | None]:
    def run() -> float:
        began = time.perf_counter()
        copy()
        return time.perf_counter() - began

    return run
