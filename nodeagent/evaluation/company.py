"""Notes what was reported with an event as the two arrive, so that no limit can change it later. Pure.

What some events mean depends on what was reported with them:

- An event without details counts only if the same code was not reported with details, too (`DETAILED`).
- A verdict of the driver does not count if an operator has overridden all codes that it may be about.
- The growth of the counter of ECC errors is contained by an Xid 94, unless there was an Xid 48 or 95.

The evaluator keeps a limited number of times of each event, and merges them beyond that, so it cannot look
this up later. It therefore keeps the times of these events by the codes that were reported with them, and
merges only times with the same codes. The order in which the events arrive makes no difference.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from nodeagent.evaluation.bursts import (
    DETAILED,
    MAX_BURSTS,
    Burst,
    Company,
    EventBursts,
    known_parts,
    near,
    undetailed,
    union_moments,
)

CONTAINED_XID, UNCONTAINED_XIDS = 94, (48, 95)
CONTAINMENT_XIDS = (CONTAINED_XID, *UNCONTAINED_XIDS)
TOGETHER_S = 30.0  # the counter is read every 10 s, and growth and Xid may be seen in either order
MAX_GROUPS = 32  # beyond that, an event counts as reported with nothing
MAX_RECENT = 128  # of one code: an event and what is reported with it arrive within seconds of each other


class RecentTimes:
    """The exact times of the events of one entity that arrived last, by code."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, int, bool], list[float]] = {}

    def note(self, check: str, code: int, at_s: float, *, detailed: bool) -> None:
        """Note an event, with or without details."""
        times = self._times.setdefault((check, code, detailed), [])
        times.append(at_s)
        if len(times) > 2 * MAX_RECENT:
            del times[:MAX_RECENT]

    def has_details(self, check: str, code: int, from_s: float, until_s: float) -> bool:
        """Return True if a code was reported with details in a period, which includes its ends."""
        return _any_in(self._times.get((check, code, True), ()), from_s, until_s)

    def xids(self, from_s: float, until_s: float) -> set[int]:
        """Return the Xids that were reported in a period, which includes its ends."""
        return {
            code
            for (check, code, _), times in self._times.items()
            if check == "xid" and _any_in(times, from_s, until_s)
        }


def _any_in(times: Iterable[float], from_s: float, until_s: float) -> bool:
    return any(from_s <= each <= until_s for each in times)


def note(company: Company, at_s: float, codes: Iterable[int]) -> None:
    """Add an event at `at_s`, and the codes that were reported with it so far."""
    found = set(codes)
    for group, times in list(company.items()):
        if (at := _index(times, at_s)) is not None:  # known already: only further codes are new
            if found <= set(group):
                return
            if times[at] == (at_s, at_s):
                del times[at]
                found |= set(group)
                if not times:
                    del company[group]
    _add(company, tuple(sorted(found)), at_s)


def accompany(company: Company, code: int, from_s: float, until_s: float) -> None:
    """Add a code to all events in a period, which includes its ends."""
    for group, times in list(company.items()):
        if code in group or times[-1][1] < from_s:
            continue
        moved: list[float] = []
        kept: list[Burst] = []
        for first, last in times:
            is_in = [from_s <= each <= until_s for each in (first, last)]
            moved += [each for each, inside in zip((first, last), is_in, strict=True) if inside]
            if not all(is_in):
                kept.append((first, last))
        if not moved:
            continue
        if kept:
            company[group] = kept
        else:
            del company[group]
        for at_s in moved:
            _add(company, tuple(sorted({*group, code})), at_s)


def _add(company: Company, codes: tuple[int, ...], at_s: float) -> None:
    if codes not in company and len(company) >= MAX_GROUPS:
        codes = ()
    times = company.setdefault(codes, [])
    if len(times) < MAX_BURSTS and (not times or times[-1][1] < at_s):  # nearly always
        times.append((at_s, at_s))
    else:
        company[codes] = union_moments([times, [(at_s, at_s)]], 0.0)


def _index(times: list[Burst], at_s: float) -> int | None:
    """Return the index of the span that starts or ends at `at_s`; None if there is none."""
    at = bisect_left(times, (at_s, at_s))
    for n in (at, at - 1):
        if 0 <= n < len(times) and at_s in times[n]:
            return n
    return None


def of_plain(plain: EventBursts, details: Iterable[EventBursts], *, are_known: bool) -> Company:
    """Return the company of events without details that an earlier agent stored.

    Args:
        are_known: See `undetailed`.
    """
    alone = undetailed(plain, details, are_known=are_known)
    found: Company = {(): alone} if alone else {}
    rest = [each for each in plain.moments if each not in alone]
    return {**found, (DETAILED,): rest} if rest else found


def of_others(
    bursts: EventBursts, codes: Iterable[tuple[int, Iterable[Burst]]], before_s: float, after_s: float
) -> Company:
    """Return the company of events that an earlier agent stored, given the moments of each code.

    A moment that no single event of a code can have accompanied throughout counts as reported with nothing,
    so nothing excuses it.

    Args:
        before_s: How long before an event a code is reported with it.
        after_s: The same for a code after it.
    """
    known = [
        (code, [(first - after_s, last + before_s) for each in spans for first, last in known_parts(each)])
        for code, spans in codes
    ]
    found: Company = {}
    for moment in bursts.moments:
        is_covered = any(
            first <= moment[0] and moment[1] <= last for _, spans in known for first, last in spans
        )
        with_it = sorted(code for code, spans in known if near(spans, moment, 0.0)) if is_covered else []
        found.setdefault(tuple(with_it), []).append(moment)
    return found
