"""Scripts that have never heard of holdfast: what they do without a step, and how they start and end."""

from __future__ import annotations

import pytest

from tests.local.conftest import Start

pytestmark = [pytest.mark.local, pytest.mark.timeout(150)]

FIRST_STEP_S = 6.0  # more than the longest time between two looks


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_that_does_no_step_is_done_to_its_end_however_long_it_works(
    start: Start, ranks: int
) -> None:
    options = f"--nproc-per-node {ranks} --first-step-timeout {FIRST_STEP_S:g}s"
    ended = start(options, "stepless.py", 1.5 * FIRST_STEP_S).finish()
    assert ended.code == 0, ended.output
    assert ended.output.count("predicted") == ranks, ended.output
    assert "incident" not in ended.output
    assert ended.output.count("no step of a torch.optim optimizer for") == 1, ended.output
