"""Silent corruption: a replica that is no longer equal is found by its snapshots' checksums."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.local.conftest import Start

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]

SPOILT, EVERY = 260, 64


def test_a_silently_corrupted_replica_is_named_and_rolled_back(start: Start, tmp_path: Path) -> None:
    given = (1500, 1, SPOILT, tmp_path / "marker", tmp_path / "digest")
    run = start(f"--members 3 --snapshot-every {EVERY} --checkpoint-every 0", "liar.py", *given)
    ended = run.finish()
    assert ended.code == 0, ended.output
    (found,) = run.incidents()
    assert (found["kind"], found["rank"], found["member"], found["remedy"]) == (
        "diverged",
        1,
        "m1",
        "rollback",
    )
    assert found["resume"]["step"] <= SPOILT, "what came after it is as bad on every member"
    assert "that of m1 is not the others'" in found["why"]
    ranks = [json.loads((tmp_path / f"digest.{rank}").read_text()) for rank in range(3)]
    assert all(each["optimizer"] == ranks[0]["optimizer"] for each in ranks)
