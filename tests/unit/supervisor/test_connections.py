"""What a member is sent: the newest order, and a drill once."""

from __future__ import annotations

from dataclasses import replace

from holdfast.messages import Drill, MemberOrder
from supervisor.connections import Connections

RUN = MemberOrder("run", 3)
DRILL = Drill(1, "nan", 0)


def connections() -> Connections:
    return Connections(lambda: 0, lambda: None)


def test_a_drill_is_not_lost_when_another_decision_comes_before_it_has_left() -> None:
    made = connections()
    made.order("m0", replace(RUN, drill=DRILL))
    made.order("m0", replace(RUN, settled=True))
    assert made.line("m0").order == replace(RUN, settled=True, drill=DRILL)


def test_a_drill_that_has_left_is_not_sent_again() -> None:
    made = connections()
    made.order("m0", replace(RUN, drill=DRILL))
    made.line("m0").sent = made.line("m0").order
    made.order("m0", replace(RUN, settled=True))
    assert made.line("m0").order == replace(RUN, settled=True)


def test_a_drill_ends_with_its_generation_and_with_a_fault() -> None:
    for after in (MemberOrder("run", 4), MemberOrder("secure", 3)):
        made = connections()
        made.order("m0", replace(RUN, drill=DRILL))
        made.order("m0", after)
        assert made.line("m0").order == after


def test_the_same_order_again_is_not_sent_again() -> None:
    made = connections()
    made.order("m0", RUN)
    line = made.line("m0")
    line.sent = line.order
    line.changed.clear()
    made.order("m0", MemberOrder("run", 3))
    assert not line.changed.is_set()
