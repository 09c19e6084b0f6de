"""Release nodes that have been healthy for long enough. Pure.

A few nodes cause many of the failures (Meta, arXiv 2410.21680). A node that has failed repeatedly is likely
to fail again, and each failure costs a job more than doing without the node. The lemon score therefore counts
a node's incidents, and each of them doubles how long the node must be healthy.

Time during which a sensor that found the fault could not measure proves nothing. The agent does not count
such time. An agent of an older version does, so the quarantine records on the node when its sensors are
blind.

If the agent has lost its saved state, a fault can end in its report without a remedy. A node that was out for
such a fault then returns only after a boot that remedies it, or if an operator releases it.

If a GPU must be replaced, the node returns only when that GPU is gone and another one is in its place,
because neither a boot nor time repairs it. An operator who knows better can remove the taint.

A node that an operator has taken out returns only when an operator releases it, because the sensors may not
see what the operator knows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from holdfast.node_report import cost_rank, remedy_of
from supervisor.quarantine import evidence
from supervisor.quarantine.model import (
    NO_NEW_WORK,
    OPERATOR,
    Hold,
    NodePolicy,
    NodeView,
    PastQuarantine,
    Quarantine,
    QuarantineAction,
    Release,
    Report,
)

_BOOT = "reboot it, or remove the taint if it is remedied"
RELAPSE_WEIGHT = 2.0  # a relapse counts as two incidents, because the required healthy period was too short


def waiting(node: NodeView, why: str, age_s: float, limit_s: float, now_s: float) -> Hold:
    """Return a hold that becomes an alert when its cause is `limit_s` old. Its age now is `age_s`."""
    age_s = max(0.0, age_s)  # after a clock was set back, the age would be negative
    if age_s < limit_s:
        return Hold(node.name, why, now_s + limit_s - age_s)
    return Hold(node.name, f"{why}; for {age_s / 3600:.0f} h", alert=True)


def release_quarantined(
    node: NodeView, report: Report, held: Quarantine, now_s: float, policy: NodePolicy
) -> QuarantineAction:
    """Return a release if the node has been healthy for long enough since it was taken out; else a hold."""
    if OPERATOR in held.sources:
        why = "an operator has taken it out: it waits for an operator to release it"
        return waiting(node, why, now_s - held.at_s, policy.repair_s, now_s)
    needed_s = required_health_s(node, now_s, policy)
    clean_s = proof_s(report, held, now_s)
    if blind := blind_sensors(report, held):
        return _hold_blind(node, blind, held, now_s, policy)
    if held.replace and not is_remedied(node):
        why = f"{', '.join(held.replace)} must be replaced, and no other GPU has been seen in its place"
        return Hold(node.name, f"{why}: replace it, or remove the taint", alert=True)
    if is_forgotten(report, held):
        why = f"its agent has lost its saved state, and there is no sign of the remedy ({remedy(held)})"
        do = "remove the taint once the hardware is replaced" if remedy(held) == "replace" else _BOOT
        return Hold(node.name, f"{why}: {do}", alert=True)
    if clean_s < needed_s:
        lacks = "" if is_remedied(node) else f", without a sign of the remedy ({remedy(held)})"
        why = f"healthy for {clean_s:.0f} of {needed_s:.0f} s{lacks}"
        return Hold(node.name, why, now_s + needed_s - clean_s)
    score = lemon_score(node.history, now_s, policy)
    return Release(node.name, f"healthy for {clean_s:.0f} s; lemon score {score:.1f}", node.version)


def may_be_traded(node: NodeView, now_s: float, policy: NodePolicy) -> bool:
    """True if the node is out only to prove its health, and has already been healthy for `clean_s`.

    It may then return early, to make room for a node with a fault.
    """
    report, held = node.report, node.quarantine
    if report is None or held is None or node.cordoned or not node.ready or evidence.unhealthy(report):
        return False
    return (
        OPERATOR not in held.sources
        and not blind_sensors(report, held)
        and is_remedied(node)
        and policy.clean_s <= proof_s(report, held, now_s) < required_health_s(node, now_s, policy)
    )


def proof_s(report: Report, held: Quarantine, now_s: float) -> float:
    """Return how long the node has proven its health since it was tainted."""
    blind_s = held.blind_s + (0.0 if held.blind_at_s is None else now_s - held.blind_at_s)
    return max(0.0, min(_reported_s(report, held), now_s - held.at_s) - blind_s)


def _reported_s(report: Report, held: Quarantine) -> float:
    return report.clean_s if held.effect == NO_NEW_WORK else report.quiet_s


def blind_sensors(report: Report, held: Quarantine) -> list[str]:
    """Return the sensors that found the fault and cannot measure now."""
    return sorted({*report.blind} & {*held.sources})


def with_blind_time(held: Quarantine, report: Report, silent_s: float, now_s: float) -> Quarantine:
    """Return the taint with the time when its sensors were blind but the agent's healthy time did not pause.

    Returns the same object if nothing has changed. `silent_s` is the age of the report.
    """
    is_out = held.effect == NO_NEW_WORK
    found = evidence.unhealthy(report) if is_out else report.findings
    if found:
        is_noted = held.blind_at_s is not None or held.blind_s > 0
        return replace(held, blind_at_s=None, blind_s=0.0) if is_noted else held
    blind = {*blind_sensors(report, held)} - {*(report.clean_needs if is_out else report.quiet_needs)}
    since_s, healthy_s = held.blind_at_s, _reported_s(report, held) + silent_s
    if since_s is not None:
        # If the healthy time has restarted since then, blind time before the restart no longer counts.
        blind_s = min(held.blind_s + now_s - since_s, healthy_s)
        return held if blind else replace(held, blind_at_s=None, blind_s=blind_s)
    if blind:
        return replace(held, blind_at_s=now_s)
    # The healthy time includes the blind time, unless the healthy time has restarted. Compare with only half
    # of the blind time, because clocks differ a bit.
    return replace(held, blind_s=0.0) if healthy_s < held.blind_s / 2 else held


def _hold_blind(
    node: NodeView, blind: Sequence[str], held: Quarantine, now_s: float, policy: NodePolicy
) -> Hold:
    why = f"its agent reports no fault, but {', '.join(blind)} cannot measure"
    return waiting(node, why, now_s - held.at_s, policy.alert_s, now_s)


def release_avoided(
    node: NodeView, report: Report, held: Quarantine, now_s: float, policy: NodePolicy
) -> QuarantineAction:
    """Return a release if the taint, which only makes work prefer other nodes, is obsolete; else a hold."""
    if not policy.prefer_away:
        return Release(node.name, "degraded nodes are no longer avoided", node.version)
    if report.findings:
        age_s = evidence.age_s(node, report.findings)
        why = f"avoided: {evidence.describe(report.findings)}"
        return waiting(node, why, age_s, policy.repair_s, now_s)
    if blind := blind_sensors(report, held):
        return _hold_blind(node, blind, held, now_s, policy)
    quiet_s = proof_s(report, held, now_s)
    if quiet_s < policy.clean_s:
        until_s = now_s + policy.clean_s - quiet_s
        return Hold(node.name, f"healthy for {quiet_s:.0f} of {policy.clean_s:.0f} s", until_s)
    return Release(node.name, f"healthy for {quiet_s:.0f} s", node.version)


def unremedied(report: Report, held: Quarantine) -> frozenset[str]:
    """Return the keys of the evidence that still needs a remedy. Each key ends with its remedy.

    If the node has booted since it was taken out, only a replacement can still be needed.
    """
    has_booted = report.boot_id != held.boot_id
    return frozenset(key for key, each in remedies(held).items() if each == "replace" or not has_booted)


def named(key: str) -> str:
    """Return the remedy that the key of a finding ends with; "" if its action is no remedy."""
    return remedy_of(key.rpartition(" ")[2])


def remedies(held: Quarantine) -> Mapping[str, str]:
    """Return the remedy of each key of the evidence that needs one."""
    found = {key: named(key) for key in held.evidence}
    for each in held.remedies:
        unnamed, _, key = each.partition(" ")
        if key in found:
            found[key] = remedy_of(found[key], unnamed)
    return {key: each for key, each in found.items() if each}


def remedy(held: Quarantine) -> str:
    """Return the costliest remedy that the evidence needs; "" if it needs none."""
    return max((remedy_of(held.action), *remedies(held).values()), key=cost_rank)


def is_forgotten(report: Report, held: Quarantine) -> bool:
    """True if the evidence may have vanished with the agent's memory, rather than because of its remedy."""
    if "" in (report.state_id, held.state_id) or report.state_id == held.state_id:
        return False  # an older agent does not say which memory it has
    needed = remedy(held)
    if not needed or held.replace:
        return False  # the fault ends without a remedy, or the GPUs in the node show the replacement
    return needed == "replace" or held.boot_id == report.boot_id


