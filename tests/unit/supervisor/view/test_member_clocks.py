from __future__ import annotations

from dataclasses import replace

from holdfast.protocol.launcher_messages import BadNumber, Ending, LauncherState, StartTimes
from holdfast.protocol.member_messages import MemberReport
from supervisor.view import faults, member_clocks
from supervisor.view.member_clocks import WINDOW_NS, ClockOffset
from supervisor.view.model import Policy
from tests.unit.supervisor.job_views import launcher, member, rank, report, view

MS = 1_000_000
OURS, THEIRS = "boot-a time:1", "boot-b time:1"
APART_NS = 295 * 3600 * 10**9  # their host has been up for this much longer


def told(now_ns: int, state: LauncherState | None = None, clock: str = THEIRS) -> MemberReport:
    """Return a report that was sent at `now_ns` of our clock, by a member of the other host."""
    return report("m1", state, now_ns=now_ns + APART_NS, clock=clock)


def heard(offset: ClockOffset, sent_ns: int, took_ns: int) -> ClockOffset:
    return offset.heard(told(sent_ns), OURS, sent_ns + took_ns)


def test_times_of_another_host_are_converted_to_the_local_clock() -> None:
    offset = heard(ClockOffset(), 1000 * MS, MS)
    ending = Ending(APART_NS + 900 * MS, 1, failed_ns=APART_NS + 890 * MS)
    marks = StartTimes(APART_NS + 100 * MS, APART_NS + 200 * MS)
    flag = BadNumber("nan", 3, "nan", 0, APART_NS + 880 * MS)
    state = launcher(rank(1, ending, flag=flag, marks=marks), warm_ending=ending)
    found = member_clocks.on_supervisor_clock(told(1000 * MS, state), offset).launcher
    assert found is not None
    assert found.ranks[0].ending == replace(ending, at_ns=901 * MS, failed_ns=891 * MS) == found.warm_ending
    assert found.ranks[0].flag == replace(flag, at_ns=881 * MS)
    assert found.ranks[0].marks == StartTimes(101 * MS, 201 * MS), "times that were never set must stay unset"


def test_times_on_the_same_clock_are_unchanged() -> None:
    state = launcher(rank(1, Ending(5, 1)))
    for clock in (OURS, ""):
        offset = ClockOffset().heard(told(10, state, clock), OURS, 999 * MS)
        assert offset == ClockOffset()
        assert member_clocks.on_supervisor_clock(told(10, state, clock), offset) == told(10, state, clock)


def test_the_shortest_delay_counts_and_small_differences_do_not() -> None:
    """A time identifies an event, so it must not change with each report."""
    offset = heard(ClockOffset(), 0, 80 * MS)
    offset = heard(offset, 500 * MS, 2 * MS)
    assert offset.ns == -APART_NS + 2 * MS
    for number, took_ns in enumerate((900 * MS, MS, 3 * MS, 60 * MS)):
        offset = heard(offset, (600 + number) * MS, took_ns)
        assert offset.ns == -APART_NS + 2 * MS


def test_drifting_clocks_are_followed() -> None:
    offset, drifted = heard(ClockOffset(), 0, MS), 0
    for at_ns in range(0, 10 * WINDOW_NS, WINDOW_NS // 30):
        drifted = at_ns // 20_000  # 50 us a second
        offset = offset.heard(told(at_ns - drifted), OURS, at_ns + MS)
    assert abs(offset.ns - (drifted - APART_NS)) < 25 * MS


def test_the_first_failure_is_found_across_hosts() -> None:
    """The rank that failed first is on the host that has been up for longer."""
    first = launcher(rank(1, Ending(APART_NS + 900 * MS, 1, fail="exception", failed_ns=APART_NS + 900 * MS)))
    later = launcher(rank(0, Ending(950 * MS, 1, fail="exception", failed_ns=950 * MS)))
    offset = heard(ClockOffset(), 1000 * MS, MS)
    there = member_clocks.on_supervisor_clock(told(1000 * MS, first), offset)
    seen = view(member("m0", report("m0", later)), member("m1", there), now_s=1.0)
    assert faults.root_cause(faults.find_faults(seen, Policy())).rank == 1


def test_each_time_of_a_rank_is_converted_and_none_precedes_the_clocks_beginning() -> None:
    marks, moved = StartTimes(10, 20, 30, 40, 7), StartTimes(5, 15, 25, 35, 7)
    state = launcher(rank(1, marks=marks), rank(2, Ending(0, 1, failed_ns=3), marks=StartTimes(2)))
    offset = ClockOffset(-5, 1, 1, 1)
    found = member_clocks.on_supervisor_clock(report("m1", state), offset)
    assert found == report(
        "m1",
        launcher(rank(1, marks=moved), rank(2, Ending(0, 1, failed_ns=1), marks=StartTimes(1))),
    )
    assert member_clocks.on_supervisor_clock(report("m1", None), offset) == report("m1", None)


def test_each_report_updates_the_known_clock_offset_within_its_window() -> None:
    def after(known: ClockOffset, difference_ms: int, now_ms: int) -> ClockOffset:
        sent = report("m1", None, now_ns=(now_ms - difference_ms) * MS, clock=THEIRS)
        return known.heard(sent, OURS, now_ms * MS)

    first = after(ClockOffset(), 500, 1000)
    assert first == ClockOffset(500 * MS, 500 * MS, None, 1000 * MS)
    assert after(first, 510, 2000) == first
    assert after(first, 490, 2000) == ClockOffset(500 * MS, 490 * MS, None, 1000 * MS), "10 ms are not"
    assert after(first, 489, 2000) == ClockOffset(489 * MS, 489 * MS, None, 1000 * MS)
    assert after(first, 510, 61_000) == first, "the window has not ended"
    second = after(first, 511, 61_001)
    assert second == ClockOffset(500 * MS, 511 * MS, 500 * MS, 61_001 * MS), "the window before counts"
    third = after(second, 520, 121_002)
    assert third == ClockOffset(511 * MS, 520 * MS, 511 * MS, 121_002 * MS)
    same = report("m1", None, now_ns=5, clock=OURS)
    assert third.heard(same, OURS, 9) == ClockOffset()
    assert third.heard(replace(same, clock=""), OURS, 9) == ClockOffset()
    assert third.heard(same, "", 9) == ClockOffset()
