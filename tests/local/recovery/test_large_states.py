"""A large state on two members and a standby: one fault after another costs at most one step each.

HOLDFAST_LARGE_BYTES=1500000000 gives the state the size in the README. The test then needs 15 GB of memory
and five minutes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from bench.workloads.network import BALLAST
from tests.local.conftest import Start
from tests.local.running import Run

pytestmark = [pytest.mark.local, pytest.mark.timeout(900)]

BYTES = int(os.environ.get("HOLDFAST_LARGE_BYTES", "300000000"))
ROOT = Path(__file__).resolve().parents[3]


def standby(run: Run) -> None:
    """Wait until there is a warm standby and the group trains steadily."""

    def ready(status: dict[str, object]) -> bool:
        members = status["members"]
        assert isinstance(members, list)
        return any(each["role"] == "standby" and each["parked"] for each in members)

    run.wait(ready, "a standby")
    run.steady()


def test_ten_consecutive_faults_cost_at_most_one_step_each(start: Start) -> None:
    run = start(
        "--members 2 --standby 1 --checkpoint-every 0", "-m", "bench.workloads.protected",
        PYTHONPATH=str(ROOT), **{BALLAST: str(BYTES)},
    )  # fmt: skip
    faults: list[Callable[[], object]] = [
        partial(run.hit, 0, signal.SIGKILL),
        partial(run.hit, 1, signal.SIGKILL),
        partial(run.inject, "member", 1),
        partial(run.hit, 1, signal.SIGKILL),
        partial(run.hit, 0, signal.SIGSTOP),
    ]
    kinds = ["crash", "crash", "member_lost", "crash", "hang"]
    for act, kind in zip(faults * 2, kinds * 2, strict=True):
        standby(run)
        found = run.broken(act)
        assert found["kind"] == kind, found
        assert found["lost_steps"] <= 1, found
        assert found["resume"]["source"] == "slot"
    status = run.running()
    memory = status["memory"]
    assert memory["state_bytes"] > BYTES
    assert 2 * 2 * BYTES < memory["needed_bytes"] <= memory["available_bytes"]
    assert memory["used_bytes"] <= memory["needed_bytes"]
    assert {"supervisor", *(each["name"] for each in status["members"])} <= set(status["lag"])
    assert run.runtime is not None
    starts = list(run.runtime.glob("m*/restore"))
    assert starts
    for each in starts:
        assert len(list(each.iterdir())) <= 3, "private states of earlier starts are left"
    assert run.stop().code == 130
