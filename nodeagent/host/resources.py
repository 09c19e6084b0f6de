"""Checks of the kernel resources in use: memory, open files, process ids and load."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nodeagent.model import NODE
from nodeagent.sensing.sensor import LeftOut
from nodeagent.sensing.small_files import SMALL_BYTES, try_read
from nodeagent.sensing.sweep import Reading


def memory_used(meminfo: bytes) -> float | None:
    """Return percent of the memory that cannot be had any more; None if it is not said.

    `MemAvailable` is the kernel's own estimate of what can be had without swapping: free memory alone
    would count the page cache as used.
    """
    found: dict[bytes, int] = {}
    for line in meminfo.splitlines():
        name, _, rest = line.partition(b":")
        figures = rest.split()[:1]
        if name in (b"MemTotal", b"MemAvailable") and figures and figures[0].isdigit():
            found[name] = int(figures[0][:20])
    total, available = found.get(b"MemTotal", 0), found.get(b"MemAvailable")
    if total <= 0 or available is None:
        return None
    return 100.0 * max(0, total - available) / total


def files_used(file_nr: bytes) -> float | None:
    """Return percent; None if it is not said. The file has: allocated, free, most."""
    fields = file_nr.split()
    if len(fields) < 3 or not all(each.isdigit() and len(each) <= 20 for each in fields[:3]):
        return None
    allocated, free, most = (int(each) for each in fields[:3])
    return 100.0 * max(0, allocated - free) / most if most else None


def pids_used(loadavg: bytes, pid_max: bytes, threads_max: bytes) -> float | None:
    """Return percent; None if it is not said.

    A thread has an id, too. How many there are is the figure behind the slash in /proc/loadavg: to count
    them in /proc would cost a walk through all of it.
    """
    fields = loadavg.split()
    threads = fields[3].partition(b"/")[2] if len(fields) > 3 else b""
    limits = [int(each) for each in (pid_max.strip(), threads_max.strip()) if _is_number(each)]
    if not _is_number(threads) or not limits or min(limits) == 0:
        return None
    return 100.0 * int(threads) / min(limits)


def _is_number(raw: bytes) -> bool:
    return raw.isdigit() and len(raw) <= 20


def load_per_core(loadavg: bytes, cores: int) -> float | None:
    """Return the load average of five minutes by the number of cores; None if it is not said."""
    fields = loadavg.split()
    if len(fields) < 2 or len(fields[1]) > 20:
        return None
    try:
        load = float(fields[1])
    except ValueError:
        return None
    return load / max(1, cores) if math.isfinite(load) and load >= 0 else None


@dataclass(frozen=True, slots=True)
class Figure:
    """Files below /proc, and what makes a value of what they say."""

    files: tuple[str, ...]
    value: Callable[..., float | None]


def _load(loadavg: bytes) -> float | None:
    return load_per_core(loadavg, os.sysconf("SC_NPROCESSORS_ONLN"))


FIGURES: Mapping[str, Figure] = {
    "memory_used": Figure(("meminfo",), memory_used),
    "files_used": Figure(("sys/fs/file-nr",), files_used),
    "pids_used": Figure(("loadavg", "sys/kernel/pid_max", "sys/kernel/threads-max"), pids_used),
    "load": Figure(("loadavg",), _load),
}


class ResourceUsage:
    """Reads them. `proc` is the root of a procfs."""

    checks = frozenset(FIGURES)

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._left_out: dict[str, LeftOut] = {}

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        found = []
        for check in sorted(due & self.checks):
            figure = FIGURES[check]
            raw = [try_read(f"{self._proc}/{each}", SMALL_BYTES) for each in figure.files]
            value = None if None in raw else figure.value(*raw)
            self._left_out.pop(check, None)
            if value is None:
                self._left_out[check] = LeftOut(
                    check, f"{self._proc}: {' or '.join(figure.files)} does not say"
                )
            else:
                found.append(Reading(check, NODE, round(value, 3)))
        return found

    def left_out(self) -> tuple[LeftOut, ...]:
        return tuple(self._left_out.values())
