"""A script may catch an exception and skip the batch. A step that only a lost peer spoiled is repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.local.conftest import Start

pytestmark = [pytest.mark.local, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("skip", "--members 2"),  # the update is within the `try`, and the step once counted without it
        ("stale", "--nproc-per-node 2"),  # the update follows, with gradients that were never reduced
        ("own", "--nproc-per-node 2"),  # the script's own collective raises when it is waited for
        ("own-stale", "--members 2"),  # its own collective raises immediately; the update follows
    ],
)
def test_a_step_that_a_lost_peer_spoiled_is_repeated(
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
        assert [(each["kind"], each["rank"]) for each in found] == kills, (
            "a batch that all ranks skip is not a fault"
        )
        # At most the step in flight: the survivor may have completed it when the other rank dies.
        assert all(each["lost_steps"] <= 1 for each in found), found
        digests.append([(folder / f"digest.{rank}").read_text() for rank in range(2)])
    assert digests[0] == digests[1]
