"""A script's work at exit may finish within --grace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.waiting import WAIT_S, until

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("raise", 1), ("thread", 1)])
def test_a_script_that_ends_the_run_finishes_its_way_out(
    start: Start, tmp_path: Path, how: str, code: int
) -> None:
    run = start("--nproc-per-node 2", "work_at_exit.py", tmp_path, how)
    ended = run.finish()
    assert ended.code == code, ended.output
    rank = run.incidents()[-1]["rank"]
    assert (tmp_path / f"done.{rank}").exists(), ended.output


def test_what_a_script_has_left_in_open_files_is_written_at_its_end(start: Start, tmp_path: Path) -> None:
    ended = start("--nproc-per-node 2", "unclosed_files.py", tmp_path).finish()
    assert ended.code == 0, ended.output
    lines = "".join(f"{step}\n" for step in range(20))
    for rank in (0, 1):
        assert (tmp_path / f"log.{rank}").read_text() == lines
        assert (tmp_path / f"rows.{rank}").read_text() == lines
        assert (tmp_path / f"record.{rank}").read_text() == f"{lines}the end\n"


def test_an_upload_that_a_run_leaves_when_it_ends_well_has_the_grace(start: Start, tmp_path: Path) -> None:
    """It knows of no signals, as most do not."""
    ended = start("--nproc-per-node 2", "work_at_exit.py", tmp_path, "upload").finish()
    assert ended.code == 0, ended.output
    assert (tmp_path / "done.0").exists()
    assert "in the background" not in ended.output


def test_a_helper_that_only_waits_is_named_and_ended(start: Start, tmp_path: Path) -> None:
    ended = start("--nproc-per-node 2 --grace 1h", "work_at_exit.py", tmp_path, "helper").finish()
    assert ended.code == 0, ended.output
    ended_by = "(sleep 1000), which the script left in the background, is idle although the run has ended"
    assert ended_by in ended.output


def test_what_works_for_longer_than_the_grace_is_named_and_killed(start: Start, tmp_path: Path) -> None:
    ended = start("--nproc-per-node 2 --grace 3s", "work_at_exit.py", tmp_path, "upload").finish()
    assert ended.code == 0, ended.output
    assert not (tmp_path / "done.0").exists()
    assert "which the script left in the background, is killed" in ended.output


def test_two_signals_end_a_way_out_that_does_not_end(start: Start, tmp_path: Path) -> None:
    run = start("--nproc-per-node 2 --grace 1h", "work_at_exit.py", tmp_path, "stuck")
    run.wait(lambda status: status["phase"] == "stopping", "the end")
    run.interrupt()
    until(lambda: "press Ctrl-C again" in run.output() or None, "the first to be heard", WAIT_S)
    run.interrupt()
    assert run.finish().code == 3
