"""Copy many tensors at the speed of memory.

One thread that copies pieces of a few megabytes gets half of what memory gives: below a threshold near the
cache's size, memcpy reads each target line before it writes it. Two threads make up for that. The
interpreter's lock is free during each piece, so ordinary threads do; of small pieces there are so many that
the threads would wait for that lock more than they copy. So small ones that are to lie one behind the other
are handed to torch in one call, as tensors to concatenate.
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

THREADS = min(4, os.cpu_count() or 1)  # more do not help: memory is the bound
ALONE_BYTES = 4 << 20  # less is copied before a thread has woken up
AHEAD_BYTES = 1 << 20  # that the calling thread has copied by the time the others are awake
SMALL_BYTES = 128 << 10  # of a piece: copied in about the time that the interpreter's lock changes hands
FRESH_BYTES = 1 << 20  # of memory that nobody has touched, in one go: written while it is still in the cache
COMPARED_BYTES = 1 << 20  # in one go: what differs is copied while it is still in the cache
PIECE_BYTES = (
    64 << 20
)  # moved in one go: more, and a copy that goes on could not be told from one that stopped


_Memory = ctypes.c_ubyte * (1 << 47)  # a type for each size would take longer to make than it saves
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int
_madvise = ctypes.CDLL(None).madvise  # mmap's own keeps the interpreter's lock meanwhile
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE: one call instead of a fault for each page


def _nothing() -> None:
    """Do nothing, for nobody who looks on."""


_Pair = tuple["torch.Tensor", "torch.Tensor"]  # target, source
_Work = Callable[[Callable[[], None]], None]
_Piece = tuple[int, int, int]  # target, source, bytes


class ParallelCopy:
    """A copy that may be made again and again, as long as the tensors stay where they are."""

    def __init__(
        self,
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        *,
        sparing: bool = False,
        fresh: bool = False,
    ) -> None:
        """Prepare to copy each source into its target: same type and shape, both on the CPU.

        `sparing`: the targets are thought to be the sources already. All is compared; only what differs is
        written. `fresh`: nobody may have touched the targets' memory yet.
        """
        self.differed: list[int] = []  # one entry for each stretch that a sparing copy had to write
        self._held = list(zip(targets, sources, strict=True))  # what the pieces point to
        lying = [(t, s) for t, s in self._held if t.is_contiguous() and s.is_contiguous()]
        self._odd = [(t, s) for t, s in self._held if not (t.is_contiguous() and s.is_contiguous())]
        total = sum(source.nbytes for _, source in lying)
        ahead, threads = (AHEAD_BYTES, THREADS) if total > ALONE_BYTES else (0, 1)
        most = -(-max(total - ahead, 0) // threads)
        shares = _shares(sorted(lying, key=_address), most + ahead, most) if lying else [[]]
        work: Callable[[list[_Pair]], _Work] = _fresh if fresh else _work
        work = partial(_sparing, self.differed) if sparing else work
        self._mine, *self._others = map(work, shares)

    def run(self, moved: Callable[[], None] = _nothing) -> None:
        """Copy; on return every target is its source, and on raise nobody copies any more.

        `moved` is called after each piece, by whichever thread has copied it.
        """
        import torch

        turns = [_hand_over(partial(work, moved)) for work in self._others]
        try:
            self._mine(moved)
            with torch.no_grad():
                for target, source in self._odd:
                    target.copy_(source)
        finally:
            for turn in turns:
                turn.wait()
        for turn in turns:
            if turn.error is not None:
                raise turn.error


class _Turn:
    """A piece of work for another thread. A bare lock: a Future takes twice as long to come back."""

    __slots__ = ("_done", "_work", "error")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._done = threading.Lock()
        self._done.acquire()
        self.error: BaseException | None = None

    def take(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised again by whoever waits
            self.error = error
        finally:
            self._done.release()

    def wait(self) -> None:
        self._done.acquire()


_waiting: queue.SimpleQueue[_Turn] = queue.SimpleQueue()
_crew: list[threading.Thread] = []
os.register_at_fork(after_in_child=_crew.clear)  # a child has none of its parent's threads


def same_bytes(one: int | bytes, other: int | bytes, size: int) -> bool:
    """Compare `size` bytes at two addresses, or of bytes, without the interpreter's lock."""
    return bool(_memcmp(one, other, size) == 0)


