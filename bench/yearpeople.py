"""What people and their tools do in the simulated year about nodes that were taken out.

They wait until a node is empty, remedy it, now and then in vain, and overrule us where they know better.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from bench.year import Pool
from bench.yearnode import DAY_S, HOUR_S, Node, Sign
from supervisor import standing
from supervisor.nodes import NO_NEW_WORK, Action, Drain, Release, Taint

DRAIN_S = 120.0  # mean, until a job has made its checkpoint and gone
JOB_S = 12 * HOUR_S  # mean, until the job on a node that is only tainted ends by itself
REMEDY_S = {"reset_gpu": 300.0, "reboot_node": 900.0, "replace": 2 * DAY_S}  # mean
COMES_BACK, COMES_BACK_LEMON = 0.1, 0.5  # share of the remedies that did not help
BATCH, BATCH_S = "bad_batch", 8 * DAY_S  # nodes for whose repair there are no parts
HOLD_S = 600.0  # what an agent waits after a remedy: xid policy
OVERRULED = 0.2  # share of the false alarms that an operator ends by hand


class People:
    """Acts on what was decided; `again` is told of a fault whose remedy did not help for long."""

    def __init__(self, pool: Pool, chance: random.Random, again: Callable[[Sign, Node], None]) -> None:
        self.pool, self.chance, self._again = pool, chance, again
        self._remedies: dict[str, str] = {}  # by node: under way
        self.cleared: Callable[[Node, str], None] = lambda _node, _key: None
        pool.acted = self.acted

    def is_tainted(self, node: Node) -> bool:
        held = node.standing.quarantine
        return held is not None and held.effect == NO_NEW_WORK

    def acted(self, node: Node, action: Action) -> None:
        if isinstance(action, Taint) and node.standing.quarantine is not None:
            stay = node.standing.quarantine.at_s
            if stay == self.pool.now_s:
                self.pool.after(self.chance.expovariate(1 / JOB_S), partial(self._emptied, node, stay))
                if not node.is_bad and self.chance.random() < OVERRULED:
                    self.pool.after(self.chance.expovariate(1 / HOUR_S), partial(self._overrule, node, stay))
                self.remedy_if_empty(node)
        elif isinstance(action, Drain) and node.standing.quarantine is not None:
            stay = node.standing.quarantine.at_s
            self.pool.after(self.chance.expovariate(1 / DRAIN_S), partial(self._emptied, node, stay))
        elif isinstance(action, Release):
            node.standing = replace(node.standing, busy=True)

    def _emptied(self, node: Node, stay_s: float) -> None:
        held = node.standing.quarantine
        if held is None or held.at_s != stay_s or not node.standing.busy:
            return
        self.pool.touch(node)
        node.standing = replace(node.standing, busy=False)
        self.remedy_if_empty(node)

    def _overrule(self, node: Node, stay_s: float) -> None:
        """An operator has looked, sees that the node is well, and takes our taint off."""
        held = node.standing.quarantine
        if held is None or held.at_s != stay_s or node.is_bad:
            return
        self.pool.touch(node)
        self.pool.tally.count("overruled")
        node.standing = replace(standing.freed(node.standing, self.pool.now_s), busy=True)
        self.pool.tally.ended(node, self.pool.now_s)

    def remedy_if_empty(self, node: Node) -> None:
        """Reset, reboot or repair a node that is out and empty."""
        wanted = [each for each in node.signs.values() if each.lasting]
        if not wanted or node.standing.busy or not self.is_tainted(node) or node.name in self._remedies:
            return
        action = max((each.action for each in wanted), key=list(REMEDY_S).index)
        self._remedies[node.name] = action
        is_slow = any(each.key.startswith(BATCH) for each in wanted)
        took_s = (BATCH_S if is_slow else REMEDY_S[action]) * self.chance.uniform(0.5, 2.0)
        self.pool.after(took_s, partial(self._remedied, node, action))

    def _remedied(self, node: Node, action: str) -> None:
        """What only a remedy ends, ends; the agent waits its time before it says so."""
        del self._remedies[node.name]
        self.pool.touch(node)
        if action != "reset_gpu":
            node.booted(self.pool.now_s)
        for sign in [each for each in node.signs.values() if each.lasting]:
            if list(REMEDY_S).index(sign.action) > list(REMEDY_S).index(action):
                continue
            was_true = sign.key in node.truths
            self.heal(node, sign.key)
            self.remedy_seen(node, sign.key)
            if was_true and self.chance.random() < (COMES_BACK_LEMON if node.lemon else COMES_BACK):
                self.pool.after(self.chance.expovariate(1 / (2 * DAY_S)), partial(self._again, sign, node))
        self.remedy_if_empty(node)

    def remedy_seen(self, node: Node, key: str) -> None:
        """From then on the finding passes by itself, and the agent waits its time before it says so."""
        node.found(replace(node.signs[key], lasting=False), self.pool.now_s)
        self.pool.after(HOLD_S, partial(self.cleared, node, key))

    def heal(self, node: Node, key: str) -> None:
        """What was wrong is so no more, and nobody can see it yet."""
        self.pool.tally.account(node, self.pool.now_s)
        node.truths.discard(key)
