"""Train under both launchers in interleaved blocks, and record the step times and CPU times of each."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness import processes
from bench.harness.launchers import Failed, RunningLauncher, holdfast_run, launch, torchrun
from bench.harness.ticks import Tick, newest
from bench.overhead import blocks, stopwatch
from bench.overhead.blocks import Board
from bench.workloads.modes import RANKS
from supervisor.store.run_directory import RunDir

POLL_S = 0.1  # polling more often would take CPU time from the training
LIMIT_S = 1800.0
COLD = 4  # the first steps of a block do not count, because the other side's data is still in the caches
SIDES = ("holdfast", "torchrun")
OURS = ("keeper", "supervisor", "sidecar", "template", "parts", "launcher", "zygote", "warm")


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurement: `blocks` blocks of `steps` steps for each side, after an uncounted block."""

    blocks: int
    steps: int
    checkpoint_every: str
    members: int  # how many members the holdfast run has; the ranks are divided among them
    model: tuple[str, ...]

    def argv(self, name: str) -> list[str]:
        script = ["-m", "bench.overhead.gpt_probe", "--steps", str((self.blocks + 1) * self.steps)]
        script += ["--val-every", "0", "--log-every", "0", *self.model]
        if name == "holdfast":
            places = ("--members", str(self.members), "--nproc-per-node", str(RANKS // self.members))
            return holdfast_run((*places, "--checkpoint-every", self.checkpoint_every), script)
        return torchrun((f"--nproc-per-node={RANKS}",), script)


@dataclass(slots=True)
class Segment:
    """The results of one side."""

    name: str
    blocks: list[list[float]] = field(default_factory=list)  # step times of rank 0, without the first `COLD`
    spent: list[dict[str, Any]] = field(default_factory=list)  # what the stopwatch of each rank has recorded
    cpu_s: dict[str, float] = field(default_factory=dict)  # CPU seconds of each of holdfast's parts
    cpu_over_s: float = 0.0  # the time over which `cpu_s` was measured
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def step_times_s(self) -> list[float]:
        return [time_s for block in self.blocks for time_s in block]


@dataclass(frozen=True, slots=True)
class Call:
    """Mean calls and seconds per step, and the longest single call."""

    calls: float
    wall_s: float
    worst_s: float


@dataclass(frozen=True, slots=True)
class Inside:
    """The mean time inside holdfast's calls, per step and rank."""

    steps: int
    wall_s: float
    cpu_s: float  # in the calls and in holdfast's threads
    threads_cpu_s: float  # in the threads only
    exchange_s: float
    calls: dict[str, Call]


def run(plan: Plan, report: Callable[[Segment, Segment], None]) -> tuple[Segment, Segment]:
    """Train to the end under both launchers, interleaved. Return the results of holdfast and torchrun.

    Calls `report` with both after each pair of blocks. Raises `Failed` if a launcher fails.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-blocks-")))
        board = Board.create(folder / "board", RANKS)
        sides: list[RunningLauncher] = []
        for at, name in enumerate(SIDES):
            turns = f"{folder / 'board'}:{at}:{plan.steps}:{RANKS}"
            given = {blocks.VARIABLE: turns, stopwatch.SKIP: str(plan.steps), stopwatch.OUTPUT: "."}
            sides.append(launch(name, plan.argv(name), given))
            stack.callback(sides[-1].close)
        ours, theirs = (Segment(name) for name in SIDES)
        _watch(sides, board, plan, (ours, theirs), report)
        for side, segment in zip(sides, (ours, theirs), strict=True):
            segment.spent = [json.loads(each.read_text()) for each in sorted(_spent(side.folder))]
        status = RunDir(sides[0].run_dir).status() or {}
        ours.status = {key: status.get(key) for key in ("ettr", "incidents", "checkpoint")}
        return ours, theirs


def _spent(folder: Path) -> list[Path]:
    return list(folder.glob("spent-*.json"))


def _watch(
    sides: Sequence[RunningLauncher],
    board: Board,
    plan: Plan,
    found: tuple[Segment, Segment],
    report: Callable[[Segment, Segment], None],
) -> None:
    """Wait until both launchers end, and add up the CPU time of holdfast's parts during its turns."""
    deadline = time.monotonic() + LIMIT_S
    turn, since, used = -1, 0.0, dict[str, float]()
    while None in (codes := [side.ended() for side in sides]):
        if time.monotonic() > deadline or any(codes):
            _fail(sides, codes)
        now = board.turn()
        if now != turn:
            at, usage = time.monotonic(), cpu_of_parts(sides[0])
            if turn >= 2 and blocks.side_of(turn) == 0:
                _add(found[0], usage, used, at - since)
            turn, since, used = now, at, usage
            for side, segment in zip(sides, found, strict=True):
                segment.blocks = in_blocks(side.ticks.follow(), plan.steps)
            if turn > 2 and turn % 2 == 0:
                report(*found)
        time.sleep(POLL_S)
    _fail(sides, codes)
    for side, segment in zip(sides, found, strict=True):
        segment.blocks = in_blocks(side.ticks.follow(), plan.steps, last=True)


def _fail(sides: Sequence[RunningLauncher], codes: Sequence[int | None]) -> None:
    """Raise `Failed` with the output of each side that did not exit with code 0; return if both did."""
    bad = [side for side, code in zip(sides, codes, strict=True) if code != 0]
    if bad:
        outputs = "; ".join(f"{side.name}: exit code {side.ended()}\n{side.tail()}" for side in bad)
        raise Failed(f"did not finish: {outputs}")


def _add(segment: Segment, now: dict[str, float], before: dict[str, float], over_s: float) -> None:
    segment.cpu_over_s += over_s
    for name, value in now.items():
        more = max(0.0, value - before.get(name, 0.0))
        segment.cpu_s[name] = segment.cpu_s.get(name, 0.0) + more


def in_blocks(ticks: Sequence[Tick], steps: int, last: bool = False) -> list[list[float]]:
    """Return rank 0's step times in each counted block; omit an unfinished newest block unless `last`."""
    times: dict[int, list[float]] = {}
    before: Tick | None = None
    for tick in (each for each in ticks if each.rank == 0):
        if before is not None and tick.step >= steps and tick.step % steps >= COLD:
            times.setdefault(tick.step // steps, []).append((tick.at_ns - before.at_ns) / 1e9)
        before = tick
    whole = [times[block] for block in sorted(times)]
    return whole if last or not whole or len(whole[-1]) == steps - COLD else whole[:-1]


def cpu_of_parts(running: RunningLauncher) -> dict[str, float]:
    """Return the CPU seconds that each of holdfast's parts has used so far."""
    alive = processes.snapshot()
    ranks = {tick.pid for tick in newest(running.ticks.follow()).values()}
    names = processes.zygotes(processes.parts(running.process.pid, alive, ranks), alive)
    used = dict.fromkeys(OURS, 0.0)
    for pid, name in names.items():
        if name in used:
            used[name] += processes.cpu_s(pid)
    return used


def ratios(ours: Segment, theirs: Segment) -> list[float]:
    """Return holdfast's mean step time divided by torchrun's, for each pair of blocks.

    Medians would hide the cost of snapshots, because only one in several steps has one.
    """
    pairs = zip(ours.blocks, theirs.blocks, strict=False)
    return [statistics.fmean(mine) / statistics.fmean(base) for mine, base in pairs if mine and base]


def inside(found: Segment) -> Inside:
    """Return the mean time per step that one side spends inside holdfast's calls."""
    steps = sum(spent["steps"]["inside"] for spent in found.spent)
    whole = sum(spent["steps"]["whole"] for spent in found.spent)
    if not steps or not whole:
        return Inside(0, 0.0, 0.0, 0.0, 0.0, {})
    calls: dict[str, Call] = {}
    for call in found.spent[0]["spent"]:
        each = [spent["spent"][call] for spent in found.spent]
        calls[call] = Call(
            sum(one["calls"] for one in each) / steps,
            sum(one["wall_s"] for one in each) / steps,
            max(one["worst_s"] for one in each),
        )
    threads_s = sum(spent["threads_cpu_s"] for spent in found.spent) / (steps + whole)
    return Inside(
        steps,
        sum(spent["outer"]["wall_s"] for spent in found.spent) / whole,
        sum(spent["outer_cpu_s"] for spent in found.spent) / whole + threads_s,
        threads_s,
        sum(call.wall_s for key, call in calls.items() if key.startswith("exchange")),
        calls,
    )


def cpu_share(found: Segment) -> dict[str, float]:
    """Return the CPU seconds per second that each of holdfast's parts uses."""
    if not found.cpu_over_s:
        return {}
    return {name: used / found.cpu_over_s for name, used in found.cpu_s.items()}
