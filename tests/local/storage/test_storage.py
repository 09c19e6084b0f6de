"""Storage goes away, fills up or returns wrong data: training continues and intact states are found."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest

from holdfast.snapshot.arena import Arena
from tests.local.conftest import Start
from tests.local.running import Run
from tests.local.waiting import until
from tests.local.whole_command import holdfast

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]

ENDLESS = 10_000_000


def saved(run: Run, beyond: int) -> int:
    """Wait for a checkpoint of more than `beyond` steps without an error; return its step."""
    found = run.wait(
        lambda s: s["checkpoint"] and not s["checkpoint"]["error"] and s["checkpoint"]["step"] > beyond,
        f"a checkpoint beyond step {beyond}",
    )
    return int(found["checkpoint"]["step"])


def failing(run: Run) -> str:
    """Wait until the status reports a failed checkpoint; return the error. Training continues."""
    found = run.wait(lambda s: s["checkpoint"] and s["checkpoint"]["error"], "a failed checkpoint")
    run.trains(50)
    return str(found["checkpoint"]["error"])


def test_training_continues_while_storage_is_missing_or_full(start: Start) -> None:
    run = start("--nproc-per-node 2 --checkpoint-every 1", "steady.py", ENDLESS)
    run.steady()
    first = saved(run, -1)
    folder = run.run_dir / "checkpoints"
    folder.rename(run.folder / "away")
    folder.touch()  # not even root can create a directory in a file
    assert "checkpoints" in failing(run)
    folder.unlink()
    (run.folder / "away").rename(folder)
    second = saved(run, first)
    pid = run.running()["members"][0]["sidecar_pid"]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    assert "File too large" in failing(run)  # like ENOSPC: a write that fails halfway
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert saved(run, second) > second
    assert run.incidents() == []
    assert holdfast("checkpoints", "--verify", "--run-dir", run.run_dir, cwd=run.folder).code == 0
    run.stop()


def test_a_supervisor_that_cannot_write_still_recovers_the_group(start: Start) -> None:
    run = start("--nproc-per-node 2 --checkpoint-every 0", "steady.py", ENDLESS)
    before = run.steady()
    pid = before["supervisor_pid"]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
    run.hit(1, signal.SIGKILL)
    after = run.wait(lambda s: s["generation"] > before["generation"] and s["rate"], "a new generation")
    assert after["supervisor_pid"] == pid
    assert "File too large" in after["journal_error"]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    found = run.broken(lambda: run.hit(0, signal.SIGKILL))
    assert found["lost_steps"] <= 1
    assert run.running()["journal_error"] == ""
    assert run.stop().code == 130


def test_a_rank_that_cannot_write_its_log_keeps_training(start: Start) -> None:
    run = start("--nproc-per-node 2 --checkpoint-every 0", "prints_often.py", ENDLESS, 1)
    run.steady()
    resource.prlimit(run.pid(1), resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
    run.trains(50)
    assert run.incidents() == []
    run.stop()


def test_a_run_without_storage_for_logs_loses_only_the_logs(start: Start) -> None:
    """Ranks, sidecar, supervisor and member that start without storage for logs discard their output."""
    run = start("--members 2 --standby 1 --checkpoint-every 0", "steady.py", ENDLESS)
    run.steady()
    (run.run_dir / "logs").rename(run.folder / "away")
    (run.run_dir / "logs").touch()
    assert run.broken(lambda: run.hit(0, signal.SIGKILL))["lost_steps"] <= 1
    before = run.steady()
    for pid in (before["members"][0]["sidecar_pid"], before["supervisor_pid"]):
        os.kill(pid, signal.SIGKILL)
    run.wait(lambda s: s["supervisor_pid"] != before["supervisor_pid"] and s["warm_ready"], "both are back")
    assert run.broken(lambda: run.inject("member"))["lost_steps"] <= 1
    run.wait(lambda s: s["warm_ready"] and len(s["members"]) == 3, "a new standby")
    assert run.stop().code == 130


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(start: Start) -> None:
    run = start("--nproc-per-node 2 --checkpoint-every 1", "steady.py", ENDLESS)
    run.steady()
    older = saved(run, saved(run, -1))
    run.interrupt()
    run.finish()
    listed = holdfast("checkpoints", "--json", "--run-dir", run.run_dir, cwd=run.folder)
    newest = max(json.loads(listed.output), key=lambda each: int(each["step"]))
    assert newest["step"] > older
    flip_a_bit(Path(newest["path"]) / "replicated.safetensors")
    shown = holdfast("checkpoints", "--verify", "--run-dir", run.run_dir, cwd=run.folder)
    assert shown.code == 1
    assert "replicated.safetensors" in shown.output
    again = start("--nproc-per-node 2 --checkpoint-every 0", "steady.py", ENDLESS)
    resumed = again.wait(lambda s: s["step"] is not None and s["generation"] > 1, "a step")
    assert older <= resumed["step"]
    again.wait(lambda s: "generation 2 runs" in again.output() or None, "the line of the new generation")
    said = again.output()
    assert f"step-{newest['step']:08d} is not used" in said
    assert f"from step {resumed['resumed']['step']:,} (checkpoint)" in said
    again.stop()


def test_a_damaged_snapshot_is_fetched_from_a_peer(start: Start) -> None:
    run = start("--members 2 --snapshot-every 0 --checkpoint-every 0", "steady.py", ENDLESS)
    run.steady()
    assert run.runtime is not None
    arena = Arena(run.runtime / "m0" / "arena")
    until(lambda: all(map(arena.sealed, arena.records())) or None, "a checksum", 10)
    for record in arena.records():
        flip_a_bit(record.path)
    arena.close()
    found = run.broken(lambda: run.kill_ranks(0, 1))
    assert found["resume"]["source"] == "slot"
    assert "damaged" in run.logs("sidecar-m0.log")
    run.stop()


def flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_invalid_checkpoints_are_skipped(start: Start, tmp_path: Path) -> None:
    """A huge header, paths that lead elsewhere, a pickle, a torn directory: none of them is opened."""
    first = start("--nproc-per-node 1 --checkpoint-every 1", "steady.py", ENDLESS)
    first.steady()
    saved(first, -1)
    first.interrupt()
    first.finish()
    folder = first.run_dir / "checkpoints"
    [whole] = sorted(folder.glob("step-*"))[-1:]
    for number, (name, content) in enumerate(HOSTILE.items()):
        bad = folder / f"step-{90_000_000 + number:08d}"
        shutil.copytree(whole, bad)
        (bad / name).write_bytes(content)
    (folder / "step-99000000").mkdir()
    (folder / "step-99000000" / "rank-0").touch()
    again = start("--nproc-per-node 1 --checkpoint-every 0", "steady.py", ENDLESS)
    resumed = again.wait(lambda s: s["step"] is not None and s["generation"] > 1, "a step")
    assert int(whole.name[5:]) <= resumed["step"] < 90_000_000
    again.stop()
    shown = holdfast("checkpoints", "--verify", "--run-dir", first.run_dir, cwd=first.folder)
    assert shown.code == 1
    assert "step-99000000" in shown.output


HOSTILE = {
    "replicated.safetensors": b"\xff\xff\xff\xff\xff\xff\xff\x7f{}",
    "rank-00000.bin": b"\x80\x04cposix\nsystem\n(S'touch /tmp/x'\ntR.",
    "manifest.json": b'{"format": 1, "files": [{"name": "../../../../etc/passwd"}]}',
}
