"""Decide which incidents of a run are evidence against a node. Pure.

An incident is evidence against a node if its faults show signs of a hardware problem on this node and on no
other. A sure sign counts immediately. Any other sign counts only if it recurs: this node had another one
within `WITHIN_S`, at another step or on another rank, and more of them than all other nodes of the run
together. A fault that the data of a step causes, or a bug that occurs on arbitrary nodes, is therefore not
evidence.

The quarantine treats all faults that runs report about a node as one witness, even if several runs report
them. This witness supports the findings of the node's agent, and never takes a node out of service alone
(`supervisor.quarantine.evidence`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from supervisor.cluster.hardware import signs
from supervisor.observability.incident_record import incident_id
from supervisor.quarantine.model import RunFault
from supervisor.view.model import Fault, OpenIncident

WITHIN_S = 86400.0
MAX_KEPT = 64  # per run; older incidents are forgotten
MAX_TEXT = 300


@dataclass(frozen=True, slots=True)
class HardwareIncident:
    """An incident whose faults have signs of hardware on one node. It is part of the incident's record."""

    incident: str
    at_s: float
    node: str
    what: str
    is_sure: bool = False
    rank: int = -1
    step: int = -1

    def fault(self, run: str) -> RunFault:
        """Return the incident as evidence. Every supervisor reports equal evidence, so it is counted once."""
        rank = f" of rank {self.rank}" if self.rank >= 0 else ""
        return RunFault(self.at_s, why=f"{run} {self.incident}: {self.what}{rank}"[:MAX_TEXT])


def of_incident(
    incident: OpenIncident,
    world_size: int,
    node_of: Callable[[str], str],
    node_at: Callable[[str], str],
) -> HardwareIncident | None:
    """Return what an incident shows about hardware; None until its cause is known.

    Also returns None if the incident shows nothing about hardware, or points to several nodes.

    Args:
        node_of: Returns the node of a member; "" if it is unknown.
        node_at: Returns the node of the pod with an address; "" if there is none.
    """
    cause = incident.cause
    if cause is None:
        return None
    known = {each: sign for each in incident.faults if (sign := signs.sign_of(each)) is not None}
    name, at_s = incident_id(incident.number), round(incident.wall_s, 3)
    if not known:
        node = _accused(incident.faults, node_at)
        return HardwareIncident(name, at_s, node, "NCCL lost this node") if node else None
    nodes = {node_of(each.member) for each in known}
    sign = known.get(cause)
    if sign is None or len(nodes) != 1 or "" in nodes:
        return None
    if not sign.is_sure and _is_everywhere(incident.faults, cause, world_size):
        return None
    return HardwareIncident(name, at_s, nodes.pop(), sign.what, sign.is_sure, cause.rank, cause.step)


def _accused(faults: Iterable[Fault], node_at: Callable[[str], str]) -> str:
    """Return the node that all ranks lost, if each of them is only a victim; "" if there is none."""
    found = list(faults)
    if any(each.kind != "victim" for each in found):
        return ""
    address = signs.accused_address(found)
    return node_at(address) if address else ""


def _is_everywhere(faults: Iterable[Fault], cause: Fault, world_size: int) -> bool:
    """True if all ranks had the same fault, because the script is then the more likely cause."""
    same = {each.rank for each in faults if each.signature == cause.signature}
    return 1 < world_size <= len(same)


def counted(seen: Iterable[HardwareIncident]) -> tuple[HardwareIncident, ...]:
    """Return the incidents that are evidence against their node. The result only grows as more are seen."""
    known = sorted(seen, key=lambda each: (each.at_s, each.incident))
    return tuple(each for each in known if each.is_sure or _recurs(each, known))


def _recurs(one: HardwareIncident, known: Iterable[HardwareIncident]) -> bool:
    near = [each for each in known if not each.is_sure and abs(each.at_s - one.at_s) <= WITHIN_S]
    places = {(each.node, each.rank, each.step) for each in near}
    count = Counter(node for node, _, _ in places)
    return count[one.node] >= 2 and 2 * count[one.node] > count.total()


class HardwareHistory:
    """The hardware incidents of one run, including those that earlier supervisors saw."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        """`records` are incidents that `with_hardware` has completed."""
        self._seen: dict[str, HardwareIncident] = {}
        for each in records:
            found = _read(each.get("hardware"))
            if found is not None:
                self._seen[found.incident] = found

    def note(self, found: HardwareIncident) -> bool:
        """Add or update an incident. Return True if this changes anything."""
        if self._seen.get(found.incident) == found:
            return False
        self._seen = dict([*self._seen.items(), (found.incident, found)][-MAX_KEPT:])
        return True

    @property
    def counted(self) -> tuple[HardwareIncident, ...]:
        return counted(self._seen.values())

    def with_hardware(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return an incident's record, with what the incident shows about hardware, if anything."""
        found = self._seen.get(str(record.get("id")))
        return record if found is None else {**record, "hardware": asdict(found)}


def _read(raw: object) -> HardwareIncident | None:
    """Return a stored incident; None if it is malformed, because any user may have changed the resource."""
    if not isinstance(raw, Mapping):
        return None
    values = {each.name: raw.get(each.name, each.default) for each in fields(HardwareIncident)}
    kinds = {"str": (str,), "float": (float, int), "int": (int,), "bool": (bool,)}
    is_fit = all(type(values[each.name]) in kinds[str(each.type)] for each in fields(HardwareIncident))
    return HardwareIncident(**values) if is_fit else None
