"""Work after a commit that was cut off, where no older state is left to do it again from: the run says so."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.ending import holdfast
from tests.local.waiting import WAIT_S, until

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]


def test_a_run_that_left_work_undone_ends_with_code_3_and_names_it(start: Start, tmp_path: Path) -> None:
    """Copies before pauses have taken the places of older states: their private parts are gone."""
    run = start(
        "--members 2 --snapshot-every 100000 --checkpoint-every 0 --hang-floor 60s", "swapping.py", tmp_path
    )
    run.running()
    lines = tmp_path / "evaluated"
    until(lambda: (lines.exists() and len(lines.read_text().splitlines()) > 20) or None, "it is long", WAIT_S)
    run.hit(0, signal.SIGKILL)
    ended = run.finish()
    assert ended.code == 3, ended.output
    assert not (tmp_path / "done").exists()
    assert ended.lines[-1] == (
        "holdfast: all ranks have finished after 1 incident; work after commit was cut short 1 time: "
        "rank 0 after step 35 (see holdfast explain 1) (exit code 3)"
    )
    [found] = run.incidents()
    assert found["resume"]["step"] == 35
    [cut] = found["cut_short"]
    assert (cut["rank"], cut["step"], cut["again"]) == (0, 35, False)
    assert run.last_status()["cut_short"] == [{"incident": "i-0001", "rank": 0, "step": 35}]
    told = holdfast("explain", "1", "--run-dir", run.run_dir, cwd=tmp_path)
    assert "after the commit of step 35 is not done again: no state from before it is left" in told.output
