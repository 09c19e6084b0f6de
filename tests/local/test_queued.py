"""A device behind its host, which stands still in a collective when a peer dies: a step is lost at most."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.local.conftest import Start

pytestmark = [pytest.mark.local, pytest.mark.timeout(300)]

STEPS = 900


def digests(path: Path) -> list[dict[str, Any]]:
    return [json.loads(path.with_name(f"{path.name}.{rank}").read_text()) for rank in range(3)]


def test_survivors_give_the_last_committed_state_whatever_their_hosts_wait_for(
    start: Start, tmp_path: Path
) -> None:
    options = "--members 3 --snapshot-every 64 --checkpoint-every 0"
    calm = start(options, "queued.py", STEPS, tmp_path / "calm", into="calm")
    assert calm.finish().code == 0
    run = start(options, "queued.py", STEPS, tmp_path / "broken", into="broken")
    for number, rank in enumerate((2, 0, 1, 2)):
        run.steady()
        run.trains(20 + 3 * number)
        found = run.broken(lambda rank=rank: run.hit(rank, signal.SIGKILL))  # type: ignore[misc]
        assert found["lost_steps"] <= 1, found
        assert found["resume"]["source"] == "slot"
    assert run.finish().code == 0
    assert digests(tmp_path / "broken") == digests(tmp_path / "calm"), "not the same training, bit for bit"
