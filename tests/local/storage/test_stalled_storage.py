"""The run directory's storage stops responding: training continues, recovery and Ctrl-C work."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from holdfast.checkpoint.catalog import StoredCheckpoint, each_checkpoint, verify
from holdfast.snapshot.arena import Arena
from tests.local.conftest import Start
from tests.local.running import Json, Run
from tests.local.waiting import WAIT_S, until
from tests.stalling.switch import Storage

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]

OPTIONS = "--nproc-per-node 2 --checkpoint-every 0"
ENDLESS = 10_000_000


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    made = Storage(tmp_path / "run", tmp_path)
    yield made
    made.answer()


def stalled(start: Start, storage: Storage) -> tuple[Run, Json]:
    """Return a run that trains while its storage no longer responds, and its last status."""
    run = start(OPTIONS, "steady.py", ENDLESS, **storage.environment)
    status = run.steady()
    storage.stall()
    return run, status


def test_a_fault_is_recovered_from_while_storage_hangs(start: Start, storage: Storage) -> None:
    run, before = stalled(start, storage)
    os.kill(before["ranks"][1]["pid"], signal.SIGKILL)
    after = run.wait(lambda s: s["generation"] > before["generation"] and s["rate"], "a new generation")
    assert after["supervisor_pid"] == before["supervisor_pid"], "the supervisor was replaced"
    assert "the storage has not responded" in after["journal_error"]
    run.trains(20)
    until(lambda: "does not respond" in run.output() or None, "the screen says so", WAIT_S)
    storage.answer()
    run.wait(lambda s: not s["journal_error"], "the decision is on disk")
    found = run.recovered(before["incidents"] + 1)
    assert found["lost_steps"] <= 1, str(found)
    until(lambda: "is available again" in run.output() or None, "the screen says so", WAIT_S)
    again = run.broken(lambda: run.hit(0, signal.SIGKILL))
    assert again["lost_steps"] <= 1
    assert run.stop().code == 130


def test_ranks_that_die_one_after_another_while_a_checkpoint_hangs_cost_at_most_one_step_each(
    start: Start, tmp_path: Path
) -> None:
    """Until the checkpoint has been written, its member cannot reuse the slot from which it is written."""
    storage = Storage(tmp_path / "run" / "checkpoints", tmp_path)
    options = "--members 2 --nproc-per-node 1 --standby 0 --checkpoint-every 1s"
    run = start(options, "steady.py", ENDLESS, **storage.environment)
    try:
        run.steady()
        run.wait(lambda s: s["checkpoint"], "a checkpoint")
        storage.stall()
        assert run.runtime is not None
        [folder] = run.runtime.rglob("m0/arena")
        arena = Arena(folder)
        hangs = until(arena.being_read, "a checkpoint hangs, and holds the older snapshot", WAIT_S)
        for rank in (0, 0, 0, 1, 0, 1):
            number = run.running()["incidents"] + 1
            found = run.broken(partial(run.hit, rank, signal.SIGKILL))
            assert found["kind"] == "crash", str(found)
            assert found["lost_steps"] <= 1, str(found)
            assert run.running()["incidents"] == number, "each fault is one incident"
        assert arena.being_read() == hangs
    finally:
        storage.answer()
    last = run.running()["step"]
    run.wait(lambda s: s["checkpoint"] and s["checkpoint"]["step"] >= last, "a newer checkpoint")
    assert run.stop().code == 130
    kept = [what for _, what in each_checkpoint(run.run_dir / "checkpoints")]
    assert kept
    assert all(isinstance(each, StoredCheckpoint) and verify(each) is None for each in kept), str(kept)


def writer_and_other(journal: Path) -> tuple[str, str]:
    """Return the member that was ordered to write the last checkpoint, and the other member.

    The writer is m0, unless only m1 has completed the newest step. The members may be a step apart at a stop.
    """
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    [writer] = [str(line["after"]["save_member"]) for line in lines if line["action"] == "Save"]
    return writer, "m1" if writer == "m0" else "m0"


def test_another_member_writes_the_last_checkpoint_if_its_writer_is_lost(
    start: Start, tmp_path: Path
) -> None:
    storage = Storage(tmp_path / "run" / "checkpoints", tmp_path)
    options = "--members 2 --nproc-per-node 1 --standby 0 --checkpoint-every 600s"
    run = start(options, "steady.py", ENDLESS, **storage.environment)
    try:
        run.steady()
        storage.stall()
        run.interrupt()
        status = run.wait(lambda s: s["phase"] == "saving", "the last checkpoint is requested")
        journal = run.run_dir / "journal.jsonl"
        lost, left = writer_and_other(journal)
        [member] = [each for each in status["members"] if each["name"] == lost]
        for name in ("launcher_pid", "sidecar_pid"):
            os.kill(member[name], signal.SIGKILL)
        why = f"member {lost} is lost: member {left} saves the checkpoint of step"
        until(lambda: why in journal.read_text() or None, "another member is ordered to write", WAIT_S)
    finally:
        storage.answer()
    ended = run.finish()
    assert ended.code == 130
    assert "stopped as requested, with a checkpoint of step" in ended.lines[-1]
    [(_, found)] = each_checkpoint(run.run_dir / "checkpoints")
    assert isinstance(found, StoredCheckpoint)
    assert found.meta["member"] == left
    assert verify(found) is None


def test_ctrl_c_ends_a_run_whose_storage_hangs(start: Start, storage: Storage) -> None:
    run, _ = stalled(start, storage)
    run.interrupt()
    until(lambda: "saving a checkpoint" in run.output() or None, "the first signal is handled", WAIT_S)
    run.interrupt_again()
    ended = run.finish()
    assert ended.code == 130
    assert "stopped immediately, as requested" in ended.lines[-1]
