"""Stores all evidence about a node's entities and derives findings from it. No I/O, no clock.

The evaluator may be queried at any time and any number of times. The findings depend on the set of
observations and on the time, but not on the order of the observations or on repetitions. `samples` describes
how late an observation may arrive.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

from nodeagent.evaluation import events, samples
from nodeagent.evaluation.events import EndMarks, EventBursts
from nodeagent.evaluation.samples import SampleSeries
from nodeagent.model import (
    DRIVER,
    GONE,
    NODE,
    VERDICT_XID,
    Action,
    HealthFinding,
    HealthVerdict,
    Level,
    Observation,
)
from nodeagent.policy.meanings import LONGEST_S
from nodeagent.policy.rules import HealthPolicy, Rule, RuleKind

MAX_SERIES = 4096
MAX_EVENTS = 2048
MAX_VARIANTS = 16
MAX_PROBLEMS = 32
MAX_GONE = 512
NEVER_GONE = (NODE, DRIVER, "gpu", "sensor")  # kinds whose absence is itself a fault
VOLUME = "user_volume"  # the check whose value 1 means that a device backs a pod's volume
MARKS = ("gpu_reset", "boot", "replaced", "cleared")
FORGET_S = LONGEST_S  # the longest recurrence window

Place = tuple[str, str]  # entity, check
Event = tuple[str, str, int]  # entity, check, code


@dataclass(slots=True)
class _Series:
    series: SampleSeries
    sources: set[str]
    text: str = ""
    finding: HealthFinding | None = None  # the current finding, valid while `known`
    known: bool = False


class Evaluator:
    """Holds the evidence; see the module's docstring."""

    def __init__(self, policy: HealthPolicy, branch: int | None = None) -> None:
        self.policy = policy
        self._branch = branch
        self._series: dict[Place, _Series] = {}
        self._events: dict[Event, dict[str, EventBursts]] = {}
        # by entity: the finding, and when it clears
        self._judged: dict[str, dict[Event, tuple[HealthFinding | None, float]]] = {}
        self.entities: set[str] = {NODE}  # all entities ever seen
        self._models: dict[str, str] = {}  # by entity: the name of the GPU
        self._policies: dict[str, HealthPolicy] = {}  # by the name of the GPU
        self._gone_s: dict[str, float] = {}  # by entity, oldest first: when its sensor last found it gone
        self.problems: dict[Place, str] = {}  # evidence that could not be evaluated since the start
        self._findings: tuple[HealthFinding, ...] | None = None  # None: not computed since the last change
        self.until_s = inf  # when the last findings may change without new evidence
        self._asked_s = inf

    @property
    def branch(self) -> int | None:
        """The driver's branch, such as 575; None if it is unknown."""
        return self._branch

    @branch.setter
    def branch(self, branch: int | None) -> None:
        if branch != self._branch:
            self._branch = branch
            self._judged.clear()
            self._findings = None

    def set_model(self, entity: str, name: str) -> None:
        """Note the name of a GPU: some codes have another meaning for some models."""
        if name != self._models.get(entity):
            self._models[entity] = name
            self._judged.pop(entity, None)
            self._findings = None

    def _policy_of(self, entity: str) -> HealthPolicy:
        name = self._models.get(entity, "")
        if name not in self._policies:
            self._policies[name] = self.policy.for_gpu(name)
        return self._policies[name]

    def use(self, policy: HealthPolicy) -> None:
        """Evaluate all evidence by another policy from now on."""
        self.policy = policy
        self._policies.clear()
        self._series = {place: held for place, held in self._series.items() if place[1] in policy.rules}
        for (_, check), held in self._series.items():
            held.series.fit(policy.rules[check])
            held.known = False
        self._judged.clear()
        self._findings = None

    def add(self, seen: Observation) -> bool:
        """Add one observation. Return False if it is known, too late, not finite, or of an unknown check."""
        if not (isfinite(seen.at_s) and isfinite(seen.value)):
            return False
        self._findings = None
        try:
            return self._add(seen)
        except Exception as error:  # a bug about one entity must not end the agent, which watches the others
            self._set_aside(seen.entity, seen.check, error)
            return False

    def _add(self, seen: Observation) -> bool:
        rule = self.policy.rules.get(seen.check)
        if seen.check in ("xid", "sxid") or (rule is not None and rule.kind is RuleKind.EVENT):
            return self._add_event(seen)
        if rule is None:
            return False
        if seen.check == GONE:
            return bool(seen.value) and self._end_gone(seen.entity, seen.at_s)
        place = (seen.entity, seen.check)
        if place not in self._series and len(self._series) >= MAX_SERIES:
            return False
        if seen.at_s < self._gone_s.get(seen.entity, -inf):
            return False
        held = self._series.get(place) or self._new_series(seen.entity, rule)
        if not held.series.add(rule, (seen.at_s, seen.value)):
            return False
        self._series[place] = held
        self.entities.add(seen.entity)
        held.series.fold(rule)
        held.known = False
        held.sources.add(seen.source)
        if held.series.samples[-1][0] == seen.at_s:
            held.text = seen.text
        return True

    def _new_series(self, entity: str, rule: Rule) -> _Series:
        held = _Series(SampleSeries([]), set())
        for at_s in self._times(entity, "cleared"):
            held.series.clear(rule, at_s)
        return held

    def _clear_samples(self, entity: str, at_s: float) -> None:
        for (owner, check), held in self._series.items():
            if owner == entity:
                held.series.clear(self.policy.rules[check], at_s)
                held.known = False

    def _end_gone(self, entity: str, at_s: float) -> bool:
        """Drop the samples of an entity that no longer exists. Its successor starts without any."""
        if entity.partition("/")[0] in NEVER_GONE:
            return False
        self._gone_s[entity] = max(at_s, self._gone_s.pop(entity, at_s))
        while len(self._gone_s) > MAX_GONE:
            del self._gone_s[next(iter(self._gone_s))]
        ended = [
            place
            for place, held in self._series.items()
            if place[0] == entity and (not held.series.samples or held.series.samples[-1][0] < at_s)
        ]
        for place in ended:
            del self._series[place]
        if not any(known[0] == entity for known in (*self._series, *self._events)):
            self.entities.discard(entity)
        return bool(ended)

    def _set_aside(self, entity: str, check: str, error: Exception) -> None:
        """Continue without evidence that cannot be evaluated: drop samples, keep events without a finding."""
        dropped = self._series.pop((entity, check), None) is not None
        lost = "its samples were dropped" if dropped else "its events are not judged"
        if len(self.problems) < MAX_PROBLEMS:
            self.problems[entity, check] = (
                f"{entity}: evaluating {check} failed, so {lost}: {type(error).__name__}: {error}"
            )

    def _add_event(self, seen: Observation) -> bool:
        key = (seen.entity, seen.check, int(seen.value))
        if key not in self._events and len(self._events) >= MAX_EVENTS:
            self._drop_oldest()
        variants = self._events.setdefault(key, {})
        if seen.variant not in variants and len(variants) >= MAX_VARIANTS:
            del variants[min(variants, key=lambda name: (variants[name].spans[-1][1], name))]
        self.entities.add(seen.entity)
        if seen.entity == NODE:
            self._judged.clear()  # a boot clears findings of other entities, too
        self._judged.pop(seen.entity, None)
        if seen.check == "cleared":
            self._clear_samples(seen.entity, seen.at_s)
        return variants.setdefault(seen.variant, EventBursts()).add(seen)

    def _drop_oldest(self) -> None:
        oldest = min(self._events, key=lambda e: (max(b.spans[-1][1] for b in self._events[e].values()), e))
        del self._events[oldest]
        self._judged.pop(oldest[0], None)

    def findings(self, now_s: float) -> tuple[HealthFinding, ...]:
        """Return all current findings, worst first; the same tuple until evidence or time changes them."""
        if now_s < self._asked_s:
            self._judged.clear()  # findings that had cleared by then may be active at an earlier time
        if self._findings is None or not self._asked_s <= now_s < self.until_s:
            self._findings = self._find(now_s)
            self._asked_s = now_s
            self.until_s = min((t for e in self._judged.values() for _, t in e.values()), default=inf)
        return self._findings

    def _find(self, now_s: float) -> tuple[HealthFinding, ...]:
        found: list[HealthFinding] = []
        for (entity, check), held in [*self._series.items()]:
            if not held.known:
                held.finding, held.known = self._of_samples(entity, check, held), True
            if held.finding is not None:
                found.append(held.finding)
        events = (self._of_event(event, now_s) for event in self._events if event[1] not in MARKS)
        found += (self._limited(each) for each in events if each is not None)
        found.sort(key=lambda f: (-f.level, -f.action, f.entity, f.check, f.code or 0))
        return tuple(found)

    def _of_samples(self, entity: str, check: str, held: _Series) -> HealthFinding | None:
        rule = self.policy.rules[check]
        try:
            return samples.sample_finding(entity, rule, held.series, held.sources, held.text)
        except Exception as error:  # a bug about one entity must not end the agent, which watches the others
            self._set_aside(entity, check, error)
            return None

    def _limited(self, finding: HealthFinding) -> HealthFinding:
        """Limit a finding about a device that backs a pod's volume: the node is not at fault."""
        held = self._series.get((finding.entity, VOLUME))
        is_volume = held is not None and held.series.samples and held.series.samples[-1][1]
        if not is_volume or finding.overridden == "operator":
            return finding
        level = min(finding.level, Level.DEGRADED)
        return replace(finding, level=level, action=min(finding.action, Action.RESTART_APP))

    def _of_event(self, event: Event, now_s: float) -> HealthFinding | None:
        entity, check, code = event
        judged = self._judged.setdefault(entity, {})
        if event not in judged or now_s >= judged[event][1]:
            judged[event] = (None, inf)
            try:
                if not self._settled(entity, check, code):
                    judged[event] = events.event_finding(
                        entity, check, code, self._events[event], self._verdicts(entity), self._marks(entity),
                        self._policy_of(entity), self.branch, now_s,
                    )  # fmt: skip
            except Exception as error:  # as in `_of_samples`
                self._set_aside(entity, check, error)
        return judged[event][0]

    def verdicts(self, now_s: float) -> tuple[HealthVerdict, ...]:
        """Return one verdict for each entity ever seen, sorted by name."""
        return verdicts(self.findings(now_s), self.entities)

    def undecided(self, since_s: float) -> Iterator[tuple[str, str, str]]:
        """Yield entity, check and reason for each check sampled after `since_s` that is undecided.

        Checks whose evidence could not be evaluated are undecided, too.
        """
        for (entity, check), held in sorted(self._series.items()):
            if held.series.samples and held.series.samples[-1][0] >= since_s:
                why = samples.why_undecided(self.policy.rules[check], held.series.samples)
                if why:
                    yield entity, check, why
        for (entity, check), problem in sorted(self.problems.items()):
            yield entity, check, problem

    def forget(self, before_s: float) -> None:
        """Forget evidence last seen before `before_s`, such as samples of a disk that was removed since."""
        self._series = {
            place: held
            for place, held in self._series.items()
            if held.series.samples and held.series.samples[-1][0] >= before_s
        }
        for variants in self._events.values():
            for name in [n for n, each in variants.items() if each.spans[-1][1] < before_s]:
                del variants[name]
        self._events = {event: variants for event, variants in self._events.items() if variants}
        self._judged.clear()
        self._findings = None

    def _settled(self, entity: str, check: str, code: int) -> bool:
        """Return True for a driver's verdict that concerns only codes that the operator has overridden."""
        if (check, code) != ("xid", VERDICT_XID):
            return False
        others = [
            (self.policy.meaning("xid", number, name, self.branch), bursts.spans)
            for (owner, kind, number), variants in self._events.items()
            if (owner, kind) == (entity, "xid") and number != VERDICT_XID
            for name, bursts in variants.items()
        ]
        words = self._verdicts(entity).values()
        return all(events.all_overridden(each.spans[-1], others) for each in words)

    def _verdicts(self, entity: str) -> dict[str, EventBursts]:
        return self._events.get((entity, "xid", VERDICT_XID), {})

    def _marks(self, entity: str) -> EndMarks:
        # A later verdict "none" means that the fault is over.
        over = self._verdicts(entity).get("none")
        return EndMarks(
            resets=sorted([*self._times(entity, "gpu_reset"), *(over.spans[-1:][0][1:] if over else ())]),
            boots=self._times(NODE, "boot"),
            replaced=self._times(entity, "replaced"),
            cleared=self._times(entity, "cleared"),
        )

    def _times(self, entity: str, check: str) -> list[float]:
        """Return when a mark was seen, oldest first: the ends of its bursts."""
        variants = self._events.get((entity, check, 0), {})
        return sorted(last for each in variants.values() for _, last in each.spans)

    def dump(self) -> dict[str, Any]:
        """Return all evidence as JSON; an evaluator that loads it returns the same findings."""
        return {
            "series": [
                [*place, held.series.dump(), sorted(held.sources), held.text]
                for place, held in self._series.items()
            ],
            "events": [
                [*event, name, bursts.dump()]
                for event, variants in self._events.items()
                for name, bursts in variants.items()
            ],
            "unseen": [
                [*place, *unseen_s]
                for place, held in self._series.items()
                if any(unseen_s := [each.unseen_s for each in held.series.base])
            ],
        }

    def load(self, raw: Any) -> None:
        """Restore the dumped evidence. Raises ValueError, TypeError or KeyError if it is malformed."""
        self._findings = None
        for entity, check, series, sources, text in raw["series"][:MAX_SERIES]:
            if str(check) in self.policy.rules:
                held = _Series(SampleSeries.load(series), {str(each) for each in sources}, str(text))
                held.series.fit(self.policy.rules[str(check)])
                self._series[str(entity), str(check)] = held
                self.entities.add(str(entity))
        for entity, check, *unseen_s in raw.get("unseen", ()):  # an earlier version did not measure it
            if (known := self._series.get((entity, check))) is not None:
                low, high = (
                    replace(each, unseen_s=float(s))
                    for each, s in zip(known.series.base, unseen_s, strict=True)
                )
                known.series.base = (low, high)
        for entity, check, code, variant, bursts in raw["events"][: MAX_EVENTS * MAX_VARIANTS]:
            variants = self._events.setdefault((str(entity), str(check), int(code)), {})
            variants[str(variant)] = EventBursts.load(bursts)
            self._judged.clear()
            self.entities.add(str(entity))


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
