"""The content of a page shows when a tail began, what is uncommitted, and how long a copy takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.protocol import progress
from holdfast.protocol.progress import FailKind, Phase, Progress

FOUND = Progress(
    generation=1, rank=0, local_rank=0, pid=7, phase=Phase.FORWARD, phase_seq=1, phase_since_ns=500,
    step_started_ns=400, write_seq=0, step=9, steps_done=9, times_written=9, loss=1.0, grad_norm=1.0,
    samples=0, tokens=0, flops=0.0, flags=0, position=-1, first_step_s=1.0, data_ns=0, forward_ns=0,
    pause_limit_s=0.0, pause_label="", failed_ns=0, fail_kind=FailKind.NONE, fail_code=0,
    snapshot_step=-1, snapshot_cost_s=0.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "tail_since_ns", "expected"),
    [
        (Phase.TAIL, 300, 300),
        (Phase.TAIL, 0, 500),
        (Phase.TAIL, -300, 500),
        (Phase.EVAL, 300, 300),
        (Phase.EVAL, 0, 0),
        (Phase.EVAL, -300, 0),
        (Phase.SNAPSHOT, 300, 300),
        (Phase.IDLE, 300, 300),
        (Phase.DONE, 300, 300),
        (Phase.DATA, 300, 0),
        (Phase.OPTIMIZER, 300, 0),
        (Phase.JOINING, 300, 0),
    ],
)
def test_a_tail_begins_with_the_commit_and_contains_pauses_copies_and_the_end_of_a_loop(
    phase: Phase, tail_since_ns: int, expected: int
) -> None:
    assert progress.tail_began_ns(replace(FOUND, phase=phase, tail_since_ns=tail_since_ns)) == expected


@pytest.mark.parametrize(
    ("phase", "copying_in", "declared"),
    [
        (Phase.EVAL, Phase.DATA, True),
        (Phase.CHECKPOINT, Phase.DATA, True),
        (Phase.PAUSED, Phase.DATA, True),
        (Phase.SNAPSHOT, Phase.EVAL, True),
        (Phase.SNAPSHOT, Phase.DATA, False),
        (Phase.DATA, Phase.EVAL, False),
        (Phase.TAIL, Phase.EVAL, False),
    ],
)
def test_a_pause_counts_as_declared_even_while_holdfast_copies_the_state_in_it(
    phase: Phase, copying_in: Phase, declared: bool
) -> None:
    assert progress.is_declared(replace(FOUND, phase=phase, copying_in=int(copying_in))) is declared


@pytest.mark.parametrize(
    ("phase", "copying_in", "written_ns", "tail_since_ns", "expected"),
    [
        (Phase.FORWARD, Phase.DATA, 0, 0, 0),
        (Phase.FORWARD, Phase.DATA, 450, 0, 450),
        (Phase.EVAL, Phase.DATA, 0, 0, 500),
        (Phase.EVAL, Phase.DATA, 450, 0, 450),
        (Phase.EVAL, Phase.DATA, 450, 300, 0),
        (Phase.TAIL, Phase.DATA, 450, 300, 0),
        (Phase.SNAPSHOT, Phase.DATA, 450, 0, 0),
        (Phase.SNAPSHOT, Phase.EVAL, 450, 0, 450),
        (Phase.SNAPSHOT, Phase.EVAL, 0, 0, 500),
        (Phase.JOINING, Phase.DATA, 450, 0, 0),
        (Phase.IDLE, Phase.DATA, 450, 0, 0),
        (Phase.DONE, Phase.DATA, 450, 0, 0),
    ],
)
def test_work_is_uncommitted_after_the_optimizers_writes_or_in_a_declared_pause_within_a_step(
    phase: Phase, copying_in: Phase, written_ns: int, tail_since_ns: int, expected: int
) -> None:
    found = replace(
        FOUND,
        phase=phase,
        copying_in=int(copying_in),
        written_ns=written_ns,
        tail_since_ns=tail_since_ns,
    )
    assert progress.uncommitted_since_ns(found) == expected


@pytest.mark.parametrize(
    ("cost_s", "known_s", "state_bytes", "expected_s"),
    [
        (0.0, 0.0, 0, 0.0),
        (2.0, 1.0, 1 << 30, 2.0),
        (1.0, 2.0, 1 << 30, 2.0),
        (1.0, 2.0, 3 << 30, 3.0),
        (-1.0, -1.0, -(1 << 40), 0.0),
        (1e9, 0.0, 0, 300.0),
        (0.0, 0.0, 1 << 60, 300.0),
    ],
)
def test_a_copy_takes_the_longest_of_what_is_measured_known_and_estimated_within_a_bound(
    cost_s: float, known_s: float, state_bytes: int, expected_s: float
) -> None:
    found = replace(FOUND, snapshot_cost_s=cost_s, known_copy_s=known_s, state_bytes=state_bytes)
    assert progress.copy_s(found) == expected_s


def test_bytes_that_are_not_a_page_have_no_content() -> None:
    for page in (b"", bytes(progress.PAGE_BYTES)):
        assert progress.read(page) is None
        assert progress.read_torn_ok(page) is None
        assert progress.step_times_s(page) is None
        assert progress.tail_times_s(page) is None
        assert progress.uncommitted_times_s(page) is None
        assert progress.copied(page) == 0
