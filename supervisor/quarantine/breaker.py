"""A pool's circuit breaker, which limits how many nodes are taken out of service. Pure.

The breaker counts the nodes that are out now, not recent actions. It therefore stops even a slow cascade, and
survives a restart of the deciding process. Nodes that others took out count too, because their capacity is
also missing. They do not use up `min_out`, because otherwise, in a small pool, a forgotten cordon would keep
every bad node in service. `min_serving` limits the sum of both kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from supervisor.quarantine.model import NO_NEW_WORK, NodePolicy, NodeView


@dataclass(frozen=True, slots=True)
class Breaker:
    """The state of a pool's breaker. `room` is the number of nodes that may still be taken out now."""

    total: int
    out: int
    unknown: int  # nodes in service whose agents are silent
    allowed: int
    min_serving: int

    @property
    def room(self) -> int:
        return max(0, self.balance)

    @property
    def balance(self) -> int:
        """Like `room`, but negative if more nodes are out than allowed."""
        serving = self.total - self.out - self.unknown
        return min(self.allowed - self.out, serving - self.min_serving)

    @property
    def why(self) -> str:
        serving = self.total - self.out - self.unknown
        if self.allowed - self.out <= serving - self.min_serving:
            return f"{self.out} of {self.total} nodes are out; at most {self.allowed} may be"
        return f"{serving} of {self.total} nodes are known to serve; at least {self.min_serving} must be left"


def assess(total: int, candidates: Sequence[NodeView], policy: NodePolicy) -> Breaker:
    """Return the state of the breaker. `candidates` must contain every node that is out or unknown."""
    out = sum(1 for node in candidates if is_out(node))
    by_others = sum(1 for node in candidates if is_out(node) and not is_tainted(node))
    unknown = sum(1 for node in candidates if not is_out(node) and is_unknown(node, policy))
    allowed = min(total, max(by_others + policy.min_out, int(policy.max_share * total)))
    return Breaker(total, out, unknown, allowed, policy.min_serving)


def is_tainted(node: NodeView) -> bool:
    """True if Holdfast keeps new work off the node."""
    return node.quarantine is not None and node.quarantine.effect == NO_NEW_WORK


def is_out(node: NodeView) -> bool:
    """True if the node gets no new work, because of a taint, a cordon or the kubelet."""
    return is_tainted(node) or node.cordoned or not node.ready


def is_unknown(node: NodeView, policy: NodePolicy) -> bool:
    """True if the node's agent has been silent for longer than `policy.stale_s`, or has never reported."""
    return node.report is None or node.silent_s > policy.stale_s
