"""How many more nodes may be taken out. Pure.

It counts what stands, not what was done in the last minutes: a slow cascade is seen, and so is a restart of
whoever decides. Who took a node out does not matter: it is missing all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from supervisor.quarantine.model import NO_NEW_WORK, NodePolicy, NodeView


@dataclass(frozen=True, slots=True)
class Breaker:
    """`room` more may be taken out now."""

    total: int
    out: int
    unknown: int  # in service, but their agents are silent
    allowed: int
    min_serving: int

    @property
    def room(self) -> int:
        serving = self.total - self.out - self.unknown
        return max(0, min(self.allowed - self.out, serving - self.min_serving))

    @property
    def why(self) -> str:
        serving = self.total - self.out - self.unknown
        if self.allowed - self.out <= serving - self.min_serving:
            return f"{self.out} of {self.total} nodes are out, and no more than {self.allowed} may be"
        return f"{serving} of {self.total} nodes are known to serve, and {self.min_serving} must be left"


def assess(total: int, odd: Sequence[NodeView], policy: NodePolicy) -> Breaker:
    """Return where the breaker stands. `odd` must have every node that is out or unknown."""
    out = sum(1 for node in odd if is_out(node))
    unknown = sum(1 for node in odd if not is_out(node) and is_unknown(node, policy))
    allowed = min(total, max(policy.min_out, int(policy.max_share * total)))
    return Breaker(total, out, unknown, allowed, policy.min_serving)


def is_out(node: NodeView) -> bool:
    """True when no new work is put there, whoever sees to that."""
    tainted = node.quarantine is not None and node.quarantine.effect == NO_NEW_WORK
    return tainted or node.cordoned or not node.ready


def is_unknown(node: NodeView, policy: NodePolicy) -> bool:
    return node.report is None or node.silent_s > policy.stale_s
