"""A run directory that an earlier version wrote is resumed.

`earlier/628c3a2` is what that version's `holdfast run --nproc-per-node 2 -- python exact.py 0.6` left,
without its logs: rank 1 was killed at step 3, and Ctrl-C stopped the run at step 7.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import SCRIPTS
from tests.local.whole_command import holdfast

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]

WRITTEN = Path(__file__).with_name("earlier") / "628c3a2"
STORED, STEPS = 7, 14


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(WRITTEN, tmp_path / "run"))


def test_a_run_of_version_628c3a2_resumes_from_its_last_checkpoint_with_its_whole_state(
    start: Start, run_dir: Path
) -> None:
    """The weights at the end depend on each rank's random state, and on the optimizer's momentum."""
    run = start(f"--plain --nproc-per-node 2 --run-dir {run_dir}", "exact.py", 0.02)
    ended = run.finish()
    assert ended.code == 0, ended.output
    for rank in range(2):
        assert f"rank {rank} began at step {STORED}; its weights are exact: True" in ended.output
        steps = (run.folder / f"steps-{rank}").read_text().split()
        assert [*map(int, steps)] == [*range(STORED, STEPS)]
    journal = [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]
    before = len((WRITTEN / "journal.jsonl").read_text().splitlines())
    began = next(line for line in journal[before:] if line["action"] == "Start")
    lineage = [(each["generation"], each["step"]) for each in began["after"]["lineage"]]
    assert (lineage, began["what"]["resume"]["source"]) == ([(1, 0), (2, 3), (3, STORED)], "checkpoint")


def test_the_incidents_of_a_run_of_version_628c3a2_can_be_read(run_dir: Path) -> None:
    listed = holdfast("incidents", "--run-dir", run_dir, cwd=run_dir)
    assert (listed.code, "i-0001" in listed.output) == (0, True), listed.output
    told = holdfast("explain", "1", "--run-dir", run_dir, cwd=run_dir)
    assert told.code == 0
    assert "rank 1 was killed by SIGKILL at step 3" in told.output


def test_the_script_that_wrote_the_directory_still_exists() -> None:
    command = json.loads((WRITTEN / "run.json").read_text())["command"]
    assert (SCRIPTS / command[1]).is_file()
