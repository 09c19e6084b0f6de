"""Read from an owner's object how many of its pods train. The table of kinds says where to look. Pure.

An owner can have several replica types, such as the replicatedJobs of a JobSet, or the Master and Worker of a
PyTorchJob. The group consists of the types whose pod templates opt in. If no template opts in, because the
pods got the annotation in another way, the types must be known to train together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.fileio.strict_json import brief
from supervisor.admission.pod_layout import INJECT, MEMBERS
from supervisor.cluster.adoption.pod_facts import CUT, MAX_MEMBERS, characters
from supervisor.cluster.adoption.untrusted_json import MAX_TEXT, at, items, refuse, table, text, whole
from supervisor.cluster.adoption.workload_kinds import WorkloadKind

MAX_PARTS = 1_000  # replica types of one object
MAX_KEPT = 65_536  # characters of an owner, not counting the parts that `kept` leaves out
# the depth of an owner's object; the table's paths, including a pod template's, have up to eight parts
MAX_DEPTH = 32
_BULK = ("status", "managedFields", "containers", "initContainers", "ephemeralContainers", "volumes")


@dataclass(frozen=True, slots=True)
class _Part:
    """One replica type in an owner's object."""

    name: str  # in lower case, as in labels
    pods: int
    opts_in: bool


def kept(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an owner's object without the parts of its pod templates that are never read. Never raises.

    A user can make those parts as large as the API server accepts, in any number of owners. If the remaining
    parts are also too large, the result has the field `CUT` with the reason.
    """
    found = _without_bulk(content, MAX_DEPTH)
    if (size := characters(found)) <= MAX_KEPT:
        assert isinstance(found, dict)
        return found
    metadata = content.get("metadata")
    uid = metadata.get("uid") if isinstance(metadata, Mapping) else None
    return {"metadata": {"uid": uid}, CUT: f"has {size} characters; expected at most {MAX_KEPT}"}


def _without_bulk(value: object, depth: int) -> object:
    if isinstance(value, Mapping):
        if not depth:
            return {}
        names = [name for name in value if name not in _BULK]
        return {
            name: _opt_in(value[name]) if name == "annotations" else _without_bulk(value[name], depth - 1)
            for name in names
        }
    if isinstance(value, list):
        return [_without_bulk(each, depth - 1) for each in value[: MAX_PARTS + 1]] if depth else []
    return brief(value) if isinstance(value, str) and len(value) > MAX_TEXT else value


def _opt_in(annotations: object) -> object:
    """Return a pod template's annotations, reduced to the only one that is read."""
    if not isinstance(annotations, Mapping):
        return _without_bulk(annotations, 1)
    return {name: _without_bulk(annotations[name], 1) for name in (INJECT,) if name in annotations}


def owner_size(
    content: Mapping[str, Any], owner: str, kind: WorkloadKind, idle: frozenset[str], replica_type: str
) -> int:
    """Return the number of pods that train.

    Args:
        content: The owner's object.
        owner: The owner's name, for messages.
        kind: The owner's row in the table.
        idle: Replica types that do not train.
        replica_type: The pod's replica type; "" if the pod does not state it.

    Raises:
        UnfitObject: The object has no size, or it is unclear which replica types form the group.
    """
    parts = _parts(content, owner, kind)
    if kind.replica_type and not replica_type and len(parts) > 1:
        refuse(f"the pod does not state which replica type of {owner} it has")
    training = [part for part in parts if part.name not in idle]
    opted_in = [part for part in training if part.opts_in]
    counted = opted_in or training
    names = [part.name for part in counted]
    if len(counted) > 1 and not opted_in and not set(names) <= set(kind.trains):
        refuse(
            f"{owner} has several replica types ({brief(', '.join(names))}), but none opts in:"
            f" set {INJECT} in the templates of the types that train, or {MEMBERS} on the pods"
        )
    if kind.parts and replica_type and replica_type not in names:
        counts = f"{owner} trains with {brief(', '.join(names))}"
        refuse(f"the pod is of the replica type {brief(replica_type)}, but {counts}")
    pods = sum(part.pods for part in counted)
    if not 0 < pods <= MAX_MEMBERS:
        refuse(f"{owner} wants {pods} pods that train; expected 1 to {MAX_MEMBERS}")
    return pods


def _parts(content: Mapping[str, Any], owner: str, kind: WorkloadKind) -> list[_Part]:
    if not kind.parts:
        return [_part(content, owner, kind, "")]
    where = f"{kind.parts} of {owner}"
    found = at(content, kind.parts, owner)
    if kind.part_name:
        raw = [table(each, where) for each in items(found, where, MAX_PARTS)]
        named = [(text(each.get(kind.part_name), where), each) for each in raw]
    else:
        named = [(text(name, where), table(each, where)) for name, each in table(found, where).items()]
    if not 0 < len(named) <= MAX_PARTS:
        refuse(f"{where} has {len(named)} replica types; expected 1 to {MAX_PARTS}")
    return [_part(each, f"{owner}, {brief(name)}", kind, name) for name, each in named]


def _part(raw: Mapping[str, Any], where: str, kind: WorkloadKind, name: str) -> _Part:
    def number(path: str) -> int:
        return whole(at(raw, path, where), f"{path} of {where}", MAX_MEMBERS, kind.size_default)

    pods = 1
    for path in kind.size:
        pods *= number(path)
    for path, other in kind.agree:
        if at(raw, path, where) is not None and number(path) != number(other):
            refuse(
                f"{path} of {where} is {number(path)} and {other} is {number(other)}, so not all of its pods"
                f" run at the same time: set {MEMBERS} on the pods"
            )
    return _Part(name.lower(), pods, _opts_in(raw, where, kind))


def _opts_in(raw: Mapping[str, Any], where: str, kind: WorkloadKind) -> bool:
    """Return True if the part's pod templates opt in."""
    found = set()
    for path in kind.templates:
        template = at(raw, path, where)
        if template is not None:
            annotations = at(table(template, f"{path} of {where}"), "metadata.annotations", where)
            found.add(table(annotations, f"annotations in {path} of {where}").get(INJECT) == "true")
    if len(found) > 1:
        refuse(f"only some of the pod templates of {where} opt in: set {MEMBERS} on the pods")
    return found == {True}
