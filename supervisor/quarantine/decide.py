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

from supervisor.quarantine import breaker, evidence, release, storms
from supervisor.quarantine import evidence as witness
from supervisor.quarantine.breaker import Breaker, is_unknown
from supervisor.quarantine.model import (
    DEGRADED,
    MAX_EVIDENCE,
    NO_NEW_WORK,
    PREFER_NOT,
    Action,
    Drain,
    Forget,
    Hold,
    NodeFinding,
    NodePolicy,
    NodeView,
    PoolView,
    Quarantine,
    Report,
    Taint,
)
from supervisor.quarantine.storms import StormState


def decide(pool: PoolView, policy: NodePolicy) -> tuple[Action, ...]:
    """Return what is to be done now; the holds, which say why something is not done, come last."""
    odd = _relevant(pool, policy)
    unrest = storms.detect(pool, odd, policy)
    found: list[Action] = []
    wanted: list[tuple[NodeView, Taint]] = []
    for node in odd:
        action = node_action(node, pool.now_s, unrest, policy)
        if isinstance(action, Taint) and not _is_free(node, action):
            wanted.append((node, action))
        elif action is not None:
            found.append(action)
    crowd = sum(1 for node in odd if node.name in unrest.crowd and is_waiting(node))
    found += _admitted(wanted, crowd, unrest.crowd, breaker.assess(len(pool.nodes), odd, policy))
    if unrest.everywhere is not None:
        found.append(Hold("", unrest.everywhere.why, unrest.everywhere.until_s))
    return tuple(sorted(found, key=lambda each: isinstance(each, Hold)))


def _relevant(pool: PoolView, policy: NodePolicy) -> list[NodeView]:
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
    return evidence.severity(evidence.unhealthy(node.report))


# What one node's own case asks for, the breaker apart. Pure.


def node_action(node: NodeView, now_s: float, unrest: StormState, policy: NodePolicy) -> Action | None:
    """Return what is to be done about a node if there is room; None when there is nothing to say."""
    report = node.report
    if report is None:
        return Hold(node.name, "unknown: no agent has reported")
    if is_unknown(node, policy):
        return Hold(node.name, f"unknown: its agent has said nothing for {node.silent_s:.0f} s")
    bad = witness.unhealthy(report)
    held = node.quarantine
    if held is not None and held.effect == NO_NEW_WORK:
        if not bad:
            return release.release_quarantined(node, report, held, now_s, policy)
        return _grown(node, report, held, unrest, policy) or _emptying(node, bad, held, now_s, unrest, policy)
    if bad:
        return _bad(node, report, now_s, unrest, policy)
    if held is not None:
        return release.release_avoided(node, report, now_s, policy)
    return _serving(node, report, now_s, unrest, policy)


def is_waiting(node: NodeView) -> bool:
    """True for a bad node that serves, and that nobody has asked us to leave alone."""
    if node.report is None or node.cordoned or _has(node, NO_NEW_WORK):
        return False
    return bool(_live(node, witness.unhealthy(node.report)))


def _has(node: NodeView, effect: str) -> bool:
    return node.quarantine is not None and node.quarantine.effect == effect


def _live(node: NodeView, found: tuple[NodeFinding, ...]) -> tuple[NodeFinding, ...]:
    """Leave out what an operator has waived."""
    if node.waiver is None:
        return found
    return tuple(each for each in found if each.key not in node.waiver.evidence)


def _sure(found: tuple[NodeFinding, ...], policy: NodePolicy) -> tuple[NodeFinding, ...]:
    return tuple(each for each in found if witness.unconfirmed_s((each,), policy) <= 0)


# -- bad, and in service


