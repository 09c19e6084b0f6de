"""A simulated year of pools of 1 to 20 nodes, where rare conditions last for weeks.

In each pool, someone else cordons one node for three weeks. Another node still has an old version of the
agent when it has a fault that two sources report. In larger pools, three nodes flap for a week, and during
that week another node in their rack has a fault of this kind. Faults are far more frequent than in reality.
After an alert, operators repair nodes that Holdfast may not take out, such as the only node of a pool.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

from bench.quarantine.fault_mixes import YEAR_S, FaultRate
from bench.quarantine.report import REACTION_S
from bench.quarantine.scenarios import NodeEvents
from bench.quarantine.simulated_node import DAY_S, HOUR_S, REPORT_S, Node
from bench.quarantine.simulated_pool import Pool
from bench.quarantine.tally import Case
from bench.text import Verdict
from supervisor.quarantine.model import NodePolicy

SIZES = (1, 2, 3, 5, 7, 8, 12, 20)
SURE = FaultRate("", "gpu", "lasting", "reboot_node", ("kmsg", "nvml_poll"), False, 10.0, 0.0, 600.0, 6.0)
DEAD = FaultRate("", "row_remap", "lasting", "replace", ("kmsg", "nvml_poll"), False, 10.0, 0.0, 600.0, 2.0)
ALONE = FaultRate("", "gsp", "lasting", "reset_gpu", ("kmsg",), False, 2.0, 0.0, 600.0, 4.0)
PORT = FaultRate("", "port", "passing", "contact_support", ("sysfs",), False, 240.0, 7200.0, 600.0, 4.0)
SETTLE_S = 40 * DAY_S
FLAP_EVERY_S = 20 * 60.0
FLAPPING = 3


def simulate(size: int, policy: NodePolicy, seed: int, year_s: float = YEAR_S) -> Pool:
    """Simulate one pool until all of its nodes are repaired and can be released."""
    chance = random.Random(seed)
    nodes = [Node(f"n{at:02d}", "r0", chance.uniform(0, REPORT_S), lemon=False) for at in range(size)]
    pool = Pool(nodes, policy, seed + 1)
    events = NodeEvents(pool, seed + 2, year_s)
    pool.alerted = events.people.answer
    events.faults([SURE, DEAD, ALONE, PORT])
    events.silences(size)
    last = nodes[-1]
    for node in nodes[:-1]:
        pool.at(0.20 * year_s, partial(_upgrade, pool, node))
    pool.at(0.22 * year_s, partial(events.strike, SURE, last))
    pool.at(0.25 * year_s, partial(_upgrade, pool, last))
    if size > FLAPPING:
        _flap(pool, events, nodes[:FLAPPING], 0.40 * year_s, 0.42 * year_s)
        pool.at(0.41 * year_s, partial(events.strike, SURE, last))
    pool.at(0.60 * year_s, partial(events.cordon, nodes[0], True))
    pool.at(0.66 * year_s, partial(events.cordon, nodes[0], False))
    pool.run(year_s + SETTLE_S)
    return pool


def _upgrade(pool: Pool, node: Node) -> None:
    pool.touch(node)
    node.agent = "2"


def _flap(pool: Pool, events: NodeEvents, nodes: Sequence[Node], begin_s: float, end_s: float) -> None:
    for node in nodes:
        at_s = begin_s
        while at_s < end_s:
            pool.at(at_s, partial(events.flap, node, "contact_support", "sysfs"))
            at_s += events.chance.expovariate(1 / FLAP_EVERY_S)


def judge(pools: Sequence[Pool]) -> list[Verdict]:
    """Return the verdicts on all pools taken together."""
    policy = pools[0].policy
    cases = [case for pool in pools for case in pool.tally.cases]
    sure = [case for case in cases if case.sure]
    bound_s = policy.alert_s + REACTION_S
    buried = [case for case in sure if _known_after_s(case) > bound_s]
    evicted = sum(len(pool.tally.evicted) for pool in pools)
    forgotten = sum(1 for case in cases if not case.how)
    out = sum(1 for pool in pools for node in pool.nodes if node.standing.quarantine is not None)
    return [
        Verdict(
            f"small pools: every sure fault out, over or an alert within {bound_s / HOUR_S:.1f} h",
            f"{len(sure) - len(buried)} of {len(sure)}",
            not buried,
        ),
        Verdict("small pools: no bad node forgotten", f"{forgotten} left", not forgotten),
        Verdict("small pools: no healthy node evicted", str(evicted), not evicted),
        Verdict("small pools: all healthy nodes back", f"{out} still out", not out),
    ]


def _known_after_s(case: Case) -> float:
    """Return the time from the first report to the fault's end, its node's removal, or an alert."""
    known = [each for each in (case.out_s, case.alerted_s, case.ended_s) if each is not None]
    return min(known, default=float("inf")) - case.reported_s


def facts(pools: Sequence[Pool]) -> dict[str, float]:
    cases = [case for pool in pools for case in pool.tally.cases]
    alerts = [case for case in cases if case.alerted_s is not None]
    return {
        "small pools: faults that an agent reported as unhealthy": len(cases),
        "  taken out": sum(1 for case in cases if case.how == "taint"),
        "  alerts, because the node could not be taken out": len(alerts),
        "  false alarms of single sensors": sum(pool.tally.counts.get("false_alarms", 0) for pool in pools),
    }
