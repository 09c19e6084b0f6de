"""Measure what snapshots and commits cost on a real NVIDIA GPU. Without one, the bench measures nothing.

The just-in-time copy is made while a 5 s kernel blocks the training's stream before the optimizer's writes,
as a collective with a dead peer would. The bench compares its duration, and the duration of a snapshot taken
during training, with a plain copy of the same number of bytes from the device into pinned memory. It also
measures how long a commit takes on the host while the device is busy. A commit records the marks, copies the
part of the state that is on the host, and fetches numbers such as the loss.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from bench.harness import results
from bench.harness.console import make_parser, say
from bench.text import Verdict, all_met, at_most, below, seconds, size, summary, table

STILL_S = 5.0
SHARE = 0.8  # the target for a snapshot, as a share of a plain copy's speed
COMMIT_S = 1e-3
SNAPSHOTS = 8  # before the measured one; the first use of each slot takes seconds, because it pins memory


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    import torch

    if not torch.cuda.is_available():
        say("this machine has no NVIDIA GPU: nothing was measured")
        return 0
    found = results.begin("gpu")
    found["gpu"] = torch.cuda.get_device_name(0)
    say(found["gpu"])
    figures = {**_copies(options), **_commits(options)}
    verdicts = _verdicts(figures)
    say(table(("what", "median", "worst"), _rows(figures)))
    for each in verdicts:
        say(each.line)
    found.update(figures=figures, verdicts=[each.line for each in verdicts])
    results.write(found)
    return 0 if all_met(verdicts) else 1


def _copies(options: argparse.Namespace) -> dict[str, Any]:
    """Return the size of the state, and the seconds of plain copies, snapshots and just-in-time copies."""
    import torch

    from bench.gpu.training import GPU, Training, cycles, folder

    just_in_time, plain, snapshots = [], [], []
    with folder() as memory:
        for number in range(options.repeats):
            training = Training(memory / str(number), options.width, options.layers, every=1)
            training.run(SNAPSHOTS, wait=True)
            keeping = training.state._protection
            assert keeping is not None
            snapshots.append(training.snapshot_s())
            training.queue(SNAPSHOTS, before_write=cycles(STILL_S))
            began = time.perf_counter()
            answer = training.secured()
            just_in_time.append(time.perf_counter() - began)
            if not answer.whole:
                say(f"no just-in-time copy: {answer.why}")
            total = keeping.snapshots.arena.records()[0].total_bytes
            torch.cuda.synchronize()
            plain.append(_plain(total, GPU))
            del training, keeping
    return {"bytes": total, "just_in_time_s": just_in_time, "plain_s": plain, "snapshot_s": snapshots}


def _plain(total: int, device: Any) -> float:
    """Copy `total` bytes in one piece into pinned memory; return the seconds that it took."""
    import torch

    source = torch.zeros(total, dtype=torch.uint8, device=device)
    target = torch.zeros(total, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _commits(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds that each commit took on the host while the device was busy."""
    import torch

    from bench.gpu.training import GPU, Training, cycles, folder

    took = []
    with folder() as memory:
        training = Training(memory, 256)
        loop = training.state.steps(10 * options.repeats + 10)
        busy = cycles(0.02)
        for number, step in enumerate(loop):
            torch.cuda.synchronize()
            torch.cuda._sleep(busy)
            training.optimizer.step()
            loss = torch.ones((), device=GPU)
            began = time.perf_counter()
            training.state.commit(loss=loss, position=step)
            if number >= 10:
                took.append(time.perf_counter() - began)
    return {"commit_s": took}


def _rows(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    names = {
        "just_in_time_s": "just-in-time copy during a blocked kernel",
        "snapshot_s": "snapshot during training",
        "plain_s": "plain copy into pinned memory",
        "commit_s": "commit while the device is busy",
    }
    found = {text: summary(figures[name]) for name, text in names.items()}
    rows = [(text, seconds(each.median), seconds(each.worst)) for text, each in found.items()]
    return [*rows, ("state", size(figures["bytes"]), "")]


def _verdicts(figures: dict[str, Any]) -> list[Verdict]:
    plain, snapshot = (summary(figures[name]).median for name in ("plain_s", "snapshot_s"))
    late = summary(figures["just_in_time_s"]).worst
    commit = summary(figures["commit_s"]).median
    shown = f"{seconds(snapshot)}, plain {seconds(plain)}"
    return [
        below("a just-in-time copy waits for no kernel", late, STILL_S / 2, seconds(late)),
        at_most(f"a snapshot has {SHARE:.0%} of a plain copy's speed", snapshot, plain / SHARE, shown),
        below("a commit waits for no kernel", commit, COMMIT_S, seconds(commit)),
    ]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("gpu", __doc__ or "")
    parser.add_argument("--width", type=int, default=8192, help="width of the square layers")
    parser.add_argument("--layers", type=int, default=8, help="number of layers")
    parser.add_argument("--repeats", type=int, default=5, help="number of copies of each kind")
    return parser.parse_args(list(argv))
