"""Measure what the node agent costs and how fast it is: events, sweeps, rest, a simulated week.

The tests' fake NVML library simulates the GPUs. It answers immediately, so the bench measures only the agent
and not the driver.

  events  time from an event in NVML to the published verdict, for single events, including saves to disk
  sweep   CPU time of one poll of all GPUs with every check due
  rest    CPU time and memory of a real, idle `holdfast node serve`
  week    the evaluator with the shipped policy and every check at its period, in simulated time
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import results
from bench.harness.console import make_parser, say
from bench.nodeagent import idle, simulated_week
from bench.text import Verdict, all_met, at_most, below, percent, seconds, summary, table
from nodeagent.agent.agent import Agent
from nodeagent.agent.saved_state import SavedState
from nodeagent.agent.sensor_threads import FittedSensor
from nodeagent.nvml.driver import NvmlDriver
from nodeagent.nvml.events import NvmlEvents
from nodeagent.policy.loading import load
from nodeagent.sensing.clock import begin
from tests.fakenvml.costs import sweep_cpu_s
from tests.fakenvml.inprocess import faked

GPUS = 8
EVENT_S, SWEEP_S, REST, REST_MB = 0.05, 0.005, 0.005, 60.0
PATIENCE_S = 10.0


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    found = results.begin("nodeagent")
    took_s = events(options.events)
    p99_s = sorted(took_s)[int(len(took_s) * 0.99)]
    latency = summary(took_s)
    sweep_s = sweep_cpu_s(GPUS)
    say(table(("what", "median", "p99", "worst"), [
        ("event to verdict", seconds(latency.median), seconds(p99_s), seconds(latency.worst)),
        (f"CPU of a sweep of {GPUS} GPUs", seconds(sweep_s), "", ""),
    ]))  # fmt: skip
    rest = idle.measure(options.rest)
    say(
        f"at rest for {options.rest:g} s: {percent(rest.cpu, 2)} of a core, {rest.rss_mb:.1f} MB; "
        f"a process that only wakes up equally often, {rest.wakes_per_s:.0f} times per second: "
        f"{percent(rest.sleeper_cpu, 2)}"
    )
    week = simulated_week.measure(options.days, say)
    verdicts = [
        at_most(
            f"an event becomes a verdict in <= {EVENT_S * 1e3:g} ms, p99", p99_s, EVENT_S, seconds(p99_s)
        ),
        at_most(f"a sweep of {GPUS} GPUs <= {SWEEP_S * 1e3:g} ms of CPU", sweep_s, SWEEP_S, seconds(sweep_s)),
        below(f"at rest < {100 * REST:g}% of a core", rest.cpu, REST, percent(rest.cpu, 2)),
        at_most(f"at rest <= {REST_MB:g} MB", rest.rss_mb, REST_MB, f"{rest.rss_mb:.1f} MB"),
        simulated_week.verdict(week),
    ]
    return _end(
        found, options, verdicts, {"event_s": took_s, "sweep_s": sweep_s, "rest": asdict(rest), "week": week}
    )


def events(count: int) -> list[float]:
    """Return the seconds from each of `count` events to its verdict.

    No two events have both the same code and the same GPU.
    """
    with (
        tempfile.TemporaryDirectory(prefix="bench-node-") as folder,
        faked(Path(folder) / "nvml", GPUS) as fake,
    ):
        clock, driver = begin(None, 0.0), NvmlDriver(Path(folder))
        agent = Agent(load(), clock, SavedState(), Path(folder), lambda _: None, lambda: driver.branch)
        agent.watch([FittedSensor(NvmlEvents(driver, clock))])
        running = threading.Thread(target=agent.run)
        running.start()
        fake.until(lambda state: state.waiting == 1)
        took_s = []
        for number in range(count):
            gpu, code = number % GPUS, 1 + number // GPUS
            entity = fake.entity(gpu)
            with agent.looked:
                began = time.perf_counter()
                fake.xid(gpu, code)
                if not agent.looked.wait_for(partial(_is_published, agent, entity, code), PATIENCE_S):
                    raise TimeoutError(f"no verdict for Xid {code} of {entity}")
                took_s.append(time.perf_counter() - began)
        agent.stop()
        running.join(PATIENCE_S)
        for each in agent.watched:  # a sensor closes NVML only after its wait for an event
            each.join(PATIENCE_S)
    return took_s


def _is_published(agent: Agent, entity: str, code: int) -> bool:
    return any(
        each.code == code
        for verdict in agent.published.verdicts
        if verdict.entity == entity
        for each in verdict.findings
    )


def _end(
    found: dict[str, Any], options: argparse.Namespace, judged: list[Verdict], figures: dict[str, Any]
) -> int:
    say()
    for each in judged:
        say(each.line)
    found |= {"options": vars(options), "figures": figures, "verdicts": [asdict(each) for each in judged]}
    results.write(found)
    return 1 if options.strict and not all_met(judged) else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("nodeagent", __doc__ or "")
    add = parser.add_argument
    add("--events", type=int, default=1000, metavar="N", help="number of Xids")
    add("--rest", type=float, default=60.0, metavar="S", help="how long the idle agent is measured")
    add("--days", type=float, default=7.0, metavar="N", help="number of days to simulate")
    add("--strict", action="store_true", help="exit with code 1 if a target is missed")
    options = parser.parse_args(argv)
    if not 1 <= options.events <= GPUS * 178:
        parser.error(f"--events: {options.events}; expected 1 to {GPUS * 178}")
    return options
