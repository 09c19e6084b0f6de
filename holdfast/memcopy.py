"""Copy many tensors at the speed of memory.

One thread that copies pieces of a few megabytes gets half of what memory gives: below a threshold near the
cache's size, memcpy reads each target line before it writes it. Two threads make up for that. The
interpreter's lock is free during each piece, so ordinary threads do; of small pieces there are so many that
the threads would wait for that lock more than they copy, so those are handed to torch in one call.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

THREADS = min(4, os.cpu_count() or 1)  # more do not help: memory is the bound
ALONE_BYTES = 8 << 20  # less is copied before a thread has woken up
SMALL_BYTES = 128 << 10  # of a piece: copied in about the time that the interpreter's lock changes hands

_Piece = tuple[int, int, int]  # target, source, bytes
_pool: ThreadPoolExecutor | None = None


class Copying:
    """A copy that may be made again and again, as long as the tensors stay where they are."""

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Prepare to copy each source into its target: same type and shape, both on the CPU."""
        pairs = list(zip(targets, sources, strict=True))
        flat = [(t, s) for t, s in pairs if t.is_contiguous() and s.is_contiguous()]
        self._odd = [(t, s) for t, s in pairs if not (t.is_contiguous() and s.is_contiguous())]
        total = sum(source.nbytes for _, source in flat)
        threads = THREADS if total > ALONE_BYTES else 1
        shares = _shares(flat, -(-total // threads)) if flat else [[]]
        self._mine = partial(_move, [_piece(*pair) for pair in shares[0]])
        self._others = [_work(share) for share in shares[1:]]

    def run(self) -> None:
        """Copy; on return every target is its source. Only within `torch.no_grad()`."""
        waiting = [_submit(work) for work in self._others]
        self._mine()
        for target, source in self._odd:
            target.copy_(source)
        for each in waiting:
            each.result()


def _submit(work: Callable[[], None]) -> Future[None]:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max(1, THREADS - 1), thread_name_prefix="holdfast-copy")
    return _pool.submit(work)


def _shares(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], most: int
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Deal out all bytes in runs of `most`, in order; a tensor that does not fit is cut."""
    shares: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[]]
    room = most
    for target, source in pairs:
        flat = _bytes(target), _bytes(source)
        done, size = 0, source.nbytes
        while done < size:
            if room == 0:
                shares.append([])
                room = most
            part = min(room, size - done)
            shares[-1].append((flat[0][done : done + part], flat[1][done : done + part]))
            done, room = done + part, room - part
    return shares


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.detach().view(-1).view(torch.uint8)


def _work(share: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    import torch

    together = getattr(torch, "_foreach_copy_", None)
    if together is None or sum(source.nbytes for _, source in share) > SMALL_BYTES * len(share):
        return partial(_move, [_piece(*pair) for pair in share])
    targets, sources = [target for target, _ in share], [source for _, source in share]

    def work() -> None:
        with torch.no_grad():  # each thread has its own
            together(targets, sources)

    return work


def _piece(target: torch.Tensor, source: torch.Tensor) -> _Piece:
    return target.data_ptr(), source.data_ptr(), source.nbytes


def _move(pieces: list[_Piece]) -> None:
    for target, source, size in pieces:
        ctypes.memmove(target, source, size)
