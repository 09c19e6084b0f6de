"""Stores all evidence about a node's entities and derives findings from it. No I/O, no clock.

Query it at any time, as often as you like. The findings depend on the set of observations and on the time,
but not on the observations' order or on repeats. `samples` describes how late an observation may arrive.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from math import inf, isfinite
from typing import Any

from nodeagent.evaluation import growth, memory, samples
from nodeagent.evaluation.bursts import Burst, EventBursts
from nodeagent.evaluation.devices import INVENTORY
from nodeagent.evaluation.evidence import MARKS, Event, Evidence, is_end_mark, time_off
from nodeagent.evaluation.judging import Judge
from nodeagent.evaluation.retention import EvidenceRetention
from nodeagent.evaluation.samples import LATE_S
from nodeagent.model import GONE, Action, HealthFinding, HealthVerdict, Level, Observation
from nodeagent.policy.rules import HealthPolicy


class Evaluator:
    """Takes observations and returns findings; see the module's docstring."""

    def __init__(self, policy: HealthPolicy, branch: int | None = None) -> None:
        self._evidence = Evidence()
        self._evidence.branch = branch
        self._judge = Judge(self._evidence, policy)
        self._retention = EvidenceRetention(self._evidence, self._judge)
        self._findings: tuple[HealthFinding, ...] | None = None  # None: not computed since the last change
        self.until_s = inf  # the time when the last findings may change without new evidence
        self._asked_s = inf
        # by event that has changed since the last query: its recurrences, if the first change came very late
        self._reported: dict[Event, dict[str, list[Burst]]] = {}

    @property
    def policy(self) -> HealthPolicy:
        return self._judge.policy

    @property
    def branch(self) -> int | None:
        """The driver's branch, such as 575; None if it was never known.

        Setting None keeps the previous value.
        """
        return self._evidence.branch

    @branch.setter
    def branch(self, branch: int | None) -> None:
        if branch not in (None, self._evidence.branch):
            self._evidence.branch = branch
            self._judge.revise()
            self._findings = None

    @property
    def entities(self) -> set[str]:
        """All entities with evidence, and the node."""
        return self._evidence.entities

    @property
    def dropped(self) -> int:
        """How much was lost because of a limit.

        Counts refused observations, evidence of current findings that was dropped for more severe
        observations, series that were dropped while in use, and events or variants that were dropped while
        they still counted towards a recurrence.
        """
        return self._retention.dropped

    @property
    def problems(self) -> dict[tuple[str, str], str]:
        """The evidence that could not be evaluated since the start, by entity and check."""
        return self._judge.problems

    def use(self, policy: HealthPolicy) -> None:
        """Use another policy to evaluate all evidence from now on."""
        self._evidence.fit(policy)
        self._judge.use(policy)
        self._findings = None

    def begin(self, now_s: float, *, knew_more: bool = False) -> None:
        """Set the time of the first observation at this node, unless a memory was loaded.

        A log may report a fault from before that time, and the fault may have been remedied since. Its
        finding starts at the first observation, and is only degraded while the driver recommends no action
        for the GPU, unless only a boot ends it: the log is that of this boot.

        Args:
            knew_more: True if an agent has watched the node before, and what it knew is lost. A fault in the
                log may then be one that it had not seen remedied, so it is not degraded.
        """
        evidence = self._evidence
        if evidence.first_look_s == -inf and not (evidence.series or evidence.events):
            evidence.first_look_s, evidence.knew_more = now_s, knew_more

    # -- observations

    def add(self, seen: Observation) -> bool:
        """Add one observation. Return False if it adds nothing or is refused.

        It adds nothing if it is already known, too late, not finite, or about an unknown check. Observations
        that are refused because of a limit are counted in `dropped`.
        """
        if not (isfinite(seen.at_s) and isfinite(seen.value)):
            return False
        self._findings = None
        try:
            return self._add(seen)
        except Exception as error:  # a bug that affects one entity must not end the agent
            self._judge.set_aside((seen.entity, seen.check), error)
            return False

    def _add(self, seen: Observation) -> bool:
        if seen.check == INVENTORY and self._evidence.see_gpu(seen):
            self._judge.revise()
        if self.policy.is_event(seen.check):
            return self._add_event(seen)
        if seen.check == GONE:
            return bool(seen.value) and self._evidence.end_gone(seen.entity, seen.at_s)
        return seen.check in self.policy.rules and self._add_sample(seen)

    def _add_sample(self, seen: Observation) -> bool:
        evidence, rule = self._evidence, self.policy.rules[seen.check]
        place = (seen.entity, seen.check)
        if evidence.is_of_gone(seen.entity, seen.at_s):
            return False
        if place not in evidence.series and not self._retention.make_room_for_series(seen, rule):
            return False
        held = evidence.series_for(seen.entity, rule)
        sample = (seen.at_s, seen.value)
        if not held.series.add(rule, sample):
            return False
        evidence.series[place] = held
        evidence.note_boots(held, rule)
        evidence.entities.add(seen.entity)
        for at_s, name in growth.shown(rule, held.series, bisect_left(held.series.samples, sample)):
            is_new = at_s == seen.at_s
            texts = [(at_s, seen.text)] if is_new and seen.text else []
            heard = dict.fromkeys([seen.source] if is_new else held.heard, at_s)
            grown = EventBursts([(at_s, at_s)], texts, heard)
            grown.company = {evidence.grown_with(seen.entity, at_s): [(at_s, at_s)]}
            growth.note(evidence.grown.setdefault((*place, 0), {}), name, grown)
            self._judge.revise_events_of(seen.entity)
        held.series.fold(rule)
        held.known = False
        held.heard[seen.source] = max(seen.at_s, held.heard.get(seen.source, -inf))
        if held.last_s == seen.at_s:
            held.text = seen.text
        return True

    def _add_event(self, seen: Observation) -> bool:
        evidence, event = self._evidence, (seen.entity, seen.check, int(seen.value))
        if event not in evidence.events and not self._retention.make_room_for_event(seen, self._asked_s):
            return False
        variants = evidence.events.setdefault(event, {})
        if seen.variant not in variants:
            self._retention.make_room_for_variant(event, seen.at_s)
        self._retention.keep_recurrence(event, seen)
        self._note_recurrences(event, seen.at_s)
        evidence.entities.add(seen.entity)
        self._judge.revise_event(event, seen.at_s)
        is_mark = is_end_mark(event, seen.variant)
        is_new = variants.setdefault(seen.variant, EventBursts(exact=is_mark)).add(seen)
        if seen.check == "boot" and (off := time_off(seen)) is not None:
            variants[seen.variant].join(EventBursts([off]))
        if reported := self._reported[event]:
            self._retention.keep_recurrences(event, reported, self._asked_s)
        evidence.keep_company(event, seen.variant, seen.at_s)
        if is_mark:
            evidence.thin_marks(event, seen.variant)
        if seen.check == "boot":  # it clears findings of other entities, too
            evidence.renew()
            self._judge.revise()
        if seen.check in MARKS:
            evidence.note_mark(seen, self.policy)
        return is_new

    def _note_recurrences(self, event: Event, at_s: float) -> None:
        """Before the first change of an event since the last query, note the recurrences that it has shown.

        They matter only if the change is later than promised: an event in time never hides them.
        """
        if event not in self._reported:
            is_late = isfinite(self._asked_s) and at_s < self._asked_s - LATE_S
            self._reported[event] = self._retention.recurrences(event, self._asked_s) if is_late else {}

    # -- findings

    def findings(self, now_s: float) -> tuple[HealthFinding, ...]:
        """Return all current findings, worst first; the same tuple until evidence or time changes them."""
        self._reported.clear()
        if now_s < self._asked_s:
            self._judge.revise()  # findings that have cleared since may be active at the earlier time
        if self._findings is None or not self._asked_s <= now_s < self.until_s:
            found = list(self._judge.current(now_s))
            found.sort(key=lambda f: (-f.level, -f.action, f.entity, f.check, f.code or 0))
            self._findings = tuple(found)
            self._asked_s, self.until_s = now_s, self._judge.until_s
        return self._findings

    def verdicts(self, now_s: float) -> tuple[HealthVerdict, ...]:
        """Return one verdict for each entity with evidence, sorted by name."""
        return verdicts(self.findings(now_s), self.entities)

    def sampled(self, check: str) -> tuple[str, ...]:
        """Return the entities with samples of a check."""
        return tuple(sorted(entity for entity, name in self._evidence.series if name == check))

    def undecided(self, since_s: float) -> Iterator[tuple[str, str, str]]:
        """Yield entity, check and reason for each check sampled after `since_s` that is undecided.

        Checks whose evidence could not be evaluated are undecided, too.
        """
        for (entity, check), held in sorted(self._evidence.series.items()):
            if held.series.samples and held.last_s >= since_s:
                why = samples.why_undecided(self.policy.rules[check], held.series.samples)
                if why:
                    yield entity, check, why
        for (entity, check), problem in sorted(self.problems.items()):
            yield entity, check, problem

    # -- the memory

    def forget(self, before_s: float) -> None:
        """Forget evidence that ended before `before_s` and was not seen since.

        An example is evidence about a removed disk. Evidence of a current finding, and evidence on which its
        level depends, is kept, no matter how long ago it was last seen.
        """
        self._retention.forget(before_s)
        self._findings = None

    def dump(self) -> dict[str, Any]:
        """Return all evidence as JSON; an evaluator that loads it returns the same findings."""
        return memory.dump(self._evidence)

    def load(self, raw: Any) -> None:
        """Restore the dumped evidence. Raises ValueError, TypeError or KeyError if it is malformed.

        Evidence of checks that the policy no longer has is omitted.
        """
        memory.load(self._evidence, self.policy, raw)
        self._judge.revise()
        self._findings = None


def verdicts(findings: Iterable[HealthFinding], entities: Iterable[str]) -> tuple[HealthVerdict, ...]:
    """Return one verdict for each entity: its worst level, and the greatest action at that level."""
    by_entity: dict[str, list[HealthFinding]] = {entity: [] for entity in sorted(entities)}
    for each in findings:
        by_entity.setdefault(each.entity, []).append(each)
    return tuple(_verdict(entity, tuple(found)) for entity, found in sorted(by_entity.items()))


def _verdict(entity: str, found: tuple[HealthFinding, ...]) -> HealthVerdict:
    level = max((each.level for each in found), default=Level.HEALTHY)
    action = max((each.action for each in found if each.level == level), default=Action.NONE)
    return HealthVerdict(entity, level, action, found)
