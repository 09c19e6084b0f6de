"""Memory used, from /proc/meminfo. Pure."""

from __future__ import annotations


def used(meminfo: bytes) -> float | None:
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
