"""Process ids used of the kernel's limit. Pure."""

from __future__ import annotations


def used(loadavg: bytes, pid_max: bytes, threads_max: bytes) -> float | None:
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
