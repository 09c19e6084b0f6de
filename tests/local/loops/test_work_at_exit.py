"""A script's work at exit may finish within --grace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.waiting import WAIT_S, until

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]


@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("raise", 1), ("thread", 1)])
def test_a_script_that_ends_the_run_finishes_its_work_at_exit(
    start: Start, tmp_path: Path, how: str, code: int
) -> None:
    run = start("--nproc-per-node 2", "work_at_exit.py", tmp_path, how)
    ended = run.finish()
    assert ended.code == code, ended.output
    rank = run.incidents()[-1]["rank"]
    assert (tmp_path / f"done.{rank}").exists(), ended.output


def test_buffered_output_of_open_files_is_written_at_the_end(start: Start, tmp_path: Path) -> None:
    ended = start("--nproc-per-node 2", "unclosed_files.py", tmp_path).finish()
    assert ended.code == 0, ended.output
    lines = "".join(f"{step}\n" for step in range(20))
    for rank in (0, 1):
        assert (tmp_path / f"log.{rank}").read_text() == lines
        assert (tmp_path / f"rows.{rank}").read_text() == lines
        assert (tmp_path / f"record.{rank}").read_text() == f"{lines}the end\n"


def test_an_upload_in_the_background_gets_the_grace_after_a_successful_run(
    start: Start, tmp_path: Path
) -> None:
    """The upload handles no signals, like most."""
    ended = start("--nproc-per-node 2", "work_at_exit.py", tmp_path, "upload").finish()
    assert ended.code == 0, ended.output
    assert (tmp_path / "done.0").exists()
    assert "in the background" not in ended.output


def test_an_idle_helper_in_the_background_is_named_and_ended(start: Start, tmp_path: Path) -> None:
    ended = start("--nproc-per-node 2 --grace 1h", "work_at_exit.py", tmp_path, "helper").finish()
    assert ended.code == 0, ended.output
    ended_by = "(sleep 1000), which the script left in the background, is idle although the run has ended"
    assert ended_by in ended.output


def test_a_background_process_that_works_beyond_the_grace_is_named_and_killed(
    start: Start, tmp_path: Path
) -> None:
    ended = start("--nproc-per-node 2 --grace 3s", "work_at_exit.py", tmp_path, "upload").finish()
    assert ended.code == 0, ended.output
    assert not (tmp_path / "done.0").exists()
    assert "which the script left in the background, did not end within --grace: killing it" in ended.output


def test_two_signals_end_work_at_exit_that_never_finishes(start: Start, tmp_path: Path) -> None:
    run = start("--nproc-per-node 2 --grace 1h", "work_at_exit.py", tmp_path, "stuck")
    run.wait(lambda status: status["phase"] == "stopping", "the end")
    run.interrupt()
    until(lambda: "press Ctrl-C again" in run.output() or None, "the first to be handled", WAIT_S)
    run.interrupt_again()
    assert run.finish().code == 3
