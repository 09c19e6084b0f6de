"""What a member is sent: the newest order, and a drill once."""

from __future__ import annotations

from dataclasses import replace

from holdfast import hostclock
from holdfast.launcher_messages import Ending
from holdfast.messages import Drill, MemberOrder
from supervisor.connections import Connections
from tests.unit.supervisor.views import launcher, rank, report

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


def test_what_a_member_of_another_host_tells_is_put_on_our_clock() -> None:
    made = Connections(lambda: 5_000, lambda: None, "ours")
    line = made.line("m0")
    state = launcher(rank(0, Ending(90_100, 1)))
    made._take(line, report("m0", state, now_ns=90_500, clock="theirs"))
    assert line.report is not None
    assert line.report.launcher == launcher(rank(0, Ending(4_600, 1)))
    assert (line.connected, line.heard_ns) == (True, 5_000)
    made._take(line, report("m0", state, now_ns=90_500, clock="ours"))
    assert line.report.launcher == state


def test_processes_of_one_host_have_one_clock() -> None:
    assert hostclock.identity() == hostclock.identity() != ""
