"""A step has one more forward pass than earlier steps, so private state that was sent early is not final."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.local.conftest import Start

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]


def results(folder: Path) -> list[Any]:
    return [json.loads((folder / f"result.{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("places", ["--members 2", "--nproc-per-node 2"])
def test_a_rank_lost_before_its_commit_resumes_its_random_draws_after_the_last_pass(
    start: Start, tmp_path: Path, places: str
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    (broken / "kill").touch()
    for folder in (whole, broken):
        run = start(f"{places} --checkpoint-every 0", "gradient_accumulation.py", folder, into=folder.name)
        ended = run.finish()
        assert ended.code == 0, ended.output
        assert len(run.incidents()) == (folder == broken)
    assert run.incidents()[0]["lost_steps"] == 0
    assert results(broken) == results(whole)
