"""After twenty faults of all kinds the weights are bit-for-bit the same, with both bundled trainers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from pathlib import Path

import pytest

from holdfast import parts
from tests.local.conftest import Start
from tests.local.running import Json, Refused, Run
from tests.local.waiting import WAIT_S, until

pytestmark = [pytest.mark.local, pytest.mark.timeout(300)]

FAULTS = 20
KINDS = ("kill", "member", "stop", "hang", "spin", "nan", "exit", "sidecar", "supervisor", "launcher")
SIGNALS = {
    "stop": signal.SIGSTOP,
    **dict.fromkeys(("kill", "sidecar", "supervisor", "launcher"), signal.SIGKILL),
}
FREE = ("sidecar", "supervisor")  # their deaths cost nothing, and are no incidents
ASKED = 5
# The faults occur in the first two thirds: while a supervisor is away, training continues and must not end.
STEPS = {"gpt": 840, "vision": 420}


def train(start: Start, options: str, trainer: str, digest: Path) -> Run:
    """Start a trainer's tiny preset."""
    words = [f"trainer.{trainer}", "--tiny", "--log-every", "500", "--val-every", "300"]
    words += ["--steps", str(STEPS[trainer]), "--digest", str(digest)]
    words += ["--fake-data"] if trainer == "vision" else []
    options += " --checkpoint-every 5 --hang-floor 600ms"  # shortens the wait for `spin`, which may be work
    return start(options, "-m", *words, into=digest.stem, PYTHONPATH=str(parts.folder()))


def strike(run: Run, kind: str, rank: int) -> None:
    """Cause a fault: by a signal if possible, otherwise by a drill."""
    if kind in SIGNALS:
        until(lambda: struck(run, kind, rank), f"a living process for {kind}", WAIT_S)
    else:
        drill(run, kind, rank)


def struck(run: Run, kind: str, rank: int) -> bool | None:
    """Signal the process that the status names. Return None if the previous fault has already ended it."""
    status = run.running()
    member = next(m for m in status["members"] if rank in m["ranks"])
    pids = {each: member[f"{each}_pid"] for each in ("sidecar", "launcher")}
    pids["supervisor"] = status["supervisor_pid"]
    pid = pids[kind] if kind in pids else run.pid(rank)
    if not lives(pid):
        return None
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, SIGNALS[kind])
        return True
    return None


def lives(pid: int | None) -> bool:
    """Return True if the process exists and is not a zombie. Signals would have no effect on a zombie."""
    try:
        return pid is not None and Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def drill(run: Run, kind: str, rank: int) -> None:
    """Request a drill; retry if the previous fault, noticed only now, had stopped the group."""
    for _ in range(ASKED):
        try:
            return run.inject(kind, rank)
        except Refused:
            run.running()
    raise AssertionError(f"{kind} of rank {rank} was refused {ASKED} times")


def noticed(run: Run, known: int, kind: str) -> None:
    """Wait for one more incident than `known`."""
    run.wait(lambda status: int(status["incidents"]) > known, f"an incident for {kind}")


def read(digest: Path) -> Json:
    found = json.loads(digest.read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("trainer", ["gpt", "vision"])
def test_after_twenty_faults_everything_is_bit_identical(start: Start, trainer: str, tmp_path: Path) -> None:
    chance = random.Random(20)
    kinds = [*KINDS, *KINDS]
    chance.shuffle(kinds)
    run = train(start, "--members 2 --standby 1", trainer, tmp_path / "broken.json")
    run.steady()
    for number, kind in enumerate(kinds):
        run.reach(STEPS[trainer] * number * 2 // (3 * FAULTS))
        known = int(run.running()["incidents"])
        strike(run, kind, chance.randrange(2))
        if kind not in FREE:  # otherwise the next fault may join this one's incident
            noticed(run, known, kind)
    ended = run.finish(120)
    assert ended.code == 0, ended.output
    assert len(run.incidents()) >= FAULTS - sum(kind in FREE for kind in kinds)
    whole = train(start, "--nproc-per-node 2", trainer, tmp_path / "whole.json")
    assert whole.finish(120).code == 0
    assert read(tmp_path / "broken.json") == read(tmp_path / "whole.json")
