"""A script that catches what a step raises skips that batch, but no step that only a lost peer spoiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.local.conftest import Start

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("skip", "--members 2"),  # the update is in the `try`: the step was counted without one
        ("stale", "--nproc-per-node 2"),  # it comes after: with gradients that were never reduced
        ("own", "--nproc-per-node 2"),  # a collective of the script's own raises, as it is waited for
        ("own-stale", "--members 2"),  # or at once, and the update comes after
    ],
)
def test_a_step_that_a_lost_peer_spoilt_is_done_again(
    start: Start, tmp_path: Path, how: str, options: str
) -> None:
    digests = []
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "killed":
            (folder / "kill").touch()
        run = start(options, "skips_failed_batch.py", folder, how, into=f"run-{name}")
        ended = run.finish()
        assert ended.code == 0, ended.output
        found = run.incidents()
        kills = [] if name == "whole" else [("crash", 1)] * 4
        assert [(each["kind"], each["rank"]) for each in found] == kills, "what all leave out is no fault"
        assert [each["lost_steps"] for each in found] == [0] * len(kills)
        digests.append([(folder / f"digest.{rank}").read_text() for rank in range(2)])
    assert digests[0] == digests[1]
