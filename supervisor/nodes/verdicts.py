"""Decide which verdicts of node agents move the members of jobs at once. Pure.

An agent's verdict justifies a planned swap before the quarantine has confirmed the fault, because a swap does
not repeat any step, while a node that fails costs more. However, an agent can be wrong, and so can all agents
of a new version at once. The limits for a taint therefore apply here too, and they are checked when a verdict
arrives:

- A node counts as taken out as soon as its members move, so the breaker limits the number of such nodes.
- In a storm, no members move. A storm means that many nodes turned bad within a window, that several nodes of
  one rack did, or that most nodes are bad. Verdicts that arrived before the storm was visible may have moved
  members, but not more than the breaker allows.
- The process that leads may be new, so a verdict that it finds counts from the time that the agent has
  written. A node that has recovered within `memory_s` counts too. It is unknown when that node turned bad, so
  it counts for any storm that began before its recovery. A storm therefore lasts at least as long as it would
  have under the predecessor, but at most for `memory_s` after the recovery.
- Nodes that flap can prolong a storm forever, so it holds a node with a fault of its own for at most one
  cool-down. Such a node has been bad without interruption for `cooldown_s`, and only a few of the nodes that
  are still bad turned bad together with it. Only a storm that is too large to consist of flapping nodes may
  hold it longer. Anything that holds a node for `alert_s` becomes an alert.
- A verdict that flaps moves the members of its node at most once in `cooldown_s`. This process does not save
  when it moved them, so its successor may move them once more. A node that flaps for `alert_s`, and is never
  well for `cooldown_s`, becomes an alert, too.
- In a dry run, no members move, and the verdict is announced.
- After an operator's release, no members move until there is another fault. Until then, the node does not
  count among the bad ones, and its verdict is no sign of a storm if it turns bad again. If another fault ends
  the release, the node counts as having turned bad at that time.
- The verdict of an agent that has fallen silent moves no members, because it may be days old.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from supervisor.quarantine.breaker import Breaker
from supervisor.quarantine.model import NodePolicy


@dataclass(frozen=True, slots=True)
class NodesInService:
    """The breaker of the quarantine, the nodes that it counts as out, and the nodes that an operator trusts.

    `silent` contains the nodes whose agents the deciding process has not heard from recently.
    """

    breaker: Breaker
    out: frozenset[str]
    waived: frozenset[str] = frozenset()  # released by an operator, and without another fault since
    silent: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class VerdictSwaps:
    """What is done about the verdicts now.

    Members move away from the nodes in `moving`. They stay on the nodes in `held` and in `would`, for the
    reason given there. They would leave the nodes in `would` if this were not a dry run. The nodes in
    `alerts` have been held for so long that an operator must act.
    """

    moving: frozenset[str] = frozenset()
    held: Mapping[str, str] = field(default_factory=dict)
    would: Mapping[str, str] = field(default_factory=dict)
    alerts: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Node:
    """An agent's verdict. Times are on the clock of the caller."""

    rack: str
    problem: str = ""  # what is wrong; "" while nothing is
    turned_s: float = -math.inf  # when it last turned bad, or when another fault ended its release
    was_expected: bool = False  # its trouble was known or expected then, so this is no sign of a storm
    # when it recovered, if this process has not seen it turn bad; -inf if it has, or if that is long ago
    recovered_s: float = -math.inf
    # since when it has been bad without being well for `cooldown_s`, as far as this process has seen
    flaps_s: float = -math.inf
    well_s: float = -math.inf  # when it last recovered, as this process has seen
    moved_s: float = -math.inf  # when its members were last allowed to move
    moves: bool = False  # its members have been allowed to move since the verdict turned bad


