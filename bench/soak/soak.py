"""Inject random faults of all kinds at random times, for a long time, into the run of a bundled trainer.

The same training first runs without faults. Then it runs on two members and a standby, and one fault follows
another: SIGKILL, SIGSTOP, a rank that hangs or spins, NaN, an exit, or the loss of a member, a launcher, a
sidecar or the supervisor. Some faults are followed by a second one during the recovery. At the end, the
parameters, buffers, optimizer and random states of all ranks must be the same as in the run without faults.
The run must not get stuck or leave any process or memory behind.

With --quiet-faults no fault is injected. The bench then shows whether any part of holdfast grows: its memory,
its open files, the shared memory, or the run directory.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.harness import results
from bench.harness.console import make_parser, say
from bench.harness.launchers import Failed, RunningLauncher, holdfast_run, launch
from bench.harness.watch import RunWatch
from bench.soak import faults, report
from bench.soak.faults import InjectedFault
from bench.text import all_met
from bench.workloads.modes import MANY

START_S = 180.0
SHARE = 0.4  # the share of the wall clock time spent training while faults are injected
CALIBRATION_STEPS = 300
QUIET_MODEL = "--layers 1 --heads 1 --width 16 --context 16 --batch 2"


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    found = results.begin("soak")
    steps = options.steps or _steps_for(options)
    say(f"{steps} steps of trainer.{options.trainer}, seed {options.seed}")
    reference = None if options.quiet_faults else _undisturbed(steps, options)
    running = launch("soak", _command(steps, options, options.standby))
    try:
        watch = RunWatch(running, options.every)
        done = _soak(watch, options)
        code = _until_end(watch)
        found.update(
            options=vars(options),
            steps=steps,
            exit_code=code,
            faults=[asdict(each) for each in done],
            status=_kept(watch.status()),
            left_behind=_left_behind(watch),
            readings=[asdict(each) for each in watch.readings],
        )
        digests = _digests(running)
        found["digests"], found["reference"] = digests, reference
        if code != 0:
            say(running.tail())
    finally:
        running.close()
    return _end(found, done, watch, options)


def _end(
    found: dict[str, Any], done: list[InjectedFault], watch: RunWatch, options: argparse.Namespace
) -> int:
    growths = report.growths(watch.readings, quiet=options.quiet_faults)
    found["growth"] = [asdict(each) for each in growths]
    judged = report.verdicts(found, done, growths, quiet=options.quiet_faults)
    say()
    for line in report.lines(found, done, growths):
        say(line)
    say()
    for verdict in judged:
        say(verdict.line)
    found["verdicts"] = [asdict(each) for each in judged]
    results.write(found)
    return 1 if options.strict and not all_met(judged) else 0


def _command(steps: int, options: argparse.Namespace, standby: int) -> list[str]:
    run = ("--nproc-per-node", "1", "--members", str(options.members), "--standby", str(standby))
    # By default, a spinning rank may run for minutes, because it may be working; here it counts as hung.
    more = ("--max-restarts", MANY, "--checkpoint-every", "10s", "--hang-floor", "600ms")
    script = ["-m", f"trainer.{options.trainer}", "--tiny", "--steps", str(steps)]
    script += ["--seed", str(options.seed), "--val-every", "200", "--log-every", "1000"]
    return holdfast_run((*run, *more), [*script, "--digest", "digest.json", *options.model])


def _undisturbed(steps: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train without faults, and return the digests of all ranks."""
    began = time.monotonic()
    running = launch("undisturbed", _command(steps, options, 0))
    try:
        watch = RunWatch(running, 1e9)
        if _until_end(watch) != 0:
            raise Failed(f"the run without faults failed\n{running.tail()}")
        found = _digests(running)
    finally:
        running.close()
    assert found is not None
    say(f"without faults: {time.monotonic() - began:.0f} s, digest {found['0']['all'][:16]}")
    return found


def _steps_for(options: argparse.Namespace) -> int:
    """Estimate how many steps fit into --minutes, including the recoveries, from a short run."""
    running = launch("calibration", _command(CALIBRATION_STEPS, options, 0))
    try:
        began = time.monotonic()
        watch = RunWatch(running, 1e9)
        steps: list[tuple[float, int]] = []
        while watch.poll():
            step = watch.status().get("step")
            if step is not None and (not steps or step > steps[-1][1]):
                steps.append((time.monotonic() - began, step))
    finally:
        running.close()
    if len(steps) < 2:
        raise Failed(f"the calibration run did not train\n{running.name}")
    (first_s, first), (last_s, last) = steps[0], steps[-1]
    step_s = (last_s - first_s) / max(1, last - first)
    share = 1.0 if options.quiet_faults else SHARE
    return max(200, int(options.minutes * 60 * share / step_s))


