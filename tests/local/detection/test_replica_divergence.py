"""Silent corruption: the checksums of snapshots show which replica no longer matches."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.local.conftest import Start
from tests.local.running import Run
from tests.samples.checkpoints import newest_whole, scan

pytestmark = [pytest.mark.local, pytest.mark.timeout(400)]

SPOILT, EVERY = 900, 64


def test_a_silently_corrupted_replica_is_named_and_rolled_back(start: Start, tmp_path: Path) -> None:
    given = (6000, 1, SPOILT, tmp_path / "marker", tmp_path / "digest")
    run = start(f"--members 3 --snapshot-every {EVERY} --checkpoint-every 1", "flips_bit.py", *given)
    ended = run.finish()
    assert ended.code == 0, ended.output
    (found,) = run.incidents()
    assert (found["kind"], found["rank"], found["member"], found["remedy"]) == (
        "diverged",
        1,
        "m1",
        "rollback",
    )
    assert 0 < found["resume"]["step"] <= SPOILT, "every later state is bad on all members"
    assert "m1 differs from the others" in found["why"]
    ranks = [json.loads((tmp_path / f"digest.{rank}").read_text()) for rank in range(3)]
    assert all(each["optimizer"] == ranks[0]["optimizer"] for each in ranks)


def await_equal(run: Run, beyond: int) -> int:
    """Return a step beyond `beyond` at which the replicas are known to have matched."""
    found = run.wait(
        lambda s: s["proven_step"] is not None and s["proven_step"] > beyond, "matching replicas", 120.0
    )
    return int(found["proven_step"])


def test_a_divergence_at_a_realistic_size_costs_only_the_steps_after_the_last_proof(
    start: Start, tmp_path: Path
) -> None:
    """Seals of 100 MB are rarer than snapshots and checkpoints, so all of the newest ones are bad."""
    spoil, marker = tmp_path / "spoil", tmp_path / "marker"
    options, given = "--members 2 --checkpoint-every 3", ("large_layer.py", 1, spoil, marker)
    run = start(options, *given)
    run.steady()
    equal = await_equal(run, await_equal(run, -1))
    spoil.touch()
    found = run.recovered(1, limit_s=180.0)
    assert (found["kind"], found["remedy"]) == ("diverged", "rollback")
    proven, resumed = found["step"], found["resume"]["step"]
    assert equal <= proven
    assert 0 < resumed <= proven, "no state after the last step with matching replicas is used"
    folder = run.run_dir / "checkpoints"
    between = [each.step for each in scan(folder) if resumed < each.step <= proven]
    assert between == [], "no state before that step is lost"
    after = run.trains(20)
    run.interrupt()
    ended = run.finish()
    assert ended.code == 130
    named = re.search(r"with a checkpoint of step (\d+)", ended.output)
    assert named is not None, ended.output
    newest, notes = newest_whole(folder)
    assert newest is not None
    assert (newest.path.name, notes) == (f"step-{int(named[1]):08d}", ())
    assert newest.step >= after["step"]
    assert not [each.step for each in scan(folder) if proven < each.step and each.generation == 1]
    again = start(options, *given)
    resumed_at = again.wait(lambda status: status["resumed"], "a generation that has resumed")["resumed"]
    assert resumed_at == {"step": newest.step, "source": "checkpoint"}
    again.stop()
