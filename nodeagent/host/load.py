"""Load of the last five minutes for each core, from /proc/loadavg. Pure."""

from __future__ import annotations

import math


def each_core(loadavg: bytes, cores: int) -> float | None:
    """Return the load average of five minutes by the number of cores; None if it is not said."""
    fields = loadavg.split()
    if len(fields) < 2 or len(fields[1]) > 20:
        return None
    try:
        load = float(fields[1])
    except ValueError:
        return None
    return load / max(1, cores) if math.isfinite(load) and load >= 0 else None
