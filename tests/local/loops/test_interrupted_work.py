"""Work after a commit was interrupted and every older state is damaged: the run reports the work as lost."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.waiting import WAIT_S, until
from tests.local.whole_command import holdfast

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]


def test_a_run_that_left_work_undone_ends_with_code_3_and_names_the_work(
    start: Start, tmp_path: Path
) -> None:
    """Snapshots are off: memory holds only the first step's state, and the survivor's at the fault."""
    run = start(
        "--members 2 --snapshot-every 0 --checkpoint-every 0 --hang-floor 60s", "swapped_weights.py", tmp_path
    )
    run.running()
    lines = tmp_path / "evaluated"
    until(lambda: (lines.exists() and len(lines.read_text().splitlines()) > 20) or None, "it is long", WAIT_S)
    runtime = Path(json.loads((run.run_dir / "run.json").read_text())["runtime"])
    slots = list(runtime.glob("m*/arena/slot-*"))
    assert len(slots) == 2
    for slot in slots:
        _damage(slot)
    run.hit(0, signal.SIGKILL)
    ended = run.finish()
    assert ended.code == 3, ended.output
    assert not (tmp_path / "done").exists()
    assert ended.lines[-1] == (
        "holdfast: all ranks have finished after 2 incidents; work after commit was cut short 1 time: "
        "rank 0 after step 35 (see holdfast explain 2) (exit code 3)"
    )
    first, found = run.incidents()
    assert (first["resume"]["step"], found["kind"]) == (0, "restore")
    assert found["resume"]["step"] == 35
    [cut] = found["cut_short"]
    assert (cut["rank"], cut["step"], cut["again"]) == (0, 35, False)
    assert run.last_status()["cut_short"] == [
        {"incident": "i-0002", "rank": 0, "step": 35, "before_commit": False}
    ]
    told = holdfast("explain", "2", "--run-dir", run.run_dir, cwd=tmp_path)
    [line] = [line for line in told.output.splitlines() if "after the commit of step 35 (" in line]
    assert line.endswith("is not repeated, because no earlier state is left")


def _damage(path: Path) -> None:
    """Flip the bits of a byte in the middle, as a broken memory module does."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        [byte] = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0xFF]))
