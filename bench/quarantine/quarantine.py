"""A simulated year of 2,000 nodes: who is taken out, how soon, and who is not.

The real decision (`supervisor.quarantine`) runs on a simulated pool. Faults come at the rates that Llama 3's
and ByteRobust's authors have published, to some nodes more often. Beside them: sensors that are wrong for a
moment or until a reset, agents that fall silent, a rack without power, a leaf switch, a failed cooling, a bad
batch for which there are no parts, maintenance by others, operators who overrule, and new agents that call
every GPU lost in the driver's name, rolled out at once or in waves. Every node that serves runs a job, so
that a drain without need always costs somebody his work.

The decision is given the nodes' reports and what stands on them. What is true of a node only the world and
the figures below know. That nothing is done about a node of which nothing is heard, against an operator's
word, to a node that somebody else has cordoned, or beyond what the breaker allows, is asserted at every
decision.
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
from bench.quarantine import fault_mixes, report
from bench.quarantine.scenarios import Befalls, Crowds
from bench.quarantine.simulated_node import DAY_S, REPORT_S, Node
from bench.quarantine.simulated_pool import Pool
from bench.text import all_met, table
from supervisor.nodepolicy import NodePolicy

LEMONS = 0.01
SETTLE_S = 150 * DAY_S  # after the last fault: the longest repair, and the longest proof of health


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    found = results.begin("quarantine")
    policy = NodePolicy(max_share=options.max_share)
    began_s = time.monotonic()
    pool = simulate(options, policy)
    took_s = time.monotonic() - began_s
    found["options"] = vars(options)
    found["policy"] = {**asdict(policy), "drain_for": sorted(policy.drain_for)}
    return _end(found, pool, took_s, options)


def simulate(options: argparse.Namespace, policy: NodePolicy) -> Pool:
    """Let the days pass, then wait until all is repaired and every node has had time to come back."""
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
    befalls = Befalls(pool, options.seed + 2, until_s)
    befalls.faults(fault_mixes.load(tuple(options.mix)))
    befalls.flapping(int(options.flapping * years))
    befalls.silences(int(options.silences * years))
    if not options.no_crowds:
        Crowds(befalls, options.rack).all_of_them(until_s)
    pool.run(until_s + SETTLE_S)
    return pool


def _end(found: dict[str, Any], pool: Pool, took_s: float, options: argparse.Namespace) -> int:
    tally = pool.tally
    say(f"{options.days} days of {tally.nodes} nodes: {pool.decisions} decisions in {took_s:.1f} s\n")
    rows, figures = report.table_of(tally)
    say(table(("bad nodes, from the first report to out", "faults", "p50", "p99", "worst", "limit"), rows))
    facts = report.facts(pool, options.days)
    say()
    say(table(("what", ""), [(name, report.shown(value)) for name, value in facts.items()]))
    verdicts = report.judge(pool)
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
    add("--nodes", type=int, default=2000, metavar="N", help="in the pool")
    add("--days", type=float, default=365.0, metavar="D", help="in which faults come")
    add("--rack", type=int, default=32, metavar="N", help="nodes of a rack")
    mixes = sorted(fault_mixes.FLEETS)
    add("--mix", nargs="+", choices=mixes, default=mixes, metavar="MIX",
        help=f"whose faults, all at once: {', '.join(mixes)}")  # fmt: skip
    add("--flapping", type=int, default=60, metavar="N", help="bad fortnights of a sensor, a year")
    add("--silences", type=int, default=500, metavar="N", help="agents that fall silent, a year")
    add("--max-share", type=float, default=NodePolicy().max_share, metavar="P", help="of the breaker")
    add("--no-crowds", action="store_true", help="only what befalls single nodes")
    add("--seed", type=int, default=0, help="of everything")
    add("--strict", action="store_true", help="exit code 1 when a target is missed")
    options = parser.parse_args(argv)
    if options.nodes < 1 or options.rack < 1 or options.days <= 0:
        parser.error("--nodes, --rack: expected 1 or more; --days: more than 0")
    if not 0 <= options.max_share <= 1:
        parser.error(f"--max-share: {options.max_share}; expected 0 to 1")
    return options