class AgentVerdicts:
    """The verdicts of all agents. `now_s` is a time on a clock that is never set back."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._troubled: dict[str, _Node] = {}  # the nodes that are bad, or were recently
        # when the storm of each rack ends; the key "" stands for the pool
        self._calm_s: dict[str, float] = {}
        # the nodes that were released when `swaps` was last called
        self._waived: frozenset[str] = frozenset()

    def knows(self, name: str) -> bool:
        """Return whether a verdict of this node has been noted."""
        return name in self._nodes

    def note(
        self,
        name: str,
        problem: str | None,
        now_s: float,
        rack: str = "",
        *,
        is_expected: bool = False,
        age_s: float = 0.0,
        calm_s: float = math.inf,
    ) -> bool:
        """Note a verdict as `node_objects.verdict_of` returns it; None if the node or its agent is gone.

        `is_expected` is True if the node gets no new work, or if an operator has released it and knew its
        fault. Its trouble is then no sign of a storm. `age_s` is the time since the verdict turned bad, and
        `calm_s` is the time since a node without a fault recovered, according to the agent. They are used
        only for the first verdict of a node, because this process sees all other changes. Returns True if
        `swaps` may have changed.
        """
        if problem is None:
            self._troubled.pop(name, None)
            return self._nodes.pop(name, None) is not None
        node = self._nodes.get(name)
        found_s = max(0.0, age_s) if node is None else 0.0
        if node is None:
            node = self._nodes[name] = _Node(
                rack, was_expected=is_expected, recovered_s=now_s - max(0.0, calm_s)
            )
            if node.recovered_s > -math.inf and not problem:
                self._troubled[name] = node
        node.rack = rack
        if bool(problem) == bool(node.problem):
            node.problem = problem
            return False
        if not problem:
            node.well_s = now_s
        node.problem, node.moves = problem, False
        if problem:
            node.turned_s, node.was_expected, node.recovered_s = now_s - found_s, is_expected, -math.inf
            self._troubled[name] = node
        return True

    def swaps(
        self, service: NodesInService, policy: NodePolicy, now_s: float, *, is_dry: bool
    ) -> VerdictSwaps:
        """Return what to do about the verdicts, and remember which members may move."""
        self._forget(policy, now_s)
        self._end_releases(service, now_s)
        storms = self._storms(service, policy, now_s)
        apart = self._apart(service, policy, now_s)
        bad = sorted(
            ((name, node) for name, node in self._troubled.items() if node.problem),
            key=lambda each: (not each[1].moves, each[1].turned_s, each[0]),
        )
        moving: dict[str, str] = {}
        held: dict[str, str] = {}
        room, more = service.breaker.balance, 0  # `more` nodes in service have members that are moving
        for name, node in bad:
            if name in service.waived:
                continue
            is_out = name in service.out
            why = ""
            if name in service.silent:
                why = f"its agent has not been heard within {policy.stale_s:.0f} s"
            if not why and name not in apart:
                why = storms.get("") or storms.get(node.rack, "")
            if not why and not node.moves and now_s < node.moved_s + policy.cooldown_s:
                why = (
                    "its verdict has changed again, and its members have moved already within"
                    f" {policy.cooldown_s:.0f} s"
                )
            if not why and not is_out and room <= 0:
                why = f"no other node may be taken out: {service.breaker.why}"
                if more:
                    why = f"{why}, and the members of {more} more are moving"
            if why:
                held[name] = f"{node.problem}; its members stay: {why}"
                continue
            room, more = room - (not is_out), more + (not is_out)
            moving[name] = node.problem
            if not node.moves and not is_dry:
                node.moves, node.moved_s = True, now_s
        for _, node in bad:
            if node.flaps_s == -math.inf or node.turned_s > node.well_s + policy.cooldown_s:
                node.flaps_s = node.turned_s  # before that, it was well for long enough
        alerts = frozenset(each for each in held if now_s >= self._nodes[each].flaps_s + policy.alert_s)
        if is_dry:
            return VerdictSwaps(held=held, would=moving, alerts=alerts)
        return VerdictSwaps(frozenset(moving), held, alerts=alerts)

    def _forget(self, policy: NodePolicy, now_s: float) -> None:
        oldest_s = now_s - policy.memory_s
        self._troubled = {
            name: node
            for name, node in self._troubled.items()
            if node.problem or max(node.turned_s, node.recovered_s) > oldest_s
        }
        self._calm_s = {rack: at_s for rack, at_s in self._calm_s.items() if at_s > now_s}

    def _end_releases(self, service: NodesInService, now_s: float) -> None:
        """Note the nodes that are bad and no longer released: their fault is new and unexpected.

        While an agent is silent, it is not known whether its node is still released.
        """
        for name in self._waived - service.waived - service.silent:
            node = self._troubled.get(name)
            if node is not None and node.problem:
                node.turned_s, node.was_expected = now_s, False
        self._waived = service.waived | (self._waived & service.silent)

    def _storms(self, service: NodesInService, policy: NodePolicy, now_s: float) -> dict[str, str]:
        """Return why no members move, by rack; the key "" stands for the whole pool."""
        recent = [each for _, each in self._recent(policy, now_s)]
        found = {"": self._storm_of_pool(recent, service, policy)}
        racks: dict[str, int] = {}
        for each in recent:
            racks[each.rack] = racks.get(each.rack, 0) + 1
        for rack, count in racks.items():
            if rack and count >= policy.rack_nodes:
                found[rack] = f"a storm: the agents of {count} nodes of rack {rack} reported faults together"
        self._remember_storms(service, policy, now_s)
        for rack, why in found.items():
            if why:
                self._calm_s[rack] = now_s + policy.cooldown_s
        for rack in self._calm_s:
            found[rack] = found.get(rack) or "a storm has not been over for long enough"
        return found

    def _recent(self, policy: NodePolicy, now_s: float) -> Iterator[tuple[str, _Node]]:
        """Yield the nodes that have turned bad within the window of a storm."""
        for name, each in self._troubled.items():
            bad_s = max(each.turned_s, each.recovered_s)
            if bad_s > now_s - policy.storm_window_s and not each.was_expected:
                yield name, each

    def _apart(self, service: NodesInService, policy: NodePolicy, now_s: float) -> frozenset[str]:
        """Return the nodes with faults of their own that no storm of other nodes holds any longer."""
        total = len(self._nodes)
        all_bad = self._bad(service)
        bad = {name: self._troubled[name] for name in all_bad - service.out}
        steady = {name for name in all_bad if now_s - self._troubled[name].turned_s >= policy.cooldown_s}
        crowd = bad.keys() | {name for name, _ in self._recent(policy, now_s)}
        is_most = len(steady) >= 2 and 2 * len(steady) > total
        if is_most or len(crowd) > max(2 * policy.storm_nodes, int(policy.max_share * total)):
            return frozenset()
        racks: dict[str, list[tuple[float, str]]] = {"": []}
        for name, each in bad.items():
            for rack in {"", each.rack}:
                racks.setdefault(rack, []).append((each.turned_s, name))
        together = set[str]()
        for rack, turned in racks.items():
            need = policy.rack_nodes if rack else self._nodes_of_storm(policy)
            together |= _turned_together(turned, need, policy.storm_window_s)
        return frozenset(steady - together)

    def _bad(self, service: NodesInService) -> set[str]:
        """Return the nodes whose agents report a fault now, except those that an operator has released."""
        found = {name for name, each in self._troubled.items() if each.problem}
        return found - service.silent - service.waived

    def _remember_storms(self, service: NodesInService, policy: NodePolicy, now_s: float) -> None:
        """Note the end of each storm that began before this process led, even if it has already ended."""
        racks: dict[str, list[_Node]] = {"": []}
        for each in self._troubled.values():
            if not each.was_expected:
                for rack in {"", each.rack}:
                    racks.setdefault(rack, []).append(each)
        for rack, there in racks.items():
            need = policy.rack_nodes if rack else self._nodes_of_storm(policy)
            end_s = _last_storm_end_s(there, need, policy.storm_window_s)
            if not rack:
                bad = [self._troubled[name] for name in self._bad(service)]
                end_s = max(end_s, _last_majority_s(there, bad, len(self._nodes)))
            calm_s = end_s + policy.cooldown_s
            if calm_s > now_s:
                self._calm_s[rack] = max(calm_s, self._calm_s.get(rack, calm_s))

    def _nodes_of_storm(self, policy: NodePolicy) -> int:
        return max(policy.storm_nodes, int(policy.storm_share * len(self._nodes)))

    def _storm_of_pool(self, recent: list[_Node], service: NodesInService, policy: NodePolicy) -> str:
        total = len(self._nodes)
        bad = len(self._bad(service))
        if bad >= 2 and 2 * bad > total:
            return f"a storm: the agents of {bad} of {total} nodes report faults"
        if len(recent) >= self._nodes_of_storm(policy):
            return (
                f"a storm: the agents of {len(recent)} of {total} nodes have reported faults within"
                f" {policy.storm_window_s:.0f} s"
            )
        return ""


def _last_storm_end_s(there: Sequence[_Node], need: int, window_s: float) -> float:
    """Return the end of the last window in which at least `need` verdicts turned bad; -inf if there is none.

    This time can be in the future. For a node that recovered under a predecessor, only the time of the
    recovery is known. The node can have turned bad at any time before.
    """
    times = sorted((max(each.turned_s, each.recovered_s), each.recovered_s == -math.inf) for each in there)
    times_s = [at_s for at_s, _ in times]
    recovered_s = sorted(each.recovered_s for each in there if each.recovered_s > -math.inf)
    found_s = -math.inf
    for index, (first_s, is_known) in enumerate(times):
        end = bisect_left(times_s, first_s + window_s)
        later = len(recovered_s) - bisect_left(recovered_s, first_s + window_s)
        if end - index + (later if is_known else 0) >= need:
            found_s = first_s + window_s
    return found_s


def _last_majority_s(there: Sequence[_Node], bad_now: Sequence[_Node], total: int) -> float:
    """Return when a node last recovered under a predecessor while most nodes were bad; -inf if none did."""
    turned_s = sorted(each.turned_s for each in bad_now)
    recovered_s = sorted(each.recovered_s for each in there if each.recovered_s > -math.inf)
    for index in reversed(range(len(recovered_s))):
        bad = bisect_right(turned_s, recovered_s[index]) + len(recovered_s) - index
        if bad >= 2 and 2 * bad > total:
            return recovered_s[index]
    return -math.inf


def _turned_together(turned: Sequence[tuple[float, str]], need: int, window_s: float) -> set[str]:
    """Return the nodes that turned bad within a window in which at least `need` nodes did.

    `turned` contains, for each node, the time when it turned bad, and its name.
    """
    times, found, end = sorted(turned), set[str](), 0
    for first, last in zip(range(len(times)), range(need - 1, len(times)), strict=False):
        if times[last][0] - times[first][0] < window_s:
            found.update(name for _, name in times[max(first, end) : last + 1])
            end = last + 1
    return found
