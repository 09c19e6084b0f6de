"""Whether a run ends because its pods have, before its ranks were started."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.cluster.pods import PodMember
from supervisor.cluster.succession import OWNER_S, end_before_start
from supervisor.view.model import End


def pod(number: int, code: int | None, **given: Any) -> PodMember:
    ended = code is not None
    name = f"w-{number}"
    return PodMember(f"u{number}", name, name, "n", "c", not ended, has_ended=ended, exit_code=code, **given)


def end(*pods: PodMember, others: tuple[PodMember, ...] = (), lasts_s: float = 0.0) -> End | None:
    return end_before_start(pods, (*pods, *others), 2, lasts_s)


def test_a_run_ends_once_all_of_its_pods_have_failed() -> None:
    assert end(pod(0, 1), pod(1, 2, last_words="no such script")) == End(
        2, "pod w-1 ended with exit code 2 before its ranks were started: no such script"
    )
    assert end(pod(0, 0), pod(1, 3)) == End(3, "pod w-1 ended with exit code 3 before its ranks were started")


def test_a_run_does_not_end_while_a_pod_runs_or_is_pending_or_being_deleted() -> None:
    for other in (pod(9, None), pod(9, None, is_leaving=True)):
        assert end(pod(0, 1), pod(1, 1), others=(other,), lasts_s=3600.0) is None
    assert end(lasts_s=3600.0) is None, "the owner is suspended, or its pods were never created"


def test_an_owner_has_time_to_create_the_pods_that_are_missing() -> None:
    assert end(pod(0, 1), lasts_s=OWNER_S - 1) is None
    assert end(pod(0, 1), lasts_s=OWNER_S) is not None


@pytest.mark.parametrize("lasts_s", [0.0, 3600.0])
def test_pods_that_succeed_never_end_a_run_that_lacks_others(lasts_s: float) -> None:
    """After exit code 0, the others would be ordered to end."""
    assert end(pod(0, 0), lasts_s=lasts_s) is None
    ended = end(pod(0, 0), pod(1, 0), lasts_s=lasts_s)
    assert ended is not None
    assert ended.exit_code == 0