def _soak(watch: RunWatch, options: argparse.Namespace) -> list[InjectedFault]:
    """Inject faults until the run ends or gets stuck; return the faults."""
    done: list[InjectedFault] = []
    began = time.monotonic()
    if not watch.until_calm(0.0, START_S):
        raise Failed(f"the run did not start\n{watch.running.tail()}")
    if options.quiet_faults:
        return done
    chance = random.Random(options.seed)
    for kind in faults.bag(chance, tuple(options.kinds)):
        if not watch.until(time.monotonic() + chance.expovariate(1 / options.gap)):
            break
        step = watch.status().get("step") or 0
        rank = chance.randrange(options.members)
        fault = InjectedFault(kind, rank, step, round(time.monotonic() - began, 1))
        if chance.random() < options.double:
            fault.second = chance.choice(faults.SECOND)
        faults.strike(watch, fault, chance)
        done.append(fault)
        say(report.fault_line(fault))
        if fault.outcome in ("stuck", "ended", "over"):
            break
    return done


def _until_end(watch: RunWatch) -> int:
    """Wait until the run ends, and return its exit code. Stop it if no step ends for `START_S`."""
    last, at_s = -1, time.monotonic()
    shown_s = time.monotonic()
    while watch.poll():
        step = watch.status().get("step") or 0
        if step != last:
            last, at_s = step, time.monotonic()
        if time.monotonic() - at_s > START_S:
            say(f"no step for {START_S:.0f} s: stopping the run")
            watch.running.stop()
        if time.monotonic() - shown_s > 30:
            shown_s = time.monotonic()
            say(f"  step {last}")
    code = watch.running.ended()
    assert code is not None
    return code


def _digests(running: RunningLauncher) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((running.folder / "digest.json").read_text())
    except (OSError, ValueError):
        return None
    return found


def _left_behind(watch: RunWatch) -> list[str]:
    """Kill the processes that outlived the run. Return them and the memory that is left."""
    runtime = (watch.run.run() or {}).get("runtime")
    found = [str(runtime)] if runtime and Path(runtime).exists() else []
    return [*found, *watch.running.leftovers()]


def _kept(status: dict[str, Any]) -> dict[str, Any]:
    kept = ("ettr", "buckets_s", "pending_s", "total_s", "incidents", "generation", "step", "message")
    return {key: status.get(key) for key in kept}


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser(
        "soak", __doc__ or "", "a long run without faults: python -m bench soak --steps 100000 --quiet-faults"
    )
    add = parser.add_argument
    add("--minutes", type=float, default=10.0, help="approximately how long to inject faults")
    add(
        "--steps",
        type=int,
        default=0,
        metavar="N",
        help="number of optimizer steps; 0 means as many as fit into --minutes",
    )
    add("--trainer", choices=("gpt", "vision"), default="gpt", help="trainer to run, with --tiny")
    add("--model", type=shlex.split, default=[], metavar="ARGS", help="additional arguments for the trainer")
    add("--members", type=int, default=2, metavar="M", help="number of members, with one rank each")
    add("--standby", type=int, default=1, metavar="S", help="number of standby members")
    add("--kinds", nargs="+", choices=faults.KINDS, default=list(faults.KINDS), metavar="KIND",
        help=f"kinds of faults: {', '.join(faults.KINDS)}")  # fmt: skip
    add("--gap", type=float, default=1.0, metavar="S", help="mean seconds between two faults")
    add("--double", type=float, default=0.2, metavar="P", help="probability of a second fault soon after")
    add("--quiet-faults", action="store_true", help="inject no fault, and look for growth")
    add("--every", type=float, default=5.0, metavar="S", help="seconds between two readings")
    add("--seed", type=int, default=0, help="seed for the faults and the training")
    add("--strict", action="store_true", help="exit with code 1 if a target is missed")
    options = parser.parse_args(argv)
    if options.members < 1 or options.standby < 0:
        parser.error("--members: expected 1 or more; --standby: 0 or more")
    if options.quiet_faults and not options.model and options.trainer == "gpt":
        options.model = shlex.split(QUIET_MODEL)
    return options
