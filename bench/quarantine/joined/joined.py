"""Simulate a year in which each node has a real agent: `bench quarantine --joined`.

Each node has a real agent, which gets the raw sensor readings and kernel lines of a simulated machine. Its
report goes through the real reader into the real decision. So this simulation tests what the one without
--joined assumes: that findings last until their remedy, which witnesses there are, and with what delay they
report. Remedies may be wrong, late or unnoticed, and the same fault may return on the same part.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from bench.harness import results
from bench.harness.console import say
from bench.quarantine import fault_mixes, report
from bench.quarantine.fault_mixes import FaultRate
from bench.quarantine.joined import judge
from bench.quarantine.joined.events import Events
from bench.quarantine.joined.guesses import ABOUT, Guesses, variations
from bench.quarantine.joined.judge import Year
from bench.quarantine.joined.node import JoinedNode
from bench.quarantine.joined.repairs import Repairs
from bench.quarantine.simulated_node import REPORT_S
from bench.quarantine.simulated_pool import Pool
from bench.text import Verdict, all_met, table
from supervisor.quarantine.model import NodePolicy

DAY_S = 86400.0
LEMONS = 0.01  # besides the first node, which is always one
NODES = 200  # one core simulates this many in a few minutes, including the sweep, even on a busy machine
SETTLE_S = 120 * DAY_S
SWEEP_NODES, SWEEP_DAYS = 40, 40.0
SWEEP_TIMES = 20  # how many times as many faults need a remedy in the sweep, because its runs are short


def simulate(
    options: argparse.Namespace,
    policy: NodePolicy,
    guesses: Guesses,
    rates: Sequence[FaultRate] | None = None,
) -> Year:
    """Simulate the days with faults, and then the time until all nodes are repaired and can be released.

    Args:
        rates: Rates to use instead of the published ones.
    """
    chance = random.Random(options.seed)
    nodes = [
        JoinedNode(
            f"n{at:05d}",
            f"r{at // options.rack:03d}",
            chance.uniform(0, REPORT_S),
            chance.random() < LEMONS or at == 0,
            policy,
        )
        for at in range(options.nodes)
    ]
    pool = Pool([*nodes], policy, options.seed + 1)
    until_s = options.days * DAY_S
    events = Events(pool, nodes, guesses, options.seed + 2, until_s)
    repairs = Repairs(events)
    events.schedule_faults(fault_mixes.load(tuple(options.mix)) if rates is None else rates)
    events.schedule_agents()
    if not options.no_crowds:
        events.schedule_crowds(options.rack)
    pool.run(until_s + SETTLE_S)
    return Year(pool, nodes, events.truth, repairs, options.days)


def main(options: argparse.Namespace) -> int:
    found = results.begin("quarantine-joined")
    policy, guesses = NodePolicy(max_share=options.max_share), Guesses()
    began_s = time.monotonic()
    year = simulate(options, policy, guesses)
    took_s = time.monotonic() - began_s
    tally = year.pool.tally
    say(f"{options.days:g} days of {tally.nodes} nodes, each with a real agent: {took_s:.0f} s\n")
    rows, latencies = report.table_of(tally)
    say(table(("bad nodes, from the first report to out", "faults", "p50", "p99", "worst", "limit"), rows))
    facts = judge.facts(year)
    say()
    say(table(("what", ""), [(name, report.shown(value)) for name, value in facts.items()]))
    verdicts = judge.judge(year)
    swept = [] if options.no_sweep else _sweep(options, policy, guesses)
    _say_guesses(options, guesses, swept)
    if swept:
        bad = [name for name, _, met in swept if not met]
        shown = ", ".join(bad) or f"{len(swept)} of {len(swept)}"
        verdicts.append(Verdict("the same with each guess halved and doubled", shown, not bad))
    say()
    for verdict in verdicts:
        say(verdict.line)
    found.update(
        options=vars(options), guesses=asdict(guesses), took_s=took_s, latencies=latencies, facts=facts,
        evicted=tally.evicted, swept={name: values for name, values, _ in swept},
        verdicts=[asdict(each) for each in verdicts],
    )  # fmt: skip
    results.write(found)
    return 1 if options.strict and not all_met(verdicts) else 0


Swept = list[tuple[str, dict[str, float], bool]]  # the guess, the figures, whether all targets were met


def _sweep(options: argparse.Namespace, policy: NodePolicy, guesses: Guesses) -> Swept:
    """Repeat a shorter run with each guess halved and doubled, without the events that affect many nodes."""
    short: dict[str, Any] = {
        **vars(options),
        "nodes": min(SWEEP_NODES, options.nodes),
        "days": min(SWEEP_DAYS, options.days),
        "no_crowds": True,
    }
    rates = [
        replace(each, per_node_year=each.per_node_year * (SWEEP_TIMES if each.kind == "lasting" else 1))
        for each in fault_mixes.load(tuple(options.mix))
    ]
    swept: Swept = []
    for name, changed in (("none", guesses), *variations(guesses)):
        year = simulate(argparse.Namespace(**short), policy, changed, rates)
        swept.append((name, judge.figures(year), all_met(judge.judge(year))))
    return swept


def _say_guesses(options: argparse.Namespace, guesses: Guesses, swept: Swept) -> None:
    rates = fault_mixes.load(tuple(options.mix))
    rows = [
        (f"{rate.mix}: {rate.component}, faults per node and year", f"{rate.per_node_year:.3g}", "published")
        for rate in rates
        if rate.kind != "none"
    ]
    rows += [(ABOUT[name], f"{value:g}", "guess") for name, value in asdict(guesses).items()]
    say()
    say(table(("rates and guesses", "value", "source"), rows))
    if swept:
        base = swept[0][1]
        say()
        say(
            table(
                (
                    f"with each guess halved and doubled ({len(swept) - 1} short runs)",
                    "default",
                    "least",
                    "most",
                ),
                [
                    (name, f"{base[name]:.3g}", *_range([values[name] for _, values, _ in swept]))
                    for name in base
                ],
            )
        )


def _range(values: list[float]) -> tuple[str, str]:
    return f"{min(values):.3g}", f"{max(values):.3g}"
