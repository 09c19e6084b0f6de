"""Run a pool of nodes in simulated time, with the real decision at the tick after each event.

The decision sees only a view of the pool. The pool refuses one patch in fifty, as the API server does if a
node's object has changed. The decision is then repeated at the next tick.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from itertools import count

from bench.quarantine.simulated_node import Node
from bench.quarantine.tally import Tally
from supervisor.quarantine import transition
from supervisor.quarantine.breaker import is_out, is_unknown
from supervisor.quarantine.decide import decide
from supervisor.quarantine.model import (
    NO_NEW_WORK,
    Drain,
    Hold,
    NodePolicy,
    NodeView,
    PoolView,
    QuarantineAction,
    Release,
    Taint,
)

TICK_S = 15.0
REFUSED = 0.02
ROUNDS = 8  # the most decisions at one tick; an action can make room for the next one


class Pool:
    """Runs the events in order. Calls `acted` for each action carried out, and `alerted` for each alert."""

    def __init__(self, nodes: list[Node], policy: NodePolicy, seed: int) -> None:
        self.nodes, self.policy = nodes, policy
        self.by_name = {node.name: at for at, node in enumerate(nodes)}
        self.now_s = 0.0
        self.tally = Tally(len(nodes))
        self.decisions = 0
        self.acted: Callable[[Node, QuarantineAction], None] = lambda _node, _action: None
        self.alerted: Callable[[Node], None] = lambda _node: None
        self._chance = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._views: list[NodeView] = [node.view(0.0) for node in nodes]
        self._odd: set[int] = set()
        self._look_at_s = 0.0
        self._changed = False  # since the last decision

    # -- events

    def at(self, when_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when_s, self.now_s), next(self._order), call))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.at(self.now_s + delay_s, call)

    def touch(self, node: Node) -> None:
        """Note that the node is about to change. Must be called before each change."""
        self._odd.add(self.by_name[node.name])
        self._changed = True
        self.tally.account(node, self.now_s)

    def run(self, until_s: float) -> None:
        """Run all events before `until_s`, with a decision at the tick after each."""
        while (self._heap and self._heap[0][0] < until_s) or self._look_at_s < until_s:
            first_s = min(self._look_at_s, self._heap[0][0] if self._heap else until_s)
            tick_s = -(-first_s // TICK_S) * TICK_S
            while self._heap and self._heap[0][0] <= tick_s:
                self.now_s, _, call = heapq.heappop(self._heap)
                call()
            self.now_s = tick_s
            if self._changed or self._look_at_s <= tick_s:
                self._look()

    @property
    def allowed(self) -> int:
        """How many nodes may be out, computed independently of the breaker's code."""
        out = [self.nodes[at].standing for at in self._odd if is_out(self.nodes[at].standing)]
        by_others = sum(1 for node in out if node.quarantine is None or node.quarantine.effect != NO_NEW_WORK)
        return max(by_others + self.policy.min_out, int(self.policy.max_share * len(self.nodes)))

    # -- observe, decide, act

    def _look(self) -> None:
        self._changed = False
        held: tuple[Hold, ...] = ()
        done: list[QuarantineAction] = []
        for _ in range(ROUNDS):
            seen = self._view()
            actions = decide(seen, self.policy)
            self.decisions += 1
            held = tuple(each for each in actions if isinstance(each, Hold))
            done = [each for each in actions if not isinstance(each, Hold)]
            refused = [self._carry_out(each, seen) for each in done]
            self._check(seen, done, held)
            if not done or any(refused):
                break
        else:
            raise AssertionError(f"the decision does not converge: {done}")
        again_s = self.now_s + TICK_S if done else min((each.until_s for each in held), default=float("inf"))
        self._look_at_s = max(again_s, self.now_s + TICK_S)
        self.tally.held(held, self.now_s)
        for each in held:
            if each.alert and each.node:
                self.alerted(self.nodes[self.by_name[each.node]])

    def _view(self) -> PoolView:
        for at in list(self._odd):
            node = self.nodes[at]
            self._views[at] = node.view(self.now_s)
            if node.is_plain(self.now_s):
                self._odd.discard(at)
        return PoolView(self.now_s, tuple(self._views))

    def _carry_out(self, action: QuarantineAction, seen: PoolView) -> bool:
        """Carry out the action unless the API refuses it; return True if it was refused."""
        at = self.by_name[action.node]
        assert not is_unknown(seen.nodes[at], self.policy), f"acts on a silent node: {action}"
        if self._chance.random() < REFUSED:
            return True
        node = self.nodes[at]
        self._judge(node, action)
        self.tally.account(node, self.now_s)
        node.standing = transition.after(node.standing, action, self.now_s, self.policy)
        self._odd.add(at)
        self.tally.acted(node, action, self.now_s)
        self.acted(node, action)
        return False

    def _judge(self, node: Node, action: QuarantineAction) -> None:
        shown = node.standing
        if isinstance(action, Taint) and shown.quarantine is None:
            assert not shown.cordoned, f"taints a node that an operator has cordoned: {action}"
            waiver = shown.waiver
            if waiver is not None and self.now_s < waiver.at_s + self.policy.waiver_s:
                known = {*waiver.evidence}
                is_old = {*action.evidence} <= known and not node.has_news_since(waiver.at_s)
                assert not is_old, f"acts against an operator's waiver: {action}"
        if isinstance(action, (Drain, Release)):
            assert shown.quarantine is not None, action

    def _check(self, seen: PoolView, done: Sequence[QuarantineAction], held: Sequence[Hold]) -> None:
        """Check the holds, and, if a taint took a node out, that no more nodes are out than allowed."""
        out = sum(1 for at in self._odd if is_out(self.nodes[at].standing))
        was_out = sum(1 for at in self._odd if is_out(seen.nodes[at]))
        by_us = out > was_out and any(isinstance(each, Taint) for each in done)
        assert not by_us or out <= self.allowed, f"{out} are out, but only {self.allowed} may be"
        self.tally.out(out, by_us)
        for each in held:
            assert each.alert or each.until_s < float("inf"), f"neither an end nor an alert: {each}"