def lemon_score(history: Sequence[PastQuarantine], now_s: float, policy: NodePolicy) -> float:
    """Return the sum of the incidents, each weighted by 0.5 to the power of its age in half-lives."""
    return sum(
        (RELAPSE_WEIGHT if each.relapse else 1.0)
        # a clock that was set back adds no weight
        * math.pow(0.5, max(0.0, now_s - each.at_s) / policy.half_life_s)
        for each in history
    )


def required_health_s(node: NodeView, now_s: float, policy: NodePolicy) -> float:
    """Return how long a node must have been healthy. Each incident doubles the time, up to `max_clean_s`."""
    doublings = min(32.0, max(0.0, lemon_score(node.history, now_s, policy) - 1.0))
    needed_s = policy.clean_s * math.pow(2.0, doublings)
    if node.quarantine is not None and not is_remedied(node):
        needed_s *= policy.unremedied
    return min(needed_s, policy.max_clean_s)


def is_remedied(node: NodeView) -> bool:
    """True unless the remedy requires a reboot or another GPU that has not been seen.

    A fault that ended without its remedy is likely to recur.
    """
    held, report = node.quarantine, node.report
    if held is None or report is None:
        return True
    if held.replace:
        # The node must have as many GPUs as before, because the slot of a bad GPU must not just be empty.
        return len(report.devices) >= held.gpus and not {*held.replace} & {*report.devices}
    if is_forgotten(report, held):
        return False
    needed = remedy(held)
    if needed == "replace":
        return False  # nothing shows that an unknown device was replaced
    return needed != "reboot_node" or held.boot_id != report.boot_id
