"""How long a node must have been well before it comes back: longer, the oftener it was out. Pure.

Meta found that a few nodes cause many of the failures (arXiv 2410.21680): a node that has failed again and
again will fail again, and each time it costs a job more than its absence does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from supervisor.nodepolicy import NodePolicy
from supervisor.nodes import Incident, NodeView

NEEDS_BOOT = ("reboot_node", "replace")  # a new boot id shows that it was done
RELAPSE_WEIGHT = 2.0  # the proof of health was not enough the last time


def score(history: Sequence[Incident], now_s: float, policy: NodePolicy) -> float:
    """Return the number of incidents, each worth half after each half-life. One just now is worth 1."""
    return sum(
        (RELAPSE_WEIGHT if each.relapse else 1.0)
        * math.pow(0.5, max(0.0, now_s - each.at_s) / policy.half_life_s)  # a clock set back adds nothing
        for each in history
    )


def proof_s(node: NodeView, now_s: float, policy: NodePolicy) -> float:
    """Return how long a node must have been clean: it doubles with each incident, up to `max_clean_s`."""
    doublings = min(32.0, max(0.0, score(node.history, now_s, policy) - 1.0))
    needed_s = policy.clean_s * math.pow(2.0, doublings)
    if node.quarantine is not None and not is_remedied(node):
        needed_s *= policy.unremedied
    return min(needed_s, policy.max_clean_s)


def is_remedied(node: NodeView) -> bool:
    """False when the node should have been booted anew and was not: what went by itself comes by itself."""
    held = node.quarantine
    if held is None or node.report is None or held.action not in NEEDS_BOOT:
        return True
    return held.boot_id != node.report.boot_id
