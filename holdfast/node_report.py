"""What the node agent and the supervisor must agree on about the report on a node's health. Pure.

The agent publishes its report in an annotation of its Node object (`nodeagent.publishing`). The supervisor
uses it to decide whether the node may be given work (`supervisor.quarantine`).
"""

from __future__ import annotations

from collections.abc import Iterable

# Annotations of the Node object, which the agent writes.
REPORT = "holdfast.dev/node-health"
REPORT_AT = "holdfast.dev/node-health-at"

SCHEMA = 1  # of the report; the supervisor refuses a report that has another schema
# Characters. The supervisor ignores the rest of a longer name, because it stores names on nodes.
MAX_WORD = 120

DEGRADED, UNHEALTHY = "degraded", "unhealthy"  # the levels of findings that matter to the supervisor
REMEDIES = ("reset_gpu", "reboot_node", "replace")  # each includes the effect of the one before
# All actions that a finding can require, cheapest first from the supervisor's point of view. Contacting
# support costs less than a remedy, but does not replace one. The agent's own verdict has another order: see
# `nodeagent.model.Action`.
ACTIONS = ("none", "restart_app", "contact_support", *REMEDIES)

# Sources of findings that are not sensors: the agent itself, and observations that a test injects. They are
# never considered missing from the report's list of sensors.
AGENT, INJECTED = "agent", "injected"

DRIVER = "driver"  # the author whose verdict needs no other witness
WITNESSES = 2


def cost_rank(action: str) -> int:
    """Return the rank of an action by cost. An unknown action ranks as the cheapest."""
    return ACTIONS.index(action) if action in ACTIONS else 0


def remedy_of(action: str, remedy: str = "") -> str:
    """Return the costlier of an action and a reported remedy, if it is one of `REMEDIES`; otherwise ""."""
    found = max(action, remedy, key=cost_rank)
    return found if found in REMEDIES else ""


def is_corroborated(verdict_by: str, origins: Iterable[str]) -> bool:
    """Return whether the driver gave the verdict, or evidence from several origins agrees."""
    return verdict_by == DRIVER or len(set(origins)) >= WITNESSES


def severity(*, is_corroborated: bool, is_lasting: bool, action: str) -> tuple[bool, bool, int]:
    """Return a sort key that puts the most severe findings of a level last.

    The supervisor acts on the most severe findings first. If a report has too many findings, the agent
    therefore drops the ones that come first in this order.
    """
    return is_corroborated, is_lasting, cost_rank(action)
