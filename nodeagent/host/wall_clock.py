"""Checks of the wall clock: whether it was set, and whether a time service disciplines it.

The kernel slews CLOCK_REALTIME and CLOCK_BOOTTIME by the same factor and counts sleep into both. So their
difference changes only when the clock is set, or at a leap second.

adjtimex(2) reports whether the clock is disciplined. Reading this state needs no privilege.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable, Iterator, Sequence

from nodeagent.model import NODE
from nodeagent.sensing.sensor import Omission
from nodeagent.sensing.sweep import Reading

TRIES = 5
CLOSE_S = 1e-4  # two readings this close count as simultaneous
LOOSE_S = 0.1  # readings further apart are useless: the process was paused in between
ClockSample = tuple[float, float, float]  # CLOCK_BOOTTIME before, the wall clock, CLOCK_BOOTTIME after
STA_UNSYNC = 0x0040  # linux/timex.h
SYNCHRONISED, UNSYNCHRONISED = 0.0, 1.0


def read_clocks() -> list[ClockSample]:
    """Read the clocks, and repeat the reading if the process was interrupted in between."""
    found: list[ClockSample] = []
    while len(found) < TRIES:
        before = time.clock_gettime(time.CLOCK_BOOTTIME)
        wall = time.clock_gettime(time.CLOCK_REALTIME)
        found.append((before, wall, time.clock_gettime(time.CLOCK_BOOTTIME)))
        if found[-1][2] - before <= CLOSE_S:
            break
    return found


def wall_offset(samples: Sequence[ClockSample]) -> float | None:
    """Return wall clock minus CLOCK_BOOTTIME from the fastest sample; None if none was fast enough."""
    if not samples:
        return None
    before, wall, after = min(samples, key=lambda each: each[2] - each[0])
    return wall - (before + after) / 2 if 0 <= after - before <= LOOSE_S else None


def offset_change(before: float | None, now: float) -> float:
    """Return by how many seconds the wall clock was set between two offsets; 0 at the first offset."""
    return 0.0 if before is None else abs(now - before)


class _Timex(ctypes.Structure):
    """The head of struct timex on 64-bit Linux, with room for the rest: 208 bytes in total."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


def adjtimex_status() -> int:
    """Return adjtimex's status bits. Raises OSError: a seccomp filter may refuse the call."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = _Timex()  # modes 0: nothing is set
    if libc.adjtimex(ctypes.byref(found)) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found.status)


def sync_state(bits: int) -> float:
    """Return the check's state."""
    return UNSYNCHRONISED if bits & STA_UNSYNC else SYNCHRONISED


def describe_status(bits: int) -> str:
    """Return the bits as text."""
    hint = "; chrony clears STA_UNSYNC only with `rtcsync`" if bits & STA_UNSYNC else ""
    return f"adjtimex status 0x{bits & 0xFFFFFFFF:04x}{hint}"


class WallClock:
    """Checks the clock of the kernel that the agent runs on; containers share it."""

    checks = frozenset({"clock_step", "clock_unsynchronised"})

    def __init__(self) -> None:
        self._offset: float | None = None
        self._refused = ""

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        found: list[Reading] = []
        if "clock_step" in due:
            found += self._step()
        if "clock_unsynchronised" in due:
            found += self._sync()
        return found

    def left_out(self) -> tuple[Omission, ...]:
        return (Omission("clock_unsynchronised", self._refused),) if self._refused else ()

    def _step(self) -> Iterator[Reading]:
        offset = wall_offset(read_clocks())
        if offset is not None:
            step = offset_change(self._offset, offset)
            ahead = self._offset is not None and offset > self._offset
            self._offset = offset
            way = f"{step:.3f} s {'ahead' if ahead else 'back'}" if step >= 0.001 else ""
            yield Reading("clock_step", NODE, round(step, 6), way)

    def _sync(self) -> Iterator[Reading]:
        try:
            bits = adjtimex_status()
        except OSError as error:
            self._refused = f"adjtimex: {error.strerror}"
            return
        self._refused = ""
        yield Reading("clock_unsynchronised", NODE, sync_state(bits), describe_status(bits))
