"""Do all ranks wait for each other, with nothing on its way that could end it? Pure.

A look shows that a rank is at rest (`holdfast.inspection.blocked_ranks`): it waits in a collective, and only
bytes on its connections would move it before a given time. If that is so of all ranks at one and the same
moment, and each connection leads from one of them to another, then nobody is left who could send any: they
wait for ever, whatever the collectives are.

That it is the same moment cannot be told from clocks of several hosts. So when all are seen at rest, the
members are asked for another look, with the time of asking as its name. Whoever has the same mark in that
look as in the one before was at rest in between, when the supervisor asked.
"""

from __future__ import annotations

import operator
import re
from functools import reduce

from holdfast.protocol.launcher_messages import RankInspection
from supervisor.hangs import evidence
from supervisor.view import reports
from supervisor.view.model import RestingRank, View

_LATE = 1  # what members are asked with while some rank is late, and no more is known
_S = 1_000_000_000
_LINE = re.compile(r":\d+\)$")
_SAID = {"_engine_run_backward": "the backward pass"}


def update_resting(before: tuple[RestingRank, ...], view: View) -> tuple[RestingRank, ...]:
    """Return who is at rest by the newest looks, and since when it is known."""
    known = {each.rank: each for each in before}
    found: list[RestingRank] = []
    for report in reports.reports(view):
        for look in reports.looks(view, report):
            seen = evidence.findings(look)
            if look.rests_s <= 0 or seen.role != evidence.WAITS or seen.evidence:
                continue  # evidence: perhaps a child process saves something
            was = known.get(look.rank)
            if was is None or was.mark != look.mark or look.number < was.look:
                found.append(_rest(look, view.now_ns, view.now_ns))
            else:
                heard_ns = was.heard_ns if look.number == was.look else view.now_ns
                found.append(_rest(look, was.since_ns, heard_ns))
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
    return f"{_SAID.get(function, function)}{called}"


def look_request(view: View) -> int:
    """Return what the members are to be asked for looks with; 0: they need not look."""
    if not view.watch.ranks:
        return 0
    return _moment(view) or _LATE


def deadlocked_ranks(view: View, horizon_s: float) -> tuple[RestingRank, ...]:
    """Return what the ranks wait in if none of them will ever get further; () while that is not proven.

    A wait that ends by its own time limit raises an exception, and the script may know what to do about it.
    It counts as one for ever if that is more than `horizon_s` away: it would not be waited for anyway.
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
    if reduce(operator.xor, (each.ends for each in rests)):  # one leads to somebody else
        return 0
    return max(each.since_ns for each in rests)


def describe(rests: tuple[RestingRank, ...], most: int = 4) -> str:
    """Return in words who waits where."""
    places = {each.place for each in rests}
    said = "all ranks wait for each other, and nothing is on its way: "
    if len(places) == 1:
        said += f"each is in {rests[0].place}"
    else:
        said += ", ".join(f"rank {each.rank} in {each.place}" for each in rests[:most])
        said += f", and {len(rests) - most} more" if len(rests) > most else ""
    return f"{said}. All ranks must enter the same collectives in the same order"


def place(rests: tuple[RestingRank, ...]) -> str:
    """Return where the ranks wait, the same wherever within these functions a look finds them."""
    return "; ".join(sorted({_LINE.sub(")", each.place) for each in rests}))
