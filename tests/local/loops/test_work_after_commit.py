"""Work after a commit is finished, or repeated, or the run reports that it was not."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import Run
from tests.local.waiting import WAIT_S, until

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]

OPTIONS = "--members 2 --snapshot-every 5 --hang-floor 60s"  # durations are not tested here
LINES = [str(number) for number in range(40)]
# lines, at least 0.05 s each: well above the limit for long work (`supervisor.view.interrupted_work.LONG_S`)
MUCH = 14


def begun(run: Run, folder: Path) -> None:
    run.running()
    until(lambda: (folder / "begun").exists() or None, "rank 0 is at its work after a commit", WAIT_S)


def times(folder: Path) -> int:
    return len((folder / "times").read_text().splitlines())


def saved(folder: Path) -> list[str]:
    return (folder / "model.txt").read_text().splitlines()


def test_a_survivor_finishes_its_work_after_its_commit(start: Start, tmp_path: Path) -> None:
    run = start(OPTIONS, "work_after_commit.py", tmp_path, "save")
    begun(run, tmp_path)
    run.hit(1, signal.SIGKILL)
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert (times(tmp_path), saved(tmp_path)) == (1, LINES)
    [found] = run.incidents()
    assert (found["rank"], found["lost_steps"], found["cut_short"]) == (1, 0, [])
    assert "all ranks have finished after 1 incident" in ended.lines[-1]


def test_interrupted_work_after_a_commit_is_repeated(start: Start, tmp_path: Path) -> None:
    run = start(OPTIONS, "work_after_commit.py", tmp_path, "save")
    begun(run, tmp_path)
    until(lambda: len(saved(tmp_path)) > MUCH or None, "the work has taken long", WAIT_S)
    run.hit(0, signal.SIGKILL)
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert (times(tmp_path), saved(tmp_path)) == (2, LINES)
    [found] = run.incidents()
    [cut] = found["cut_short"]
    assert (cut["rank"], cut["step"], cut["again"]) == (0, 20, True)
    assert found["resume"]["step"] < 20
    assert run.last_status()["cut_short"] == []


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.2])
def test_a_save_in_a_declared_pause_is_repeated_however_early_a_fault_interrupts_it(
    start: Start, tmp_path: Path, seconds: float
) -> None:
    run = start(OPTIONS, "work_after_commit.py", tmp_path, "die", seconds)
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert (times(tmp_path), saved(tmp_path)) == (2, ["saved"])
    [found] = run.incidents()
    [cut] = found["cut_short"]
    assert (cut["rank"], cut["step"], cut["before_commit"], cut["again"]) == (0, 20, False, True)
    assert found["resume"]["step"] < 20
    assert run.last_status()["cut_short"] == []


def test_a_connection_reset_during_a_save_is_the_scripts_own_failure(start: Start, tmp_path: Path) -> None:
    """Its text is the same as for a lost peer. The group once skipped the work, and the save was lost."""
    run = start(OPTIONS, "work_after_commit.py", tmp_path, "hang-up")
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert (times(tmp_path), saved(tmp_path)) == (2, ["saved"])
    [found] = run.incidents()
    assert (found["kind"], found["rank"], found["step"]) == ("exception", 0, 20)
    assert found["resume"]["step"] < 20
    assert "ConnectionResetError: [Errno 104] Connection reset by peer" in ended.output
    assert 'work_after_commit.py", line' in ended.output


def test_a_save_after_a_barrier_in_a_pause_is_repeated_if_a_peer_dies_before_the_barrier(
    start: Start, tmp_path: Path
) -> None:
    run = start(OPTIONS, "work_after_commit.py", tmp_path, "meet")
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert (times(tmp_path), saved(tmp_path)) == (2, ["saved"])
    [found] = run.incidents()
    assert (found["kind"], found["rank"]) == ("crash", 1)
    assert found["resume"]["step"] < 20
    assert [(each["rank"], each["step"], each["again"]) for each in found["cut_short"]] == [(0, 20, True)]
    assert run.last_status()["cut_short"] == []


@pytest.mark.parametrize(("hit", "begins"), [(0, 2), (1, 1)])
def test_a_thread_that_is_joined_in_a_pause_finishes_or_repeats_its_save(
    start: Start, tmp_path: Path, hit: int, begins: int
) -> None:
    run = start(OPTIONS, "work_after_commit.py", tmp_path, "joined")
    begun(run, tmp_path)
    run.hit(hit, signal.SIGKILL)
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert (times(tmp_path), saved(tmp_path)) == (begins, LINES)
    assert "runs in a thread during the steps" not in ended.output


def test_a_thread_that_saves_during_the_steps_is_warned_of_once(start: Start, tmp_path: Path) -> None:
    ended = start(OPTIONS, "work_after_commit.py", tmp_path, "beside").finish()
    assert ended.code == 0, ended.output
    assert saved(tmp_path) == LINES
    assert ended.output.count("runs in a thread during the steps") == 1, ended.output
    assert "holdfast: warning: save (work_after_commit.py, line " in ended.output


def test_work_after_a_commit_that_a_stop_interrupts_is_repeated_by_the_next_run(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    assert (
        start(OPTIONS, "work_after_commit.py", tmp_path / "alone", "save", into="undisturbed").finish().code
        == 0
    )
    run = start(f"{OPTIONS} --grace 1s", "work_after_commit.py", tmp_path, "save")
    begun(run, tmp_path)
    run.interrupt()
    stopped = run.finish()
    assert stopped.code == 130, stopped.output
    assert "interrupted work after a commit (rank 0 after step 20), which will be repeated" in stopped.output
    assert saved(tmp_path) != LINES
    again = start(f"{OPTIONS} --run-dir {run.run_dir}", "work_after_commit.py", tmp_path, "save")
    ended = again.finish()
    assert ended.code == 0, ended.output
    assert (times(tmp_path), saved(tmp_path)) == (2, LINES)
    for rank in (0, 1):
        name = f"digest.{rank}"
        assert (tmp_path / name).read_text() == (tmp_path / "alone" / name).read_text()


@pytest.mark.parametrize("how", ["plain", "pause"])
def test_interrupted_work_before_a_commit_is_repeated(start: Start, tmp_path: Path, how: str) -> None:
    """Its peer has already committed that step, so the group could also resume after it."""
    (tmp_path / "alone").mkdir()
    assert (
        start(OPTIONS, "work_before_commit.py", tmp_path / "alone", how, into="undisturbed").finish().code
        == 0
    )
    run = start(OPTIONS, "work_before_commit.py", tmp_path, how)
    begun(run, tmp_path)
    until(lambda: len(saved(tmp_path)) > 2 * MUCH or None, "the work has taken long", WAIT_S)
    run.hit(0, signal.SIGKILL)
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert (times(tmp_path), saved(tmp_path)) == (2, LINES)
    [found] = run.incidents()
    [cut] = found["cut_short"]
    assert (cut["rank"], cut["step"], cut["before_commit"], cut["again"]) == (0, 20, True, True)
    assert found["resume"]["step"] <= 20
    assert run.last_status()["cut_short"] == []
    for rank in (0, 1):
        name = f"digest.{rank}"
        assert (tmp_path / name).read_text() == (tmp_path / "alone" / name).read_text()


def test_a_survivor_finishes_its_work_before_a_commit_that_its_peer_has_already_made(
    start: Start, tmp_path: Path
) -> None:
    run = start("--members 2 --snapshot-every 7 --hang-floor 60s", "work_before_commit.py", tmp_path, "pause")
    begun(run, tmp_path)
    run.wait(lambda status: status["snapshot_step"] == 21, "its peer has a snapshot of the next step")
    run.hit(1, signal.SIGKILL)
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert (times(tmp_path), saved(tmp_path)) == (1, LINES)
    [found] = run.incidents()
    assert (found["rank"], found["resume"]["step"], found["cut_short"]) == (1, 21, [])


@pytest.mark.parametrize(
    ("what", "says"), [("raise", "the evaluation failed"), ("interrupt", "KeyboardInterrupt")]
)
def test_an_exception_after_a_commit_ends_the_run_like_one_in_a_step(
    start: Start, tmp_path: Path, what: str, says: str
) -> None:
    run = start(OPTIONS, "work_after_commit.py", tmp_path, what)
    ended = run.finish()
    assert ended.code == 1, ended.output
    assert says in ended.output
    assert "work_after_commit.py" in ended.output
    assert times(tmp_path) == 3
    assert [(each["kind"], each["rank"], each["step"]) for each in run.incidents()] == [
        ("exception", 0, 20)
    ] * 3
    assert "(3 incidents)" in ended.output


def test_work_after_a_commit_that_raises_once_is_repeated(start: Start, tmp_path: Path) -> None:
    run = start(OPTIONS, "work_after_commit.py", tmp_path, "raise-once")
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert times(tmp_path) == 2


def test_a_programming_error_before_any_step_is_retried_once(start: Start, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(
        "import holdfast\nsession = holdfast.join()\nlen(session.rank)\n"  # a TypeError
    )
    run = start("--nproc-per-node 2", "wrong.py")
    ended = run.finish()
    assert ended.code == 1
    assert len(run.incidents()) == 2
    assert "the same failure 2 times at step 0; this is a bug, not a fault" in ended.output


def test_exceptions_that_the_script_handles_are_no_incidents(start: Start) -> None:
    run = start("--nproc-per-node 2", "handles_exceptions.py")
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert run.incidents() == []


def test_an_exception_is_reported_while_its_finally_blocks_run_to_their_end(
    start: Start, tmp_path: Path
) -> None:
    run = start("--nproc-per-node 2 --snapshot-every 5", "slow_unwinding.py", tmp_path)
    ended = run.finish()
    assert ended.code == 0, ended.output
    [found] = run.incidents()
    assert (found["kind"], found["rank"], found["step"]) == ("exception", 1, 25)
    assert found["message"].endswith("RuntimeError: the batch cannot be read\n")
    assert "slow_unwinding.py" in found["message"]
    assert (tmp_path / "uploaded").exists()
