"""What holdfast costs while nothing happens, on the bundled GPT, against torchrun.

Short segments of the same training alternate between `holdfast run` and torchrun (A B, B A, A B, ...),
so that the machine's moods hit both; each pair gives one ratio of step times. Beside that, free of such
noise: the seconds that each step spends inside holdfast's calls (by wrapping them from outside), the
CPU seconds of holdfast's own processes, and the cost of one progress write. Snapshots are at the
automatic interval, checkpoints run in the background, more often than by default so that some fall
into every segment.

The wall clock of the calls includes waiting for the peer in the exchange of private state. Where both
ranks' cores are shared with other work that is mostly time for which the next collective would have
waited; the CPU time beside it has no waiting in it.
"""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench import progress_write, results, segments
from bench.figures import Summary, ratio, summary
from bench.modes import RANKS
from bench.options import make_parser
from bench.say import say
from bench.segments import Plan, Segment
from bench.table import number, percent, seconds, table
from bench.verdicts import Verdict, all_met, at_most, below

STEP_S, SHARE, WRITE_S = 0.05, 0.01, 2e-6


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    found = results.begin("overhead")
    write = progress_write.measure()
    say(f"a progress write: {seconds(write.median)} (best {seconds(write.best)})")
    plan = Plan(options.steps, options.skip, options.checkpoint_every, tuple(options.model))
    done: list[Segment] = []
    try:
        for name in order(options.pairs):
            segment = segments.run(name, plan)
            done.append(segment)
            say(f"{name:<9} {_steps(segment)}")
    except KeyboardInterrupt:
        say("interrupted: what was measured so far")
    found["options"] = vars(options)
    found["progress_write_s"] = asdict(write)
    found["segments"] = [asdict(each) for each in done]
    return _end(found, done, write, options.strict)


def order(pairs: int) -> list[str]:
    """Return who runs when: A B, B A, A B, ..."""
    both = ("holdfast", "torchrun")
    return [name for at in range(pairs) for name in (both if at % 2 == 0 else both[::-1])]


def ratios(done: Sequence[Segment]) -> list[tuple[float, float]]:
    """Return holdfast's step time over torchrun's in each whole pair: of medians, of means."""
    found: list[tuple[float, float]] = []
    for one, other in zip(done[::2], done[1::2], strict=False):
        ours, theirs = (one, other) if one.name == "holdfast" else (other, one)
        mine, base = summary(ours.step_times_s), summary(theirs.step_times_s)
        found.append((ratio(mine.median, base.median), ratio(mine.mean, base.mean)))
    return found


def _steps(segment: Segment) -> str:
    found = summary(segment.step_times_s)
    return (
        f"{found.count} steps: median {seconds(found.median)}, mean {seconds(found.mean)}, "
        f"p90 {seconds(found.p90)}"
    )


def _end(found: dict[str, Any], done: list[Segment], write: Summary, strict: bool) -> int:
    say()
    say(_table(done))
    inside = {name: segments.inside(done, name) for name in ("holdfast", "torchrun")}
    for name, each in inside.items():
        if each.steps:
            say(f"\nper step inside holdfast's calls, under {name} (both ranks, all segments):")
            say(_calls(each))
    cpu = segments.cpu_share(done)
    if cpu:
        say("\nCPU seconds per second of holdfast's own processes:")
        say(table(("part", "CPU"), [(name, percent(share)) for name, share in cpu.items()]))
    pairs = ratios(done)
    of_medians, of_means = (summary([pair[at] for pair in pairs]) for at in (0, 1))
    found.update(ratios=pairs, inside={k: asdict(v) for k, v in inside.items()}, cpu_share=cpu)
    verdicts = _verdicts(done, inside["holdfast"], write)
    say()
    say(f"step time, holdfast to torchrun, {len(pairs)} pairs: {_spread(of_medians)} (medians)")
    say(f"                                         {_spread(of_means)} (means)")
    for verdict in verdicts:
        say(verdict.line)
    found["verdicts"] = [asdict(each) for each in verdicts]
    results.write(found)
    return 1 if strict and not all_met(verdicts) else 0


def _spread(found: Summary) -> str:
    return f"{number(found.median, 4)}, from {number(found.best, 4)} to {number(found.worst, 4)}"


def _table(done: Sequence[Segment]) -> str:
    rows = []
    for name in ("holdfast", "torchrun"):
        times = [t for each in done if each.name == name for t in each.step_times_s]
        all_of = summary(times)
        rows.append((name, str(all_of.count), *map(seconds, (all_of.median, all_of.mean, all_of.p90))))
    return table(("launcher", "steps", "median", "mean", "p90"), rows)


def _calls(found: segments.Inside) -> str:
    rows = [
        (name, number(each.calls, 2), seconds(each.wall_s), seconds(each.worst_s))
        for name, each in found.calls.items()
        if each.calls
    ]
    rows.append(("all together, once", "", seconds(found.wall_s), ""))
    rows.append(("  without the exchange", "", seconds(found.wall_s - found.exchange_s), ""))
    rows.append(("  CPU time", "", seconds(found.cpu_s), ""))
    return table(("call", "calls", "mean", "worst"), rows)


def _verdicts(done: Sequence[Segment], inside: segments.Inside, write: Summary) -> list[Verdict]:
    step_s = summary([t for each in done if each.name == "holdfast" for t in each.step_times_s]).median
    share = ratio(inside.wall_s, step_s)
    own = ratio(inside.cpu_s, step_s)
    own_cpu = sum(segments.cpu_share(done).values()) or math.nan
    found = [
        below(
            "a progress write < 2 us",
            write.best,  # what it costs itself; the median has the machine's other work in it
            WRITE_S,
            f"{seconds(write.best)} (median {seconds(write.median)})",
        ),
        Verdict("measured at steps >= 50 ms", seconds(step_s), step_s >= STEP_S),
        below("calls in the ranks < 1% of step time, CPU", own, SHARE, percent(own)),
        below("calls in the ranks < 1% of step time, wall clock", share, SHARE, percent(share)),
        below(
            "our own processes < 1% of the ranks' cores",
            own_cpu / RANKS,
            SHARE,
            f"{percent(own_cpu / RANKS)} ({percent(own_cpu)} of one core)",
        ),
    ]
    pairs = ratios(done)
    if pairs:
        whole = summary([pair[0] for pair in pairs]).median
        limit = 1 + SHARE
        found.append(at_most("step time to torchrun's <= 1.01", whole, limit, number(whole, 4)))
    return found


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("overhead", __doc__ or "")
    add = parser.add_argument
    add("--pairs", type=int, default=4, metavar="N", help="segments of each launcher")
    add("--steps", type=int, default=100, metavar="N", help="steps of a segment")
    add("--skip", type=int, default=15, metavar="N", help="of which the first are not counted")
    add("--checkpoint-every", default="3s", metavar="TIME", help="of the holdfast runs")
    add(
        "--model",
        type=shlex.split,
        default=[],
        metavar="ARGS",
        help="more arguments for trainer.gpt, in one word: its size, for example",
    )
    add("--strict", action="store_true", help="exit code 1 when a target is missed")
    options = parser.parse_args(argv)
    if options.steps <= options.skip + 10:
        parser.error(f"--steps: {options.steps}; accepted is more than --skip and 10")
    return options
