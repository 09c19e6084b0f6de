"""Xid 144 to 150: which rows of NVIDIA's decode table fit the report of an NVLink 5 unit. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

XIDS = range(144, 151)
NEW_LAYOUT = 575  # the driver branch from which intrInfo holds the unit in bits 6 to 0, not 9 to 5
WIDTH = 32

_REPORT = re.compile(r"(\S{1,64}) (Fatal|Nonfatal) 0x([0-9a-f]{1,8}) 0x([0-9a-f]{1,8})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Mask:
    """Bits of intrInfo that must be as they are here."""

    care: int
    bits: int

    def fits(self, info: int) -> bool:
        return info & self.care == self.bits


@dataclass(frozen=True, slots=True)
class Pattern:
    """What a report must say to fall under one row."""

    xid: int
    units: frozenset[str]  # upper case; drivers before and since the new layout may use other names
    before: Mask
    since: Mask
    statuses: frozenset[int]  # errorStatus; empty: any


@dataclass(frozen=True, slots=True)
class Report:
    """What a kernel line says, as the sensor writes it into an observation's variant."""

    unit: str
    fatal: bool
    info: int  # intrInfo
    status: int  # errorStatus


def mask(text: str) -> Mask:
    """Return the mask that a table writes as 32 of `0`, `1` and `-`, which may be either.

    Raises:
        ValueError: it is written otherwise.
    """
    if len(text) != WIDTH or set(text) - set("01-"):
        raise ValueError(f"{WIDTH} of 0, 1 and -")
    care = int("".join("0" if char == "-" else "1" for char in text), 2)
    return Mask(care, int(text.replace("-", "0"), 2))


def parsed(variant: str) -> Report | None:
    """Return what `UNIT Fatal 0xintrinfo 0xerrorstatus` says; None if it is written otherwise."""
    match = _REPORT.fullmatch(variant)
    if match is None:
        return None
    unit, word, info, status = match.groups()
    return Report(unit.upper(), word.lower() == "fatal", int(info, 16), int(status, 16))


def matching(
    patterns: Iterable[Pattern], xid: int, report: Report, branch: int | None
) -> tuple[Pattern, ...]:
    """Return the rows that fit on a driver of `branch`; of either layout if that is not known."""
    return tuple(
        each
        for each in patterns
        if each.xid == xid
        and report.unit in each.units
        and (not each.statuses or report.status in each.statuses)
        and any(layout.fits(report.info) for layout in _layouts(each, branch))
    )


def _layouts(pattern: Pattern, branch: int | None) -> tuple[Mask, ...]:
    if branch is None:
        return (pattern.before, pattern.since)
    return (pattern.since,) if branch >= NEW_LAYOUT else (pattern.before,)