def populate(address: int, size: int) -> bool:
    """Have memory behind a range, in one call instead of a fault for each page, and change nothing of it.

    False where that cannot be: there is no room, or the kernel is older than 5.14. Then, too, a fault gives
    each page when it is written.
    """
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    return bool(_madvise(begin, address + size - begin, _POPULATE_WRITE) == 0)


def address_of(mapping: mmap.mmap) -> int:
    """Return where a writable mapping lies; whoever uses that keeps it alive."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(mapping))


def sampled_bytes(address: int, size: int, step: int) -> list[int]:
    """Return the first of `size` bytes at an address, and each that is `step` further."""
    found: list[int] = _Memory.from_address(address)[:size:step]
    return found


def _hand_over(work: Callable[[], None]) -> _Turn:
    """Give `work` to a thread that has nothing to do."""
    turn = _Turn(work)
    _waiting.put(turn)
    if not _crew:
        for number in range(max(1, THREADS - 1)):
            _crew.append(threading.Thread(target=_serve, name=f"holdfast-copy-{number}", daemon=True))
            _crew[-1].start()
    return turn


def _serve() -> None:
    while True:
        _waiting.get().take()


def _shares(pairs: Sequence[_Pair], first: int, most: int) -> list[list[_Pair]]:
    """Deal out all bytes, in order: the first share of `first`, others `most`; what does not fit is cut."""
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
    """Return the bytes of a contiguous tensor, where they lie."""
    import torch

    return tensor.detach().view(-1).view(torch.uint8)


def _address(pair: _Pair) -> int:
    return pair[0].data_ptr()


def _work(share: list[_Pair]) -> _Work:
    pieces = _pieces(share)
    behind = all(at + size == after for (at, _, size), (after, _, _) in pairwise(pieces))
    total = sum(size for _, _, size in pieces)
    if len(pieces) < 2 or not behind or total > SMALL_BYTES * len(pieces):
        return partial(_move, pieces)
    return partial(_concatenate, [source for _, source in share], _over(pieces[0][0], total))


def _sparing(differed: list[int], share: list[_Pair]) -> _Work:
    return partial(_renew, _pieces(share), differed)


def _fresh(share: list[_Pair]) -> _Work:
    return partial(_fill, _pieces(share))


def _pieces(share: list[_Pair]) -> list[_Piece]:
    return [(target.data_ptr(), source.data_ptr(), source.nbytes) for target, source in share]


def _over(address: int, size: int) -> torch.Tensor:
    """Return the bytes from `address` on; whoever uses them keeps that memory alive."""
    import torch

    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)


def _concatenate(sources: list[torch.Tensor], target: torch.Tensor, moved: Callable[[], None]) -> None:
    import torch

    with torch.no_grad():  # each thread has its own
        torch.cat(sources, out=target)
    moved()


def _move(pieces: list[_Piece], moved: Callable[[], None]) -> None:
    since = 0
    for target, source, size in pieces:
        for at in range(0, size, PIECE_BYTES):
            part = min(PIECE_BYTES, size - at)
            ctypes.memmove(target + at, source + at, part)
            since += part
            if since >= PIECE_BYTES:
                since = 0
                moved()


def _fill(pieces: list[_Piece], moved: Callable[[], None]) -> None:
    for target, source, size in pieces:
        for at in range(0, size, FRESH_BYTES):
            part = min(FRESH_BYTES, size - at)
            populate(target + at, part)
            ctypes.memmove(target + at, source + at, part)
            moved()


def _renew(pieces: list[_Piece], differed: list[int], moved: Callable[[], None]) -> None:
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
