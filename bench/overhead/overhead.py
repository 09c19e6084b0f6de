"""Measure what holdfast costs while nothing fails, on the bundled GPT, compared with torchrun.

The same training runs under `holdfast run` and under torchrun at the same time and on the same cores, in
interleaved blocks of a few seconds (A B, B A, A B, ...), so that changes in the machine's speed affect both.
Each pair of blocks yields one ratio of mean step times. Under torchrun, everything that holdfast does inside
a rank is turned off, which leaves plain DDP.

The other figures are not subject to such noise: the seconds that each step spends inside holdfast's calls
(which the bench wraps), the CPU seconds of holdfast's threads in the ranks, the CPU seconds of holdfast's own
processes, and the cost of one progress write. Each rank is on a separate member, so the ranks send each other
their private state at each step. Snapshots are made at the automatic interval, and the steps with a snapshot
count like any other. Checkpoints are written in the background, more often than by default, so that the
measurement includes some.

The time spent in holdfast's calls per step hardly depends on the model. The table shows the step time at
which it would amount to 1%. The wall clock time of the calls includes the wait for the peer's private state.
Without that wait, the next collective would mostly wait for the peer instead. The CPU time does not include
any waiting.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.harness import results
from bench.harness.console import make_parser, say
from bench.harness.memory_needs import MEMORY
from bench.overhead import segments
from bench.overhead.segments import COLD, Plan, Segment, ratios
from bench.text import Summary, Verdict, all_met, below, number, percent, ratio, seconds, summary, table
from bench.workloads.modes import RANKS
from holdfast.protocol.progress import Phase
from holdfast.protocol.progress_writer import Page

STEP_S, SHARE, WRITE_S = 0.05, 0.01, 2e-6
ROUNDS = 40
WRITES = 2500
PAUSE_S = 0.1  # between rounds, so that a shared core that is briefly slow does not affect all of them


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    found = results.begin("overhead")
    write = _progress_write()
    say(f"a progress write: {seconds(write.median)} (best {seconds(write.best)})")
    plan = Plan(
        options.blocks, options.steps, options.checkpoint_every, options.members, tuple(options.model)
    )
    ours, theirs = segments.run(plan, _print_pair)
    found["options"] = vars(options)
    found["progress_write_s"] = asdict(write)
    found["segments"] = [asdict(ours), asdict(theirs)]
    return _end(found, ours, theirs, write, options.strict)


def _print_pair(ours: Segment, theirs: Segment) -> None:
    """Print the mean step times of the newest pair of blocks, and their ratio."""
    pairs = ratios(ours, theirs)
    if pairs:
        at = len(pairs) - 1
        mine, base = (statistics.fmean(side.blocks[at]) for side in (ours, theirs))
        say(f"pair {at + 1:3d}: holdfast {seconds(mine)}, torchrun {seconds(base)}: {number(pairs[-1], 4)}")


def _end(found: dict[str, Any], ours: Segment, theirs: Segment, write: Summary, strict: bool) -> int:
    say()
    say(_table((ours, theirs)))
    spent = segments.inside(ours)
    say("\nper step inside holdfast's calls (both ranks):")
    say(_calls(spent))
    cpu = segments.cpu_share(ours)
    say("\nCPU seconds per second of holdfast's own processes:")
    say(table(("part", "CPU"), [(name, percent(share)) for name, share in cpu.items()]))
    pairs = ratios(ours, theirs)
    found.update(ratios=pairs, inside=asdict(spent), cpu_share=cpu)
    verdicts = _verdicts(ours, pairs, spent, cpu, write)
    say()
    say(f"step time, holdfast to torchrun, {len(pairs)} pairs: {_spread(pairs)}")
    for verdict in verdicts:
        say(verdict.line)
    found["verdicts"] = [asdict(each) for each in verdicts]
    results.write(found)
    return 1 if strict and not all_met(verdicts) else 0


def mean_and_off(pairs: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95% confidence interval, assuming many pairs."""
    if not pairs:
        return math.nan, math.inf
    off = 1.96 * statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.inf
    return statistics.fmean(pairs), off


def _spread(pairs: Sequence[float]) -> str:
    mean, off = mean_and_off(pairs)
    middle = statistics.median(pairs) if pairs else math.nan
    return f"mean {number(mean, 4)} +- {number(off, 4)}, median {number(middle, 4)}"


def step_time(pairs: Sequence[float]) -> Verdict:
    """Judge the ratio of step times by its mean; undecided if its interval contains the limit."""
    mean, off = mean_and_off(pairs)
    limit = 1 + SHARE
    met = None if not abs(mean - limit) > off else mean <= limit
    return Verdict(f"step time to torchrun's <= {limit:g}", f"{number(mean, 4)} +- {number(off, 4)}", met)


