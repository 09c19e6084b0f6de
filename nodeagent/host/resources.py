"""Checks of the kernel resources in use: memory, open files, process ids and load."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nodeagent.model import NODE
from nodeagent.sensing.sensor import Omission
from nodeagent.sensing.small_files import MAX_FIGURES, SMALL_BYTES, try_read
from nodeagent.sensing.sweep import Reading

MEMINFO_BYTES = 8192  # about 1500 are used


def memory_used(proc: str) -> float | None:
    """Return the percentage of memory that is not available; None if meminfo is missing or malformed.

    Available memory is the kernel's estimate of the memory that can be allocated without swapping. Free
    memory alone would count the page cache as used. If meminfo has no such estimate, or one that cannot be
    right, psutil computes one.
    """
    total, available = _memory(try_read(f"{proc}/meminfo", MEMINFO_BYTES) or b"")
    if not 0 < available <= total:
        total, available = _memory_by_psutil(proc)
    return 100.0 * (total - available) / total if total > 0 else None


def _memory(meminfo: bytes) -> tuple[int, int]:
    """Return the total and the available memory; 0 if unknown."""
    found = {b"MemTotal": 0, b"MemAvailable": 0}
    for line in meminfo.splitlines():
        name, _, rest = line.partition(b":")
        number = rest.strip().removesuffix(b" kB")
        if name in found and _is_number(number):
            found[name] = int(number)
    return found[b"MemTotal"], found[b"MemAvailable"]


def _memory_by_psutil(proc: str) -> tuple[int, int]:
    # Imported here, because it takes 0.9 MB, and meminfo has the estimate on every current kernel.
    import psutil

    psutil.PROCFS_PATH = proc  # process-wide: only the agent's host sensor uses psutil
    try:
        found = psutil.virtual_memory()
    except (OSError, KeyError, IndexError, ValueError):  # no such file, or not in the kernel's format
        return 0, 0
    return found.total, found.available


def files_used(file_nr: bytes) -> float | None:
    """Return the percentage used, from the allocated, free and maximum counts; None if it is malformed."""
    fields = file_nr.split()
    if len(fields) < 3 or not all(_is_number(each) for each in fields[:3]):
        return None
    allocated, free, most = (int(each) for each in fields[:3])
    return 100.0 * max(0, allocated - free) / most if most else None


def pids_used(loadavg: bytes, pid_max: bytes, threads_max: bytes) -> float | None:
    """Return the percentage used; None if a file is malformed.

    Threads have ids, too. Their number is the figure after the slash in /proc/loadavg; counting them in /proc
    would require a walk through every process.
    """
    fields = loadavg.split()
    threads = fields[3].partition(b"/")[2] if len(fields) > 3 else b""
    limits = [int(each) for each in (pid_max.strip(), threads_max.strip()) if _is_number(each)]
    if not _is_number(threads) or not limits or min(limits) == 0:
        return None
    return 100.0 * int(threads) / min(limits)


def _is_number(raw: bytes) -> bool:
    return raw.isdigit() and len(raw) <= MAX_FIGURES


def load_per_core(loadavg: bytes, cores: int) -> float | None:
    """Return the five-minute load average per core; None if the file is malformed."""
    fields = loadavg.split()
    if len(fields) < 2 or len(fields[1]) > MAX_FIGURES:
        return None
    try:
        load = float(fields[1])
    except ValueError:
        return None
    return load / max(1, cores) if math.isfinite(load) and load >= 0 else None


@dataclass(frozen=True, slots=True)
class Figure:
    """The value of one check, and the files below the root of a procfs that it is computed from."""

    files: tuple[str, ...]
    value: Callable[[str], float | None]  # takes the root of the procfs


def _parsed(parse: Callable[..., float | None], *files: str) -> Figure:
    """Return a figure that `parse` computes from the contents of `files`."""

    def value(proc: str) -> float | None:
        raw = [try_read(f"{proc}/{each}", SMALL_BYTES) for each in files]
        return None if None in raw else parse(*raw)

    return Figure(files, value)


def _load(loadavg: bytes) -> float | None:
    return load_per_core(loadavg, os.cpu_count() or 1)


FIGURES: Mapping[str, Figure] = {
    "memory_used": Figure(("meminfo",), memory_used),
    "files_used": _parsed(files_used, "sys/fs/file-nr"),
    "pids_used": _parsed(pids_used, "loadavg", "sys/kernel/pid_max", "sys/kernel/threads-max"),
    "load": _parsed(_load, "loadavg"),
}


class ResourceUsage:
    """Checks the resources in `FIGURES`. `proc` is the root of a procfs."""

    checks = frozenset(FIGURES)

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._left_out: dict[str, Omission] = {}

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        found = []
        for check in sorted(due & self.checks):
            figure = FIGURES[check]
            value = figure.value(self._proc)
            self._left_out.pop(check, None)
            if value is None:
                self._left_out[check] = Omission(
                    check, f"{self._proc}: no valid value in {' or '.join(figure.files)}"
                )
            else:
                found.append(Reading(check, NODE, round(value, 3)))
        return found

    def left_out(self) -> tuple[Omission, ...]:
        return tuple(self._left_out.values())
