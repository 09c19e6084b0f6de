"""Measure what frozen parameters cost: snapshots of a small model, without and with frozen parameters.

First, one process takes four kinds of snapshots, interleaved: of the small model alone; with the frozen
parameters, while the kernel reports which pages were written; with the frozen parameters but without such
reports, so that the parameters are compared in full; and with everything copied, as in the first two
snapshots of a generation. Before each snapshot, the bench writes to other memory, as training does.

Then the two ranks of one member train the small model in a run with steps of fixed length, first without and
then with the frozen parameters. The bench shows the times between steps, the times of the copies (for each
rank, the first three are listed one by one), and the incidents. There must be no incidents.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.harness import memory_needs, results
from bench.harness.console import make_parser, say
from bench.harness.launchers import Failed, holdfast_run, launch
from bench.harness.memory_needs import MEMORY
from bench.harness.rounds import take_turns
from bench.harness.ticks import step_times_s
from bench.harness.watch import RunWatch
from bench.snapshot import copying
from bench.snapshot.frozen_training import BYTES, COPIES, STEP_S, Beside
from bench.text import Verdict, all_met, number, ratio, seconds, size, size_of, summary, table
from holdfast.snapshot import written_pages
from holdfast.training.protection.snapshot_writer import SnapshotWriter

ALONE, ASKED, COMPARED, COPIED = (
    "the small model alone",
    "frozen, writes reported",
    "frozen, compared",
    "all copied",
)
# The first copies, which are not counted: one into each slot, and one that compares everything. The kernel
# reports writes only after these copies.
FIRST = 3
MORE_S = 0.005  # how much longer a later snapshot may take with the frozen parameters
START_S = 300.0
COLD = 20  # the first steps, which are not counted


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    frozen_bytes = size_of(options.frozen)
    # Two arenas of two slots, the frozen parameters themselves, and a copy for comparison.
    memory_needs.check("--frozen", frozen_bytes, shared=4, beside=2, other_bytes=int(options.evict * 1e6))
    found = results.begin("frozen")
    torch.set_num_threads(1)
    took = _in_turns(frozen_bytes, options)
    say(table((f"a snapshot, {size(frozen_bytes)} frozen", "median", "best", "worst"), _rows(took)))
    runs = {}
    for name, nbytes in (("alone", 0), ("beside the frozen parameters", frozen_bytes)):
        runs[name] = _run(nbytes, options)
        say(f"\na run, {name}: {_line(runs[name])}")
    more_s = summary(took[ASKED]).median - summary(took[ALONE]).median
    incidents = [each for run in runs.values() for each in run["incidents"]]
    judged = [
        Verdict(f"a later snapshot takes <= {seconds(MORE_S)} longer", seconds(more_s), more_s <= MORE_S),
        Verdict("no incident", str(len(incidents)), not incidents),
    ]
    say()
    for each in judged:
        say(each.line)
    found.update(options=vars(options), seconds=took, runs=runs, verdicts=[asdict(each) for each in judged])
    results.write(found)
    return 1 if options.strict and not all_met(judged) else 0


def _in_turns(frozen_bytes: int, options: argparse.Namespace) -> dict[str, list[float]]:
    small, large = _objects(0), _objects(frozen_bytes)
    with tempfile.TemporaryDirectory(prefix="bench-frozen-", dir=_memory()) as folder:
        calls: dict[str, Callable[[], float | None]] = {
            ALONE: _snapshotter(Path(folder) / "alone", small),
            ASKED: _snapshotter(Path(folder) / "asked", large),
        }
        with _not_asked():
            calls[COMPARED] = _snapshotter(Path(folder) / "compared", large)
        took = take_turns(calls, options.repeats, copying.elsewhere(options.evict))
        whole = SnapshotWriter(Path(folder) / "compared", large, 1)
        whole.frozen.distrust()
        copied = [whole.write(2, step) for step in range(options.repeats)]
        return {**took, COPIED: [each for each in copied if each is not None]}


def _objects(frozen_bytes: int) -> dict[str, Any]:
    model = Beside(frozen_bytes)
    trained = [each for each in model.parameters() if each.requires_grad]
    for each in trained:
        each.grad = torch.ones_like(each)
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def _snapshotter(folder: Path, objects: dict[str, Any]) -> Callable[[], float | None]:
    """Make the first snapshots, and return a call that makes a later one."""
    snapshots = SnapshotWriter(folder, objects, 1)
    steps = iter(range(1 << 60))
    for _ in range(FIRST + 1):
        snapshots.write(1, next(steps))
    return lambda: snapshots.write(1, next(steps))


@contextmanager
def _not_asked() -> Any:
    watch = written_pages.watch
    written_pages.watch = lambda ranges: None
    try:
        yield
    finally:
        written_pages.watch = watch


def _run(frozen_bytes: int, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-frozen-") as folder:
        copies = Path(folder) / "copies"
        environment = {BYTES: str(frozen_bytes), STEP_S: str(options.step), COPIES: str(copies)}
        argv = holdfast_run(("--nproc-per-node", "2"), ("-m", "bench.snapshot.frozen_training"))
        running = launch("frozen", argv, environment)
        try:
            watch = RunWatch(running, 5.0)
            give_up_at = time.monotonic() + START_S
            while len(running.ticks.follow()) < 2 * COLD:
                if not watch.poll() or time.monotonic() > give_up_at:
                    raise Failed(running.tail())
            if not watch.until(time.monotonic() + options.seconds):
                raise Failed(running.tail())
            incidents = watch.run.incidents()
            running.stop()
            by_rank: dict[str, list[tuple[float, float]]] = {}
            for line in copies.read_text().splitlines():
                rank, read, cost_s = line.split()
                by_rank.setdefault(rank, []).append((float(read), float(cost_s)))
            return {
                "step_s": step_times_s(running.ticks.follow(), 0, COLD),
                "copies": by_rank,
                "incidents": incidents,
            }
        finally:
            running.close()


def _later(run: dict[str, Any]) -> list[float]:
    return [cost_s for copies in run["copies"].values() for _, cost_s in copies[FIRST:]]


def _line(run: dict[str, Any]) -> str:
    steps, later = summary(run["step_s"]), summary(_later(run))
    first = ", ".join(seconds(took) for copies in run["copies"].values() for _, took in copies[:FIRST])
    return (
        f"{steps.count} steps, median {seconds(steps.median)}, mean {seconds(steps.mean)}, worst "
        f"{seconds(steps.worst)}; first copies {first}; {later.count} later, median "
        f"{seconds(later.median)}, worst {seconds(later.worst)}; {len(run['incidents'])} incidents"
    )


def _rows(took: dict[str, list[float]]) -> list[tuple[str, ...]]:
    alone = summary(took[ALONE]).median
    rows: list[tuple[str, ...]] = []
    for name, each in took.items():
        of = summary(each)
        times = f" ({number(ratio(of.median, alone), 1)} times)" if name != ALONE else ""
        rows.append((name, f"{seconds(of.median)}{times}", seconds(of.best), seconds(of.worst)))
    return rows


def _memory() -> Path | None:
    return MEMORY if os.access(MEMORY, os.W_OK) else None


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("frozen", __doc__ or "")
    add = parser.add_argument
    add(
        "--frozen",
        default="2G",
        metavar="SIZE",
        help="size of the frozen parameters; the bench needs six times as much memory",
    )
    add("--step", type=float, default=0.02, metavar="SECONDS", help="minimum step time of the runs")
    add("--seconds", type=float, default=60.0, metavar="N", help="how long each run trains")
    add("--repeats", type=int, default=15, metavar="N", help="number of snapshots of each kind")
    add(
        "--evict",
        type=float,
        default=512,
        metavar="MB",
        help="amount of other memory written before each snapshot",
    )
    add("--strict", action="store_true", help="exit with code 1 if a target is missed")
    return parser.parse_args(argv)
