"""A stopped supervisor is replaced, and Ctrl-C ends the run no matter what state the supervisor is in."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor.store import run_lead
from tests.local.conftest import Start
from tests.local.running import Run
from tests.local.waiting import until

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]

OPTIONS = "--nproc-per-node 2 --checkpoint-every 0"
ENDLESS = 10_000_000


def supervisor(run: Run) -> int:
    return int(run.running()["supervisor_pid"])


def test_a_stopped_supervisor_is_replaced_and_its_run_recovers(start: Start) -> None:
    run = start(OPTIONS, "steady.py", ENDLESS)
    before = run.steady()
    os.kill(before["supervisor_pid"], signal.SIGSTOP)
    os.kill(before["ranks"][1]["pid"], signal.SIGKILL)
    found = run.recovered(before["incidents"] + 1)
    assert found["lost_steps"] <= 1
    assert run.running()["supervisor_pid"] != before["supervisor_pid"]
    assert "the supervisor has sent no heartbeat for 5 s and is stopped" in run.output()
    assert run.stop().code == 130


def test_ctrl_c_saves_a_checkpoint_although_the_supervisor_is_stopped(start: Start) -> None:
    run = start(OPTIONS, "steady.py", ENDLESS)
    run.steady()
    os.kill(supervisor(run), signal.SIGSTOP)
    run.interrupt()
    ended = run.finish()
    assert ended.code == 130
    assert "with a checkpoint of step" in ended.lines[-1]


def test_ctrl_c_ends_a_run_whose_supervisor_cannot_be_started(start: Start) -> None:
    run = start(OPTIONS, "steady.py", ENDLESS)
    pid = run.steady()["supervisor_pid"]
    (run.run_dir / "run.json").write_text("{")
    os.kill(pid, signal.SIGKILL)
    until(
        lambda: "supervisor has ended 3 times in a row" in run.output() or None,
        "the crashes are reported",
        60,
    )
    run.interrupt()
    ended = run.finish()
    assert ended.code == 130
    assert "stopped without a last checkpoint" in ended.lines[-1]


def test_a_second_ctrl_c_ends_the_run_at_once_although_the_supervisor_is_stopped(start: Start) -> None:
    run = start(OPTIONS, "steady.py", ENDLESS)
    run.steady()
    os.kill(supervisor(run), signal.SIGSTOP)
    assert run.stop().code == 130


def test_a_keeper_without_free_descriptors_retries_the_start_of_a_part(start: Start) -> None:
    run = start("--members 2 --standby 1 --checkpoint-every 0", "steady.py", ENDLESS)
    before = run.steady()
    run.wait(lambda s: len(s["members"]) == 3 and s["warm_ready"], "a standby")
    usual = resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE)
    none = 3, usual[1]
    resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE, none)
    os.kill(before["supervisor_pid"], signal.SIGKILL)
    until(lambda: "supervisor cannot be started" in run.output() or None, "it is reported", 60)
    resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE, usual)
    assert run.running()["supervisor_pid"] != before["supervisor_pid"]
    resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE, none)
    run.inject("member", 1)
    until(lambda: "another member cannot be started" in run.output() or None, "it is reported", 60)
    resource.prlimit(run.process.pid, resource.RLIMIT_NOFILE, usual)
    run.wait(lambda s: len([m for m in s["members"] if m["role"] != "lost"]) == 3, "a new member")
    run.trains(20)
    assert run.stop().code == 130


def test_members_that_fail_at_startup_are_created_at_growing_intervals(start: Start) -> None:
    run = start(OPTIONS, "steady.py", ENDLESS, HOLDFAST_BIND="203.0.113.1")  # no address of this machine
    until(lambda: "launcher has ended 3 times in a row" in run.output() or None, "it is reported", 60)
    began = time.monotonic()
    until(lambda: (run.run_dir / "logs" / "launcher-m4.log").exists() or None, "the fifth member", 60)
    made = len(list((run.run_dir / "logs").glob("launcher-m*.log")))
    assert made <= 6 + (time.monotonic() - began) / 4
    assert run.stop().code == 130


def test_members_that_end_with_a_short_run_have_not_failed(start: Start) -> None:
    run = start("--members 2 --standby 1 --checkpoint-every 0", "steady.py", 40)
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert "in a row" not in ended.output


def _stands_still(pid: int) -> bool:
    """Return True if all threads are stopped. A thread in a system call, such as a rename, stops after it."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(") ")[2].startswith("T") for task in tasks)


def test_a_status_that_cannot_be_displayed_does_not_end_the_run(start: Start) -> None:
    run = start(OPTIONS, "steady.py", ENDLESS)
    pid = run.steady()["supervisor_pid"]
    os.kill(pid, signal.SIGSTOP)  # otherwise it would overwrite the status immediately
    until(lambda: _stands_still(pid) or None, "each thread is stopped", 60)
    ours = run.run_dir / "ours.json"
    ours.write_text('{"members": [7], "ranks": 3, "step": "x", "phase": []}')
    ours.replace(run.run_dir / "status.json")
    until(lambda: "the status cannot be displayed" in run.output() or None, "it is reported", 60)
    run.running()
    assert run.stop().code == 130


