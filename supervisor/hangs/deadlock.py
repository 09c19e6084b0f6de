"""Prove that all ranks wait for each other and that nothing in transit could end the wait. Pure.

An inspection can show that a rank is at rest (`holdfast.inspection.blocked_ranks`): the rank waits in a
collective and, until a given time, only bytes on its connections could wake it. Suppose all ranks are at rest
at the same time, and each connection leads from one of them to another. Then no process is left to send any
bytes, and the ranks wait forever, no matter which collectives they are in.

The clocks of different hosts cannot show that the ranks were at rest at the same time. When inspections show
all ranks at rest, the supervisor therefore requests another inspection of each, and uses the time at which
the last of them came to rest as the id of this inspection. A rank whose mark is the same in both inspections
was at rest at that time.
"""

from __future__ import annotations

import operator
from functools import reduce

from holdfast.protocol.launcher_messages import RankInspection
from supervisor.hangs import evidence
from supervisor.view import reports
from supervisor.view.model import SECOND_NS, RankAtRest, View

_LATE = 1  # the id of the inspection if a rank is late but not all ranks are at rest
_IN_WORDS = {"_engine_run_backward": "the backward pass"}


def inspection_id(view: View) -> int:
    """Return the id of the inspection that members must make; 0 if they must make none.

    If all ranks wait only for each other, the id is a time in nanoseconds: when the last one came to rest. A
    new id requests another inspection.
    """
    if not view.watch.ranks:
        return 0
    return _all_resting_since_ns(view) or _LATE


def update_resting(before: tuple[RankAtRest, ...], view: View) -> tuple[RankAtRest, ...]:
    """Return the ranks at rest according to their newest inspections, with the start of each rest."""
    known = {each.rank: each for each in before}
    found: list[RankAtRest] = []
    for report in reports.reports(view):
        for inspection in reports.inspections(view, report):
            findings = evidence.findings(inspection)
            if inspection.rests_s <= 0 or findings.role != evidence.WAITS or findings.shows_progress:
                continue  # the rank may still move: for example, its child process may be saving a file
            last = known.get(inspection.rank)
            if last is None or last.mark != inspection.mark or inspection.number < last.look:
                found.append(_resting(inspection, view.now_ns, view.now_ns))
            else:
                is_same = inspection.number == last.look
                heard_ns = last.heard_ns if is_same else view.now_ns
                found.append(_resting(inspection, last.since_ns, heard_ns))
    return tuple(sorted(found, key=lambda each: each.rank))


def _resting(inspection: RankInspection, since_ns: int, heard_ns: int) -> RankAtRest:
    return RankAtRest(
        rank=inspection.rank,
        step=inspection.step,
        mark=inspection.mark,
        since_ns=since_ns,
        look=inspection.number,
        asked=inspection.asked,
        heard_ns=heard_ns,
        rests_s=inspection.rests_s,
        ends=inspection.ends,
        place=_wait_in_words(inspection),
    )


def _wait_in_words(inspection: RankInspection) -> str:
    function = inspection.at.partition(" (")[0].rpartition(".")[2]
    called = f", called by {inspection.where}" if inspection.where else ""
    return f"{_IN_WORDS.get(function, function)}{called}"


def deadlocked_ranks(view: View, horizon_s: float) -> tuple[RankAtRest, ...]:
    """Return all ranks and where they wait if it is proven that none will continue; () otherwise.

    When a collective reaches its time limit, it raises an exception that the script may handle. A wait is
    therefore considered endless only if that limit is more than `horizon_s` away: before such a limit is
    reached, the group would be restarted anyway.
    """
    since_ns, rests = _all_resting_since_ns(view), view.watch.rests
    if not since_ns or any(each.asked != since_ns for each in rests):
        return ()
    ends_ns = min(each.heard_ns + int(each.rests_s * SECOND_NS) for each in rests)
    return rests if ends_ns >= view.now_ns + int(horizon_s * SECOND_NS) else ()


def _all_resting_since_ns(view: View) -> int:
    """Return when the last rank came to rest; 0 unless all ranks wait only for each other."""
    rests = view.watch.rests
    if len(rests) < 2 or {each.rank for each in rests} != set(range(view.memory.world_size)):
        return 0
    if reduce(operator.xor, (each.ends for each in rests)):  # a connection leads outside the group
        return 0
    return max(each.since_ns for each in rests)


def describe(rests: tuple[RankAtRest, ...], most: int = 4) -> str:
    """Return in words where each rank waits. If the places differ, list the first `most` ranks."""
    places = {each.place for each in rests}
    text = "all ranks wait for each other, and nothing is in transit: "
    if len(places) == 1:
        text += f"each is in {rests[0].place}"
    else:
        text += ", ".join(f"rank {each.rank} in {each.place}" for each in rests[:most])
        text += f", and {len(rests) - most} more" if len(rests) > most else ""
    return f"{text}. All ranks must enter the same collectives in the same order"


def place(rests: tuple[RankAtRest, ...]) -> str:
    """Return where the ranks wait, without line numbers, so that all lines of a function compare equal."""
    return "; ".join(sorted({evidence.without_line(each.place) for each in rests}))
