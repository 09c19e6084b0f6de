"""The events of the simulated year: faults of single nodes, events of many nodes, and repairs.

Every node in service always runs a job, which is the worst case for an unnecessary drain.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from bench.quarantine.fault_mixes import YEAR_S, FaultRate
from bench.quarantine.simulated_node import DAY_S, GPUS, HOUR_S, Node, Sign, origins_of
from bench.quarantine.simulated_pool import Pool
from bench.quarantine.tally import SILENT, Case
from supervisor.quarantine import transition
from supervisor.quarantine.model import NO_NEW_WORK, Drain, QuarantineAction, Release, Taint

DRAIN_S = 120.0  # mean time until a drained job has written its checkpoint and ended
JOB_S = 12 * HOUR_S  # mean time until a job finishes on a node that is tainted but not drained
REMEDY_S = {"reset_gpu": 300.0, "reboot_node": 900.0, "replace": 2 * DAY_S}  # mean duration of each remedy
COMES_BACK, COMES_BACK_LEMON = 0.1, 0.5  # the share of remedies that do not help, in general and on lemons
BAD_BATCH, BAD_BATCH_S = "bad_batch", 8 * DAY_S  # nodes whose repair must wait until parts arrive
HOLD_S = 600.0  # how long an agent keeps a finding after its remedy, according to the Xid policy
OVERRULED = 0.2  # the share of false alarms whose taint an operator removes


class People:
    """The operators and their tools, who act on taints and drains.

    They wait until a node is empty and then repair it, sometimes without success. They overrule the decision
    if they know that the node is healthy. `again` is called for a fault that recurs after its remedy.
    """

    def __init__(self, pool: Pool, chance: random.Random, again: Callable[[Sign, Node], None]) -> None:
        self.pool, self.chance, self._again = pool, chance, again
        self._remedies: dict[str, str] = {}  # the remedies in progress, by node
        self._answering: set[str] = set()  # the nodes that an operator is about to repair in service
        self.cleared: Callable[[Node, str], None] = lambda _node, _key: None
        pool.acted = self.acted

    def is_tainted(self, node: Node) -> bool:
        held = node.standing.quarantine
        return held is not None and held.effect == NO_NEW_WORK

    def acted(self, node: Node, action: QuarantineAction) -> None:
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
        """Remove the taint of a node that an operator finds to be healthy."""
        held = node.standing.quarantine
        if held is None or held.at_s != stay_s or node.is_bad:
            return
        self.pool.touch(node)
        self.pool.tally.count("overruled")
        node.standing = replace(transition.released_by_operator(node.standing, self.pool.now_s), busy=True)
        self.pool.tally.ended(node, self.pool.now_s)

    def remedy_if_empty(self, node: Node) -> None:
        """Begin the reset, reboot or repair of a node that needs one, if it is out and empty."""
        wanted = [each for each in node.signs.values() if each.lasting]
        if not wanted or node.standing.busy or not self.is_tainted(node) or node.name in self._remedies:
            return
        action = max((each.action for each in wanted), key=list(REMEDY_S).index)
        self._remedies[node.name] = action
        is_slow = any(each.key.startswith(BAD_BATCH) for each in wanted)
        took_s = (BAD_BATCH_S if is_slow else REMEDY_S[action]) * self.chance.uniform(0.5, 2.0)
        self.pool.after(took_s, partial(self._remedied, node, action))

    def _remedied(self, node: Node, action: str) -> None:
        """End the faults that this remedy can end; the agent clears its findings `HOLD_S` later."""
        del self._remedies[node.name]
        self.pool.touch(node)
        if action != "reset_gpu":
            node.booted(self.pool.now_s)
        for sign in [each for each in node.signs.values() if each.lasting]:
            if list(REMEDY_S).index(sign.action) > list(REMEDY_S).index(action):
                continue
            was_true = sign.key in node.truths
            if sign.action == "replace":
                node.exchanged(sign.device)
            self.heal(node, sign.key)
            self.remedy_seen(node, sign.key)
            if was_true and self.chance.random() < (COMES_BACK_LEMON if node.lemon else COMES_BACK):
                self.pool.after(self.chance.expovariate(1 / (2 * DAY_S)), partial(self._again, sign, node))
        self.remedy_if_empty(node)

    def answer(self, node: Node) -> None:
        """Have an operator repair a node after an alert, if it is still in service then."""
        if node.name not in self._answering:
            self._answering.add(node.name)
            self.pool.after(self.chance.uniform(1, 8) * HOUR_S, partial(self._repair_in_service, node))

    def _repair_in_service(self, node: Node) -> None:
        self._answering.discard(node.name)
        wanted = [each for each in node.signs.values() if each.lasting]
        if not wanted or self.is_tainted(node):
            return
        self.pool.touch(node)
        node.booted(self.pool.now_s)
        for sign in wanted:
            if sign.action == "replace":
                node.exchanged(sign.device)
            self.heal(node, sign.key)
            self.remedy_seen(node, sign.key)

    def remedy_seen(self, node: Node, key: str) -> None:
        """Let the agent clear the finding without another remedy, `HOLD_S` later."""
        node.found(replace(node.signs[key], lasting=False), self.pool.now_s)
        self.pool.after(HOLD_S, partial(self.cleared, node, key))

    def heal(self, node: Node, key: str) -> None:
        """End the fault `key`; its finding remains until the agent clears it."""
        self.pool.tally.account(node, self.pool.now_s)
        node.truths.discard(key)


LEMON_RATE = 8.0  # how many times as many faults a lemon has
FLAP_EVERY_S = 4 * HOUR_S  # mean time between a sensor's false alarms during an episode
FLAP_S = 90.0  # mean duration of a false alarm, without the time that the agent takes to clear it
FLAP_STAYS = 0.1  # the share of false alarms that only a reset ends


class NodeEvents:
    """Schedules the events of single nodes: faults, maintenance, false alarms and silent agents.

    No event begins after `until_s`.
    """

    def __init__(self, pool: Pool, seed: int, until_s: float) -> None:
        self.pool, self.until_s = pool, until_s
        self.chance = random.Random(seed)
        self._serial = 0
        self._cases: dict[str, Case] = {}  # by key of the fault
        self.people = People(pool, self.chance, self._again)
        self.people.cleared = self._clear

    # -- schedules

    def faults(self, faults: list[FaultRate]) -> None:
        """Schedule each kind of fault at its rate, with more of them on lemons."""
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
        """Schedule episodes of some days during which a sensor of a healthy node is occasionally wrong."""
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
        """Schedule when agents of healthy nodes fall silent."""
        for _ in range(times):
            node = self.chance.choice(self.pool.nodes)
            at_s = self.chance.uniform(0, self.until_s)
            self.pool.at(at_s, partial(self.silence, node, self.chance.expovariate(1 / mean_s)))

    # -- events

    def strike(self, fault: FaultRate, node: Node) -> None:
        {
            "degraded": self._degraded,
            "passing": self._passing,
            "lasting": self._lasting,
            "dead": self._dead,
            "panic": self._panic,
            "maintenance": self._maintenance,
        }[fault.kind](fault, node)

    def _degraded(self, fault: FaultRate, node: Node) -> None:
        key = self._key(fault.component)
        self.pool.touch(node)
        node.found(Sign(key, "degraded", fault.action, fault.sources, self.pool.now_s), self.pool.now_s)
        self.pool.after(
            self.chance.expovariate(1 / fault.lasts_s) + fault.clears_s, partial(self._clear, node, key)
        )

    def _passing(self, fault: FaultRate, node: Node) -> None:
        self.hurt(fault, node, self.chance.expovariate(1 / fault.lasts_s))

    def hurt(self, fault: FaultRate, node: Node, lasts_s: float) -> None:
        """Begin a fault that ends after `lasts_s` without a remedy."""
        key = self._truth(fault, node)
        if lasts_s > fault.delay_s:
            self.pool.after(fault.delay_s, partial(self._report, fault, node, key))
            self.pool.after(lasts_s + fault.clears_s, partial(self._clear, node, key))
        self.pool.after(lasts_s, partial(self.people.heal, node, key))

    def _lasting(self, fault: FaultRate, node: Node) -> None:
        key = self._truth(fault, node)
        self.pool.after(
            self.chance.uniform(0.1, 1.0) * fault.delay_s, partial(self._report, fault, node, key)
        )

    def _dead(self, fault: FaultRate, node: Node) -> None:
        self._lose(node, self.chance.expovariate(1 / fault.lasts_s) + HOUR_S)

    def _panic(self, fault: FaultRate, node: Node) -> None:
        self._lose(node, self.chance.uniform(0.5, 1.5) * fault.lasts_s)

    def _maintenance(self, fault: FaultRate, node: Node) -> None:
        """Have an operator cordon the node, and cause a true report, on which the decision must not act."""
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
        node.standing = replace(node.standing, cordoned=False)  # before the agent has cleared the finding

    def flap(self, node: Node, action: str, source: str) -> None:
        """Have one sensor report a false fault, which the agent keeps as a finding for a while."""
        key = self._key(f"false {source}")
        stays = action != "contact_support" and self.chance.random() < FLAP_STAYS
        self.pool.tally.count("false_alarms")
        self.pool.touch(node)
        self._ill(node, Sign(key, "unhealthy", action, (source,), self.pool.now_s, lasting=stays))
        if not stays:
            lasts_s = self.chance.expovariate(1 / FLAP_S) + self.chance.choice((60.0, 600.0))
            self.pool.after(lasts_s, partial(self._clear, node, key))

    def silence(self, node: Node, lasts_s: float) -> None:
        self.pool.tally.count("silent_agents")
        self.pool.touch(node)
        node.hush(self.pool.now_s)
        self.pool.after(lasts_s, partial(self._heard_again, node))

    def cordon(self, node: Node, cordoned: bool) -> None:
        """Have someone cordon or uncordon a node for a reason that no report shows."""
        self.pool.touch(node)
        node.standing = replace(node.standing, cordoned=cordoned)

    def lost(self, node: Node, lasts_s: float) -> None:
        """Cut off a running node from the network."""
        self._lose(node, lasts_s)

    # -- faults and what agents report

    def _key(self, what: str) -> str:
        self._serial += 1
        return f"{what} {self._serial}"

    def _truth(self, fault: FaultRate, node: Node) -> str:
        key = self._key(fault.component)
        self.pool.tally.account(node, self.pool.now_s)
        node.truths.add(key)
        return key

    def _clear(self, node: Node, key: str) -> None:
        self.pool.touch(node)
        node.cleared(key, self.pool.now_s)
        case = self._cases.pop(key, None)
        if case is not None:
            self.pool.tally.passed(case, self.pool.now_s)

    def _ill(self, node: Node, sign: Sign) -> None:
        node.found(sign, self.pool.now_s)
        self.people.remedy_if_empty(node)

    def _report(self, fault: FaultRate, node: Node, key: str) -> None:
        if key not in node.truths:
            return
        self.pool.touch(node)
        now_s, policy = self.pool.now_s, self.pool.policy
        lasting = fault.kind == "lasting"
        gpu = node.gpus[int(key.rpartition(" ")[2]) % GPUS] if lasting else ""
        sign = Sign(key, "unhealthy", fault.action, fault.sources, now_s, fault.driver, lasting, gpu)
        sure = fault.driver or len(origins_of(fault.sources)) > 1
        wait_s = policy.confirm_s if sure else policy.confirm_alone_s
        case = Case(node.name, fault.component, sure, now_s, now_s + wait_s)
        if node.cut_off:
            case.held = SILENT
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
        """Begin the same fault again, after a remedy that did not help."""
        again = FaultRate(
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


LEAF = FaultRate("", "leaf_switch", "passing", "contact_support", ("sysfs",), False, 240.0, 1.0, 600.0, 0.0)
HEAT = FaultRate("", "cooling", "passing", "contact_support", ("nvml_poll",), False, 60.0, 1.0, 120.0, 0.0)
BATCH = FaultRate("", BAD_BATCH, "lasting", "replace", ("kmsg", "nvml_poll"), True, 10.0, 0.0, 600.0, 0.0)
ROLLOUT_WAVE, WAVE_S, HALTED_AT = 0.05, 600.0, 0.3  # NVSentinel rolls out to 5% of the nodes at a time
LONGEST_S = DAY_S + HOUR_S  # duration of the longest of these events, longer than the policy's `cohort_s`


class PoolEvents:
    """Schedules events that affect many nodes, such as a rack's loss of power, at fixed times of the year."""

    def __init__(self, events: NodeEvents, rack_size: int) -> None:
        self.events, self.rack_size = events, rack_size
        self.pool, self.chance = events.pool, events.chance

    def all_of_them(self, year_s: float) -> None:
        """Schedule each of these events; the roll-outs come last in the year."""
        self.pool.at(0.10 * year_s, partial(self.lose_rack, 3, 3 * HOUR_S))
        self.pool.at(0.15 * year_s, partial(self.lose_leaf, 5, 3 * HOUR_S))
        self.pool.at(0.20 * year_s, partial(self.go_blind, 0.4, 1200.0))
        self.pool.at(0.25 * year_s, partial(self.overheat, 0.15, 6 * HOUR_S))
        self.pool.at(0.30 * year_s, partial(self.wear_out, 0.125, 0.02 * year_s))
        self.pool.at(0.60 * year_s, partial(self.roll_out_at_once, 2 * HOUR_S))
        self.pool.at(0.75 * year_s, partial(self.roll_out_in_waves, 8 * HOUR_S))
        self.pool.at(0.90 * year_s, partial(self.roll_out_at_once, LONGEST_S))

    def _rack(self, number: int) -> list[Node]:
        racks = -(-len(self.pool.nodes) // self.rack_size)
        at = number % racks * self.rack_size
        return self.pool.nodes[at : at + self.rack_size]

    def lose_rack(self, number: int, lasts_s: float) -> None:
        """Cut the power of a rack, so that all of its nodes fall silent within seconds."""
        for node in self._rack(number):
            self.pool.after(self.chance.uniform(0, 5), partial(self.events.lost, node, lasts_s))

    def lose_leaf(self, number: int, lasts_s: float) -> None:
        """Break a rack's InfiniBand switch: its agents still report, and all of them report ports down."""
        for node in self._rack(number):
            self.events.hurt(LEAF, node, lasts_s)

    def overheat(self, share: float, lasts_s: float) -> None:
        """Break the cooling of some nodes, more than may be out."""
        for node in self.chance.sample(self.pool.nodes, int(share * len(self.pool.nodes))):
            self.pool.after(self.chance.uniform(0, HOUR_S), partial(self.events.hurt, HEAT, node, lasts_s))

    def wear_out(self, share: float, within_s: float) -> None:
        """Let a bad batch of nodes fail one by one, more than may be out. Parts arrive after 4 to 16 days."""
        for node in self.chance.sample(self.pool.nodes, int(share * len(self.pool.nodes))):
            self.pool.after(self.chance.uniform(0, within_s), partial(self.events.strike, BATCH, node))

    def go_blind(self, share: float, lasts_s: float) -> None:
        """Silence a share of all agents."""
        for node in self.chance.sample(self.pool.nodes, int(share * len(self.pool.nodes))):
            self.events.silence(node, lasts_s)

    def roll_out_at_once(self, lasts_s: float) -> None:
        """Roll out an agent that reports every GPU as lost, from two sensors and as the driver's verdict."""
        for node in self.pool.nodes:
            self.pool.after(self.chance.uniform(0, 60), partial(self._upgrade, node, "bad"))
            self.pool.after(lasts_s + self.chance.uniform(0, 60), partial(self._upgrade, node, "mended"))

    def roll_out_in_waves(self, lasts_s: float) -> None:
        """Roll out the same agent to one node, and an hour later in waves, until an operator stops this."""
        order = self.chance.sample(self.pool.nodes, int(HALTED_AT * len(self.pool.nodes)))
        wave = max(1, int(ROLLOUT_WAVE * len(self.pool.nodes)))
        for at, node in enumerate(order):
            delay_s = 0.0 if at == 0 else HOUR_S + (at - 1) // wave * WAVE_S
            self.pool.after(delay_s + self.chance.uniform(0, 60), partial(self._upgrade, node, "waves"))
            self.pool.after(lasts_s + self.chance.uniform(0, 60), partial(self._upgrade, node, "mended"))

    def _upgrade(self, node: Node, version: str) -> None:
        self.pool.touch(node)
        now_s, key = self.pool.now_s, "gpu/0 lost, according to the new agent"
        node.agent = version
        if version == "mended":
            node.cleared(key, now_s)
        else:
            node.found(Sign(key, "unhealthy", "reset_gpu", ("kmsg", "nvml_events"), now_s, True, True), now_s)
