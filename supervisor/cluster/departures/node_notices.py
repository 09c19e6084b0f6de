"""Find announcements in a node's taints and conditions that the node is about to go away. Pure.

`node_notices.toml` lists the announcements of other programs, with their sources.
"""

from __future__ import annotations

import math
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from supervisor.cluster.adoption.tolerations import Toleration
from supervisor.kubernetes.client import KubernetesObject
from supervisor.nodes.names import VERDICTS
from supervisor.nodes.node_objects import verdict_of

if sys.version_info >= (3, 11):
    import tomllib as _toml
else:
    import tomli as _toml

FILE = "node_notices.toml"
# The node controller sets these taints when a node falls silent, and removes them when it reports again.
# Members on such a node do not move immediately, because the kubelet may merely have been restarted.
_LIFECYCLE = frozenset({"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"})
KUBELET_RESTART_S = 30.0
# The reason that the kubelet gives for a node that is not ready while its pods end before a shutdown.
_SHUTDOWN = "node is shutting down"
_READY = "Ready"


class KnownNotice(NamedTuple):
    """A row of the table: the key of a taint, or the type of a condition."""

    key: str
    effect: str
    is_departure: bool
    is_tolerable: bool
    what: str
    source: str


@dataclass(frozen=True, slots=True)
class NodeNotice:
    """The announcement that a node is about to go away, or that the pods on it are about to end.

    `after_s` is the time from the announcement to the eviction of the pod; None if it is unknown. The
    announcement takes effect only after it has been present for `patience_s`.
    """

    why: str
    after_s: float | None = None
    patience_s: float = 0.0
    is_of_agent: bool = False  # True for a verdict of the node agent, which does not end the pods of the node


def departure_of(
    node: KubernetesObject, tolerations: Sequence[Toleration], *, heeds_verdict: bool = False
) -> NodeNotice | None:
    """Return the most urgent announcement for a pod with these tolerations; None if the node stays.

    With `heeds_verdict`, a verdict of the node agent is an announcement too.
    """
    found = [*_of_object(node), *_of_taints(node, tolerations), *_of_conditions(node)]
    if heeds_verdict and (verdict := verdict_of(node)):
        name = node["metadata"].get("name")
        found.append(NodeNotice(f"the node agent of {name} reports: {verdict}", is_of_agent=True))
    return min(found, key=lambda each: (each.patience_s, _or_forever(each.after_s)), default=None)


