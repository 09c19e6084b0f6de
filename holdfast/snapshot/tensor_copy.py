"""Copy many tensors at the bandwidth of main memory.

A single thread that copies pieces of a few megabytes reaches only half the bandwidth: for copies smaller than
about the size of the cache, memcpy reads each line of the target before it writes it. Several threads reach
the full bandwidth. Ordinary Python threads suffice, because the interpreter's lock (GIL) is released while a
piece is copied. But with many small pieces, they would spend more time waiting for that lock than copying. So
small tensors with adjacent targets are copied with a single `torch.cat`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

THREADS = min(4, os.cpu_count() or 1)  # more threads do not help, because memory bandwidth is the limit
ALONE_BYTES = 4 << 20  # up to this size, one thread copies alone, because other threads wake up too late
AHEAD_BYTES = 1 << 20  # the calling thread copies this much before the other threads have woken up
SMALL_BYTES = 128 << 10  # copying this much takes about as long as passing on the interpreter's lock
# New memory is populated in pieces of this size, so that a piece is still in the cache when it is written.
FRESH_BYTES = 1 << 20
# Memory is compared in pieces of this size, so that a piece is still in the cache if it must be copied.
COMPARED_BYTES = 1 << 20
# Progress is reported after each piece of this size. With larger pieces, a copy would appear to be stuck.
PIECE_BYTES = 64 << 20


_Memory = ctypes.c_ubyte * (1 << 47)  # one type for all sizes, because creating a type is slow
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int
_madvise = ctypes.CDLL(None).madvise  # mmap.madvise holds the interpreter's lock during the call
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: one call instead of one fault per page


def _nothing() -> None:
    """Do nothing. This is the default for callers that do not need progress reports."""


_Pair = tuple["torch.Tensor", "torch.Tensor"]  # target, source
_Work = Callable[[Callable[[], None]], None]
_Piece = tuple[int, int, int]  # target, source, bytes


class ParallelCopy:
    """Copies many tensors. The copy can be repeated while the tensors keep their addresses."""

    def __init__(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        *,
        sparing: bool = False,
        fresh: bool = False,
    ) -> None:
        """Prepare to copy each source into its target. Both are on the CPU and have the same type and shape.

        Set `sparing` if the targets probably match the sources: the copy then compares all bytes, and
        writes only pieces that differ. Set `fresh` if the targets' memory may never have been written.
        """
        # The addresses, in the sources, of the pieces that a sparing copy had to write.
        self.differed: list[int] = []
        self._held = list(zip(targets, sources, strict=True))  # keeps the memory of all pieces alive
        dense = [(t, s) for t, s in self._held if t.is_contiguous() and s.is_contiguous()]
        self._strided = [(t, s) for t, s in self._held if not (t.is_contiguous() and s.is_contiguous())]
        total = sum(source.nbytes for _, source in dense)
        ahead, threads = (AHEAD_BYTES, THREADS) if total > ALONE_BYTES else (0, 1)
        most = -(-max(total - ahead, 0) // threads)
        shares = _shares(sorted(dense, key=_address), most + ahead, most) if dense else [[]]
        work: Callable[[list[_Pair]], _Work] = _fresh if fresh else _work
        work = partial(_sparing, self.differed) if sparing else work
        self._own_work, *self._other_work = map(work, shares)

    def run(self, moved: Callable[[], None] = _nothing) -> None:
        """Copy all tensors. Once this has returned or raised an exception, no thread is still copying.

        Each thread calls `moved` after each piece, to report progress.
        """
        import torch

        turns = [_queue(partial(work, moved)) for work in self._other_work]
        try:
            self._own_work(moved)
            with torch.no_grad():
                for target, source in self._strided:
                    target.copy_(source)
        finally:
            for turn in turns:
                turn.wait()
        for turn in turns:
            if turn.error is not None:
                raise turn.error


class _Turn:
    """A task for another thread. It uses a plain lock, because a Future takes twice as long."""

    __slots__ = ("_done", "_work", "error")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._done = threading.Lock()
        self._done.acquire()
        self.error: BaseException | None = None

    def work(self) -> None:
        try:
            self._work()
        except BaseException as error:  # `ParallelCopy.run` raises it in the calling thread
            self.error = error
        finally:
            self._done.release()

    def wait(self) -> None:
        self._done.acquire()


_queued: queue.SimpleQueue[_Turn] = queue.SimpleQueue()
_threads: list[threading.Thread] = []
os.register_at_fork(after_in_child=_threads.clear)  # a forked child does not inherit its parent's threads


def same_bytes(one: int | bytes, other: int | bytes, size: int) -> bool:
    """Return whether `size` bytes are the same. The interpreter's lock is released during the comparison.

    `one` and `other` are addresses or bytes objects.
    """
    return bool(_memcmp(one, other, size) == 0)


def populate(address: int, size: int) -> bool:
    """Allocate memory for a range in one call, without changing its content.

    This replaces the page fault that the first write to each page would cause. Returns False if there is no
    room, or if the kernel is older than 5.14. Those page faults then occur as usual.
    """
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    return bool(_madvise(begin, address + size - begin, _POPULATE_WRITE) == 0)


def address_of(mapping: mmap.mmap) -> int:
    """Return the address of a writable mapping, which the caller must keep alive."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(mapping))


