"""What befalls many nodes at once in the simulated year: a rack, a switch, a roll-out of a bad agent."""

from __future__ import annotations

from functools import partial

from bench.fault_mixes import Fault
from bench.yearfaults import Befalls
from bench.yearnode import DAY_S, HOUR_S, Node, Sign
from bench.yearpeople import BATCH as BATCH_NAME

LEAF = Fault("", "leaf_switch", "passing", "contact_support", ("sysfs",), False, 240.0, 1.0, 600.0, 0.0)
HEAT = Fault("", "cooling", "passing", "contact_support", ("nvml_poll",), False, 60.0, 1.0, 120.0, 0.0)
BATCH = Fault("", BATCH_NAME, "lasting", "replace", ("kmsg", "nvml_poll"), True, 10.0, 0.0, 600.0, 0.0)
ROLLOUT_WAVE, WAVE_S, HALTED_AT = 0.05, 600.0, 0.3  # NVSentinel rolls out by 5 %
LONGEST_S = DAY_S + HOUR_S  # of all of them: longer than the policy's `cohort_s`


class Crowds:
    """Puts them into a year of `befalls`; each comes at a fixed share of it."""

    def __init__(self, befalls: Befalls, rack_size: int) -> None:
        self.befalls, self.rack_size = befalls, rack_size
        self.pool, self.chance = befalls.pool, befalls.chance

    def all_of_them(self, year_s: float) -> None:
        """Have each of them happen once, the roll-outs last."""
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
        """Its power goes: all of it falls silent within seconds."""
        for node in self._rack(number):
            self.pool.after(self.chance.uniform(0, 5), partial(self.befalls.lost, node, lasts_s))

    def lose_leaf(self, number: int, lasts_s: float) -> None:
        """Its InfiniBand switch goes: the agents can still be heard, and all say: ports down."""
        for node in self._rack(number):
            self.befalls.hurt(LEAF, node, lasts_s)

    def overheat(self, share: float, lasts_s: float) -> None:
        """Cooling fails for more nodes than may be out."""
        for node in self.chance.sample(self.pool.nodes, int(share * len(self.pool.nodes))):
            self.pool.after(self.chance.uniform(0, HOUR_S), partial(self.befalls.hurt, HEAT, node, lasts_s))

    def wear_out(self, share: float, within_s: float) -> None:
        """One by one a bad batch fails, in all more than may be out, and parts take weeks to come."""
        for node in self.chance.sample(self.pool.nodes, int(share * len(self.pool.nodes))):
            self.pool.after(self.chance.uniform(0, within_s), partial(self.befalls.strike, BATCH, node))

    def go_blind(self, share: float, lasts_s: float) -> None:
        """Nothing is heard of a part of all agents."""
        for node in self.chance.sample(self.pool.nodes, int(share * len(self.pool.nodes))):
            self.befalls.silence(node, lasts_s)

    def roll_out_at_once(self, lasts_s: float) -> None:
        """A new agent calls every GPU lost: with two sensors, and in the driver's name."""
        for node in self.pool.nodes:
            self.pool.after(self.chance.uniform(0, 60), partial(self._upgrade, node, "bad"))
            self.pool.after(lasts_s + self.chance.uniform(0, 60), partial(self._upgrade, node, "mended"))

    def roll_out_in_waves(self, lasts_s: float) -> None:
        """The same, first on one node for an hour, then wave by wave until somebody stops it."""
        order = self.chance.sample(self.pool.nodes, int(HALTED_AT * len(self.pool.nodes)))
        wave = max(1, int(ROLLOUT_WAVE * len(self.pool.nodes)))
        for at, node in enumerate(order):
            delay_s = 0.0 if at == 0 else HOUR_S + (at - 1) // wave * WAVE_S
            self.pool.after(delay_s + self.chance.uniform(0, 60), partial(self._upgrade, node, "waves"))
            self.pool.after(lasts_s + self.chance.uniform(0, 60), partial(self._upgrade, node, "mended"))

    def _upgrade(self, node: Node, version: str) -> None:
        self.pool.touch(node)
        now_s, key = self.pool.now_s, "gpu/0 lost, says the new agent"
        node.agent = version
        if version == "mended":
            node.cleared(key, now_s)
        else:
            node.found(Sign(key, "unhealthy", "reset_gpu", ("kmsg", "nvml_events"), now_s, True, True), now_s)
