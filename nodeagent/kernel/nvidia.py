"""The NVIDIA drivers' lines: Xids, SXids, a GPU that is gone, which GPU has which UUID. Pure.

All are matched from the record's first character. Other lines of the kernel quote what users choose, such as
the name of the library in which a program crashed, and must not pass for the driver's.
"""

from __future__ import annotations

import re

from nodeagent.kernel import nvlink5
from nodeagent.kernel.seen import Seen, named, quoted
from nodeagent.observation import gpu, pci

HINTS = ("NVRM: ", "SXid (")  # one of them is in every such line
FELL_OFF_THE_BUS = 79

_PCI = r"(?:PCI:)?(?P<pci>[0-9a-fA-F:.]{5,16})"
# The shapes are those of kernel_rc.c in NVIDIA's open kernel modules; a MIG device adds its instances.
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
_ADDRESS = re.compile(
    r"(?:(?<=PCI:)|(?<![0-9a-fA-F:]))(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?(?!\w)"
)
_PLACE = re.compile(r"\(GPC (?P<gpc>\d{1,3}), TPC (?P<tpc>\d{1,3})(?:, SM (?P<sm>\d{1,3}))?")
_LINK = re.compile(r"NVLink: .{0,80}? link (?P<link>-?\d{1,4})", re.DOTALL)
_SEVEN = re.compile(r"\((0x[0-9a-fA-F]{1,8}(?:, ?0x[0-9a-fA-F]{1,8}){6})\)")
_ACTION = re.compile(
    r"action changed from .{0,60}? to 0x(?P<to>[0-9a-fA-F]{1,2})(?: \((?P<says>[^)\n]{1,60}))?"
)

# By number, not by word: the words differ among drivers ("Node Reboot Required", "OS Reboot"; "GPU Reset
# Required", "PF FLR"). The numbers are those of NVML field 230; 5, to recover IMEX, is none of a GPU's.
_ACTIONS = {
    0: "none", 1: "reset_gpu", 2: "reboot_node", 3: "drain_p2p", 4: "drain_and_reset",
    6: "reset_gpu", 7: "reboot_node",
}  # fmt: skip


def parse(text: str) -> tuple[Seen, ...]:
    """Return what a line of the NVIDIA drivers tells; nothing for any other. Never raises."""
    if text.startswith("NVRM: "):
        return _xid(text) or _fallen(text)
    return _sxid(text) if text.startswith("nvidia-nvswitch") else ()


def uuid(text: str) -> tuple[str, str] | None:
    """Return the entity and the UUID of a GPU if the line names both."""
    match = _UUID.match(text)
    return (gpu(match["pci"]), match["uuid"]) if match else None


def _xid(text: str) -> tuple[Seen, ...]:
    match = _XID.match(text)
    if match is None:
        return ()
    facts = {name: value for name, value in match.groupdict().items() if name not in ("pci", "code")}
    code, detail = int(match["code"]), text[match.end() :]
    variant, more = _detail(code, detail)
    known = (*named({n: v for n, v in facts.items() if v != "<unknown>"}), *more)
    return (Seen("xid", gpu(match["pci"]), float(code), variant, quoted(text), known),)


def _detail(code: int, detail: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the variant of an Xid, "" if it has none, and the facts that its words hold."""
    if code in nvlink5.XIDS:
        error = nvlink5.parse(detail)
        return (error.variant, error.facts) if error else ("", ())
    if code == 13 and (place := _PLACE.search(detail)):
        return f"GPC {int(place['gpc'])} TPC {int(place['tpc'])}", named(place.groupdict())
    if code == 74:
        return _registers(detail)
    if code == 154 and (action := _ACTION.search(detail)):
        return _ACTIONS.get(int(action["to"], 16), ""), named({"driver_says": action["says"]})
    return "", ()


def _registers(detail: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    link, seven = _LINK.search(detail), _SEVEN.search(detail)
    variant = ",".join(f"0x{int(each, 16):x}" for each in seven[1].split(",")) if seven else ""
    return variant, named(link.groupdict()) if link else ()


def _fallen(text: str) -> tuple[Seen, ...]:
    if "fallen off the bus" not in text:
        return ()
    address = _ADDRESS.search(text)
    if address is None:
        return ()
    return (Seen("xid", gpu(address[0]), float(FELL_OFF_THE_BUS), "", quoted(text)),)


def _sxid(text: str) -> tuple[Seen, ...]:
    match = _SXID.match(text)
    if match is None:
        return ()
    severity = (match["severity"] or "").lower()
    facts = named({"switch": match["switch"], "link": match["link"] and str(int(match["link"]))})
    entity = f"nvswitch/{pci(match['pci'])}"
    return (Seen("sxid", entity, float(match["code"]), severity, quoted(text), facts),)
