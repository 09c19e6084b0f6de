"""Decodes the content of NVLink errors: the registers of Xid 74, and the units of Xids 144 to 150. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

NVLINK4_XID = 74
REGISTERS = (1, 3, 4, 5)  # the registers that NVIDIA's Xid catalogue decodes
REGISTER_COUNT = 7
WIDTH = 32  # bits in a register and in intrInfo
_REGISTER = re.compile(r"\s*0x([0-9a-f]{1,8})\s*", re.IGNORECASE)
RegisterBit = tuple[int, int]  # register, from 1; bit, from 0
NVLINK5_XIDS = range(144, 151)
NEW_LAYOUT = 575  # the first driver branch with the unit in bits 6 to 0 of intrInfo, not in bits 9 to 5
_REPORT = re.compile(r"(\S{1,64}) (Fatal|Nonfatal) 0x([0-9a-f]{1,8}) 0x([0-9a-f]{1,8})", re.IGNORECASE)


def set_bits(variant: str) -> tuple[RegisterBit, ...]:
    """Return the bits set in the decoded registers; none unless `variant` has seven registers."""
    matches = [_REGISTER.fullmatch(part) for part in variant.split(",", REGISTER_COUNT)]
    values = [int(match[1], 16) for match in matches if match]
    if len(values) != REGISTER_COUNT or len(matches) != REGISTER_COUNT:
        return ()
    return tuple(
        (register, bit) for register in REGISTERS for bit in range(WIDTH) if values[register - 1] >> bit & 1
    )


@dataclass(frozen=True, slots=True)
class BitMask:
    """Bits of intrInfo that must have these values."""

    care: int
    bits: int

    def fits(self, info: int) -> bool:
        return info & self.care == self.bits


@dataclass(frozen=True, slots=True)
class NvlinkPattern:
    """The conditions for a report to match one row."""

    xid: int
    units: frozenset[str]  # upper case; the names may differ between drivers before and after the new layout
    before: BitMask
    since: BitMask
    statuses: frozenset[int]  # errorStatus; empty: any


@dataclass(frozen=True, slots=True)
class NvlinkReport:
    """The content of a kernel line, as the sensor writes it into an observation's variant."""

    unit: str
    fatal: bool
    info: int  # intrInfo
    status: int  # errorStatus


def parse_mask(text: str) -> BitMask:
    """Parse a mask: 32 characters, each `0`, `1` or `-` (either value).

    Raises:
        ValueError: it is malformed.
    """
    if len(text) != WIDTH or set(text) - set("01-"):
        raise ValueError(f"{WIDTH} of 0, 1 and -")
    care = int("".join("0" if char == "-" else "1" for char in text), 2)
    return BitMask(care, int(text.replace("-", "0"), 2))


def parse_report(variant: str) -> NvlinkReport | None:
    """Parse `UNIT Fatal 0xintrinfo 0xerrorstatus`; return None if it is malformed."""
    match = _REPORT.fullmatch(variant)
    if match is None:
        return None
    unit, word, info, status = match.groups()
    return NvlinkReport(unit.upper(), word.lower() == "fatal", int(info, 16), int(status, 16))


def matching_rows(
    patterns: Iterable[NvlinkPattern], xid: int, report: NvlinkReport, branch: int | None
) -> tuple[NvlinkPattern, ...]:
    """Return the rows that match on a driver of `branch`; in either layout if the branch is unknown."""
    return tuple(
        each
        for each in patterns
        if each.xid == xid
        and report.unit in each.units
        and (not each.statuses or report.status in each.statuses)
        and any(layout.fits(report.info) for layout in _layouts(each, branch))
    )


def _layouts(pattern: NvlinkPattern, branch: int | None) -> tuple[BitMask, ...]:
    if branch is None:
        return (pattern.before, pattern.since)
    return (pattern.since,) if branch >= NEW_LAYOUT else (pattern.before,)
