"""Why a case was held: the hold that was in force when its fault was due."""

from __future__ import annotations

import pytest

from bench.quarantine.simulated_node import Node
from bench.quarantine.tally import UNCONFIRMED, Case, Tally
from supervisor.quarantine.model import NO_NEW_WORK, Hold, Taint

TAINT = Taint("a", NO_NEW_WORK, ("k",), "reset_gpu", ("kmsg",), "b1", "why")
FULL = "4 of 40 nodes are out; at most 4 may be"


@pytest.mark.parametrize(
    ("hold_s", "hold", "taint_s", "expected"),
    [
        (60.0, FULL, 360.0, FULL),
        (60.0, f"xid 48: {UNCONFIRMED}", 360.0, ""),
        (60.0, FULL, 70.0, ""),
        (80.0, FULL, 360.0, FULL),
    ],
    ids=["held since before it was due", "not confirmed", "taken out before it was due", "held when due"],
)
def test_a_case_is_held_by_the_hold_that_was_in_force_when_it_was_due(
    hold_s: float, hold: str, taint_s: float, expected: str
) -> None:
    node, tally = Node("a", "r1", 0.0, lemon=False), Tally(1)
    case = Case("a", "gpu_hbm3", True, 0.0, due_s=75.0)
    tally.reported(case, node)
    tally.held((Hold("a", hold, 500.0),), hold_s)
    tally.acted(node, TAINT, taint_s)
    assert (case.how, case.held) == ("taint", expected)
