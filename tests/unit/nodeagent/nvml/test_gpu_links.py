from __future__ import annotations

import pytest

from nodeagent.nvml.gpu_checks import HEALTHY, IN_PROGRESS, LIMITED, UNHEALTHY, fabric_state, nvlink_down

COMPLETED = 3
FINE = 2 | 2 << 2 | 2 << 4 | 2 << 6 | 1 << 8  # nothing of it is so


def test_an_incomplete_fabric_is_in_progress_whatever_else_nvml_reports() -> None:
    assert fabric_state(1, 0, 0, 0) == (IN_PROGRESS, "not started")
    assert fabric_state(2, 15, 2, 1) == (IN_PROGRESS, "")


def test_a_gpu_whose_registration_failed_has_an_unhealthy_fabric() -> None:
    assert fabric_state(COMPLETED, 15, 1, FINE) == (UNHEALTHY, "the GPU could not join: GPU_IS_LOST")


@pytest.mark.parametrize(("summary", "state"), [(1, HEALTHY), (2, UNHEALTHY), (3, LIMITED)])
def test_the_summary_takes_precedence_over_the_mask(summary: int, state: int) -> None:
    assert fabric_state(COMPLETED, 0, summary, FINE)[0] == state
    assert fabric_state(COMPLETED, 0, summary, 1 << 4)[0] == state


@pytest.mark.parametrize(
    ("mask", "state", "why"),
    [
        (0, HEALTHY, ""),
        (FINE, HEALTHY, ""),
        (1, LIMITED, "degraded bandwidth"),
        (1 << 2, LIMITED, "route recovery"),
        (1 << 4, UNHEALTHY, "route unhealthy"),
        (1 << 6, UNHEALTHY, "access timeout"),
        (5 << 8, LIMITED, "incorrect configuration 5"),
        (1 << 4 | 1, UNHEALTHY, "route unhealthy, degraded bandwidth"),
    ],
)
def test_without_a_summary_the_mask_counts(mask: int, state: int, why: str) -> None:
    assert fabric_state(COMPLETED, 0, 0, mask) == (state, why)


def test_a_link_that_does_not_answer_is_not_down() -> None:
    were_up = {0, 1, 2}
    (reading,) = nvlink_down({0: True, 1: False}, were_up)
    assert (reading.value, reading.text) == (1, "of 3 links down: 1")


def test_links_that_were_never_up_with_mig_on_are_not_down() -> None:
    (reading,) = nvlink_down({0: False, 1: False}, set(), mig=True)
    assert (reading.value, reading.text) == (0, "MIG is on, and no link was ever up in this mode")


def test_a_link_that_was_never_up_is_not_down() -> None:
    were_up: set[int] = set()
    assert list(nvlink_down({0: False}, were_up)) == []
    assert list(nvlink_down({}, {0})) == []


def test_a_link_that_was_up_and_does_not_answer_is_not_counted_as_up() -> None:
    """After a restart of the agent, the driver may refuse to say what it said before."""
    assert list(nvlink_down({0: True}, {0, 1})) == []
    (reading,) = nvlink_down({0: False}, {0, 1})
    assert (reading.value, reading.text) == (1, "of 2 links down: 0")
    (reading,) = nvlink_down({0: True, 1: True}, {0, 1})
    assert reading.value == 0
