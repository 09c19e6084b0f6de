from __future__ import annotations

from typing import Any

import pytest

from bench.harness.watch import is_calm

CALM = {"updated": 100.0, "phase": "running", "open_incident": None, "warm_ready": True}


def test_a_run_that_trains_with_all_warm_processes_ready_is_calm() -> None:
    assert is_calm(CALM, 99.0, 100.5)


@pytest.mark.parametrize(
    "changed",
    [{"updated": 98.0}, {"phase": "securing"}, {"open_incident": {"id": "i-0001"}}, {"warm_ready": False}],
)
def test_a_stale_recovering_or_cold_run_is_not_calm(changed: dict[str, Any]) -> None:
    assert not is_calm({**CALM, **changed}, 99.0, 100.5)


def test_a_status_from_before_the_fault_or_too_old_is_not_used() -> None:
    assert not is_calm(CALM, 100.0, 100.5)
    assert not is_calm(CALM, 99.0, 110.0)
    assert not is_calm({}, 0.0, 1.0)
