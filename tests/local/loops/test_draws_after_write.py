"""A script that changes its private state after the optimizer's write is warned, and resumes exactly."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from tests.local.conftest import Start

pytestmark = [pytest.mark.local, pytest.mark.timeout(180)]

STEPS = 200


def digests(folder: Path, name: str) -> list[str]:
    return [(folder / f"{name}.{rank}").read_text() for rank in (0, 1)]


def test_the_script_is_warned_once_and_ends_with_the_undisturbed_state(start: Start, tmp_path: Path) -> None:
    for name, places in (("beside", "--nproc-per-node 2"), ("apart", "--members 2")):
        run = start(
            f"{places} --snapshot-every 16", "draws_after_write.py", STEPS, tmp_path / name, into=name
        )
        run.reach(STEPS // 3)
        run.broken(partial(run.hit, 1, signal.SIGKILL))
        ended = run.finish()
        assert ended.code == 0, ended.output
        # once in the run, though each rank of each generation finds it
        assert ended.output.count("changes between optimizer.step() and commit()") == 1
    run = start(
        "--members 2 --snapshot-every 16", "draws_after_write.py", STEPS, tmp_path / "lost", into="lost"
    )
    run.steady()
    run.reach(STEPS // 3)
    found = run.broken(lambda: run.inject("member", 1))
    assert found["resume"]["source"] == "slot", "the other member holds its final private state"
    assert run.finish().code == 0
    assert digests(tmp_path, "lost") == digests(tmp_path, "apart")
    whole = start("--nproc-per-node 2", "draws_after_write.py", STEPS, tmp_path / "whole", into="whole")
    assert whole.finish().code == 0
    assert digests(tmp_path, "beside") == digests(tmp_path, "apart") == digests(tmp_path, "whole")