def _bad(node: NodeView, report: Report, now_s: float, unrest: StormState, policy: NodePolicy) -> Action:
    live = _live(node, witness.unhealthy(report))
    if not live:
        return Hold(node.name, "an operator has let it back, and nothing else has been found since")
    if node.cordoned:
        return Hold(node.name, "cordoned by somebody else: left to them")
    left_s = witness.unconfirmed_s(live, policy)
    if left_s > 0:
        return Hold(node.name, f"{witness.describe(live)}: to be confirmed", now_s + left_s)
    reason = unrest.about(node.name)
    if reason is not None:
        return Hold(node.name, reason.why, reason.until_s)
    # With the taint the waiver ends, so all that is found goes into its evidence.
    return _taint(node, report, _sure(witness.unhealthy(report), policy), NO_NEW_WORK)


def _taint(node: NodeView, report: Report, found: tuple[NodeFinding, ...], effect: str) -> Taint:
    return Taint(
        node.name,
        effect,
        witness.keys(found),
        witness.costliest_action(found),
        witness.sources(found),
        report.boot_id,
        witness.describe(found),
        node.version,
    )


# -- bad, and out of service


def _grown(
    node: NodeView, report: Report, held: Quarantine, unrest: StormState, policy: NodePolicy
) -> Taint | None:
    """Write down what has been found since the node was taken out."""
    sure = _sure(witness.unhealthy(report), policy)
    dearer = witness.cost_rank(witness.costliest_action(sure)) > witness.cost_rank(held.action)
    if not sure or unrest.about(node.name) or not (dearer or set(witness.keys(sure)) - set(held.evidence)):
        return None
    taint = _taint(node, report, sure, NO_NEW_WORK)
    dearest = max(taint.action, held.action, key=witness.cost_rank)
    evidence = _merged(taint.evidence, held.evidence)
    sources = tuple(sorted({*taint.sources, *held.sources}))
    return Taint(node.name, NO_NEW_WORK, evidence, dearest, sources, held.boot_id, taint.why, node.version)


def _merged(new: tuple[str, ...], old: tuple[str, ...]) -> tuple[str, ...]:
    """Return both, sorted; when they are too many, old ones go."""
    kept = [key for key in old if key not in new][: MAX_EVIDENCE - len(new)]
    return tuple(sorted((*new, *kept)))


def _emptying(
    node: NodeView,
    bad: tuple[NodeFinding, ...],
    held: Quarantine,
    now_s: float,
    unrest: StormState,
    policy: NodePolicy,
) -> Action:
    wanting = tuple(each for each in bad if witness.wants_drain(each, policy))
    if not node.busy or not wanting:
        return Hold(node.name, f"out: {witness.describe(bad)}")
    if held.drain_at_s is not None:
        return Hold(node.name, "what runs there is being ended")
    if node.cordoned:
        return Hold(node.name, "cordoned by somebody else: what runs there is left to them")
    reason = unrest.about(node.name)
    if reason is not None:
        return Hold(node.name, reason.why, reason.until_s)
    grounds = tuple(each for each in wanting if witness.may_drain(each, policy))
    if grounds:
        return Drain(node.name, witness.describe(grounds), node.version)
    seconded = tuple(each for each in wanting if witness.is_corroborated(each))
    if seconded:
        return Hold(
            node.name,
            f"{witness.describe(seconded)}: to be confirmed",
            now_s + witness.unconfirmed_s(seconded, policy),
        )
    return Hold(node.name, f"{witness.describe(wanting)}: one witness keeps new work off, and ends none")


# -- not unhealthy, and in service


def _serving(
    node: NodeView, report: Report, now_s: float, unrest: StormState, policy: NodePolicy
) -> Action | None:
    if node.waiver is not None and report.clean_s >= release.required_health_s(node, now_s, policy):
        return Forget(node.name, "well for long enough: what was waived is over", node.version)
    if not policy.prefer_away or node.cordoned:
        return None
    found = _live(node, tuple(each for each in report.findings if each.level == DEGRADED)[:MAX_EVIDENCE])
    if not found:
        return None
    left_s = policy.confirm_alone_s - max(each.held_s for each in found)
    if left_s > 0:
        return Hold(node.name, f"{witness.describe(found)}: to be confirmed", now_s + left_s)
    reason = unrest.about(node.name)
    if reason is not None:
        return Hold(node.name, reason.why, reason.until_s)
    return _taint(node, report, found, PREFER_NOT)
