"""Do all ranks wait for each other, with nothing in flight that could end it? Pure.

An inspection shows that a rank is at rest (`holdfast.inspection.blocked_ranks`): it waits in a collective,
and only bytes on its connections would move it before a given time. If all ranks are at rest at one and the
same moment, and each connection leads from one of them to another, then no process is left that could send
any: they wait for ever, whatever the collectives are.

Clocks of several hosts cannot show that it is the same moment. So when all are seen at rest, the supervisor
requests another inspection, with the time of the request as its name. A rank that has the same mark in that
inspection as in the one before was at rest in between, when the supervisor requested it.
"""

from __future__ import annotations

import operator
import re
from functools import reduce

from holdfast.protocol.launcher_messages import RankInspection
from supervisor.hangs import evidence
from supervisor.view import reports
from supervisor.view.model import RestingRank, View

_LATE = 1  # the request while some rank is late, and no more is known
_S = 1_000_000_000
_LINE = re.compile(r":\d+\)$")
_IN_WORDS = {"_engine_run_backward": "the backward pass"}


def update_resting(before: tuple[RestingRank, ...], view: View) -> tuple[RestingRank, ...]:
    """Return the ranks that are at rest by the newest inspections, and since when that is known."""
    known = {each.rank: each for each in before}
    found: list[RestingRank] = []
    for report in reports.reports(view):
        for look in reports.looks(view, report):
            seen = evidence.findings(look)
            if look.rests_s <= 0 or seen.role != evidence.WAITS or seen.evidence:
                continue  # evidence: perhaps a child process saves something
            last = known.get(look.rank)
            if last is None or last.mark != look.mark or look.number < last.look:
                found.append(_rest(look, view.now_ns, view.now_ns))
            else:
                same = look.number == last.look
                heard_ns = last.heard_ns if same else view.now_ns
                found.append(_rest(look, last.since_ns, heard_ns))
    return tuple(sorted(found, key=lambda each: each.rank))


def _rest(look: RankInspection, since_ns: int, heard_ns: int) -> RestingRank:
    return RestingRank(
        rank=look.rank,
        step=look.step,
        mark=look.mark,
        since_ns=since_ns,
        look=look.number,
        asked=look.asked,
        heard_ns=heard_ns,
        rests_s=look.rests_s,
        ends=look.ends,
        place=_place(look),
    )


def _place(look: RankInspection) -> str:
    function = look.at.partition(" (")[0].rpartition(".")[2]
    called = f", called by {look.where}" if look.where else ""
    return f"{_IN_WORDS.get(function, function)}{called}"


def look_request(view: View) -> int:
    """Return the number with which members are asked for inspections; 0: they need not inspect any rank."""
    if not view.watch.ranks:
        return 0
    return _moment(view) or _LATE


def deadlocked_ranks(view: View, horizon_s: float) -> tuple[RestingRank, ...]:
    """Return where the ranks wait if none of them will ever continue; () while that is not proven.

    A wait that ends by its own time limit raises an exception, and the script may handle it. It counts as
    endless if that limit is more than `horizon_s` away: the group would be restarted before that anyway.
    """
    moment, rests = _moment(view), view.watch.rests
    if not moment or any(each.asked != moment for each in rests):
        return ()
    ends_ns = min(each.heard_ns + int(each.rests_s * _S) for each in rests)
    return rests if ends_ns >= view.now_ns + int(horizon_s * _S) else ()


def _moment(view: View) -> int:
    """Return when all ranks were first known to be at rest among themselves; 0 if they are not."""
    rests = view.watch.rests
    if len(rests) < 2 or {each.rank for each in rests} != set(range(view.memory.world_size)):
        return 0
    if reduce(operator.xor, (each.ends for each in rests)):  # one leads to a process outside of the group
        return 0
    return max(each.since_ns for each in rests)


def describe(rests: tuple[RestingRank, ...], most: int = 4) -> str:
    """Return in words which rank waits where."""
    places = {each.place for each in rests}
    text = "all ranks wait for each other, and nothing is on its way: "
    if len(places) == 1:
        text += f"each is in {rests[0].place}"
    else:
        text += ", ".join(f"rank {each.rank} in {each.place}" for each in rests[:most])
        text += f", and {len(rests) - most} more" if len(rests) > most else ""
    return f"{text}. All ranks must enter the same collectives in the same order"


def place(rests: tuple[RestingRank, ...]) -> str:
    """Return where the ranks wait, without line numbers: the same anywhere within a function."""
    return "; ".join(sorted({_LINE.sub(")", each.place) for each in rests}))
