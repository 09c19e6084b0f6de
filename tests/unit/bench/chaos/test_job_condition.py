from __future__ import annotations

from typing import Any

import pytest

from bench.chaos.fault_table import FaultSign
from bench.chaos.job_condition import (
    STEPS,
    condition_of,
    missing_sign,
    new_incidents,
    survives_without,
    why_not_back,
)
from bench.chaos.job_table import ChaosJob
from supervisor.observability import short_status

JOB = ChaosJob("pytorch", "PyTorchJob", "pytorchjob.yaml", standby=1, stored=True)
ALONE = ChaosJob("stateful", "StatefulSet", "statefulset.yaml", standby=0, stored=True)


def member(name: str, ranks: tuple[int, ...] = (), **more: Any) -> dict[str, Any]:
    return {"name": name, "ranks": list(ranks), "connected": True, "parked": 1, **more}


WHOLE = (member("a", (0,)), member("b", (1,)), member("c"))


def status(*members: dict[str, Any], step: int = 100, **more: Any) -> dict[str, Any]:
    view = {"phase": more.get("phase", "running"), "members": list(members or WHOLE), "updated": step}
    found = {"phase": "running", "step": step, "incidents": 1, "generation": 2, "epoch": 3, "recent": []}
    return {**found, "view": short_status.encode(view), **more}


def why(now: dict[str, Any], since: dict[str, Any], job: ChaosJob = JOB, *, whole: bool = True) -> str:
    return why_not_back(job, condition_of(job, now), condition_of(job, since), whole=whole)


def test_a_job_that_trains_with_its_standby_is_back() -> None:
    assert why(status(step=100 + STEPS), status(step=100)) == ""


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (status(step=100 + STEPS - 1), "it is at step 104, and was at 100"),
        (status(step=200, phase="securing", message="waits for b"), "its phase is securing: waits for b"),
        (status(member("a", (0,)), member("c"), step=200), "1 of 2 members have ranks"),
        (
            status(member("a", (0,)), member("b", (1,), connected=False), member("c"), step=200),
            "not connected: b",
        ),
        (status(member("a", (0,)), member("b", (1,)), step=200), "fewer than 1 standbys are warm"),
        (status(*WHOLE[:2], member("c", parked=0), step=200), "fewer than 1 standbys are warm"),
        (status(step=200, recent=[{"id": "i-0001", "open": True}]), "an incident is open"),
        (status(phase="ended", exitCode=1, message="why"), "it has ended with exit code 1: why"),
    ],
)
def test_a_job_is_not_back_and_the_reason_is_told(now: dict[str, Any], told: str) -> None:
    assert why(now, status(step=100)) == told


def test_a_status_older_than_the_fault_shows_nothing() -> None:
    now = {**status(step=200), "view": status(step=100)["view"]}
    assert why(now, status(step=100)) == "its status has not been published again"


def test_a_job_may_train_before_its_standby_is_warm() -> None:
    now = status(*WHOLE[:2], step=200)
    assert why(now, status(step=100), whole=False) == ""
    assert why(now, status(step=100), ALONE) == ""


def test_a_run_that_has_ended_well_is_back_whatever_its_step() -> None:
    assert why(status(phase="ended", exitCode=0), status(step=100)) == ""
    assert condition_of(JOB, status(phase="ended", exitCode=0)).exit_code == 0
    assert condition_of(JOB, status()).exit_code is None


def test_a_job_without_a_status_is_not_calm() -> None:
    assert condition_of(JOB, {}).unrest == "its phase is unknown: "


@pytest.mark.parametrize(
    ("sign", "change", "restarts", "told"),
    [
        ("incident", {}, 1, "no incident"),
        ("incident", {"incidents": 2}, 0, ""),
        ("epoch", {"incidents": 2}, 1, "no other supervisor"),
        ("epoch", {"epoch": 4}, 0, ""),
        ("restart", {"epoch": 4, "incidents": 2}, 0, "no restarted container"),
        ("restart", {}, 1, ""),
        ("", {}, 0, ""),
        ("incident", {"phase": "ended", "exitCode": 0}, 0, ""),
        ("incident", {"phase": "ended", "exitCode": 1}, 0, "no incident"),
    ],
)
def test_each_fault_has_its_own_sign(
    sign: FaultSign, change: dict[str, Any], restarts: int, told: str
) -> None:
    now, since = condition_of(JOB, status(**change)), condition_of(JOB, status())
    assert missing_sign(sign, now, since, restarts) == told


def test_incidents_are_reported_once() -> None:
    first = {"id": "i-0001", "kind": "crash", "lost_steps": 0, "stacks": ["long"]}
    second = {**first, "id": "i-0002"}
    [found] = new_incidents({"recent": [first, second]}, {"i-0001"})
    assert (found["id"], found["kind"]) == ("i-0002", "crash")
    assert "stacks" not in found


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        (["n1", "n2"], ""),
        (["n2", "n3"], ""),
        (["n1", "n1"], "all members of pytorch are on n1"),
        (["n2"], "pytorch has 1 of 2 members"),
    ],
)
def test_a_node_may_be_lost_only_if_each_job_keeps_a_member(nodes: list[str], told: str) -> None:
    assert survives_without(JOB, nodes, "n1") == told
