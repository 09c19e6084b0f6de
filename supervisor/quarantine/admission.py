"""Choose which nodes to take out first when the breaker has no room for all. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from supervisor.quarantine import evidence, release
from supervisor.quarantine.breaker import Breaker
from supervisor.quarantine.model import (
    Hold,
    NodeFinding,
    NodePolicy,
    NodeView,
    QuarantineAction,
    Release,
    Taint,
)

Wanted = tuple[NodeView, tuple[NodeFinding, ...], Taint]  # the node, the findings against it, and its taint


def admitted(
    wanted: Sequence[Wanted],
    waiting: int,
    crowd: frozenset[str],
    state: Breaker,
    now_s: float,
    policy: NodePolicy,
) -> list[QuarantineAction]:
    """Return taints for as many nodes as the breaker has room for, and holds for the others.

    The nodes of the `crowd` come last, and are tainted only if there is room for all of them. `waiting` is
    the number of nodes in the crowd that still need a taint.
    """
    alone = _worst_first([each for each in wanted if each[0].name not in crowd])
    others = _worst_first([each for each in wanted if each[0].name in crowd])
    if others and waiting > state.room - len(alone):
        why = (
            f"{waiting} nodes became unhealthy together, too many for the breaker:"
            " an operator must investigate"
        )
        held = [Hold(node.name, why, alert=True) for node, _, _ in others]
        return [*_up_to(alone, state, now_s, policy), *held]
    return _up_to([*alone, *others], state, now_s, policy)


def _up_to(
    wanted: Sequence[Wanted], state: Breaker, now_s: float, policy: NodePolicy
) -> list[QuarantineAction]:
    return [
        taint
        if at < state.room
        else release.waiting(
            node, f"{taint.why}; {state.why}", evidence.age_s(node, findings), policy.alert_s, now_s
        )
        for at, (node, findings, taint) in enumerate(wanted)
    ]


def _worst_first(wanted: Sequence[Wanted]) -> list[Wanted]:
    by_name = sorted(wanted, key=lambda each: each[0].name)
    return sorted(by_name, key=lambda each: evidence.severity(each[1]), reverse=True)


def trades(
    wanted: Sequence[Wanted], crowd: frozenset[str], proving: Sequence[NodeView], room: int, now_s: float
) -> list[Release]:
    """Return early releases of nodes that are proving their health, to make room for proven faults.

    Args:
        proving: The nodes that may be released early.
        room: The balance of the breaker after the releases that are due anyway.
    """
    sure = sum(1 for node, found, _ in wanted if node.name not in crowd and any(map(evidence.is_sure, found)))
    places = min(sure, room + len(proving)) - max(room, 0)
    if places <= 0:
        return []
    best = sorted(proving, key=lambda each: (-_proof_s(each, now_s), each.name))
    return [
        Release(
            node.name,
            f"healthy for {_proof_s(node, now_s):.0f} s,"
            " and the breaker has no room for a node with a proven fault",
            node.version,
        )
        for node in best[: places + max(-room, 0)]
    ]


def _proof_s(node: NodeView, now_s: float) -> float:
    assert node.report is not None, "a node without a report does not prove its health"
    assert node.quarantine is not None, "a node in service has nothing to prove"
    return release.proof_s(node.report, node.quarantine, now_s)
