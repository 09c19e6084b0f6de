"""A fault that ends a run costs no steps: the state before it is saved, and a corrected script resumes it."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.catalog import StoredCheckpoint, each_checkpoint, verify
from tests.local.conftest import Start
from tests.local.running import Run
from tests.local.waiting import WAIT_S, until
from tests.local.whole_command import Ended, holdfast
from tests.stalling.switch import Storage

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]

STEP, STEPS = 9, 14  # of `exact.py`
MEMBERS = "--members 2 --checkpoint-every 0"
RANKS = "--nproc-per-node 2 --checkpoint-every 0"
SAVED = f"; the state of step {STEP} is saved as a checkpoint ("
RESUME = "holdfast: resume with: holdfast "


def buggy(start: Start, tmp_path: Path, bug: str, options: str, **environment: str) -> Run:
    """Start `exact.py` with a bug in step 9."""
    (tmp_path / "bug").write_text(bug)
    return start(f"--plain {options}", "exact.py", 0.02, **environment)


def steps(run: Run) -> dict[int, StoredCheckpoint]:
    """Return the checkpoints, each of which is intact."""
    found = [each for _, each in each_checkpoint(run.run_dir / "checkpoints")]
    whole = [each for each in found if isinstance(each, StoredCheckpoint)]
    assert [verify(each) for each in whole] == [None] * len(found)
    return {each.step: each for each in whole}


def resumed(run: Run, ended: Ended) -> None:
    """Correct the script, run the command that the run has printed, and check the final weights."""
    (run.folder / "bug").unlink()
    done = [(run.folder / f"steps-{rank}").read_text().splitlines() for rank in (0, 1)]
    [line] = [each for each in ended.lines if each.startswith(RESUME)]
    again = holdfast(*shlex.split(line.removeprefix(RESUME)), cwd=run.folder)
    assert again.code == 0, again.output
    for rank in (0, 1):
        assert f"rank {rank} began at step {STEP}; its weights are exact: True" in again.output
        later = (run.folder / f"steps-{rank}").read_text().splitlines()[len(done[rank]) :]
        assert later == [str(step) for step in range(STEP, STEPS)]


@pytest.mark.parametrize("options", [MEMBERS, RANKS], ids=["members", "ranks"])
@pytest.mark.parametrize(
    ("bug", "more", "code", "why"),
    [
        ("raise", "", 1, "the same failure 3 times at step 9; this is a bug, not a fault"),
        ("nan", "", 1, "produces a bad number again"),
        ("exit", "", 3, "not restarted, because the script chose to exit"),
        ("kill", " --max-restarts 1", 137, "--max-restarts 1 reached"),
    ],
    ids=["exception", "NaN", "exit", "restarts"],
)
def test_a_corrected_script_resumes_at_the_step_that_failed(
    start: Start, tmp_path: Path, bug: str, more: str, code: int, why: str, options: str
) -> None:
    run = buggy(start, tmp_path, bug, options + more)
    ended = run.finish()
    assert ended.code == code, ended.output
    assert why in ended.lines[-1]
    assert SAVED in ended.lines[-1]
    assert list(steps(run)) == [STEP]
    where = run.run_dir / "checkpoints" / f"step-{STEP:08d}"
    assert f"holdfast: the checkpoint of step {STEP} is {where}" in ended.lines
    if bug == "nan":  # it offers to skip the step, which would change the weights
        line = next(each for each in ended.lines if "holdfast run --resume" in each)
        words = line.partition("holdfast run ")[2].replace("--skip-bad-batches ", "")
        ended = Ended(code, f"{RESUME}run {words}")
    resumed(run, ended)


def test_a_lost_member_whose_private_state_a_peer_holds_costs_nothing(start: Start, tmp_path: Path) -> None:
    run = buggy(start, tmp_path, "wait", MEMBERS + " --max-restarts 0")
    run.wait(lambda s: (s["step"] or 0) >= STEP, "the step in which rank 1 waits")
    run.inject("member", 1)
    ended = run.finish()
    assert ended.code == 1
    assert "member m1 with rank 1 is lost" in ended.lines[-1]
    assert SAVED in ended.lines[-1]
    resumed(run, ended)


def test_a_member_whose_ranks_have_moved_to_the_standby_saves_the_state_that_it_holds(
    start: Start, tmp_path: Path
) -> None:
    """The group fails again before it makes another snapshot."""
    run = buggy(start, tmp_path, "kill, then exit", MEMBERS + " --standby 1 --nproc-per-node 2")
    ended = run.finish()
    assert ended.code == 5, ended.output
    assert SAVED in ended.lines[-1]
    resumed(run, ended)


def test_a_member_that_no_longer_answers_delays_the_end_for_a_bounded_time(
    start: Start, tmp_path: Path
) -> None:
    """Its connections stay open, as those of a host that has lost its power."""
    run = buggy(start, tmp_path, "wait", MEMBERS + " --max-restarts 0")
    status = run.wait(lambda s: (s["step"] or 0) >= STEP, "the step in which rank 1 waits")
    [member] = [each for each in status["members"] if each["name"] == "m1"]
    os.kill(member["sidecar_pid"], signal.SIGSTOP)
    run.hit(0, signal.SIGKILL)
    ended = run.finish()
    assert ended.code == 137, ended.output
    assert SAVED in ended.lines[-1]
    resumed(run, ended)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    made = Storage(tmp_path / "run" / "checkpoints", tmp_path)
    yield made
    made.answer()


def saving(start: Start, tmp_path: Path, storage: Storage) -> Run:
    """Return a run that a bug ends, and that cannot write its checkpoint until `storage` answers."""
    run = buggy(start, tmp_path, "wait", RANKS + " --max-restarts 0", **storage.environment)
    run.wait(lambda s: (s["step"] or 0) >= STEP, "the step in which rank 1 waits")
    storage.stall()
    run.hit(1, signal.SIGKILL)
    status = run.wait(lambda s: s["phase"] == "saving", "the state is being saved")
    assert status["exit_code"] is None
    expected = f"the state of step {STEP}, before the run ends: --max-restarts 0 reached"
    assert status["message"].startswith(expected)
    return run


def test_a_supervisor_that_dies_during_the_save_is_replaced_and_the_end_is_the_same(
    start: Start, tmp_path: Path, storage: Storage
) -> None:
    run = saving(start, tmp_path, storage)
    status = run.wait(lambda s: s["supervisor_pid"], "a supervisor")
    os.kill(status["supervisor_pid"], signal.SIGKILL)
    run.wait(
        lambda s: s["supervisor_pid"] != status["supervisor_pid"] and s["phase"] == "saving", "another one"
    )
    storage.answer()
    ended = run.finish()
    assert ended.code == 137
    assert SAVED in ended.lines[-1]
    resumed(run, ended)


def test_ctrl_c_twice_ends_the_save(start: Start, tmp_path: Path, storage: Storage) -> None:
    run = saving(start, tmp_path, storage)
    run.interrupt()
    until(lambda: "press Ctrl-C again" in run.output() or None, "the first signal is handled", WAIT_S)
    run.interrupt_again()
    ended = run.finish()
    assert ended.code == 130
    said = "stopped immediately, as requested, while the run was ending: --max-restarts 0 reached"
    assert said in ended.lines[-1]


def test_storage_that_cannot_be_written_leaves_the_exit_code_and_is_named(
    start: Start, tmp_path: Path
) -> None:
    run = buggy(start, tmp_path, "wait", RANKS + " --max-restarts 0")
    run.wait(lambda s: (s["step"] or 0) >= STEP, "the step in which rank 1 waits")
    folder = run.run_dir / "checkpoints"
    folder.rmdir()
    folder.touch()  # not even root can create a directory in a file
    run.hit(1, signal.SIGKILL)
    ended = run.finish()
    assert ended.code == 137
    assert f"; the state of step {STEP} could not be saved: " in ended.lines[-1]
    assert f"the run stopped, {STEP} steps lost" in ended.output
    assert RESUME not in ended.output


def test_a_bug_in_the_first_step_leaves_nothing_to_resume(start: Start, tmp_path: Path) -> None:
    """The corrected script may have another model, which would not fit a checkpoint of step 0."""
    (tmp_path / "early.py").write_text(
        "import torch, holdfast\n"
        "model = torch.nn.Linear(8, 1)\n"
        "session = holdfast.join()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "state = session.protect(model=model, optimizer=optimizer)\n"
        "for step in state.steps(5):\n"
        "    raise ValueError('the bug')\n"
    )
    run = start("--plain", "early.py")
    ended = run.finish()
    assert ended.code == 1
    assert steps(run) == {}
    assert "could be saved" not in ended.output
    assert RESUME not in ended.output
