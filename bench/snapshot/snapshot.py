"""Measure how fast the state is copied into the arena and onto storage, compared with plain copies.

The time of a snapshot covers everything that a rank does at a step: collect the tensors, claim the slot,
copy, commit. "The copy in it" covers only the copy: the same call, into a mapping of the same layout. A
snapshot of the same number of 64-byte tensors shows what a snapshot costs regardless of size.

Snapshot and copy are compared with plain copies of as many bytes between buffers that were touched before,
into anonymous memory and into memory that is shared through a file system, like the arena's. These are
torch's copy_ and memmove of all bytes in one piece, and memmove of the same tensors one by one. Before each
copy the bench writes to other memory, as training does between two snapshots, so that no copy finds its bytes
in a cache. (glibc's memmove of one large piece bypasses the cache, which nearly doubles its speed, but does
not do so for pieces of the size of most tensors.)

The time of a checkpoint covers everything that a sidecar does: write, checksum, fsync, manifest, rename. It
is compared with a plain write and one fsync.

All of these measurements are interleaved within one process, with as many threads as a rank has (--threads).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.harness import results
from bench.harness.console import make_parser, say
from bench.harness.memory_needs import MEMORY
from bench.harness.rounds import take_turns
from bench.snapshot import copying, report, storing
from bench.snapshot.report import CHECKPOINT, COPY, EMPTY, PLAIN_WRITE, SNAPSHOT
from bench.text import all_met, size, summary
from holdfast.snapshot import member_directory

SPARE = 1.3  # factor on the memory needed, to leave some for the rest of the machine


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    found = results.begin("snapshot")
    torch.set_num_threads(options.threads)
    rows = [_measure(copying.bundled(), options)]
    for wanted in options.sizes:
        needed = int(wanted * 1e6 * 6 * SPARE)  # the state, three buffers, two slots
        if needed > _available():
            say(f"{wanted} MB: skipped, because it needs {size(needed)} of memory")
            continue
        rows.append(_measure(copying.make(int(wanted * 1e6), options.parameters), options))
    return _end(found, rows, options)


def _measure(held: copying.ProtectedObjects, options: argparse.Namespace) -> dict[str, Any]:
    shared = MEMORY if os.access(MEMORY, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="bench-arena-", dir=shared) as memory,
        tempfile.TemporaryDirectory(prefix="bench-store-", dir=options.directory) as storage,
    ):
        plain = copying.shared(Path(memory), held.nbytes)
        calls = {
            SNAPSHOT: copying.snapshotter(held, Path(memory) / member_directory.ARENA),
            COPY: copying.copier(held, plain),
            EMPTY: copying.snapshotter(
                copying.make(1, len(held.sources) // copying.TENSORS_PER_PARAMETER), Path(memory) / "tiny"
            ),
            **copying.plain_copies(held, plain),
        }
        copies = take_turns(calls, options.repeats, copying.elsewhere(options.evict))
        say(report.copies_table(held.title, held.nbytes, copies))
        slot = max((Path(memory) / member_directory.ARENA).glob("*"), key=lambda each: each.stat().st_size)
        stores = take_turns(
            {
                CHECKPOINT: storing.checkpointer(slot, Path(storage)),
                PLAIN_WRITE: storing.plain_writer(slot, Path(storage)),
            },
            options.writes,
        )
        say(f"{report.stores_table(held.title, held.nbytes, stores)}\n")
    return {
        "title": held.title,
        "bytes": held.nbytes,
        "tensors": len(held.sources),
        "seconds": {**copies, **stores},
        "summary": {name: asdict(summary(each)) for name, each in {**copies, **stores}.items()},
    }


def _end(found: dict[str, Any], rows: list[dict[str, Any]], options: argparse.Namespace) -> int:
    judged = report.verdicts(rows)
    for each in judged:
        say(each.line)
    found["options"] = vars(options)
    found["sizes"] = rows
    found["verdicts"] = [asdict(each) for each in judged]
    results.write(found)
    return 1 if options.strict and not all_met(judged) else 0


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("snapshot", __doc__ or "")
    add = parser.add_argument
    add(
        "--sizes",
        type=float,
        nargs="+",
        default=[10, 100, 1000],
        metavar="MB",
        help="sizes of generated states, which are measured after the state of the bundled GPT",
    )
    add("--parameters", type=int, default=64, metavar="N", help="number of tensors of a generated model")
    add("--repeats", type=int, default=15, metavar="N", help="number of copies of each kind")
    add("--writes", type=int, default=5, metavar="N", help="how many checkpoints and plain writes to time")
    add("--evict", type=float, default=512, metavar="MB", help="amount of other memory written before a copy")
    add("--threads", type=int, default=1, metavar="N", help="number of torch's threads in this process")
    add(
        "--directory",
        type=Path,
        default=None,
        metavar="DIR",
        help="directory on the storage to measure; by default, the directory of temporary files",
    )
    add("--strict", action="store_true", help="exit with code 1 if a target is missed")
    return parser.parse_args(argv)
