"""One stretch of undisturbed training under one launcher, and what is known of it afterwards."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import processes, stopwatch
from bench.launching import Failed, Running, holdfast_run, launch, torchrun
from bench.modes import RANKS
from bench.ticks import newest, step_times_s
from supervisor.rundir import RunDir

POLL_S = 0.1  # looking costs what is measured: seldom
LIMIT_S = 600.0
OURS = ("keeper", "supervisor", "sidecar", "launcher", "zygote", "warm")


@dataclass(frozen=True, slots=True)
class Plan:
    steps: int
    skip: int
    checkpoint_every: str
    model: tuple[str, ...]

    def argv(self, name: str) -> list[str]:
        script = ["-m", "bench.gpt_probe", "--steps", str(self.steps)]
        script += ["--val-every", "0", "--log-every", "0", *self.model]
        if name == "holdfast":
            options = ("--nproc-per-node", str(RANKS), "--checkpoint-every", self.checkpoint_every)
            return holdfast_run(options, script)
        return torchrun((f"--nproc-per-node={RANKS}",), script)


@dataclass(slots=True)
class Segment:
    """`spent` is what each rank's stopwatch says; `cpu_s` seconds of our parts in `cpu_over_s`."""

    name: str
    step_times_s: list[float] = field(default_factory=list)  # of rank 0, without the first ones
    spent: list[dict[str, Any]] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)
    cpu_over_s: float = 0.0
    status: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """Per step: calls and seconds on average; the worst single call."""

    calls: float
    wall_s: float
    worst_s: float


@dataclass(frozen=True, slots=True)
class Inside:
    """Per step and rank, the time inside of holdfast's calls."""

    steps: int
    wall_s: float
    cpu_s: float
    exchange_s: float
    calls: dict[str, Call]


def run(name: str, plan: Plan) -> Segment:
    """Train once, to the end. Raises `Failed` when that does not work."""
    running = launch(name, plan.argv(name), {stopwatch.SKIP: str(plan.skip), stopwatch.OUTPUT: "."})
    try:
        found = Segment(name)
        _watch(running, plan, found)
        ticks = running.ticks.follow()
        found.step_times_s = step_times_s(ticks, 0, plan.skip)
        found.spent = [json.loads(each.read_text()) for each in sorted(_spent(running.folder))]
        status = RunDir(running.run_dir).status() or {}
        found.status = {key: status.get(key) for key in ("ettr", "incidents", "checkpoint")}
        return found
    finally:
        running.close()


def _spent(folder: Path) -> list[Path]:
    return list(folder.glob("spent-*.json"))


def _watch(running: Running, plan: Plan, found: Segment) -> None:
    """Wait for the end; between warm-up and shortly before the end take the CPU time of our parts."""
    deadline = time.monotonic() + LIMIT_S
    first: tuple[float, dict[str, float]] | None = None
    while (code := running.ended()) is None:
        if time.monotonic() > deadline:
            raise Failed(f"{running.name}: not at its end after {LIMIT_S:.0f} s\n{running.tail()}")
        step = min((tick.step for tick in newest(running.ticks.follow()).values()), default=0)
        if found.name == "holdfast" and plan.skip <= step < plan.steps - 5:
            now = time.monotonic()
            used = cpu_of_parts(running)
            first = first or (now, used)
            found.cpu_over_s = now - first[0]
            found.cpu_s = {name: max(0.0, used[name] - first[1].get(name, 0.0)) for name in used}
            time.sleep(POLL_S * 4)
        time.sleep(POLL_S)
    if code != 0:
        raise Failed(f"{running.name}: exit code {code}\n{running.tail()}")


def cpu_of_parts(running: Running) -> dict[str, float]:
    """Return the CPU seconds so far of each kind of our processes."""
    alive = processes.snapshot()
    ranks = {tick.pid for tick in newest(running.ticks.follow()).values()}
    names = processes.zygotes(processes.parts(running.process.pid, alive, ranks), alive)
    used = dict.fromkeys(OURS, 0.0)
    for pid, name in names.items():
        if name in used:
            used[name] += processes.cpu_s(pid)
    return used


def inside(done: Sequence[Segment], name: str) -> Inside:
    """Return what a step spent inside of holdfast on average, over all segments of `name`."""
    found = [spent for each in done if each.name == name for spent in each.spent]
    steps = sum(spent["steps"] for spent in found)
    if not steps:
        return Inside(0, 0.0, 0.0, 0.0, {})
    calls: dict[str, Call] = {}
    for call in found[0]["spent"]:
        each = [spent["spent"][call] for spent in found]
        calls[call] = Call(
            sum(one["calls"] for one in each) / steps,
            sum(one["wall_s"] for one in each) / steps,
            max(one["worst_s"] for one in each),
        )
    return Inside(
        steps,
        sum(spent["outer"]["wall_s"] for spent in found) / steps,
        sum(spent["outer_cpu_s"] for spent in found) / steps,
        sum(call.wall_s for key, call in calls.items() if key.startswith("exchange")),
        calls,
    )


def cpu_share(done: Sequence[Segment]) -> dict[str, float]:
    """Return CPU seconds per second of each of our parts, over all segments."""
    over_s = sum(each.cpu_over_s for each in done)
    if not over_s:
        return {}
    names = dict.fromkeys(name for each in done for name in each.cpu_s)
    return {name: sum(each.cpu_s.get(name, 0.0) for each in done) / over_s for name in names}
