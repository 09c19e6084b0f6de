"""The width of a PCIe link against its full width. Pure.

The speed is not looked at: a link at rest may be slow by design. What the full width is, the device and the
port above it say; but a slot may have fewer lanes than its port claims. So it counts only once the device,
or another of its model, has been seen with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

WIDTHS = frozenset({1, 2, 4, 8, 12, 16, 32})  # PCI Express: others, as 0 and 63, are no link


def best(now: int | None, before: int | None, most: int | None) -> int | None:
    """Return the greatest width that a device has been seen with, now or before; None if none.

    Args:
        now: What sysfs says.
        before: The best that is remembered.
        most: What device and port can: what is remembered of another slot does not count.
    """
    seen = [each for each in (now, before) if each in WIDTHS and each is not None]
    if not seen:
        return None
    return max(seen) if most is None else min(max(seen), most)


def full(own: int | None, most: int | None, alike: Iterable[int | None]) -> int | None:
    """Return the width that a link should have; None if nobody knows.

    Args:
        own: The best it has been seen with.
        most: What device and port can.
        alike: The best widths of the other devices of its model.
    """
    seen = [each for each in (own, *alike) if each is not None]
    if not seen:
        return None
    return max(seen) if most is None else min(max(seen), most)


def share(now: int | None, whole: int | None) -> float | None:
    """Return the share of the full width; None if one of them is not known."""
    if now not in WIDTHS or now is None or whole is None or whole <= 0:
        return None
    return min(1.0, now / whole)


def widths(remembered: Mapping[Any, Any]) -> dict[str, int]:
    """Return the best widths of a memory that may be garbage."""
    return {
        key: width
        for key, width in remembered.items()
        if isinstance(key, str) and isinstance(width, int) and width in WIDTHS
    }
