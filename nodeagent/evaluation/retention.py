"""Decides which evidence to drop: evidence beyond the limits of `quotas`, and old evidence. Pure."""

from __future__ import annotations

from math import inf, isfinite

from nodeagent.evaluation import quotas, samples
from nodeagent.evaluation.bursts import MAX_BURSTS, Burst, TimeOff, near, union_bursts
from nodeagent.evaluation.evidence import MARKS, Event, Evidence, Place, Variants, ends_others
from nodeagent.evaluation.judging import Judge
from nodeagent.evaluation.quotas import FREE, EvidenceRank
from nodeagent.model import Level, Observation, kind_of
from nodeagent.policy.meanings import LONGEST_S
from nodeagent.policy.rules import Rule

FORGET_S = LONGEST_S  # the longest recurrence window
DEPARTED_S = 400 * 86400.0  # how long the evidence about a GPU that is no longer in the node is kept
_Refusal = tuple[str | Level, ...]  # the kind of evidence, the kind of entity, and the refused severity


class EvidenceRetention:
    """Makes room for new evidence and forgets old evidence, but keeps all evidence of unhealthy findings."""

    def __init__(self, evidence: Evidence, judge: Judge) -> None:
        self.dropped = 0  # what was lost because of a limit: see `Evaluator.dropped`
        self._evidence = evidence
        self._judge = judge
        self._full_until_s: dict[_Refusal, float] = {}

    def make_room_for_series(self, seen: Observation, rule: Rule) -> bool:
        """Make room for another series if the limit is reached; return False if no series may be dropped.

        Series without a finding are dropped first. If there are none, series are dropped whose finding is
        milder than what this sample shows, or whose check cannot report anything as severe as this sample's
        check can. A series on which the level of an event's finding depends is never dropped.
        """
        kind, now_s = kind_of(seen.entity), seen.at_s
        stored, limit = self._evidence.series, quotas.series_limit(kind)
        if len(stored) < limit:
            return True
        shows, may_show = samples.worst_shown(rule, (now_s, seen.value)), samples.worst_reachable(rule)
        refusal = ("series", kind, shows, may_show)
        if self._refuses_for_now(refusal, now_s):
            return False
        pool = quotas.full_pool(stored, kind, limit)
        if not pool:
            return True
        decisive = self._judge.decisive_series()
        ranks = [(self._rank_of_series(each, shows, may_show), each) for each in pool if each not in decisive]
        ranked = [(rank, stored[each].last_s, each) for rank, each in ranks if rank and each in stored]
        given_up = quotas.to_give_up(ranked, limit)
        for rank, last_s, place in given_up:
            self.dropped += rank != FREE or last_s > now_s - quotas.GONE_S  # it may still be in use
            del stored[place]
        self._evidence.drop_unused({place[0] for *_, place in given_up})
        return bool(given_up) or self._refuse(refusal, now_s)

    def _rank_of_series(self, place: Place, shows: Level, may_show: Level) -> EvidenceRank | None:
        """Return the cost of dropping a series; None if it must be kept."""
        found = self._judge.of_series(place)
        if found is None:
            return FREE
        finds = samples.worst_reachable(self._judge.policy.rules[place[1]])
        is_milder = found.level is not Level.UNHEALTHY and (found.level < shows or finds < may_show)
        return (quotas.STANDS, found.level) if is_milder else None

    def make_room_for_event(self, seen: Observation, asked_s: float) -> bool:
        """Make room for another event if the limit is reached; return False if no event may be dropped.

        Events without a finding are dropped first. If there are none, events are dropped whose finding is
        milder than that of the new event. An event that may end an entity's findings is never refused.

        Args:
            asked_s: The time of the newest query, which may be later than the event; infinity if there was no
                query.
        """
        event, kind = (seen.entity, seen.check, int(seen.value)), kind_of(seen.entity)
        stored, limit = self._evidence.events, quotas.event_limit(kind)
        if len(stored) < limit:
            return True
        level = self._judge.level_of_new(event, seen.variant)
        is_remedy = ends_others(event) and seen.entity in self._evidence.entities
        refusal = ("events", kind, level)
        if not is_remedy and self._refuses_for_now(refusal, seen.at_s):
            return False
        pool = quotas.full_pool(stored, kind, limit)
        if not pool:
            return True
        now_s = max(seen.at_s, asked_s) if isfinite(asked_s) else seen.at_s
        ranks = [(self._rank_of_event(each, level, now_s), each) for each in pool]
        ranked = [(rank, _last_s(stored[each]), each) for rank, each in ranks if rank]
        given_up = quotas.to_give_up(ranked, limit)
        for rank, _, each in given_up:
            self.dropped += rank != FREE
            del stored[each]
            self._judge.revise_events_of(each[0])
        self._evidence.drop_unused({each[0] for *_, each in given_up})
        return bool(given_up) or is_remedy or self._refuse(refusal, seen.at_s)

    def _rank_of_event(self, event: Event, level: Level, now_s: float) -> EvidenceRank | None:
        """Return the cost of dropping an event for a new event of `level`; None if it must be kept."""
        stands = self._judge.level_of(event, now_s)
        if stands is not None:
            return (quotas.STANDS, stands) if stands < level else None
        recurrence = self._judge.recurrence(event, now_s)
        return FREE if recurrence is None else (quotas.COUNTS, recurrence)

    def make_room_for_variant(self, event: Event, at_s: float) -> None:
        """If the limit is reached, drop a variant of an event to make room for another; count the loss."""
        variants = self._evidence.events[event]
        if len(variants) < quotas.MAX_VARIANTS:
            return
        self.dropped += quotas.drop_variant(
            variants,
            lambda name: self._judge.kind_of_variant(event, name),
            lambda name: self._judge.recurring(event, name, variants[name]),
            at_s,
            TimeOff(self._evidence.off()),
        )

    def keep_recurrence(self, event: Event, seen: Observation) -> None:
        """If another burst is about to merge the two oldest, keep the recurrence that they have shown.

        The finding of a recurrence may stand until its remedy, however many bursts follow.
        """
        bursts = self._evidence.events[event].get(seen.variant)
        if bursts is None or len(bursts.spans) < MAX_BURSTS or near(bursts.spans, (seen.at_s, seen.at_s)):
            return
        oldest, second = bursts.spans[:2]
        if second in self._judge.recurring_by_any_rule(event, seen.variant):
            bursts.recurring = union_bursts([bursts.recurring, [(oldest[0], second[1])]])

    def recurrences(self, event: Event, now_s: float) -> dict[str, list[Burst]]:
        """Return the bursts of each variant at which the event has recurred, as shown at `now_s`."""
        variants = self._evidence.events[event]
        if sum(len(each.spans) for each in variants.values()) < 2:
            return {}
        return {name: self._judge.recurring_by_any_rule(event, name, now_s) for name in variants}

    def keep_recurrences(self, event: Event, before: dict[str, list[Burst]], now_s: float) -> None:
        """Keep the recurrences from before a very late event that the evidence no longer shows.

        The late event shows that there was no silence between two faults, but the finding stands already.
        """
        after = self.recurrences(event, now_s)
        for name, shown in before.items():
            bursts, now = self._evidence.events[event].get(name), after.get(name, [])
            lost = [each for each in shown if not near(now, each, 0.0)]
            if bursts is not None and lost:
                bursts.recurring = union_bursts([bursts.recurring, lost])

    def _refuse(self, refusal: _Refusal, now_s: float) -> bool:
        """Count a refusal, and refuse similar evidence for a moment, because a search takes milliseconds."""
        self.dropped += 1
        self._full_until_s[refusal] = now_s + quotas.SEARCH_EVERY_S
        return False

    def _refuses_for_now(self, refusal: _Refusal, now_s: float) -> bool:
        """If similar evidence was refused a moment ago, count another refusal and return True."""
        until_s = self._full_until_s.get(refusal, -inf)
        is_full = until_s - quotas.SEARCH_EVERY_S <= now_s < until_s
        self.dropped += is_full
        return is_full

    def forget(self, before_s: float) -> None:
        """Forget evidence that ended before `before_s` and was not seen since.

        An example is evidence about a removed disk. Evidence of a current finding, and evidence on which its
        level depends, is kept, no matter how long ago it was last seen. The time while the node was off does
        not count.
        """
        before_s = TimeOff(self._evidence.off()).window_start_s(before_s, inf)
        decisive = self._judge.decisive_series()
        self._evidence.series = {
            place: held
            # A copy, because `of_series` drops a series that it cannot evaluate.
            for place, held in tuple(self._evidence.series.items())
            if held.last_s >= before_s or place in decisive or self._judge.of_series(place) is not None
        }
        ended, oldest_s = self._ended(before_s)
        stored, sighting_s = self._evidence.events, self._evidence.devices.oldest_sighting_s()
        for event, variants in stored.items():
            if ends_others(event):
                # Such events are needed while older evidence is kept. Boots are also needed to tell which GPU
                # the evidence is about.
                limit_s = min(before_s, oldest_s, sighting_s if event[1] == "boot" else inf)
                ended += [(stored, event, name) for name, each in variants.items() if each.last_s < limit_s]
        for store, event, name in ended:
            del store[event][name]
            if not store[event]:
                del store[event]
        self._evidence.drop_unused(set(self._evidence.entities))
        self._evidence.renew()
        self._judge.revise()

    def _ended(self, before_s: float) -> tuple[list[tuple[dict[Event, Variants], Event, str]], float]:
        """Return the evidence of findings to forget, and the time of the oldest evidence that is kept."""
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
                    elif not ends_others(event):
                        ended.append((store, event, name))
        return ended, oldest_s


def _last_s(variants: Variants) -> float:
    return max(each.last_s for each in variants.values())