def _table(sides: Sequence[Segment]) -> str:
    rows = []
    for side in sides:
        all_of = summary(side.step_times_s)
        rows.append((side.name, str(all_of.count), *map(seconds, (all_of.median, all_of.mean, all_of.p90))))
    return table(("launcher", "steps", "median", "mean", "p90"), rows)


def _calls(found: segments.Inside) -> str:
    rows = [
        (name, number(each.calls, 2), seconds(each.wall_s), seconds(each.worst_s))
        for name, each in found.calls.items()
        if each.calls
    ]
    rows.append(("all calls, nested ones counted once", "", seconds(found.wall_s), ""))
    rows.append(("  without the exchange", "", seconds(found.wall_s - found.exchange_s), ""))
    rows.append(("  CPU time, all threads", "", seconds(found.cpu_s), ""))
    rows.append(("  of that, holdfast's own threads", "", seconds(found.threads_cpu_s), ""))
    rows.append((f"  step time if the CPU time is {SHARE:.0%} of it", "", seconds(found.cpu_s / SHARE), ""))
    return table(("call", "calls", "mean", "worst"), rows)


def _verdicts(
    ours: Segment, pairs: Sequence[float], spent: segments.Inside, cpu: Mapping[str, float], write: Summary
) -> list[Verdict]:
    step_s = summary(ours.step_times_s).mean
    share, own = ratio(spent.wall_s, step_s), ratio(spent.cpu_s, step_s)
    own_cpu = sum(cpu.values()) or math.nan
    return [
        below(
            f"a progress write < {WRITE_S * 1e6:g} us",
            write.median,
            WRITE_S,
            f"{seconds(write.median)} in the median of {write.count} rounds (best {seconds(write.best)})",
        ),
        Verdict(f"measured at steps >= {STEP_S * 1e3:g} ms", seconds(step_s), step_s >= STEP_S),
        below(f"calls and threads in the ranks < {SHARE:.0%} of step time, CPU", own, SHARE, percent(own)),
        below(f"calls in the ranks < {SHARE:.0%} of step time, wall clock", share, SHARE, percent(share)),
        below(
            f"holdfast's own processes < {SHARE:.0%} of the ranks' cores",
            own_cpu / RANKS,
            SHARE,
            f"{percent(own_cpu / RANKS)} ({percent(own_cpu)} of one core)",
        ),
        step_time(pairs),
    ]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("overhead", __doc__ or "")
    add = parser.add_argument
    add("--blocks", type=int, default=20, metavar="N", help="number of counted blocks of each launcher")
    add("--steps", type=int, default=24, metavar="N", help="number of steps per block")
    add("--checkpoint-every", default="20s", metavar="TIME", help="checkpoint interval of the holdfast run")
    add(
        "--members",
        type=int,
        default=RANKS,
        choices=(1, RANKS),
        help="members of the holdfast run; ranks on different members send each other their private state",
    )
    add(
        "--model",
        type=shlex.split,
        default=["--layers", "6"],
        metavar="ARGS",
        help="additional arguments for trainer.gpt, such as its size, quoted as one argument",
    )
    add("--strict", action="store_true", help="exit with code 1 if a target is missed")
    options = parser.parse_args(argv)
    if options.steps < COLD + 4:
        parser.error(f"--steps: {options.steps}; expected {COLD + 4} or more")
    if options.blocks < 2:
        parser.error(f"--blocks: {options.blocks}; expected 2 or more")
    return options


def _progress_write() -> Summary:
    """Return the seconds that one write to a rank's progress page takes, as means of rounds of many writes.

    A single write is too short to be timed, because reading the clock costs 50 ns.
    """
    shared = MEMORY
    with tempfile.TemporaryDirectory(
        prefix="bench-page-", dir=shared if os.access(shared, os.W_OK) else None
    ) as folder:
        page = Page.create(Path(folder) / "page.bin")
        page.begin(1, 0, 0, os.getpid(), 0)
        page.phase(Phase.DATA)
        took_s = [_round(page, at * WRITES) for at in range(ROUNDS)]
        page.close()
    return summary(took_s)


def _round(page: Page, first: int) -> float:
    time.sleep(PAUSE_S)
    began = time.perf_counter()
    for step in range(first, first + WRITES):
        page.commit(step, 2.5, 1.0, 8, 1024, 1e9, 0, step)
    return (time.perf_counter() - began) / WRITES
