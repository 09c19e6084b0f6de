"""Describe what the owner of a stopped job's pods does next, and how to end, suspend or resume it. Pure.

Holdfast may not change owners. Until the user ends or suspends it, an owner that replaces failed pods creates
new ones. Holdfast ends these pods as long as the Supervision contains the request to stop.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.fileio.strict_json import mapping
from supervisor.cluster.adoption.workload_kinds import WorkloadKind, shipped

_BUILT_IN = ("", "apps", "batch")  # API groups whose kinds kubectl knows by their short names
_UNKNOWN = "It may create new pods, or restart the containers of pods that have ended."


@dataclass(frozen=True, slots=True)
class FollowUp:
    """What the owner of a stopped job does next (`does`), and commands for it, which may be ""."""

    owner: str  # as kubectl names it, such as job/gpt; "" for pods without an owner
    does: str
    delete: str
    suspend: str
    train_again: str

    def lines(self) -> list[str]:
        """Return what `holdfast stop` prints after the run has ended."""
        subject = self.owner or "the pods"
        commands = {
            f"to end {subject}": self.delete,
            f"to suspend {subject}": self.suspend,
            "before it may train again": self.train_again,
        }
        width = max(len(each) for each in commands) + 1
        shown = [f"{f'{what}:':{width}}  {each}" for what, each in commands.items() if each]
        return [f"{subject} continues to exist: {_uncapitalized(self.does)}", *shown]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def follow_up(spec: Mapping[str, Any], namespace: str, name: str, context: str = "") -> FollowUp:
    """Return what the owner of a stopped job does next. `spec` belongs to the Supervision `name`."""
    owner = mapping(spec.get("owner"))
    version, kind = str(owner.get("apiVersion") or ""), str(owner.get("kind") or "")
    kubectl = f"kubectl{f' --context {shlex.quote(context)}' if context else ''} -n {shlex.quote(namespace)}"
    stop = json.dumps({"spec": {"stop": ""}})
    again = f"{kubectl} patch supervision/{shlex.quote(name)} --type merge -p {shlex.quote(stop)}"
    if not owner.get("uid") or not kind:
        does = next(each.after_stop for each in shipped().pods)
        return FollowUp("", does, f"{kubectl} delete pod POD ...", "", "")
    row, group = shipped().find(version, kind), version.rpartition("/")[0]
    short = kind.lower() if group in _BUILT_IN else f"{kind.lower()}.{group}"
    target = shlex.quote(f"{short}/{owner.get('name') or name}")
    halt = _halt(row, kubectl, target) if row is not None else ""
    does = row.after_stop if row is not None else _UNKNOWN
    return FollowUp(target, does, f"{kubectl} delete {target}", halt, again)


def _halt(row: WorkloadKind, kubectl: str, target: str) -> str:
    """Return the command that suspends an owner or scales it to 0; "" if its kind supports neither."""
    *way, last = row.halt.split(".")
    if not last:
        return ""
    if last == "replicas":
        return f"{kubectl} scale {target} --replicas=0"
    change: dict[str, Any] = {last: True}
    for field in reversed(way):
        change = {field: change}
    return f"{kubectl} patch {target} --type merge -p {shlex.quote(json.dumps(change))}"


def _uncapitalized(text: str) -> str:
    return text[:1].lower() + text[1:]
