"""Simulate a year of 2,000 nodes: which nodes are taken out and how soon, and which are not.

The real decision (`supervisor.quarantine`) runs on a simulated pool. Faults occur at the rates published by
the authors of Llama 3 and ByteRobust, and more often on some nodes. The simulation also includes sensors that
are wrong briefly or until a reset, agents that fall silent, a rack without power, a failed leaf switch,
failed cooling, a bad batch of nodes whose spare parts arrive late, maintenance by operators, and operators
who overrule the decision. New versions of the agent, rolled out to all nodes or in waves, report every GPU as
lost and claim that this is the driver's verdict. Every node in service runs a job, so an unnecessary drain
always costs a job its work.

The decision sees only the nodes' reports, taints and cordons. The simulation and the figures below also know
which faults are real. Every decision is checked: it must not act on a node whose agent is silent, against an
operator's waiver, on a node that an operator has cordoned, or beyond what the breaker allows. Each hold must
have an end or be an alert. Pools of 1 to 20 nodes are simulated as well (`small_pools`).

With --joined, fewer nodes are simulated, but each with a real agent that reads a simulated machine's sensors
and kernel log (`joined`).
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.harness import results
from bench.harness.console import make_parser, say
from bench.quarantine import fault_mixes, report, small_pools
from bench.quarantine.joined import joined
from bench.quarantine.scenarios import NodeEvents, PoolEvents
from bench.quarantine.simulated_node import DAY_S, REPORT_S, Node
from bench.quarantine.simulated_pool import Pool
from bench.text import all_met, table
from supervisor.quarantine.model import NodePolicy

NODES = 2000
LEMONS = 0.01  # the share of nodes with more frequent faults
SETTLE_S = 150 * DAY_S  # time after the last fault for the longest repair and the longest proof of health


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    if options.joined:
        return joined.main(options)
    found = results.begin("quarantine")
    policy = NodePolicy(max_share=options.max_share)
    began_s = time.monotonic()
    pool = simulate(options, policy)
    took_s = time.monotonic() - began_s
    small = [small_pools.simulate(each, NodePolicy(), options.seed + each) for each in small_pools.SIZES]
    found["options"] = vars(options)
    found["policy"] = {**asdict(policy), "drain_for": sorted(policy.drain_for)}
    return _end(found, pool, small, took_s, options)


def simulate(options: argparse.Namespace, policy: NodePolicy) -> Pool:
    """Simulate the days with faults, and then the time until all nodes are repaired and can be released."""
    chance = random.Random(options.seed)
    nodes = [
        Node(
            f"n{at:05d}", f"r{at // options.rack:03d}", chance.uniform(0, REPORT_S), chance.random() < LEMONS
        )
        for at in range(options.nodes)
    ]
    pool = Pool(nodes, policy, options.seed + 1)
    until_s = options.days * DAY_S
    years = until_s / fault_mixes.YEAR_S
    events = NodeEvents(pool, options.seed + 2, until_s)
    events.faults(fault_mixes.load(tuple(options.mix)))
    events.flapping(int(options.flapping * years))
    events.silences(int(options.silences * years))
    if not options.no_crowds:
        PoolEvents(events, options.rack).all_of_them(until_s)
    pool.run(until_s + SETTLE_S)
    return pool


def _end(
    found: dict[str, Any], pool: Pool, small: Sequence[Pool], took_s: float, options: argparse.Namespace
) -> int:
    tally = pool.tally
    say(f"{options.days} days of {tally.nodes} nodes: {pool.decisions} decisions in {took_s:.1f} s\n")
    rows, figures = report.table_of(tally)
    say(table(("bad nodes, from the first report to out", "faults", "p50", "p99", "worst", "limit"), rows))
    facts = {**report.facts(pool, options.days), **small_pools.facts(small)}
    say()
    say(table(("what", ""), [(name, report.shown(value)) for name, value in facts.items()]))
    verdicts = [*report.judge(pool), *small_pools.judge(small)]
    say()
    for verdict in verdicts:
        say(verdict.line)
    found.update(
        took_s=took_s,
        decisions=pool.decisions,
        latencies=figures,
        facts=facts,
        evicted=tally.evicted,
        verdicts=[asdict(each) for each in verdicts],
    )
    results.write(found)
    return 1 if options.strict and not all_met(verdicts) else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser(
        "quarantine", __doc__ or "", "quick: python -m bench quarantine --nodes 200 --days 60"
    )
    add = parser.add_argument
    add("--joined", action="store_true", help="give each node a real agent on a simulated machine")
    sweep = "with --joined: skip the sensitivity sweep, which halves and doubles each assumption"
    add("--no-sweep", action="store_true", help=sweep)
    add("--nodes", type=int, metavar="N",
        help=f"number of nodes in the pool; default {NODES}, with --joined {joined.NODES}")  # fmt: skip
    add("--days", type=float, default=365.0, metavar="D", help="number of days with faults")
    add("--rack", type=int, default=32, metavar="N", help="number of nodes per rack")
    mixes = sorted(fault_mixes.FLEETS)
    add("--mix", nargs="+", choices=mixes, default=mixes, metavar="MIX",
        help=f"fault mixes, used together: {', '.join(mixes)}")  # fmt: skip
    add("--flapping", type=int, default=60, metavar="N", help="episodes of a faulty sensor per year")
    add(
        "--silences",
        type=int,
        default=500,
        metavar="N",
        help="agents that fall silent per year",
    )
    add(
        "--max-share",
        type=float,
        default=NodePolicy().max_share,
        metavar="P",
        help="share of the nodes that the breaker allows to be out",
    )
    add("--no-crowds", action="store_true", help="omit the events that affect many nodes")
    add("--seed", type=int, default=0, help="seed of all random choices")
    add("--strict", action="store_true", help="exit with code 1 if a target is missed")
    options = parser.parse_args(argv)
    if options.nodes is None:
        options.nodes = joined.NODES if options.joined else NODES
    if options.nodes < 1 or options.rack < 1 or options.days <= 0:
        parser.error("--nodes, --rack: expected 1 or more; --days: more than 0")
    if not 0 <= options.max_share <= 1:
        parser.error(f"--max-share: {options.max_share}; expected 0 to 1")
    return options
