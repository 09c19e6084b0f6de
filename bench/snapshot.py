"""How fast the state gets into the arena and onto storage, against plain copies of as many bytes.

The snapshot is the whole of what a rank does at a step: collect the tensors, claim the slot, copy,
commit. It is compared with torch's copy_ and with memmove between warm buffers, into anonymous memory
and into memory shared through a file system as the arena's is. The checkpoint is the whole of what a
sidecar does: write, checksum, fsync, manifest, rename; it is compared with a plain write and one fsync.
All take turns within one run, with as many threads as a rank has (1 unless told otherwise).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench import copying, results, storing
from bench.figures import Summary, ratio, summary
from bench.options import make_parser
from bench.say import say
from bench.table import number, percent, seconds, size, table
from bench.verdicts import Verdict, all_met

SNAPSHOT, CHECKPOINT = "holdfast snapshot", "holdfast checkpoint"
PLAIN_WRITE = "plain write and fsync"
TARGET = 0.8
MEMORY = Path("/dev/shm")
SPARE = 1.3  # beside what is copied: the machine needs some, too


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    found = results.begin("snapshot")
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for wanted in options.sizes:
        needed = int(wanted * 1e6 * 6 * SPARE)  # the state, three buffers, two slots
        if needed > _available():
            say(f"{wanted} MB: left out, for it would need {size(needed)} of memory")
            continue
        rows.append(_measure(int(wanted * 1e6), options))
    return _end(found, rows, options)


def _measure(total_bytes: int, options: argparse.Namespace) -> dict[str, Any]:
    shared = MEMORY if os.access(MEMORY, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="bench-arena-", dir=shared) as memory,
        tempfile.TemporaryDirectory(prefix="bench-store-", dir=options.directory) as storage,
    ):
        held = copying.make(total_bytes, options.parameters)
        plain = copying.shared(Path(memory), held.nbytes)
        take = copying.snapshotter(held, Path(memory) / "arena")
        copies = take_turns({SNAPSHOT: take, **copying.plain_copies(held, plain)}, options.repeats)
        say(_table(held.nbytes, copies))
        slot = max((Path(memory) / "arena").glob("*"), key=lambda each: each.stat().st_size)
        stores = take_turns(
            {
                CHECKPOINT: storing.checkpointer(slot, Path(storage)),
                PLAIN_WRITE: storing.plain_writer(slot, Path(storage)),
            },
            options.writes,
        )
        say(f"{_table(held.nbytes, stores)}\n")
    return {
        "bytes": held.nbytes,
        "tensors": len(held.sources),
        "seconds": {**copies, **stores},
        "summary": {name: asdict(summary(each)) for name, each in {**copies, **stores}.items()},
    }


def take_turns(calls: Mapping[str, Callable[[], float | None]], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of `repeats` calls of each, in turns, after two that are not counted."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for at in range(repeats + 2):
        for name, call in calls.items():
            found = call()
            if found is not None and at >= 2:
                took[name].append(found)
    return took


def _table(nbytes: int, took: Mapping[str, Sequence[float]]) -> str:
    found = {name: summary(each) for name, each in took.items()}
    ours = next(iter(found.values()))
    rows = [_row(name, each, ours, nbytes) for name, each in found.items()]
    return table((size(nbytes), "median", "best", "GB/s", "GB/s best", "ours to it"), rows)


def _row(name: str, each: Summary, ours: Summary, nbytes: int) -> tuple[str, ...]:
    share = "" if each is ours else percent(ratio(each.median, ours.median), 0)
    speeds = (number(ratio(nbytes, at) / 1e9) for at in (each.median, each.best))
    return (name, seconds(each.median), seconds(each.best), *speeds, share)


def shares(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of each plain copy's speed that ours reaches, by medians."""
    median = {name: each["median"] for name, each in row["summary"].items()}
    found = {}
    for name, took_s in median.items():
        if name not in (SNAPSHOT, CHECKPOINT):
            ours = CHECKPOINT if name == PLAIN_WRITE else SNAPSHOT
            found[name] = ratio(took_s, median[ours])
    return found


def verdicts(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Judge each size: 80% of the plain copy into the same kind of memory, and of the plain write."""
    found: list[Verdict] = []
    for row in rows:
        reached = shares(row)
        title = size(row["bytes"])
        memory = min(reached[name] for name in reached if name.endswith("to shared"))
        anonymous = min(reached[name] for name in reached if name.endswith("to anonymous"))
        found += [
            Verdict(
                f"{title}: snapshot >= 80% of memcpy into shared memory",
                f"{percent(memory, 0)} ({percent(anonymous, 0)} of memcpy into anonymous memory)",
                memory >= TARGET,
            ),
            Verdict(
                f"{title}: checkpoint >= 80% of a plain write",
                percent(reached[PLAIN_WRITE], 0),
                reached[PLAIN_WRITE] >= TARGET,
            ),
        ]
    return found


def _end(found: dict[str, Any], rows: list[dict[str, Any]], options: argparse.Namespace) -> int:
    judged = verdicts(rows)
    for each in judged:
        say(each.line)
    found["options"] = vars(options)
    found["sizes"] = rows
    found["verdicts"] = [asdict(each) for each in judged]
    results.write({**found, "options": {**vars(options), "directory": str(options.directory)}})
    return 1 if options.strict and not all_met(judged) else 0


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("snapshot", __doc__ or "")
    add = parser.add_argument
    add("--sizes", type=float, nargs="+", default=[10, 100, 1000], metavar="MB", help="of the state")
    add("--parameters", type=int, default=64, metavar="N", help="tensors of the model")
    add("--repeats", type=int, default=15, metavar="N", help="copies of each kind")
    add("--writes", type=int, default=5, metavar="N", help="checkpoints and plain writes")
    add("--threads", type=int, default=1, metavar="N", help="of torch in this process")
    add(
        "--directory",
        type=Path,
        default=None,
        metavar="DIR",
        help="on the storage to be measured; None is where temporary files go",
    )
    add("--strict", action="store_true", help="exit code 1 when a target is missed")
    return parser.parse_args(argv)
