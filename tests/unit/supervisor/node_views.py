"""Builders for the views of nodes that the node decision is based on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from supervisor.quarantine import transition
from supervisor.quarantine.decide import decide
from supervisor.quarantine.model import (
    Hold,
    NodeFinding,
    NodePolicy,
    NodeView,
    PoolView,
    QuarantineAction,
    Report,
)

NOW_S = 1_800_000_000.0
DAY_S = 86400.0
POLICY = NodePolicy()
LONG_S = 30 * DAY_S
WELL = Report((), LONG_S, LONG_S, boot_id="b1", agent="1")


def finding(key: str = "gpu/0 xid 79", held_s: float = 90.0, **given: Any) -> NodeFinding:
    """Return a confirmed finding of two sensors that only a reboot ends."""
    made = NodeFinding(key, "unhealthy", "reboot_node", held_s, ("kmsg", "nvml_events"), "", True)
    return replace(made, **given)


def alone(key: str = "port/0 down", held_s: float = 400.0, **given: Any) -> NodeFinding:
    return finding(
        key, held_s, **{"action": "contact_support", "sources": ("sysfs",), "lasting": False, **given}
    )


def report(*findings: NodeFinding, **given: Any) -> Report:
    is_bad = any(each.level == "unhealthy" for each in findings)
    made = replace(WELL, findings=findings, quiet_s=0.0, clean_s=0.0 if is_bad else LONG_S)
    return replace(made, **given)


def well(name: str, **given: Any) -> NodeView:
    return replace(NodeView(name, WELL, 10.0, busy=True, version="7"), **given)


def bad(name: str, *findings: NodeFinding, **given: Any) -> NodeView:
    return well(name, **{"report": report(*(findings or (finding(),))), **given})


def recovered(node: NodeView, clean_s: float, **given: Any) -> NodeView:
    """Return a node whose agent has reported no finding for the given time."""
    said = replace(WELL, clean_s=clean_s, quiet_s=clean_s, calmed_s=clean_s)
    return replace(node, report=replace(said, **given))


def pool(*nodes: NodeView, size: int = 40, now_s: float = NOW_S) -> PoolView:
    """Return a pool of these nodes and enough healthy ones to make `size`."""
    return PoolView(now_s, (*nodes, *(well(f"well{at}") for at in range(size - len(nodes)))))


def asked(view: PoolView, policy: NodePolicy = POLICY) -> list[QuarantineAction]:
    return [each for each in decide(view, policy) if not isinstance(each, Hold)]


def why(view: PoolView, node: str, policy: NodePolicy = POLICY) -> str:
    """Return the reason why a node is held."""
    [hold] = [each for each in decide(view, policy) if isinstance(each, Hold) and each.node == node]
    return hold.why


def applied(view: PoolView, actions: Iterable[QuarantineAction], policy: NodePolicy = POLICY) -> PoolView:
    nodes = {node.name: node for node in view.nodes}
    for each in actions:
        if not isinstance(each, Hold):
            nodes[each.node] = transition.after(nodes[each.node], each, view.now_s, policy)
    return replace(view, nodes=tuple(nodes.values()))


def settled(view: PoolView, policy: NodePolicy = POLICY) -> PoolView:
    """Decide and act until no action is left. Fails if the decision does not converge."""
    for _ in range(10):
        actions = asked(view, policy)
        if not actions:
            return view
        view = applied(view, actions, policy)
    raise AssertionError(f"the decision does not converge: {actions}")


def node_of(view: PoolView, name: str) -> NodeView:
    return next(node for node in view.nodes if node.name == name)


def at(view: PoolView, now_s: float, *nodes: NodeView) -> PoolView:
    """Return the view at another time, with some nodes replaced."""
    new = {node.name: node for node in nodes}
    return PoolView(now_s, tuple(new.get(node.name, node) for node in view.nodes))