def sampled_bytes(address: int, size: int, step: int) -> list[int]:
    """Return every `step`-th of the `size` bytes at `address`, starting with the first."""
    found: list[int] = _Memory.from_address(address)[:size:step]
    return found


def _queue(work: Callable[[], None]) -> _Turn:
    """Queue `work` for the copying threads. The first call starts them."""
    turn = _Turn(work)
    _queued.put(turn)
    if not _threads:
        for number in range(max(1, THREADS - 1)):
            _threads.append(threading.Thread(target=_take_turns, name=f"holdfast-copy-{number}", daemon=True))
            _threads[-1].start()
    return turn


def _take_turns() -> None:
    while True:
        _queued.get().work()


def _shares(pairs: Sequence[_Pair], first: int, most: int) -> list[list[_Pair]]:
    """Divide all bytes, in order, into a first share of `first` bytes and further shares of `most` bytes.

    A tensor that does not fit into the rest of a share is split.
    """
    shares: list[list[_Pair]] = [[]]
    room = first
    for target, source in pairs:
        pair = byte_view(target), byte_view(source)
        done, size = 0, source.nbytes
        while done < size:
            if room == 0:
                shares.append([])
                room = most
            part = min(room, size - done)
            shares[-1].append((pair[0][done : done + part], pair[1][done : done + part]))
            done, room = done + part, room - part
    return shares


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the bytes of a contiguous tensor."""
    import torch

    return tensor.detach().view(-1).view(torch.uint8)


def _address(pair: _Pair) -> int:
    return pair[0].data_ptr()


def _work(share: list[_Pair]) -> _Work:
    pieces = _pieces(share)
    is_adjacent = all(at + size == after for (at, _, size), (after, _, _) in pairwise(pieces))
    total = sum(size for _, _, size in pieces)
    if len(pieces) < 2 or not is_adjacent or total > SMALL_BYTES * len(pieces):
        return partial(_copy_pieces, pieces)
    return partial(_concatenate, [source for _, source in share], _bytes_at(pieces[0][0], total))


def _sparing(differed: list[int], share: list[_Pair]) -> _Work:
    return partial(_copy_differing, _pieces(share), differed)


def _fresh(share: list[_Pair]) -> _Work:
    return partial(_copy_to_fresh, _pieces(share))


def _pieces(share: list[_Pair]) -> list[_Piece]:
    return [(target.data_ptr(), source.data_ptr(), source.nbytes) for target, source in share]


def _bytes_at(address: int, size: int) -> torch.Tensor:
    """Return a view of the `size` bytes at `address`. The caller must keep that memory alive."""
    import torch

    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)


def _concatenate(sources: list[torch.Tensor], target: torch.Tensor, moved: Callable[[], None]) -> None:
    import torch

    with torch.no_grad():  # each thread has its own grad mode
        torch.cat(sources, out=target)
    moved()


def _copy_pieces(pieces: list[_Piece], moved: Callable[[], None]) -> None:
    since = 0
    for target, source, size in pieces:
        for at in range(0, size, PIECE_BYTES):
            part = min(PIECE_BYTES, size - at)
            ctypes.memmove(target + at, source + at, part)
            since += part
            if since >= PIECE_BYTES:
                since = 0
                moved()


def _copy_to_fresh(pieces: list[_Piece], moved: Callable[[], None]) -> None:
    for target, source, size in pieces:
        for at in range(0, size, FRESH_BYTES):
            part = min(FRESH_BYTES, size - at)
            populate(target + at, part)
            ctypes.memmove(target + at, source + at, part)
            moved()


def _copy_differing(pieces: list[_Piece], differed: list[int], moved: Callable[[], None]) -> None:
    since = 0
    for target, source, size in pieces:
        for at in range(0, size, COMPARED_BYTES):
            part = min(COMPARED_BYTES, size - at)
            if not same_bytes(target + at, source + at, part):
                ctypes.memmove(target + at, source + at, part)
                differed.append(source + at)
            since += part
            if since >= PIECE_BYTES:
                since = 0
                moved()
