"""Two loops in one script, with work between them that must happen exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.local.conftest import Start

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]

PASSED = "the loop over steps(20) was complete before the restart, so the code after it has run again"


def results(folder: Path) -> dict[str, str]:
    return {each.name: each.read_text() for name in ("first", "all") for each in folder.glob(f"{name}.?")}


@pytest.mark.parametrize("places", ["--members 2", "--nproc-per-node 2"])
def test_work_in_the_first_step_of_the_second_loop_is_done_once_despite_faults(
    start: Start, tmp_path: Path, places: str
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder, kills in ((whole, ()), (broken, (9, 20, 21, 33))):
        folder.mkdir()
        run = start(
            f"{places} --snapshot-every 4", "two_loops.py", "guarded", folder, *kills, into=folder.name
        )
        ended = run.finish()
        assert ended.code == 0, ended.output
        assert len(run.incidents()) == len(kills)
        assert "was complete before the restart" not in ended.output, ended.output
        assert "between two loops" not in ended.output, ended.output
    assert len(results(whole)) == 4
    assert results(broken) == results(whole)


def test_work_between_two_loops_that_a_restart_repeats_is_reported(start: Start, tmp_path: Path) -> None:
    run = start("--nproc-per-node 2 --snapshot-every 4", "two_loops.py", "plain", tmp_path, 33)
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert ended.output.count(PASSED + ", with the state of step 3") == 1, ended.output
    assert "between two loops: after a restart this change may be made twice" in ended.output
