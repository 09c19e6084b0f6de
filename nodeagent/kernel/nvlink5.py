"""Xids 144 to 150, errors of NVLink 5: unit, severity and the words that NVIDIA's catalog decodes. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

XIDS = range(144, 151)
MAX_WORDS = 8  # the driver prints four to six

# "RLW_REMAP Nonfatal XC0 i0 Link 02 (0x00000004 0x00000001 ...)", in columns: more than one space may part
# them. A unit may be of two words ("MSE Degraded"), a link be -1: none.
_DETAIL = re.compile(
    r"(?P<unit>[A-Za-z0-9_/]{1,40}(?: [A-Za-z0-9_/]{1,40})?)"
    r"\s{1,32}(?:Link )?(?P<severity>Fatal|Non-?fatal)\b"
    r"(?:\s{1,32}XC(?P<contained>\d))?(?:\s{1,32}i(?P<injected>\d))?"
    r"(?:\s{1,32}Link\s{1,32}(?P<link>-?\d{1,4}))?"
    r"(?:\s{0,32}\((?P<words>[0-9a-fA-Fx ]{1,120})\)?)?"
)


@dataclass(frozen=True, slots=True)
class Detail:
    """What the line says after the code."""

    unit: str  # without spaces
    severity: str  # Fatal, Nonfatal
    link: str  # "" if the line has none
    words: tuple[int, ...]  # intrInfo, errorStatus, and what no table decodes
    flags: tuple[tuple[str, str], ...]  # cross containment, injected

    @property
    def variant(self) -> str:
        """`UNIT Severity 0xintrinfo 0xerrorstatus`; without the numbers if the line has not both."""
        numbers = [f"0x{word:08x}" for word in self.words[:2]] if len(self.words) >= 2 else []
        return " ".join([self.unit, self.severity, *numbers])

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        found = [("unit", self.unit), ("severity", self.severity)]
        if self.link:
            found.append(("link", self.link))
        found += zip(("intrinfo", "errorstatus"), (f"0x{word:08x}" for word in self.words), strict=False)
        return (*found, *self.flags)


def parse(detail: str) -> Detail | None:
    """Return what stands after "149, "; None if that is no such error. Never raises."""
    match = _DETAIL.match(detail)
    if match is None:
        return None
    flags = tuple((name, match[name]) for name in ("contained", "injected") if match[name])
    link = str(int(match["link"])) if match["link"] else ""
    severity = match["severity"].replace("-", "")
    return Detail("_".join(match["unit"].split()), severity, link, _words(match["words"] or ""), flags)


def _words(text: str) -> tuple[int, ...]:
    words = []
    for word in text.split()[:MAX_WORDS]:
        try:
            words.append(int(word, 16) & 0xFFFFFFFF)
        except ValueError:
            break  # cut off, or another thing
    return tuple(words)
