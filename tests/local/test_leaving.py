"""What a script does on its way out is let finish, within --grace."""

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
    run = start("--nproc-per-node 2", "leaving.py", tmp_path, how)
    ended = run.finish()
    assert ended.code == code, ended.output
    rank = run.incidents()[-1]["rank"]
    assert (tmp_path / f"done.{rank}").exists(), ended.output


def test_an_upload_that_a_run_leaves_when_it_ends_well_has_the_grace(start: Start, tmp_path: Path) -> None:
    ended = start("--nproc-per-node 2", "leaving.py", tmp_path, "upload").finish()
    assert ended.code == 0, ended.output
    assert (tmp_path / "done.0").exists()


def test_two_signals_end_a_way_out_that_does_not_end(start: Start, tmp_path: Path) -> None:
    run = start("--nproc-per-node 2 --grace 1h", "leaving.py", tmp_path, "stuck")
    run.wait(lambda status: status["phase"] == "stopping", "the end")
    run.interrupt()
    until(lambda: "press Ctrl-C again" in run.output() or None, "the first to be heard", WAIT_S)
    run.interrupt()
    assert run.finish().code == 3
