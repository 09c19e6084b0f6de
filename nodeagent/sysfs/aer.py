"""Error counters of PCI devices: Advanced Error Reporting. Pure."""

from __future__ import annotations

MAX_FIGURES = 20


def total(raw: bytes) -> int | None:
    """Return how many errors a file aer_dev_* counts; None if it says nothing.

    Its lines are `RxErr 0`; the last, `TOTAL_ERR_COR 0`, counts messages, of which one may name several
    errors. Without it the others are summed up.
    """
    found: dict[bytes, int] = {}
    for line in raw.splitlines():
        name, _, figures = line.strip().rpartition(b" ")
        if name and figures.isdigit() and len(figures) <= MAX_FIGURES:
            found[name.strip()] = int(figures)
    totals = [count for name, count in found.items() if name.startswith(b"TOTAL_ERR")]
    if totals:
        return totals[0]
    return sum(found.values()) if found else None