def _or_forever(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def _of_object(node: KubernetesObject) -> Iterator[NodeNotice]:
    metadata = node["metadata"]
    if metadata.get("deletionTimestamp") is not None:
        yield NodeNotice(f"node {metadata.get('name')} is being deleted")


def _of_taints(node: KubernetesObject, tolerations: Sequence[Toleration]) -> Iterator[NodeNotice]:
    for taint in _mappings((node.get("spec") or {}).get("taints")):
        known = _known_taint(taint)
        if known is not None and not known.is_departure:
            continue
        evicts = taint.get("effect") == "NoExecute"
        after_s = _evicted_after_s(taint, tolerations) if evicts else None
        is_tolerated = after_s == math.inf or (not evicts and any(t.tolerates(taint) for t in tolerations))
        if known is None and (not evicts or is_tolerated):
            continue
        if known is not None and known.is_tolerable and is_tolerated:
            continue
        yield _notice(node, taint, known, None if after_s in (None, math.inf) else after_s)


def _notice(
    node: KubernetesObject, taint: Mapping[str, Any], known: KnownNotice | None, after_s: float | None
) -> NodeNotice:
    name, key = node["metadata"].get("name"), str(taint.get("key"))
    patience_s = min(KUBELET_RESTART_S, (after_s or 0.0) / 2) if key in _LIFECYCLE else 0.0
    if known is None:
        return NodeNotice(f"node {name} has the taint {key}:NoExecute", after_s, patience_s)
    return NodeNotice(f"{known.what} (taint {key} of node {name})", after_s, patience_s)


def _evicted_after_s(taint: Mapping[str, Any], tolerations: Sequence[Toleration]) -> float:
    """Return how long a pod may stay on a node with this NoExecute taint; 0 if it does not tolerate it."""
    match = next((each for each in tolerations if each.tolerates(taint)), None)
    if match is None:
        return 0.0
    return math.inf if match.seconds is None else max(0.0, match.seconds)


def _of_conditions(node: KubernetesObject) -> Iterator[NodeNotice]:
    name = node["metadata"].get("name")
    for condition in _mappings((node.get("status") or {}).get("conditions")):
        kind = condition.get("type")
        known = _table().conditions.get(str(kind))
        if known is not None and known.is_departure and condition.get("status") == "True":
            yield NodeNotice(f"{known.what} (condition {kind} of node {name})")
        is_shutdown = _SHUTDOWN in str(condition.get("message"))
        if kind == _READY and condition.get("status") == "False" and is_shutdown:
            yield NodeNotice(f"node {name} is shutting down")


def kept_node(raw: Mapping[str, Any], also: Iterable[str] = ()) -> dict[str, Any]:
    """Return the parts of a Node that `departure_of` reads. If they are equal, nothing relevant has changed.

    `also` contains the keys of the labels to keep.
    """
    metadata = raw["metadata"]
    kept: dict[str, Any] = {"name": metadata["name"]}
    if metadata.get("deletionTimestamp") is not None:
        kept["deletionTimestamp"] = metadata["deletionTimestamp"]
    found: dict[str, Any] = {"metadata": kept}
    labels = metadata.get("labels")
    if places := {key: labels[key] for key in also if key in labels} if isinstance(labels, Mapping) else {}:
        kept["labels"] = places
    if taints := [_only(each, _TAINT) for each in _mappings((raw.get("spec") or {}).get("taints"))]:
        found["spec"] = {"taints": taints}
    conditions = [
        _only(each, _CONDITION)
        for each in _mappings((raw.get("status") or {}).get("conditions"))
        if each.get("type") in read_conditions()
    ]
    if conditions:
        found["status"] = {"conditions": conditions}
    return found


def read_conditions() -> tuple[str, ...]:
    """Return the types of the conditions of a Node that `departure_of` reads."""
    return (*_table().conditions, *VERDICTS, _READY)


_TAINT = ("key", "value", "effect")
_CONDITION = ("type", "status", "reason", "message")


def _only(found: Mapping[str, Any], keys: Iterable[str]) -> dict[str, str]:
    return {key: str(found[key])[:300] for key in keys if found.get(key)}


def _mappings(found: object) -> list[Mapping[str, Any]]:
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []


# -- the table


class _Table(NamedTuple):
    taints: tuple[KnownNotice, ...]
    conditions: Mapping[str, KnownNotice]


def known_notices() -> tuple[KnownNotice, ...]:
    """Return all rows of the table."""
    return (*_table().taints, *_table().conditions.values())


def _known_taint(taint: Mapping[str, Any]) -> KnownNotice | None:
    for each in _table().taints:
        key = str(taint.get("key"))
        is_key = key.startswith(each.key[:-1]) if each.key.endswith("*") else key == each.key
        if is_key and each.effect in ("", taint.get("effect")):
            return each
    return None


@cache
def _table() -> _Table:
    text = pkgutil.get_data(__name__.rpartition(".")[0], FILE)
    if text is None:
        raise FileNotFoundError(FILE)
    raw = _toml.loads(text.decode())
    taints = tuple(_row(each, "key") for each in raw["taint"])
    return _Table(taints, {each["type"]: _row(each, "type") for each in raw["condition"]})


def _row(raw: Mapping[str, Any], key: str) -> KnownNotice:
    return KnownNotice(
        raw[key],
        raw.get("effect", ""),
        {"departure": True, "sign": False}[raw["is"]],
        raw.get("tolerable", False),
        raw["what"],
        raw["source"],
    )
