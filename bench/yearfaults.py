"""What befalls single nodes in the simulated year: faults, maintenance, false alarms, silent agents.

Every node in service always runs a job: the worst case for whoever ends one without need.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

from bench.fault_mixes import YEAR_S, Fault
from bench.year import Pool
from bench.yearnode import DAY_S, HOUR_S, Node, Sign
from bench.yearpeople import People
from bench.yeartally import Case

LEMON_RATE = 8.0  # times as many faults
FLAP_EVERY_S = 4 * HOUR_S  # of a sensor in a bad fortnight
FLAP_S = 90.0  # mean, before the agent's own time to clear
FLAP_STANDS = 0.1  # share of the false alarms that only a reset ends


class Befalls:
    """Puts a year's events into a pool; `until_s` is when they stop."""

    def __init__(self, pool: Pool, seed: int, until_s: float) -> None:
        self.pool, self.until_s = pool, until_s
        self.chance = random.Random(seed)
        self._serial = 0
        self._cases: dict[str, Case] = {}  # by key of the fault
        self.people = People(pool, self.chance, self._again)
        self.people.cleared = self._clear

    # -- when

    def faults(self, faults: list[Fault]) -> None:
        """Have each kind come at its rate, to lemons more often."""
        nodes = self.pool.nodes
        weights = [LEMON_RATE if node.lemon else 1.0 for node in nodes]
        for fault in faults:
            if fault.kind == "none":
                continue
            per_s = fault.per_node_year * len(nodes) / YEAR_S
            at_s = self.chance.expovariate(per_s)
            while at_s < self.until_s:
                [node] = self.chance.choices(nodes, weights)
                self.pool.at(at_s, partial(self.strike, fault, node))
                at_s += self.chance.expovariate(per_s)

    def flapping(self, episodes: int) -> None:
        """Have sensors on well nodes be wrong now and then, for some days each."""
        for _ in range(episodes):
            node = self.chance.choice(self.pool.nodes)
            action = self.chance.choice(("reset_gpu", "reboot_node", "contact_support"))
            source = self.chance.choice(("nvml_poll", "sysfs", "kmsg"))
            at_s = self.chance.uniform(0, self.until_s)
            end_s = min(self.until_s, at_s + self.chance.uniform(3, 14) * DAY_S)
            while at_s < end_s:
                self.pool.at(at_s, partial(self.flap, node, action, source))
                at_s += self.chance.expovariate(1 / FLAP_EVERY_S)

    def silences(self, times: int, mean_s: float = HOUR_S) -> None:
        """Have agents of well nodes fall silent."""
        for _ in range(times):
            node = self.chance.choice(self.pool.nodes)
            at_s = self.chance.uniform(0, self.until_s)
            self.pool.at(at_s, partial(self.silence, node, self.chance.expovariate(1 / mean_s)))

    # -- what

    def strike(self, fault: Fault, node: Node) -> None:
        {
            "degraded": self._degraded,
            "passing": self._passing,
            "lasting": self._lasting,
            "dead": self._dead,
            "panic": self._panic,
            "maintenance": self._maintenance,
        }[fault.kind](fault, node)

    def _degraded(self, fault: Fault, node: Node) -> None:
        key = self._key(fault.component)
        self.pool.touch(node)
        node.found(Sign(key, "degraded", fault.action, fault.sources, self.pool.now_s), self.pool.now_s)
        self.pool.after(
            self.chance.expovariate(1 / fault.lasts_s) + fault.clears_s, partial(self._clear, node, key)
        )

    def _passing(self, fault: Fault, node: Node) -> None:
        self.hurt(fault, node, self.chance.expovariate(1 / fault.lasts_s))

    def hurt(self, fault: Fault, node: Node, lasts_s: float) -> None:
        """Let something that ends by itself be wrong for so long."""
        key = self._truth(fault, node)
        if lasts_s > fault.delay_s:
            self.pool.after(fault.delay_s, partial(self._report, fault, node, key))
            self.pool.after(lasts_s + fault.clears_s, partial(self._clear, node, key))
        self.pool.after(lasts_s, partial(self.people.heal, node, key))

    def _lasting(self, fault: Fault, node: Node) -> None:
        key = self._truth(fault, node)
        self.pool.after(
            self.chance.uniform(0.1, 1.0) * fault.delay_s, partial(self._report, fault, node, key)
        )

    def _dead(self, fault: Fault, node: Node) -> None:
        self._lose(node, self.chance.expovariate(1 / fault.lasts_s) + HOUR_S)

    def _panic(self, fault: Fault, node: Node) -> None:
        self._lose(node, self.chance.uniform(0.5, 1.5) * fault.lasts_s)

    def _maintenance(self, fault: Fault, node: Node) -> None:
        """Somebody cordons the node and works on it; its agent complains, rightly, and nobody is to act."""
        if node.standing.cordoned:
            return
        key = self._truth(fault, node)
        self.pool.touch(node)
        node.standing = replace(node.standing, cordoned=True)
        self._ill(
            node, Sign(key, "unhealthy", "reboot_node", ("nvml_poll", "kmsg"), self.pool.now_s, lasting=True)
        )
        self.pool.after(self.chance.expovariate(1 / fault.lasts_s), partial(self._handed_back, node, key))

    def _handed_back(self, node: Node, key: str) -> None:
        self.pool.touch(node)
        self.people.heal(node, key)
        node.booted(self.pool.now_s)
        self.people.remedy_seen(node, key)
        node.standing = replace(node.standing, cordoned=False)  # while the agent still has its doubts

    def flap(self, node: Node, action: str, source: str) -> None:
        """One sensor says for a moment what is not so; the agent's own rule holds on to it for a while."""
        key = self._key(f"false {source}")
        stands = action != "contact_support" and self.chance.random() < FLAP_STANDS
        self.pool.tally.count("false_alarms")
        self.pool.touch(node)
        self._ill(node, Sign(key, "unhealthy", action, (source,), self.pool.now_s, lasting=stands))
        if not stands:
            lasts_s = self.chance.expovariate(1 / FLAP_S) + self.chance.choice((60.0, 600.0))
            self.pool.after(lasts_s, partial(self._clear, node, key))

    def silence(self, node: Node, lasts_s: float) -> None:
        self.pool.tally.count("silent_agents")
        self.pool.touch(node)
        node.hush(self.pool.now_s)
        self.pool.after(lasts_s, partial(self._heard_again, node))

    def lost(self, node: Node, lasts_s: float) -> None:
        """The node is there, and cannot be reached."""
        self._lose(node, lasts_s)

    # -- truths and signs

    def _key(self, what: str) -> str:
        self._serial += 1
        return f"{what} {self._serial}"

    def _truth(self, fault: Fault, node: Node) -> str:
        key = self._key(fault.component)
        self.pool.tally.account(node, self.pool.now_s)
        node.truths.add(key)
        return key

    def _clear(self, node: Node, key: str) -> None:
        self.pool.touch(node)
        node.cleared(key, self.pool.now_s)
        case = self._cases.pop(key, None)
        if case is not None:
            self.pool.tally.passed(case)

    def _ill(self, node: Node, sign: Sign) -> None:
        node.found(sign, self.pool.now_s)
        self.people.remedy_if_empty(node)

    def _report(self, fault: Fault, node: Node, key: str) -> None:
        if key not in node.truths:
            return
        self.pool.touch(node)
        now_s, policy = self.pool.now_s, self.pool.policy
        sign = Sign(
            key, "unhealthy", fault.action, fault.sources, now_s, fault.driver, fault.kind == "lasting"
        )
        sure = fault.driver or len(fault.sources) > 1
        wait_s = policy.confirm_s if sure else policy.confirm_alone_s
        case = Case(node.name, fault.component, sure, now_s, now_s + wait_s)
        if node.cut_off:
            case.held = "its agent was silent"
        self.pool.tally.reported(case, node)
        self._ill(node, sign)
        self._cases[key] = case

    def _lose(self, node: Node, lasts_s: float) -> None:
        key = self._key("lost")
        self.pool.tally.count("lost_nodes")
        self.pool.touch(node)
        node.truths.add(key)
        node.hush(self.pool.now_s)
        node.standing = replace(node.standing, ready=False, busy=False)
        self.pool.after(lasts_s, partial(self._found_again, node, key))

    def _found_again(self, node: Node, key: str) -> None:
        self.pool.touch(node)
        self.people.heal(node, key)
        node.booted(self.pool.now_s)
        node.speak(self.pool.now_s)
        if not node.cut_off:
            node.standing = replace(node.standing, ready=True, busy=not self.people.is_tainted(node))

    def _heard_again(self, node: Node) -> None:
        self.pool.touch(node)
        node.speak(self.pool.now_s)
        if not node.cut_off:
            node.standing = replace(node.standing, ready=True)

    def _again(self, sign: Sign, node: Node) -> None:
        """The remedy has not helped for long."""
        again = Fault(
            "",
            sign.key.split(" ")[0],
            "lasting",
            sign.action,
            sign.sources,
            sign.driver,
            2.0,
            0.0,
            600.0,
            0.0,
        )
        self.pool.tally.count("came_again")
        self._lasting(again, node)
