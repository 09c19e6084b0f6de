"""The events of the joined year: faults, false alarms, restarts of agents, events that affect many nodes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from bench.quarantine.fault_mixes import YEAR_S, FaultRate
from bench.quarantine.joined import faults
from bench.quarantine.joined.faults import KINDS, Kind, NodeFault
from bench.quarantine.joined.ground_truth import Truth
from bench.quarantine.joined.guesses import HOUR_S, Guesses
from bench.quarantine.joined.machine import SimulatedMachine
from bench.quarantine.joined.node import JoinedNode
from bench.quarantine.simulated_pool import Pool
from nodeagent.nvml.gpu_roster import LOST, OK

BOOT_S = 300.0  # how long a reboot takes
RESTART_S, LONG_RESTART_S, LONG_SHARE = 30.0, 900.0, 0.1  # how long a restarting agent is away
PORT_LIES_S = 400.0  # a false reading of a port must last 240 s to matter
FALSE_XID = "NVRM: Xid (PCI:{pci}): {rest}"
TWO_LIARS, DRIVER_BUG = "two witnesses were wrong", "a driver's bug on half of the nodes"
DEAD, PANIC, MAINTENANCE, UNSEEN = "dead", "panic", "maintenance", "none"


class FaultStage:
    """Shows one fault on one machine while the fault is active and not hidden. See `faults.Stage`."""

    def __init__(self, events: Events, node: JoinedNode, fault: NodeFault) -> None:
        self._events, self._node, self._fault = events, node, fault
        self._show = fault.shows
        self.machine: SimulatedMachine = node.machine
        self.chance = events.chance

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self._events.pool.after(delay_s, partial(self._if_shown, call))

    def _if_shown(self, call: Callable[[], None]) -> None:
        fault = self._fault
        if fault.is_active and not fault.is_dormant and fault.shows == self._show and not self._node.is_down:
            call()

    def log(self, text: str) -> None:
        self._node.daemon.log(self._events.pool.now_s, text)
        self.changed()

    def changed(self) -> None:
        self._events.look(self._node)


class Events:
    """Schedules what happens to the nodes. Nothing new begins after `until_s`."""

    def __init__(
        self, pool: Pool, nodes: Sequence[JoinedNode], guesses: Guesses, seed: int, until_s: float
    ) -> None:
        self.pool, self.nodes, self.guesses, self.until_s = pool, nodes, guesses, until_s
        self.chance = random.Random(seed)
        self.truth = Truth(pool)
        self.booted: Callable[[JoinedNode], None] = lambda _: None
        self._wakes: dict[str, float] = {}
        for node in nodes:
            node.moved = self._moved
            self._schedule(node)

    # -- the agents

    def look(self, node: JoinedNode) -> None:
        """Have a node's agent take readings now, and again when the next readings are due."""
        node.look(self.pool.now_s)
        self._schedule(node)

    def _moved(self, node: JoinedNode) -> None:
        self.pool.touch(node)
        self.truth.examine(node)
        self._schedule(node)

    def _schedule(self, node: JoinedNode) -> None:
        wake_s = max(node.daemon.wake_s, self.pool.now_s + 0.01)
        if wake_s < self._wakes.get(node.name, float("inf")):
            self._wakes[node.name] = wake_s
            self.pool.at(wake_s, partial(self._wake, node, wake_s))

    def _wake(self, node: JoinedNode, wake_s: float) -> None:
        if self._wakes.get(node.name) == wake_s:
            del self._wakes[node.name]
            self.look(node)

    def stop(self, node: JoinedNode) -> None:
        self.pool.touch(node)
        node.stop(self.pool.now_s)

    def start(self, node: JoinedNode) -> None:
        self.pool.touch(node)
        node.start(self.pool.now_s)
        self._schedule(node)

    # -- schedules

    def _random_times(self, per_year: float) -> list[float]:
        found: list[float] = []
        at_s = 0.0
        while per_year > 0 and (at_s := at_s + self.chance.expovariate(per_year / YEAR_S)) < self.until_s:
            found.append(at_s)
        return found

    def schedule_faults(self, rates: Sequence[FaultRate]) -> None:
        """Schedule each kind of fault at its published rate, with more of them on lemons."""
        weights = [self.guesses.lemon_factor if node.lemon else 1.0 for node in self.nodes]
        for rate in rates:
            if rate.kind == UNSEEN:
                continue
            for at_s in self._random_times(rate.per_node_year * len(self.nodes)):
                [node] = self.chance.choices(self.nodes, weights)
                self.pool.at(at_s, partial(self.strike, rate, node))

    def schedule_agents(self) -> None:
        """Schedule restarts of agents, lost reports and false alarms."""
        guesses, count = self.guesses, len(self.nodes)
        for per_year, event in (
            (guesses.restarts, self._restart),
            (guesses.silences, self._silence),
            (guesses.false_alarms, self._lie_once),
            (guesses.lies, self._lie_twice),
        ):
            for at_s in self._random_times(per_year * count):
                self.pool.at(at_s, partial(event, self.chance.choice(self.nodes)))

    def schedule_crowds(self, rack: int) -> None:
        """Schedule the events that affect many nodes."""
        year_s, nodes = self.until_s, self.nodes
        first = nodes[:rack]
        self.pool.at(0.10 * year_s, partial(self._each, first, 5.0, lambda n: self.lose(n, 3 * HOUR_S)))
        self.pool.at(
            0.15 * year_s, partial(self._each, first, 5.0, partial(self._pass, "leaf_switch", 3 * HOUR_S))
        )
        hot = self.chance.sample(nodes, int(0.15 * len(nodes)))
        self.pool.at(
            0.25 * year_s, partial(self._each, hot, HOUR_S, partial(self._pass, "cooling", 6 * HOUR_S))
        )
        blind = self.chance.sample(nodes, int(0.4 * len(nodes)))
        self.pool.at(0.35 * year_s, partial(self._each, blind, 60.0, self._silence))
        half = self.chance.sample(nodes, len(nodes) // 2)
        self.pool.at(0.60 * year_s, partial(self._each, half, HOUR_S, self._driver_bug))

    def _each(
        self, nodes: Sequence[JoinedNode], within_s: float, event: Callable[[JoinedNode], None]
    ) -> None:
        for node in nodes:
            self.pool.after(self.chance.uniform(0, within_s), partial(event, node))

    # -- faults

    def strike(self, rate: FaultRate, node: JoinedNode) -> None:
        """Begin a fault of a published kind, unless the node is down."""
        if node.is_down:
            self.pool.tally.count("on_nodes_that_are_down")
        elif rate.kind == DEAD:
            self.lose(node, self.chance.expovariate(1 / rate.lasts_s) + HOUR_S)
        elif rate.kind == PANIC:
            self.lose(node, self.chance.uniform(0.5, 1.5) * rate.lasts_s)
        elif rate.kind == MAINTENANCE:
            self._maintain(node, self.chance.expovariate(1 / rate.lasts_s))
        else:
            kind = KINDS[rate.component]
            lasts_s = 0.0 if kind.remedy else self.chance.expovariate(1 / rate.lasts_s)
            self._begin(node, kind, lasts_s)

    def _pass(self, component: str, lasts_s: float, node: JoinedNode) -> None:
        if not node.is_down:
            self._begin(node, KINDS[component], lasts_s)

    def _begin(self, node: JoinedNode, kind: Kind, lasts_s: float) -> None:
        fault = faults.make(kind, node.machine, self.chance, self.guesses)
        if any(each.entity == fault.entity for each in node.faults) or fault.entity in node.false:
            self.pool.tally.count("on_faulty_parts")
            return
        self.again(node, fault)
        if not kind.remedy:
            self.pool.after(lasts_s, partial(self.pass_by, node, fault))

    def again(self, node: JoinedNode, fault: NodeFault) -> None:
        """Begin a fault, or show the symptoms of a hidden fault again."""
        if fault not in node.faults:
            if any(each.entity == fault.entity for each in node.faults):
                return
            node.faults.append(fault)
        elif not fault.is_dormant or node.is_down:
            return
        fault.is_active, fault.is_dormant = True, False
        fault.shows += 1
        self.truth.began(node, fault)
        fault.kind.show(FaultStage(self, node, fault), fault)
        self.look(node)

    def pass_by(self, node: JoinedNode, fault: NodeFault) -> None:
        """End a fault that needs no remedy."""
        if fault in node.faults:
            self.truth.ended(node, fault)
            fault.kind.hide(node.machine, fault)
            self.look(node)

    def lose(self, node: JoinedNode, lasts_s: float) -> None:
        """Take a node down as if it had died or lost power; it boots after `lasts_s`."""
        if node.is_down:
            return
        self.pool.tally.count("lost_nodes")
        self.pool.touch(node)
        node.truths.add("lost")
        self.take_down(node)
        self.pool.after(lasts_s, partial(self.bring_up, node))

    def take_down(self, node: JoinedNode) -> None:
        self.stop(node)
        node.is_down = True
        node.standing = replace(node.standing, ready=False, busy=False)

    def bring_up(self, node: JoinedNode) -> None:
        self.pool.touch(node)
        node.boot(self.pool.now_s)
        node.truths.discard("lost")
        node.is_down = False
        node.false.clear()
        self.booted(node)  # before the agent starts, because it may see at once that a fault has ended
        self.start(node)
        held = node.standing.quarantine
        node.standing = replace(node.standing, ready=True, busy=held is None and not node.standing.cordoned)

    def _maintain(self, node: JoinedNode, lasts_s: float) -> None:
        """Have an operator cordon the node, reboot it, and hand it back."""
        if node.standing.cordoned:
            return
        self.pool.touch(node)
        node.standing = replace(node.standing, cordoned=True, busy=False)
        self.pool.after(lasts_s, partial(self._hand_back, node))
        self.lose(node, max(BOOT_S, 0.5 * lasts_s))

    def _hand_back(self, node: JoinedNode) -> None:
        self.pool.touch(node)
        busy = not node.is_down and node.standing.quarantine is None
        node.standing = replace(node.standing, cordoned=False, busy=busy)

    # -- agents

    def _restart(self, node: JoinedNode) -> None:
        if node.daemon.runs:
            self.stop(node)
            long = self.chance.random() < LONG_SHARE
            self.pool.after(LONG_RESTART_S if long else RESTART_S, partial(self.start, node))

    def _silence(self, node: JoinedNode) -> None:
        self.pool.tally.count("silent_agents")
        self.pool.touch(node)
        node.hush(self.pool.now_s)
        self.pool.after(self.chance.expovariate(1 / HOUR_S), partial(self._heard_again, node))

    def _heard_again(self, node: JoinedNode) -> None:
        self.pool.touch(node)
        node.speak(self.pool.now_s)

    # -- false reports

    def _is_sound(self, node: JoinedNode) -> bool:
        return not (node.is_down or node.faults or node.false) and node.daemon.runs

    def _lie_once(self, node: JoinedNode) -> None:
        """Make one sensor read a false value, or log a false line."""
        if not self._is_sound(node):
            return
        self.pool.tally.count("false_alarms")
        which = self.chance.choice(("gpu", "port", "xid 119", "xid 79"))
        lasts_s = self.chance.expovariate(1 / self.guesses.false_s)
        at = self.chance.randrange(len(node.machine.gpus))
        gpu, port = node.machine.gpus[at], node.machine.ports[at]
        entity = port.entity if which == "port" else gpu.entity
        node.false[entity] = f"one sensor was wrong ({which})"
        if which == "gpu":
            gpu.state = LOST
            self.pool.after(lasts_s, partial(self._honest, node, entity))
        elif which == "port":
            port.down = True
            self.pool.after(
                lasts_s + self.chance.choice((0.0, PORT_LIES_S)), partial(self._honest, node, entity)
            )
        else:
            self._false_xid(node, gpu.pci, int(which.partition(" ")[2]))
        self.look(node)

    def _false_xid(self, node: JoinedNode, pci: str, code: int) -> None:
        place = pci.rpartition(".")[0]
        rest = f"{code}, {faults.XID_TEXTS[code]}"
        node.daemon.log(self.pool.now_s, FALSE_XID.format(pci=place, rest=rest))

    def _honest(self, node: JoinedNode, entity: str) -> None:
        if node.false.pop(entity, ""):
            for gpu in node.machine.gpus:
                if gpu.entity == entity:
                    gpu.state = OK
            for port in node.machine.ports:
                if port.entity == entity:
                    port.down = False
            self.look(node)

    def cleared(self, node: JoinedNode, entity: str) -> None:
        """Note that an operator has cleared an entity, which ends a false line but not a false reading."""
        misread = [gpu.entity for gpu in node.machine.gpus if gpu.state != OK or gpu.recovery]
        misread += [port.entity for port in node.machine.ports if port.down]
        if entity not in misread:
            node.false.pop(entity, None)

    def _lie_twice(self, node: JoinedNode, why: str = TWO_LIARS) -> None:
        """Make the log and the driver's state agree on a fault that does not exist; a boot ends this."""
        if not self._is_sound(node):
            return
        self.pool.tally.count("false_pairs")
        gpu = self.chance.choice(node.machine.gpus)
        node.false[gpu.entity] = why
        self._false_xid(node, gpu.pci, 79)
        gpu.recovery = 2
        self.look(node)

    def _driver_bug(self, node: JoinedNode) -> None:
        """Make a new driver report a fault that does not exist, until it is rolled back hours later."""
        self._lie_twice(node, DRIVER_BUG)
        self.pool.after(self.chance.uniform(2, 4) * HOUR_S, partial(self._roll_back, node))

    def _roll_back(self, node: JoinedNode) -> None:
        if not node.is_down:
            self.pool.touch(node)
            node.truths.add("lost")
            self.take_down(node)
            self.pool.after(BOOT_S, partial(self.bring_up, node))


def cause_of(node: JoinedNode) -> str:
    """Return why a healthy node was reported as unhealthy; "" if the simulation knows no reason."""
    bad = [entity for entity in node.unhealthy() if entity in node.false]
    return node.false[bad[0]] if bad else ""
