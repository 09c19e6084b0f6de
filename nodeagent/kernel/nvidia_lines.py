"""Parses the NVIDIA drivers' kernel lines: Xids, SXids, GPUs off the bus, UUIDs of GPUs. Pure.

Every pattern matches from the record's first character. Other kernel lines quote text that users control,
such as the library where a program crashed, and must not be mistaken for the driver's lines. Lines that begin
with the name of a process are not parsed here at all: see `LinePatterns`.

Xids 144 to 150 are errors of NVLink 5: their lines name a unit, a severity and the words that NVIDIA's
catalogue decodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from nodeagent.model import MAX_TEXT, VERDICT_XID, Observation, gpu_entity, normalized_pci
from nodeagent.policy.nvlink import NVLINK4_XID, NVLINK5_XIDS

CLEARED = "cleared"  # events of this check clear every finding of an entity
MAX_DETAIL_WORDS = 8  # the driver prints four to six

# "RLW_REMAP Nonfatal XC0 i0 Link 02 (0x00000004 0x00000001 ...)", in columns: more than one space may
# separate them. A unit may have two words ("MSE Degraded"), and a link of -1 means none.
_NVLINK5_DETAIL = re.compile(
    r"(?P<unit>[A-Za-z0-9_/]{1,40}(?: [A-Za-z0-9_/]{1,40})?)"
    r"\s{1,32}(?:Link )?(?P<severity>Fatal|Non-?fatal)\b"
    r"(?:\s{1,32}XC(?P<contained>\d))?(?:\s{1,32}i(?P<injected>\d))?"
    r"(?:\s{1,32}Link\s{1,32}(?P<link>-?\d{1,4}))?"
    r"(?:\s{0,32}\((?P<words>[0-9a-fA-Fx ]{1,120})\)?)?"
)

NVIDIA_HINTS = ("NVRM: ", "SXid (")  # every line of the NVIDIA drivers contains one of these
FELL_OFF_THE_BUS = 79
_PCI = r"(?:PCI:)?(?P<pci>[0-9a-fA-F:.]{5,16})"

# The formats come from kernel_rc.c in NVIDIA's open kernel modules; a MIG device adds its instances.
_XID = re.compile(
    rf"NVRM: Xid \({_PCI}(?: GPU-I:(?P<gpu_instance>\d{{1,4}}))?(?: GPU-CI:(?P<compute_instance>\d{{1,4}}))?"
    r"[^)\n]{0,64}\): (?P<code>\d{1,5})(?!\d)(?:, pid='?(?P<pid>[^,'\n]{1,32})'?)?"
    r"(?:, name=(?P<name>[^,\n]{1,64}))?(?:, (?:Ch|channel) (?P<channel>[0-9a-fA-Fx]{1,18}))?[,:]?\s{0,4}"
)

_SXID = re.compile(
    rf"nvidia-nvswitch(?P<switch>\d{{1,4}}):? SXid \({_PCI}\): (?P<code>\d{{1,6}})(?!\d)"
    r"(?:,? (?P<severity>Fatal|Non-fatal)\b)?(?:,? Link (?P<link>-?\d{1,4}))?"
)

_UUID = re.compile(rf"NVRM: GPU at {_PCI}: (?P<uuid>GPU-[0-9a-fA-F-]{{8,40}})")
# Matches the whole line up to "the bus", because other lines of the driver quote text from its clients, such
# as the version that a client claims to have. The three-line form breaks at different words in different
# drivers.
_BREAK = r"\s{1,4}(?:NVRM: )?"
_FALLEN = re.compile(
    r"NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?"
    r"(?P<pci>(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
    rf"(?:(?:: GPU)?{_BREAK}|{_BREAK}(?:\(PCI ID: [0-9a-fA-F:]{{9}}\){_BREAK})?"
    rf"installed{_BREAK}in{_BREAK}this{_BREAK}system{_BREAK})"
    rf"has{_BREAK}fallen{_BREAK}off{_BREAK}the{_BREAK}bus"
)

_PLACE = re.compile(r"\(GPC (?P<gpc>\d{1,3}), TPC (?P<tpc>\d{1,3})(?:, SM (?P<sm>\d{1,3}))?")
_LINK = re.compile(r"NVLink: .{0,80}? link (?P<link>-?\d{1,4})", re.DOTALL)
_SEVEN = re.compile(r"\((0x[0-9a-fA-F]{1,8}(?:, ?0x[0-9a-fA-F]{1,8}){6})\)")
_ACTION = re.compile(
    r"action changed from .{0,60}? to 0x(?P<to>[0-9a-fA-F]{1,2})(?: \((?P<says>[^)\n]{1,60}))?"
)

# By number, not by name: the names differ between drivers ("Node Reboot Required", "OS Reboot"; "GPU Reset
# Required", "PF FLR"). The numbers are those of NVML field 230; 5, to recover IMEX, does not concern a GPU.
_ACTIONS = {
    0: "none", 1: "reset_gpu", 2: "reboot_node", 3: "drain_p2p", 4: "drain_and_reset",
    6: "reset_gpu", 7: "reboot_node",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LineFact:
    """The content of one line: an observation without its time, with the fields of `Observation`."""

    check: str
    entity: str
    value: float = 0.0
    variant: str = ""
    text: str = ""
    facts: tuple[tuple[str, str], ...] = ()

    def at(self, at_s: float, source: str) -> Observation:
        """Return the fact as an observation of `source`."""
        return Observation(
            at_s, self.check, self.entity, source, self.value, self.variant, self.text, self.facts
        )

    def knowing(self, name: str, value: str) -> LineFact:
        """Return a copy with one more fact."""
        return replace(self, facts=(*self.facts, (name, value)))


def quoted(text: str) -> str:
    """Turn a line into evidence: strip line breaks, and cut it to the maximum length."""
    return " ".join(text[: 2 * MAX_TEXT].split())[:MAX_TEXT]


def named(groups: dict[str, str | None]) -> tuple[tuple[str, str], ...]:
    """Return the groups that matched, as facts."""
    return tuple((name, value) for name, value in groups.items() if value)


@dataclass(frozen=True, slots=True)
class NvlinkDetail:
    """The content of an NVLink 5 line after the code."""

    unit: str  # without spaces
    severity: str  # Fatal, Nonfatal
    link: str  # "" if the line has none
    words: tuple[int, ...]  # intrInfo and errorStatus, then words that no table decodes
    flags: tuple[tuple[str, str], ...]  # cross containment, injected

    @property
    def variant(self) -> str:
        """`UNIT Severity 0xintrinfo 0xerrorstatus`; without the numbers unless the line has both."""
        numbers = [f"0x{word:08x}" for word in self.words[:2]] if len(self.words) >= 2 else []
        return " ".join([self.unit, self.severity, *numbers])

    @property
    def facts(self) -> tuple[tuple[str, str], ...]:
        found = [("unit", self.unit), ("severity", self.severity)]
        if self.link:
            found.append(("link", self.link))
        found += zip(("intrinfo", "errorstatus"), (f"0x{word:08x}" for word in self.words), strict=False)
        return (*found, *self.flags)


def parse_nvlink5(detail: str) -> NvlinkDetail | None:
    """Parse the part after "149, "; None if it is not an NVLink 5 error. Never raises."""
    match = _NVLINK5_DETAIL.match(detail)
    if match is None:
        return None
    flags = tuple((name, match[name]) for name in ("contained", "injected") if match[name])
    link = str(int(match["link"])) if match["link"] else ""
    severity = match["severity"].replace("-", "")
    return NvlinkDetail("_".join(match["unit"].split()), severity, link, _words(match["words"] or ""), flags)


def _words(text: str) -> tuple[int, ...]:
    words = []
    for word in text.split()[:MAX_DETAIL_WORDS]:
        try:
            words.append(int(word, 16) & 0xFFFFFFFF)
        except ValueError:
            break  # a truncated word, or not a word
    return tuple(words)


def parse_nvidia(text: str) -> tuple[LineFact, ...]:
    """Return the facts in a line of the NVIDIA drivers; none for any other line. Never raises."""
    if text.startswith("NVRM: "):
        return _xid(text) or _fallen(text)
    return _sxid(text) if text.startswith("nvidia-nvswitch") else ()


def gpu_uuid(text: str) -> tuple[str, str] | None:
    """Return the entity and the UUID of a GPU if the line names both."""
    match = _UUID.match(text)
    return (gpu_entity(match["pci"]), match["uuid"]) if match else None


def _xid(text: str) -> tuple[LineFact, ...]:
    match = _XID.match(text)
    if match is None:
        return ()
    facts = {name: value for name, value in match.groupdict().items() if name not in ("pci", "code")}
    code, detail = int(match["code"]), text[match.end() :]
    variant, more = _detail(code, detail)
    known = (*named({n: v for n, v in facts.items() if v != "<unknown>"}), *more)
    return (LineFact("xid", gpu_entity(match["pci"]), float(code), variant, quoted(text), known),)


def _detail(code: int, detail: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the variant of an Xid ("" if it has none) and the facts in its text."""
    if code in NVLINK5_XIDS:
        error = parse_nvlink5(detail)
        return (error.variant, error.facts) if error else ("", ())
    if code == 13 and (place := _PLACE.search(detail)):
        return f"GPC {int(place['gpc'])} TPC {int(place['tpc'])}", named(place.groupdict())
    if code == NVLINK4_XID:
        return _registers(detail)
    if code == VERDICT_XID and (action := _ACTION.search(detail)):
        return _ACTIONS.get(int(action["to"], 16), ""), named({"driver_says": action["says"]})
    return "", ()


def _registers(detail: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    link, seven = _LINK.search(detail), _SEVEN.search(detail)
    variant = ",".join(f"0x{int(each, 16):x}" for each in seven[1].split(",")) if seven else ""
    return variant, named(link.groupdict()) if link else ()


def _fallen(text: str) -> tuple[LineFact, ...]:
    match = _FALLEN.match(text)
    if match is None:
        return ()
    return (LineFact("xid", gpu_entity(match["pci"]), float(FELL_OFF_THE_BUS), "", quoted(text)),)


def _sxid(text: str) -> tuple[LineFact, ...]:
    match = _SXID.match(text)
    if match is None:
        return ()
    severity = (match["severity"] or "").lower()
    facts = named({"switch": match["switch"], "link": match["link"] and str(int(match["link"]))})
    entity = f"nvswitch/{normalized_pci(match['pci'])}"
    return (LineFact("sxid", entity, float(match["code"]), severity, quoted(text), facts),)
