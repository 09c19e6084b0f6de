"""What a member is sent: the newest order, once."""

from __future__ import annotations

from holdfast import hostclock
from holdfast.launcher_messages import Ending
from holdfast.messages import MemberOrder
from supervisor.connections import Connections
from tests.unit.supervisor.views import launcher, rank, report

RUN = MemberOrder("run", 3)


def connections() -> Connections:
    return Connections(lambda: 0, lambda: None)


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
