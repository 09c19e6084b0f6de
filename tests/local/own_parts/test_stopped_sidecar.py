"""A stopped sidecar is replaced like a dead one, and its ranks keep training."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from holdfast.process import linux
from tests.local.conftest import Start
from tests.local.running import Json, Run
from tests.local.waiting import GONE_S, until

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def run(start_shared: Start) -> Iterator[Run]:
    run = start_shared("--members 2 --checkpoint-every 0", "steady.py", 10_000_000)
    yield run
    assert run.stop().code == 130


def replaced(run: Run, before: Json, member: int) -> Json:
    """Return the status once another sidecar reports for the member and the group trains as before."""
    old = before["members"][member]["sidecar_pid"]
    run.wait(lambda s: s["members"][member]["sidecar_pid"] not in (None, old), "another sidecar reports")
    after = run.trains()
    assert (after["generation"], after["incidents"]) == (before["generation"], before["incidents"])
    assert [each["pid"] for each in after["ranks"]] == [each["pid"] for each in before["ranks"]]
    return after


@pytest.mark.parametrize("member", [0, 1])
def test_a_stopped_sidecar_is_replaced_at_no_cost(run: Run, member: int) -> None:
    before = run.steady()
    pid = before["members"][member]["sidecar_pid"]
    os.kill(pid, signal.SIGSTOP)
    replaced(run, before, member)
    until(lambda: linux.state_of(pid)[0] == "X" or None, "the old one is gone", GONE_S)
    assert f"replacing sidecar m{member}: it is stopped" in run.output()


def test_a_fault_while_a_sidecar_is_stopped_is_recovered_from(run: Run) -> None:
    before = run.steady()
    os.kill(before["members"][1]["sidecar_pid"], signal.SIGSTOP)
    found = run.broken(lambda: run.hit(1, signal.SIGKILL))
    assert (found["kind"], found["rank"]) == ("crash", 1), found
    assert found["lost_steps"] <= 1
    assert {each["name"] for each in run.running()["members"]} == {"m0", "m1"}
