"""A script that changes its private state after the optimizer's write: told, and resumed exactly."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.local.conftest import Start

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]

STEPS = 200


def digests(folder: Path, name: str) -> list[str]:
    return [(folder / f"{name}.{rank}").read_text() for rank in (0, 1)]


@pytest.mark.parametrize("places", ["--nproc-per-node 2", "--members 2"])
def test_it_is_told_once_and_the_end_is_the_undisturbed_runs(
    start: Start, places: str, tmp_path: Path
) -> None:
    run = start(f"{places} --snapshot-every 16", "late.py", STEPS, tmp_path / "broken")
    run.steady()
    run.reach(STEPS // 3)
    run.broken(lambda: run.hit(1, signal.SIGKILL))
    ended = run.finish()
    assert ended.code == 0, ended.output
    assert (
        ended.output.count("changes between optimizer.step() and commit()") == 2 * 2
    )  # by each rank of each generation
    whole = start("--nproc-per-node 2", "late.py", STEPS, tmp_path / "whole", into="whole")
    assert whole.finish().code == 0
    assert digests(tmp_path, "broken") == digests(tmp_path, "whole")