def test_a_signal_that_nohup_ignores_does_not_stop_the_run(start: Start) -> None:
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = start(OPTIONS, "steady.py", ENDLESS)
    finally:
        signal.signal(signal.SIGHUP, usual)
    run.steady()
    run.interrupt(signal.SIGHUP)
    run.trains(20)
    assert "stopping" not in run.output()
    assert run.stop().code == 130


STEPS = 800


def taken_over(supervisor: int, path: Path) -> int:
    """Stop a supervisor outside any write, take over its run, and return the new epoch."""
    while True:
        os.kill(supervisor, signal.SIGSTOP)
        try:
            return run_lead.take_over(path).epoch
        except run_lead.Blocked:
            os.kill(supervisor, signal.SIGCONT)


def test_a_replaced_supervisor_that_continues_has_no_effect(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog kills the supervisor that it replaces; here, the old one survives the takeover."""
    monkeypatch.setattr(run_lead, "LOCK_S", 0.0)
    undisturbed = tmp_path / "undisturbed"
    assert start("--nproc-per-node 2", "epochs.py", STEPS, "none", undisturbed, into="a").finish().code == 0
    digest = tmp_path / "digest"
    run = start("--nproc-per-node 2", "epochs.py", STEPS, "none", digest, into="b")
    before = run.steady()
    old, journal = before["supervisor_pid"], run.run_dir / "journal.jsonl"
    taken = taken_over(old, run.run_dir / run_lead.FILE)
    known = journal.read_bytes()
    os.kill(before["ranks"][1]["pid"], signal.SIGKILL)  # the old one also learns of it
    os.kill(old, signal.SIGCONT)
    found = run.recovered(before["incidents"] + 1)
    assert found["lost_steps"] <= 1
    assert run.running()["supervisor_pid"] != old
    written = [json.loads(line) for line in journal.read_bytes()[len(known) :].splitlines()]
    assert journal.read_bytes().startswith(known)
    assert {each["epoch"] for each in written} == {taken + 1}, "only the old supervisor's successor writes"
    assert "another supervisor leads the run" in run.logs("supervisor.log")
    assert run.finish().code == 0
    assert len(run.incidents()) == 1
    for rank in ("0", "1"):
        weights = (Path(f"{path}.{rank}").read_text() for path in (digest, undisturbed))
        assert len(set(weights)) == 1


def test_a_supervisor_that_the_watchdog_has_replaced_no_longer_exists(start: Start, tmp_path: Path) -> None:
    digest = tmp_path / "digest"
    run = start("--nproc-per-node 2", "epochs.py", ENDLESS, "none", digest)
    old = run.steady()["supervisor_pid"]
    os.kill(old, signal.SIGSTOP)
    now = run.wait(lambda status: status["supervisor_pid"] != old, "another supervisor", 60)
    with pytest.raises(ProcessLookupError):
        os.kill(old, signal.SIGCONT)
    assert int((run.run_dir / run_lead.FILE).read_text()) == 2
    assert now["incidents"] == 0
    assert run.stop().code == 130


def stuck_after(run: Run, decision: str, begin: Callable[[], object]) -> None:
    """Call `begin`, and stop the supervisor between the journal line of `decision` and its completion.

    In between, the supervisor waits for a sidecar that is stopped.
    """
    before = run.steady()
    journal, sidecar = run.run_dir / "journal.jsonl", before["members"][0]["sidecar_pid"]
    known = len(journal.read_bytes())
    os.kill(sidecar, signal.SIGSTOP)
    begin()
    written = f'"action":"{decision}"'.encode()
    until(lambda: written in journal.read_bytes()[known:].replace(b" ", b"") or None, decision, 60)
    os.kill(before["supervisor_pid"], signal.SIGSTOP)
    os.kill(sidecar, signal.SIGCONT)
    assert journal.read_bytes()[known:].count(b"\n") == 1, "the supervisor was stopped too late"


def test_a_supervisor_that_is_stuck_in_a_recovery_loses_no_member(start: Start) -> None:
    run = start("--members 2 --checkpoint-every 0", "steady.py", ENDLESS)
    stuck_after(run, "Secure", lambda: run.hit(1, signal.SIGKILL))
    found = run.recovered(1)
    assert (found["kind"], found["rank"]) == ("crash", 1), found
    assert found["lost_steps"] <= 1
    after = run.running()
    assert {each["name"] for each in after["members"]} == {"m0", "m1"}
    assert run.stop().code == 130


def test_the_last_step_is_saved_although_the_supervisor_is_stuck_in_a_stop(start: Start) -> None:
    run = start("--members 2", "steady.py", ENDLESS)
    stuck_after(run, "Secure", lambda: run.interrupt(signal.SIGTERM))
    reached = int(run.last_status()["step"])
    ended = run.finish()
    assert ended.code == 130
    assert "with a checkpoint of step" in ended.lines[-1], ended.output
    step = int(ended.lines[-1].partition("with a checkpoint of step ")[2].split()[0])
    assert step >= reached
