"""Copy many tensors at the speed of memory.

One thread that copies pieces of a few megabytes gets half of what memory gives: below a threshold near the
cache's size, memcpy reads each target line before it writes it. Two threads make up for that. The
interpreter's lock is free during each piece, so ordinary threads do.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

THREADS = min(4, os.cpu_count() or 1)  # more do not help: memory is the bound
ALONE_BYTES = 4 << 20  # less is copied before a thread has woken up

_Piece = tuple[int, int, int]  # target, source, bytes
_pool: ThreadPoolExecutor | None = None


def copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into its target: same type and shape, both on the CPU."""
    pieces: list[_Piece] = []
    total = 0
    for target, source in zip(targets, sources, strict=True):
        if source.is_contiguous() and target.is_contiguous():
            pieces.append((target.data_ptr(), source.data_ptr(), source.nbytes))
            total += source.nbytes
        else:
            target.copy_(source)
    if total <= ALONE_BYTES or THREADS == 1:
        _run(pieces)
    else:
        _share_out(pieces, total)


def _share_out(pieces: list[_Piece], total: int) -> None:
    """Give each thread a run of bytes of about the same length; a large piece is cut."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(THREADS - 1, thread_name_prefix="holdfast-copy")
    shares = _shares(pieces, -(-total // THREADS))
    waiting: list[Future[None]] = [_pool.submit(_run, share) for share in shares[1:]]
    _run(shares[0])
    for each in waiting:
        each.result()


def _shares(pieces: list[_Piece], most: int) -> list[list[_Piece]]:
    shares: list[list[_Piece]] = [[]]
    room = most
    for target, source, size in pieces:
        done = 0
        while done < size:
            if room == 0:
                shares.append([])
                room = most
            part = min(room, size - done)
            shares[-1].append((target + done, source + done, part))
            done, room = done + part, room - part
    return shares


def _run(pieces: list[_Piece]) -> None:
    for target, source, size in pieces:
        ctypes.memmove(target, source, size)
