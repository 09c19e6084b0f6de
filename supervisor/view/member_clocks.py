"""Convert the times in members' reports to the supervisor's clock, because hosts' clocks are unrelated. Pure.

Each report says when it was sent, according to its host's clock. The time of receipt on the supervisor's
clock minus that time is the offset of the clocks plus the time in transit. The smallest difference is
therefore the best estimate of the offset. If both processes use the same clock, nothing is converted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.protocol.launcher_messages import BadNumber, Ending, LauncherState, RankState, StartTimes
from holdfast.protocol.member_messages import MemberReport

WINDOW_NS = 60_000_000_000  # clocks drift apart by at most 50 us per second, or 3 ms per window
STEADY_NS = 10_000_000  # smaller corrections are not applied, because times identify events


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The offset to add to a member's times, and the measurements that it is based on."""

    ns: int = 0
    least_ns: int | None = None  # the smallest difference in this window
    before_ns: int | None = None  # the smallest difference in the previous window
    since_ns: int = 0  # when this window began

    def heard(self, report: MemberReport, clock: str, now_ns: int) -> ClockOffset:
        """Return the offset, updated with a report that arrived at `now_ns` on the supervisor's `clock`."""
        if not report.clock or not clock or report.clock == clock:
            return ClockOffset()
        difference_ns = now_ns - report.now_ns
        if self.least_ns is None or now_ns - self.since_ns > WINDOW_NS:
            state = ClockOffset(self.ns, difference_ns, self.least_ns, now_ns)
        elif difference_ns < self.least_ns:
            state = replace(self, least_ns=difference_ns)
        else:  # the usual case; creating an equal object would take 5% of a report's time
            state = self
        assert state.least_ns is not None
        best_ns = state.least_ns if state.before_ns is None else min(state.least_ns, state.before_ns)
        first = self.least_ns is None
        return replace(state, ns=best_ns) if first or abs(best_ns - self.ns) > STEADY_NS else state


def on_supervisor_clock(report: MemberReport, offset: ClockOffset) -> MemberReport:
    """Return `report` with its times converted to the supervisor's clock."""
    if not offset.ns or report.launcher is None:
        return report
    return replace(report, launcher=_launcher(report.launcher, offset.ns))


def _launcher(state: LauncherState, ns: int) -> LauncherState:
    ranks = tuple(_rank(each, ns) for each in state.ranks)
    return replace(state, ranks=ranks, warm_ending=_ending(state.warm_ending, ns))


def _rank(rank: RankState, ns: int) -> RankState:
    return replace(
        rank, ending=_ending(rank.ending, ns), flag=_flag(rank.flag, ns), marks=_marks(rank.marks, ns)
    )


def _ending(ending: Ending | None, ns: int) -> Ending | None:
    if ending is None:
        return None
    return replace(ending, at_ns=_moved(ending.at_ns, ns), failed_ns=_moved(ending.failed_ns, ns))


def _flag(flag: BadNumber | None, ns: int) -> BadNumber | None:
    return None if flag is None else replace(flag, at_ns=_moved(flag.at_ns, ns))


def _marks(marks: StartTimes, ns: int) -> StartTimes:
    return replace(
        marks,
        started_ns=_moved(marks.started_ns, ns),
        joined_ns=_moved(marks.joined_ns, ns),
        restored_ns=_moved(marks.restored_ns, ns),
        first_step_ns=_moved(marks.first_step_ns, ns),
    )


def _moved(at_ns: int, ns: int) -> int:
    """Return `at_ns` plus `ns`; 0 if `at_ns` is 0, which means that there is no time."""
    return max(1, at_ns + ns) if at_ns else 0
