"""Decides which evidence to give up: what exceeds the limits of `quotas`, and what is old. Pure."""

from __future__ import annotations

from math import inf, isfinite

from nodeagent.evaluation import quotas
from nodeagent.evaluation.evidence import MARKS, Event, Evidence, Place, Variants
from nodeagent.evaluation.judging import Judge
from nodeagent.model import VERDICT_XID, kind_of
from nodeagent.policy.meanings import LONGEST_S

FORGET_S = LONGEST_S  # the longest recurrence window
DEPARTED_S = 400 * 86400.0  # how long the evidence about a GPU that is no longer in the node is kept


class EvidenceRetention:
    """Makes room for new evidence, and forgets what has ended, but never a current finding's evidence."""

    def __init__(self, evidence: Evidence, judge: Judge) -> None:
        self.dropped = 0  # what was lost because of a limit: see `Evaluator.dropped`
        self._evidence = evidence
        self._judge = judge
        self._full_until_s: dict[tuple[str, str], float] = {}  # by kind of evidence and of entity

    def make_room_for_series(self, place: Place, now_s: float) -> bool:
        """Make room for another series, if there is a limit; return False if all of its kind stand."""
        if self._refuses_for_now("series", place[0], now_s):
            return False
        surplus, pool = quotas.full_pool(self._evidence.series, place[0], quotas.series_limit)
        if not surplus:
            return True
        stored = self._evidence.series
        idle = sorted((stored[each].last_s, each) for each in pool if self._judge.of_series(each) is None)
        for last_s, each in idle[:surplus]:
            self.dropped += last_s > now_s - quotas.GONE_S  # it may still be in use
            del stored[each]
        self._evidence.drop_unused({each[0] for _, each in idle[:surplus]})
        return bool(idle) or self._refuse("series", place[0], now_s)

    def make_room_for_event(self, event: Event, now_s: float, asked_s: float) -> bool:
        """Make room for another event, if there is a limit; return False if all of its kind are needed.

        Args:
            asked_s: The newest time of a query, which may be later than `now_s`; infinity if there was none.
        """
        if self._refuses_for_now("events", event[0], now_s):
            return False
        surplus, pool = quotas.full_pool(self._evidence.events, event[0], quotas.event_limit)
        if not surplus:
            return True
        now_s = max(now_s, asked_s) if isfinite(asked_s) else now_s
        idle = sorted(
            (_last_s(self._evidence.events[each]), each) for each in pool if not self._is_needed(each, now_s)
        )
        for _, each in idle[:surplus]:
            del self._evidence.events[each]
            self._judge.revise_events_of(each[0])
        self._evidence.drop_unused({each[0] for _, each in idle[:surplus]})
        return bool(idle) or self._refuse("events", event[0], now_s)

    def make_room_for_variant(self, event: Event, at_s: float) -> None:
        """Have another variant of an event make room, if there is a limit. Count what is lost of it."""
        variants = self._evidence.events[event]
        if len(variants) < quotas.MAX_VARIANTS:
            return
        self.dropped += quotas.drop_variant(
            variants, lambda name: self._judge.kind_of_variant(event, name, variants[name]), at_s
        )

    def _refuse(self, what: str, entity: str, now_s: float) -> bool:
        """Count a refusal, and refuse more of the kind for a moment: each search costs milliseconds."""
        self.dropped += 1
        self._full_until_s[what, kind_of(entity)] = now_s + quotas.SEARCH_EVERY_S
        return False

    def _refuses_for_now(self, what: str, entity: str, now_s: float) -> bool:
        """Return True, and count a refusal, within a moment of the last one of this kind."""
        until_s = self._full_until_s.get((what, kind_of(entity)), -inf)
        is_full = until_s - quotas.SEARCH_EVERY_S <= now_s < until_s
        self.dropped += is_full
        return is_full

    def _is_needed(self, event: Event, now_s: float) -> bool:
        """Return True for a current finding, and for what ends findings: without it, they would return."""
        if _ends_others(event):
            return True
        owners = self._evidence.owners_of(event[0])
        return any(self._judge.of_event((owner, *event[1:]), now_s) for owner in owners)

    def forget(self, before_s: float) -> None:
        """Forget what ended before `before_s` and was not seen since, such as a disk that was removed.

        Evidence of a current finding is kept, no matter how long ago it was last seen.
        """
        self._evidence.series = {
            place: held
            for place, held in self._evidence.series.items()
            if held.last_s >= before_s or self._judge.of_series(place) is not None
        }
        ended, oldest_s = self._ended(before_s)
        # What ends a finding is needed as long as older evidence is kept.
        limit_s = min(before_s, oldest_s)
        stored = self._evidence.events
        for event, variants in stored.items():
            if _ends_others(event):
                ended += [(stored, event, name) for name, each in variants.items() if each.last_s < limit_s]
        for store, event, name in ended:
            del store[event][name]
            if not store[event]:
                del store[event]
        self._evidence.drop_unused(set(self._evidence.entities))
        self._judge.revise()

    def _ended(self, before_s: float) -> tuple[list[tuple[dict[Event, Variants], Event, str]], float]:
        """Return the findings' evidence that may be forgotten, and the time of the oldest that is kept."""
        ended, oldest_s = [], min((held.last_s for held in self._evidence.series.values()), default=inf)
        for store in self._evidence.stores:
            for event, variants in store.items():
                if event[1] in MARKS:
                    continue
                owners = self._evidence.owners_of(event[0])
                stands = any(self._judge.may_stand((owner, *event[1:]), before_s) for owner in owners)
                departed = self._evidence.devices.has_departed(event[0])
                limit_s = before_s + FORGET_S - DEPARTED_S if departed else before_s
                for name, each in variants.items():
                    if stands or each.last_s >= limit_s:
                        oldest_s = min(oldest_s, each.first_s)
                    elif not _ends_others(event):
                        ended.append((store, event, name))
        return ended, oldest_s


def _ends_others(event: Event) -> bool:
    """Return True for what may end findings about other events; without it they would return."""
    return event[1] in MARKS or event[1:] == ("xid", VERDICT_XID)


def _last_s(variants: Variants) -> float:
    return max(each.last_s for each in variants.values())
