"""A device that runs behind its host, and stalls when a peer dies: at most one step is lost."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from signal import SIGKILL as KILL
from signal import SIGSTOP as STOP
from typing import Any

import pytest

from tests.local.conftest import Start

pytestmark = [pytest.mark.local, pytest.mark.timeout(300)]

STEPS = 900
SPOILT = 300
OPTIONS = "--members 3 --snapshot-every 64 --checkpoint-every 0"


def digests(path: Path) -> list[dict[str, Any]]:
    return [json.loads(path.with_name(f"{path.name}.{rank}").read_text()) for rank in range(3)]


@pytest.fixture(scope="module")
def calm(start_shared: Start, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the digests of a run without faults, but with snapshots."""
    digest = tmp_path_factory.mktemp("calm") / "digest"
    run = start_shared(OPTIONS, "queued_device.py", STEPS, digest, into="calm")
    run.wait(lambda status: (status["proven_step"] or 0) >= 64, "a copy that was due while the host is ahead")
    ended = run.finish()
    assert ended.code == 0, ended.output
    return digests(digest)


def test_survivors_secure_the_last_committed_state_whatever_their_hosts_wait_for(
    start: Start, tmp_path: Path, calm: list[dict[str, Any]]
) -> None:
    run = start(OPTIONS, "queued_device.py", STEPS, tmp_path / "digest")
    resumed = 0
    for number, (rank, signum) in enumerate([(2, KILL), (0, KILL), (1, STOP), (2, KILL)]):
        run.steady()
        run.trains(20 + 3 * number)
        soon = resumed + 4
        run.wait(lambda status, soon=soon: (status["snapshot_step"] or 0) >= soon, f"the copy of step {soon}")  # type: ignore[misc]
        found = run.broken(partial(run.hit, rank, signum))
        assert found["lost_steps"] <= 1, json.dumps(found)
        assert found["resume"]["source"] == "slot"
        resumed = found["resume"]["step"]
    assert run.finish().code == 0
    assert digests(tmp_path / "digest") == calm, "not the same training, bit for bit"


def test_a_bad_number_that_is_found_a_step_later_is_rolled_back_to_before_its_step(
    start: Start, tmp_path: Path, calm: list[dict[str, Any]]
) -> None:
    run = start(OPTIONS, "queued_device.py", STEPS, tmp_path / "digest", SPOILT, tmp_path / "marker")
    ended = run.finish()
    assert ended.code == 0, ended.output
    (found,) = run.incidents()
    assert (found["kind"], found["rank"], found["step"], found["remedy"]) == ("nan", 1, SPOILT, "rollback")
    assert f"batch position {16 * SPOILT}" in found["why"]
    assert found["resume"]["step"] <= SPOILT
    assert digests(tmp_path / "digest") == calm, "not the same training, bit for bit"
