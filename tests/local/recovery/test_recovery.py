"""One fault after another in one run of two members and a standby: each costs at most one step."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.local.conftest import Start
from tests.local.running import Json, Run
from tests.local.whole_command import holdfast

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]

WARM = 0.5  # share of the run's own start time; the bench checks the target of 0.3 s


@pytest.fixture(scope="module")
def run(start_shared: Start) -> Iterator[Run]:
    """A run that continues until the last test of this module ends it."""
    run = start_shared("--members 2 --standby 1 --checkpoint-every 0", "steady.py", 10_000_000)
    yield run
    ended = run.stop()
    assert ended.code == 130


@pytest.fixture(scope="module")
def warm_s(run: Run) -> float:
    """The seconds that a warm recovery may take on this machine at its current load."""
    return WARM * float(run.steady()["buckets_s"]["start"])


def costs_a_step_at_most(incident: Json) -> None:
    assert incident["lost_steps"] <= 1, incident
    assert not incident["open"]
    assert incident["timeline"][-1]["what"] == "first step"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_costs_at_most_one_step(run: Run, warm_s: float, rank: int) -> None:
    before = run.steady()
    found = run.broken(lambda: run.hit(rank, signal.SIGKILL))
    costs_a_step_at_most(found)
    assert (found["kind"], found["rank"], found["remedy"]) == ("crash", rank, "restart")
    assert found["recovered_s"] <= warm_s, found["timeline"]
    assert run.running()["generation"] == before["generation"] + 1


def test_a_rank_that_exits_is_restarted(run: Run) -> None:
    run.steady()
    found = run.broken(lambda: run.inject("exit", 1))
    costs_a_step_at_most(found)
    assert (found["kind"], found["rank"]) == ("crash", 1)
    assert "code 17" in found["why"]


def test_a_bad_number_is_rolled_back(run: Run) -> None:
    run.steady()
    found = run.broken(lambda: run.inject("nan", 1))
    assert (found["kind"], found["rank"], found["remedy"]) == ("nan", 1, "rollback")
    assert found["resume"]["step"] <= found["step"], "the run resumed from a state after the bad step"


def test_a_lost_member_costs_at_most_one_step(run: Run, warm_s: float) -> None:
    before = run.steady()
    gone = next(m["name"] for m in before["members"] if 1 in m["ranks"])
    found = run.broken(lambda: run.inject("member", 1))
    costs_a_step_at_most(found)
    assert (found["kind"], found["member"], found["remedy"]) == ("member_lost", gone, "swap")
    assert found["recovered_s"] <= warm_s, found["timeline"]
    assert gone not in {m["name"] for m in run.running()["members"] if m["ranks"]}


def test_killed_sidecars_cost_nothing(run: Run) -> None:
    before = run.running()
    old = {m["sidecar_pid"] for m in before["members"] if m["ranks"]}
    for pid in old:
        os.kill(pid, signal.SIGKILL)
    run.wait(
        lambda s: len({m["sidecar_pid"] for m in s["members"] if m["ranks"]} - old - {None}) == 2,
        "both sidecars are back",
    )
    after = run.trains()
    assert after["generation"] == before["generation"]
    assert after["incidents"] == before["incidents"]
    costs_a_step_at_most(run.broken(lambda: run.hit(0, signal.SIGKILL)))


def test_a_killed_supervisor_costs_nothing(run: Run) -> None:
    before = run.running()
    os.kill(before["supervisor_pid"], signal.SIGKILL)
    run.wait(lambda s: s["supervisor_pid"] != before["supervisor_pid"], "a new supervisor")
    after = run.trains()
    assert after["generation"] == before["generation"]
    assert after["incidents"] == before["incidents"]
    costs_a_step_at_most(run.broken(lambda: run.hit(1, signal.SIGKILL)))


def test_a_new_standby_replaces_the_next_lost_member(run: Run) -> None:
    """This time the launcher is killed, which ends the member."""
    before = run.wait(_has_standby, "a new standby")
    member = next(m for m in before["members"] if 0 in m["ranks"])
    found = run.broken(lambda: os.kill(member["launcher_pid"], signal.SIGKILL))
    costs_a_step_at_most(found)
    assert (found["kind"], found["member"]) == ("member_lost", member["name"])
    assert found["remedy"] == "swap"


def _has_standby(status: Json) -> bool:
    return status["warm_ready"] and any(m["role"] == "standby" and m["parked"] for m in status["members"])


def test_a_silent_host_counts_as_a_lost_member(run: Run) -> None:
    """All its processes are stopped, as on a host that swaps: no connection closes, no message arrives."""
    before = run.wait(_has_standby, "a standby")
    member = next(m for m in before["members"] if 0 in m["ranks"])
    pids = [member["launcher_pid"], member["sidecar_pid"], run.pid(0)]

    def stop() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

    found = run.broken(stop)
    costs_a_step_at_most(found)
    assert (found["kind"], found["member"]) == ("member_lost", member["name"])


def test_the_commands_show_the_incidents(run: Run) -> None:
    shown = holdfast("incidents", "--run-dir", run.run_dir, cwd=run.folder)
    assert shown.code == 0, shown.output
    assert len([line for line in shown.lines if line.startswith("i-")]) == len(run.incidents())
    assert holdfast("status", "--run-dir", run.run_dir, "--json", cwd=run.folder).code == 0
    explained = holdfast("explain", "last", "--run-dir", run.run_dir, cwd=run.folder)
    assert explained.code == 0, explained.output
    assert run.incidents()[-1]["id"] in explained.output
    assert "back in" in explained.output


def test_the_ledger_adds_up(run: Run) -> None:
    status = run.running()
    booked_s = sum(status["buckets_s"].values()) + status["pending_s"]
    assert booked_s == pytest.approx(status["total_s"], abs=1e-6)
