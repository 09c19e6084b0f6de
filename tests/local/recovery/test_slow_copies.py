"""With slow copies and rare snapshots, a second fault costs no more than the first."""

from __future__ import annotations

import signal
from functools import partial

import pytest

from tests.local.conftest import Start

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]


def test_a_slow_copy_gets_enough_time_in_every_generation(start: Start) -> None:
    run = start(
        "--members 2 --snapshot-every 4096 --checkpoint-every 0 --hang-floor 8s", "slow_copy.py", 10_000_000
    )
    run.steady(20)
    for rank in (1, 0, 1):
        found = run.broken(partial(run.hit, rank, signal.SIGKILL))
        assert found["lost_steps"] <= 1, found
        assert found["resume"]["source"] == "slot"
        run.trains(10)
    assert run.stop().code == 130


def test_if_all_ranks_die_after_a_recovery_the_group_resumes_from_its_base_or_a_newer_snapshot(
    start: Start,
) -> None:
    run = start("--members 2 --snapshot-every 4096 --checkpoint-every 0", "steady.py", 10_000_000)
    run.steady(150)
    base = run.broken(lambda: run.hit(1, signal.SIGKILL))["resume"]["step"]
    assert base >= 150
    run.trains(34)
    found = run.broken(lambda: run.kill_ranks(0, 1))
    assert found["resume"]["source"] == "slot", found
    assert found["resume"]["step"] >= base, "the group resumed from a state older than its base"
    assert run.stop().code == 130
