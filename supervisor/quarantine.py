"""Which nodes to keep work off, which to empty, which to let back. Pure: no clock, network or randomness.

- A node whose agent is silent is unknown. Nothing is done about it, whatever it said before.
- What somebody else has cordoned is theirs. What an operator has let back stays until more is found.
- An unhealthy node gets our taint once that is confirmed (`witness`), nothing larger is going on (`storms`)
  and there is room (`breaker`): the worst first. A degraded one keeps its work.
- It is drained only for a remedy that needs it empty, for a fault that does not pass by itself, on the word
  of two witnesses.
- It comes back when it has been well for long enough (`lemon`), seen by the sensors that found it ill.

An action may make room for the next one: a taint for a drain, a release for a taint. Carried out in one go or
one by one, by one process or by many after each other, they lead to the same end, and then nothing is asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from supervisor import breaker, nodecase, storms, witness
from supervisor.breaker import Breaker
from supervisor.nodepolicy import NodePolicy
from supervisor.nodes import NO_NEW_WORK, Action, Hold, NodeView, PoolView, Taint


def decide(pool: PoolView, policy: NodePolicy) -> tuple[Action, ...]:
    """Return what is to be done now; the holds, which say why something is not done, come last."""
    odd = _odd(pool, policy)
    unrest = storms.read(pool, odd, policy)
    found: list[Action] = []
    wanted: list[tuple[NodeView, Taint]] = []
    for node in odd:
        action = nodecase.about(node, pool.now_s, unrest, policy)
        if isinstance(action, Taint) and not _is_free(node, action):
            wanted.append((node, action))
        elif action is not None:
            found.append(action)
    crowd = sum(1 for node in odd if node.name in unrest.crowd and nodecase.is_waiting(node))
    found += _admitted(wanted, crowd, unrest.crowd, breaker.read(len(pool.nodes), odd, policy))
    if unrest.everywhere is not None:
        found.append(Hold("", unrest.everywhere.why, unrest.everywhere.until_s))
    return tuple(sorted(found, key=lambda each: isinstance(each, Hold)))


def _odd(pool: PoolView, policy: NodePolicy) -> list[NodeView]:
    """Return the nodes about which there may be something to say: few of thousands."""
    stale_s, memory_s = policy.stale_s, policy.memory_s
    return [
        node
        for node in pool.nodes
        if (report := node.report) is None
        or report.findings
        or report.calmed_s < memory_s
        or node.quarantine is not None
        or node.silent_s > stale_s
        or node.cordoned
        or not node.ready
        or node.waiver is not None
    ]


def _is_free(node: NodeView, taint: Taint) -> bool:
    """True when the taint takes nobody out who is not out already."""
    return taint.effect != NO_NEW_WORK or breaker.is_out(node)


def _admitted(
    wanted: Sequence[tuple[NodeView, Taint]], waiting: int, crowd: frozenset[str], stands: Breaker
) -> list[Action]:
    """Take out as many as there is room for. A crowd of `waiting` comes last, and whole or not at all."""
    alone = _worst_first([each for each in wanted if each[0].name not in crowd])
    others = _worst_first([each for each in wanted if each[0].name in crowd])
    if others and waiting > stands.room - len(alone):
        why = f"{waiting} nodes turned bad together, and there is no room for all: a person must look"
        return [*_up_to(alone, stands.room, stands.why), *[Hold(node.name, why) for node, _ in others]]
    return _up_to([*alone, *others], stands.room, stands.why)


def _up_to(wanted: Sequence[tuple[NodeView, Taint]], room: int, why: str) -> list[Action]:
    return [
        taint if at < room else Hold(node.name, f"{taint.why}; {why}")
        for at, (node, taint) in enumerate(wanted)
    ]


def _worst_first(wanted: list[tuple[NodeView, Taint]]) -> list[tuple[NodeView, Taint]]:
    by_name = sorted(wanted, key=lambda each: each[0].name)
    return sorted(by_name, key=lambda each: _severity(each[0]), reverse=True)


def _severity(node: NodeView) -> tuple[bool, bool, int, float]:
    assert node.report is not None, "nobody without a report is tainted"
    return witness.severity(witness.unhealthy(node.report))
