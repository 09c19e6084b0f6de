"""The operators' releases of the GPUs: which one is in force after a sequence of requests. Pure.

Several operators may ask for releases. The newest is in force, and an end ends all of them. A command that
fails withdraws only its own release, so the one that it had replaced is in force again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

RELEASE, WITHDRAWS = "release_s", "withdraws"  # the fields of a request
MAX_KEPT = 16


@dataclass(frozen=True, slots=True)
class GpuRelease:
    """An operator's request to close NVML until a time, for a GPU reset or a driver replacement."""

    boot_id: str
    until_boottime_s: float  # CLOCK_BOOTTIME
    why: str = ""

    @property
    def name(self) -> str:
        return f"{self.boot_id} {self.until_boottime_s:.6f}"


@dataclass(frozen=True, slots=True)
class Releases:
    """The releases of one boot, the newest last. Those before it are in force again if it is withdrawn."""

    boot_id: str
    kept: tuple[GpuRelease, ...] = ()

    @property
    def newest(self) -> GpuRelease | None:
        return self.kept[-1] if self.kept else None

    def after(self, request: Mapping[str, Any]) -> Releases:
        """Return the releases after a request; the same ones if it is of another kind or another boot."""
        asked = requested(request, self.boot_id)
        if asked is None:
            return self
        if WITHDRAWS in request:
            return self._without(request[WITHDRAWS], asked)
        at_s = float(request["boottime_s"])
        if self.newest is None or self.newest.until_boottime_s <= at_s or asked.until_boottime_s <= at_s:
            return replace(self, kept=(asked,))
        others = tuple(each for each in self.kept if each.name != asked.name)
        return replace(self, kept=(*others, asked)[-MAX_KEPT:])

    def _without(self, name: object, end: GpuRelease) -> Releases:
        others = tuple(each for each in self.kept if each.name != name)
        if self.newest is None or self.newest.name != name:
            return replace(self, kept=others)
        if others and others[-1].until_boottime_s > end.until_boottime_s:
            return replace(self, kept=others)
        ended_s = min(end.until_boottime_s, self.newest.until_boottime_s)
        return replace(self, kept=(replace(end, until_boottime_s=ended_s),))


def requested(request: Mapping[str, Any], boot_id: str) -> GpuRelease | None:
    """Return the release that a line requests in this boot, or None; an end is one that is over at once."""
    duration_s, boottime_s = finite(request.get(RELEASE)), finite(request.get("boottime_s"))
    if duration_s is None or boottime_s is None or request.get("boot_id") != boot_id:
        return None
    return GpuRelease(boot_id, round(boottime_s + duration_s, 6), str(request.get("why", "")))


def finite(raw: Any) -> float | None:
    """Return a number from a file as a float; None for anything else, and for a number beyond any time."""
    return float(raw) if type(raw) in (int, float) and abs(raw) < 1e15 and isfinite(raw) else None
