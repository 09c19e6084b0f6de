"""Stores all evidence about a node's entities and derives findings from it. No I/O, no clock.

The evaluator may be queried at any time and any number of times. The findings depend on the set of
observations and on the time, but not on the order of the observations or on repetitions. `samples` describes
how late an observation may arrive.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Any

from nodeagent.evaluation import events, growth, quotas, samples
from nodeagent.evaluation.bursts import EventBursts, union_bursts
from nodeagent.evaluation.devices import DeviceSlots, Era
from nodeagent.evaluation.events import EndMarks
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
    kind_of,
    origin_of,
)
from nodeagent.policy.meanings import LONGEST_S
from nodeagent.policy.rules import CLEARED_BY, Clears, HealthPolicy, Rule, RuleKind

MARKS = ("gpu_reset", "boot", "replaced", "cleared")
FORGET_S = LONGEST_S  # the longest recurrence window
DEPARTED_S = 400 * 86400.0  # how long the evidence about a GPU that is no longer in the node is kept
BEFORE_STANDING_S = 600.0  # the samples of a finding began at most this long before it stood
RECOVERY = "recovery_action"
MIG_ON = "on"  # in the facts of a GPU
MAX_PROBLEMS = 32
MAX_GONE = 512
NEVER_GONE = (NODE, DRIVER, "gpu", "sensor")  # kinds whose absence is itself a fault
VOLUME = "user_volume"  # the check whose value 1 means that a device backs a pod's volume

Place = tuple[str, str]  # entity, check
Event = tuple[str, str, int]  # entity, check, code
Variants = dict[str, EventBursts]


@dataclass(slots=True)
class _Series:
    series: SampleSeries
    heard: dict[str, float] = field(default_factory=dict)  # by sensor: its newest sample
    text: str = ""
    finding: HealthFinding | None = None  # the current finding, valid while `known`
    known: bool = False

    @property
    def last_s(self) -> float:
        return self.series.samples[-1][0] if self.series.samples else -inf


class Evaluator:
    """Holds the evidence; see the module's docstring."""

    def __init__(self, policy: HealthPolicy, branch: int | None = None) -> None:
        self.policy = policy
        self._branch = branch
        self._series: dict[Place, _Series] = {}
        self._events: dict[Event, Variants] = {}
        self._grown: dict[Event, Variants] = {}  # of counters whose growth lasts; the code is 0
        self._devices = DeviceSlots()
        self._owners: dict[str, tuple[str, ...]] = {}
        self._eras: dict[str, tuple[Era, ...]] = {}
        self._full_until_s: dict[tuple[str, str], float] = {}  # by kind of evidence and of entity
        # by entity: the finding, and when it clears
        self._judged: dict[str, dict[Event, tuple[HealthFinding | None, float]]] = {}
        self.entities: set[str] = {NODE}  # all entities with evidence
        self.dropped = 0  # observations refused, and series given up while in use, because of a limit
        self.problems: dict[Place, str] = {}  # evidence that could not be evaluated since the start
        self._models: dict[str, tuple[str, bool]] = {}  # by entity: the GPU, and whether MIG is on
        self._policies: dict[tuple[str, bool], HealthPolicy] = {}  # by the same
        self._gone_s: dict[str, float] = {}  # by entity, oldest first: when its sensor last found it gone
        self._first_look_s = -inf
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

    def set_model(self, entity: str, name: str, mig: str = "") -> None:
        """Note the name of a GPU and its MIG mode: they decide what some codes mean.

        Args:
            mig: The mode as the sensor describes it, the current one first: `off, on pending`.
        """
        model = (name, mig.partition(",")[0] == MIG_ON)
        if model != self._models.get(entity):
            self._models[entity] = model
            self._judged.pop(entity, None)
            self._findings = None

    def _policy_of(self, entity: str) -> HealthPolicy:
        model = self._models.get(entity, ("", False))
        if model not in self._policies:
            self._policies[model] = self.policy.for_gpu(model[0], mig=model[1])
        return self._policies[model]

    def use(self, policy: HealthPolicy) -> None:
        """Evaluate all evidence by another policy from now on."""
        self.policy = policy
        self._policies.clear()
        self._series = {place: held for place, held in self._series.items() if place[1] in policy.rules}
        for (_, check), held in self._series.items():
            held.series.fit(policy.rules[check])
            held.known = False
        for store in (self._events, self._grown):
            for event in [each for each in store if not self._has_check(each[1])]:
                del store[event]
        self._judged.clear()
        self._eras.clear()
        self._findings = None

    def begin(self, now_s: float) -> None:
        """Set the time of the first look at this node, unless a memory was loaded.

        What a log says about the time before it may have been remedied unseen. Such a finding counts from the
        first look, and is only degraded while the driver recommends no action for the GPU.
        """
        if self._first_look_s == -inf and not (self._series or self._events):
            self._first_look_s = now_s

    def add(self, seen: Observation) -> bool:
        """Add one observation. Return False if it adds nothing or is refused.

        It adds nothing if it is known, too late, not finite, or of an unknown check. What is refused because
        of a limit is counted in `dropped`.
        """
        if not (isfinite(seen.at_s) and isfinite(seen.value)):
            return False
        self._findings = None
        try:
            return self._add(seen)
        except Exception as error:  # a bug about one entity must not end the agent, which watches the others
            self._set_aside((seen.entity, seen.check), error)
            return False

    def _add(self, seen: Observation) -> bool:
        self._see_device(seen)
        if self._is_event(seen.check):
            return self._add_event(seen)
        if seen.check == GONE:
            return bool(seen.value) and self._end_gone(seen.entity, seen.at_s)
        return seen.check in self.policy.rules and self._add_sample(seen)

    def _is_event(self, check: str) -> bool:
        rule = self.policy.rules.get(check)
        return check in ("xid", "sxid") or (rule is not None and rule.kind is RuleKind.EVENT)

    def _add_sample(self, seen: Observation) -> bool:
        rule = self.policy.rules[seen.check]
        place = (seen.entity, seen.check)
        if place not in self._series and not self._has_room_for_series(place, seen.at_s):
            return False
        if seen.at_s < self._gone_s.get(seen.entity, -inf):
            return False
        held = self._series.get(place) or self._new_series(seen.entity, rule)
        sample = (seen.at_s, seen.value)
        if not held.series.add(rule, sample):
            return False
        self._series[place] = held
        self._note_boots(held, rule)
        self.entities.add(seen.entity)
        if growth.has_grown(rule, held.series, bisect_left(held.series.samples, sample)):
            grown = self._grown.setdefault((*place, 0), {})
            grown.setdefault("", EventBursts()).add(seen)
            self._rejudge(seen.entity)
        held.series.fold(rule)
        held.known = False
        held.heard[seen.source] = max(seen.at_s, held.heard.get(seen.source, -inf))
        if held.last_s == seen.at_s:
            held.text = seen.text
        return True

    def _new_series(self, entity: str, rule: Rule) -> _Series:
        held = _Series(SampleSeries([]))
        for at_s in self._times(entity, "cleared"):
            held.series.clear(rule, at_s)
        return held

    def _note_boots(self, held: _Series, rule: Rule) -> None:
        """Have a counter that each boot restarts begin with its first reading after the newest boot."""
        for at_s in self._boots() if rule.restarts_at_boot else ():
            if at_s < held.last_s:
                held.series.restart(rule, at_s)
                held.known = False

    def _clear_samples(self, entity: str, at_s: float) -> None:
        for (owner, check), held in self._series.items():
            if owner == entity:
                held.series.clear(self.policy.rules[check], at_s)
                held.known = False

    def _end_gone(self, entity: str, at_s: float) -> bool:
        """Drop the samples of an entity that no longer exists. Its successor starts without any."""
        if kind_of(entity) in NEVER_GONE:
            return False
        self._gone_s[entity] = max(at_s, self._gone_s.pop(entity, at_s))
        while len(self._gone_s) > MAX_GONE:
            del self._gone_s[next(iter(self._gone_s))]
        ended = [place for place, held in self._series.items() if place[0] == entity and held.last_s < at_s]
        for place in ended:
            del self._series[place]
        self._drop_entities({entity})
        return bool(ended)

    def _set_aside(self, place: Place, error: Exception) -> None:
        """Continue without evidence that cannot be evaluated: drop samples, keep events without a finding."""
        entity, check = place
        dropped = self._series.pop(place, None) is not None
        lost = "its samples were dropped" if dropped else "its events are not judged"
        if len(self.problems) < MAX_PROBLEMS:
            self.problems[place] = (
                f"{entity}: evaluating {check} failed, so {lost}: {type(error).__name__}: {error}"
            )

    def _add_event(self, seen: Observation) -> bool:
        event = (seen.entity, seen.check, int(seen.value))
        if event not in self._events and not self._has_room_for_event(event, seen.at_s):
            return False
        variants = self._events.setdefault(event, {})
        if seen.variant not in variants and len(variants) >= quotas.MAX_VARIANTS:
            quotas.drop_variant(
                variants,
                lambda name: self._policy_of(seen.entity).meaning(seen.check, event[2], name, self.branch),
            )
        self.entities.add(seen.entity)
        if seen.entity == NODE:
            self._judged.clear()  # a boot clears findings of other entities, too
            self._eras.clear()
        self._rejudge(seen.entity)
        if seen.check == "cleared":
            self._clear_samples(seen.entity, seen.at_s)
        is_new = variants.setdefault(seen.variant, EventBursts()).add(seen)
        if seen.check in MARKS:
            self._note_mark(seen)
        return is_new

    def _note_mark(self, seen: Observation) -> None:
        """Have the samples of an entity, or of all for a boot, judged again."""
        for (entity, check), held in self._series.items():
            if seen.entity in (NODE, entity):
                held.known = False
            if seen.check == "boot":
                self._note_boots(held, self.policy.rules[check])

    def _rejudge(self, entity: str) -> None:
        for owner in self._owners_of(entity):
            self._judged.pop(owner, None)

    # -- the GPUs in the slots

    def _see_device(self, seen: Observation) -> None:
        before = self._devices.device(seen.entity)
        changed = self._devices.see(seen)
        if self._devices.device(seen.entity) == before and not changed:
            return
        self._owners.clear()
        self._eras.clear()
        self._judged.clear()
        for place, held in self._series.items():
            held.known = held.known and place[0] not in (seen.entity, *changed)
        for entity, seen_s in changed.items():
            self._end_series(entity, seen_s)

    def _end_series(self, entity: str, seen_s: float) -> None:
        """Drop the samples of the GPU that was last seen in this slot at `seen_s`."""
        for place, held in list(self._series.items()):
            if place[0] != entity:
                continue
            later = [each for each in held.series.samples if each[0] > seen_s]
            if later:
                held.series, held.known = SampleSeries(later), False
            else:
                del self._series[place]

    def _owners_of(self, entity: str) -> tuple[str, ...]:
        """Return the entities whose findings depend on the evidence of this one."""
        if entity not in self._owners:
            self._owners[entity] = self._devices.owners(entity)
        return self._owners[entity]

    def _eras_of(self, entity: str) -> tuple[Era, ...]:
        if entity not in self._eras:
            self._eras[entity] = self._devices.eras(entity, self._boots())
        return self._eras[entity]

    def _collected(self, store: Mapping[Event, Variants], event: Event) -> Mapping[str, EventBursts]:
        """Return the evidence about an event of an entity, from each slot in which its GPU has been."""
        entity, check, code = event
        eras = self._eras_of(entity)
        if len(eras) == 1 and (eras[0].from_s, eras[0].until_s) == (-inf, inf):
            return store.get((eras[0].entity, check, code), {})
        found: Variants = {}
        for era in eras:
            for name, each in store.get((era.entity, check, code), {}).items():
                part = each.within(era.from_s, era.until_s)
                if part.spans:
                    found.setdefault(name, EventBursts()).join(part)
        return found

    # -- findings

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
        found = [self._of_series(place) for place in tuple(self._series)]
        for store in (self._events, self._grown):
            events_now = {
                (owner, check, code)
                for entity, check, code in store
                if check not in MARKS
                for owner in self._owners_of(entity)
            }
            found += [self._limited(self._of_event(event, now_s)) for event in events_now]
        known = [self._since_the_first_look(each) for each in found if each is not None]
        known.sort(key=lambda f: (-f.level, -f.action, f.entity, f.check, f.code or 0))
        return tuple(known)

    def _completed(self, found: HealthFinding) -> HealthFinding:
        """Return a finding with its GPU and the origins of its evidence."""
        is_sample = not self._is_event(found.check)
        return replace(
            found,
            origins=tuple(sorted({origin_of(each, found.entity, is_sample) for each in found.sources})),
            device=self._devices.device(found.entity),
        )

    def _since_the_first_look(self, found: HealthFinding) -> HealthFinding:
        """Return a finding with the age, and at most the level, that the agent can vouch for."""
        if found.since_s >= self._first_look_s:
            return found
        past = found.last_s < self._first_look_s and found.level is Level.UNHEALTHY
        return replace(
            found,
            since_s=self._first_look_s,
            level=Level.DEGRADED if past and self._needs_no_action(found.entity) else found.level,
        )

    def _limited(self, finding: HealthFinding | None) -> HealthFinding | None:
        """Limit a finding about a device that backs a pod's volume: the node is not at fault."""
        held = self._series.get((finding.entity, VOLUME)) if finding is not None else None
        is_volume = held is not None and held.series.samples and held.series.samples[-1][1]
        if finding is None or not is_volume or finding.overridden == "operator":
            return finding
        level = min(finding.level, Level.DEGRADED)
        return replace(finding, level=level, action=min(finding.action, Action.RESTART_APP))

    def _needs_no_action(self, entity: str) -> bool:
        """Return True if the driver has said since the first look that the GPU needs no action."""
        held = self._series.get((entity, RECOVERY))
        return held is not None and held.last_s >= self._first_look_s and held.series.samples[-1][1] == 0

    def _of_series(self, place: Place) -> HealthFinding | None:
        held = self._series[place]
        if not held.known:
            held.finding, held.known = self._judged_series(place, held), True
        found = held.finding
        if found is not None and found.level is Level.UNHEALTHY and (*place, 0) in self._grown:
            return None  # the finding about the counter's growth takes its place
        return found

    def _judged_series(self, place: Place, held: _Series) -> HealthFinding | None:
        entity, check = place
        try:
            rule = self.policy.rules[check]
            low, high = held.series.levels(rule)
            if not (low.active or high.active):
                return None
            from_s = (high if high.active else low).since_s - BEFORE_STANDING_S
            sources = [source for source, at_s in held.heard.items() if at_s >= from_s]
            found = samples.sample_finding(entity, rule, held.series, sources, held.text)
            if found is not None and found.lasting and self._is_remedied(found, held.last_s):
                found = replace(found, lasting=False)
            return found and self._completed(found)
        except Exception as error:  # a restart would load the same evidence, and fail in the same way
            self._set_aside(place, error)
            return None

    def _is_remedied(self, found: HealthFinding, last_s: float) -> bool:
        """Return True if the remedy came after the newest sample, so that only a new one shows the state."""
        done = events.remedies(CLEARED_BY.get(found.action, Clears.TIME), self._marks(found.entity))
        return any(times and times[-1] > last_s for times in done)

    def _of_event(self, event: Event, now_s: float) -> HealthFinding | None:
        judged = self._judged.setdefault(event[0], {})
        if event not in judged or now_s >= judged[event][1]:
            try:
                found, until_s = self._judge_event(event, now_s)
                judged[event] = found and self._completed(found), until_s
            except Exception as error:  # as above
                self._set_aside(event[:2], error)
                judged[event] = None, inf
        return judged[event][0]

    def _judge_event(self, event: Event, now_s: float) -> tuple[HealthFinding | None, float]:
        """Return the finding about an event at `now_s`, and when it changes without new evidence."""
        entity, check, code = event
        if not self._is_event(check):
            return self._judge_growth(event, now_s)
        variants = self._collected(self._events, event)
        if not variants or self._is_settled(event):
            return None, inf
        return events.event_finding(
            entity, check, code, variants, self._verdicts(entity), self._marks(entity),
            self._policy_of(entity), self.branch, now_s,
        )  # fmt: skip

    def _judge_growth(self, event: Event, now_s: float) -> tuple[HealthFinding | None, float]:
        entity, check, _ = event
        rule = self.policy.rules[check]
        grown = self._collected(self._grown, event)
        if not grown or not rule.lasts or rule.unhealthy is None:
            return None, inf
        codes = (growth.CONTAINED_XID, *growth.UNCONTAINED_XIDS)
        xids = {
            code: union_bursts(b.spans for b in self._collected(self._events, (entity, "xid", code)).values())
            for code in codes
        }
        contained = self._policy_of(entity).meaning("xid", growth.CONTAINED_XID, "", self.branch)
        return growth.growth_finding(entity, rule, grown, contained, xids, self._marks(entity), now_s)

    def verdicts(self, now_s: float) -> tuple[HealthVerdict, ...]:
        """Return one verdict for each entity with evidence, sorted by name."""
        return verdicts(self.findings(now_s), self.entities)

    def sampled(self, check: str) -> tuple[str, ...]:
        """Return the entities with samples of a check."""
        return tuple(sorted(entity for entity, name in self._series if name == check))

    def undecided(self, since_s: float) -> Iterator[tuple[str, str, str]]:
        """Yield entity, check and reason for each check sampled after `since_s` that is undecided.

        Checks whose evidence could not be evaluated are undecided, too.
        """
        for (entity, check), held in sorted(self._series.items()):
            if held.series.samples and held.last_s >= since_s:
                why = samples.why_undecided(self.policy.rules[check], held.series.samples)
                if why:
                    yield entity, check, why
        for (entity, check), problem in sorted(self.problems.items()):
            yield entity, check, problem

    def _is_settled(self, event: Event) -> bool:
        """Return True for a driver's verdict that concerns only codes that the operator has overridden."""
        entity, check, code = event
        if (check, code) != ("xid", VERDICT_XID):
            return False
        slots = {era.entity for era in self._eras_of(entity)}
        codes = {e[2] for e in self._events if e[0] in slots and e[1] == "xid" and e[2] != VERDICT_XID}
        others = [
            (self._policy_of(entity).meaning("xid", number, name, self.branch), bursts.spans)
            for number in codes
            for name, bursts in self._collected(self._events, (entity, "xid", number)).items()
        ]
        words = self._verdicts(entity).values()
        return all(events.all_overridden(each.spans[-1], others) for each in words)

    def _verdicts(self, entity: str) -> Mapping[str, EventBursts]:
        return self._collected(self._events, (entity, "xid", VERDICT_XID))

    def _marks(self, entity: str) -> EndMarks:
        over = self._verdicts(entity).get("none")
        slots = {era.entity for era in self._eras_of(entity)}
        replaced = self._times(entity, "replaced")
        return EndMarks(
            resets=self._times(entity, "gpu_reset"),
            boots=self._boots(),
            replaced=[t for t in replaced if not any(self._devices.explains(slot, t) for slot in slots)],
            cleared=self._times(entity, "cleared"),
            over=[last for _, last in over.spans] if over else [],
        )

    def _boots(self) -> list[float]:
        variants = self._events.get((NODE, "boot", 0), {})
        return sorted(last for each in variants.values() for _, last in each.spans)

    def _times(self, entity: str, check: str) -> list[float]:
        """Return when a mark was seen, oldest first: the ends of its bursts."""
        variants = self._collected(self._events, (entity, check, 0))
        return sorted(last for each in variants.values() for _, last in each.spans)

    # -- limits

    def _has_room_for_series(self, place: Place, now_s: float) -> bool:
        """Make room for another series, if there is a limit; return False if all of its kind stand."""
        if self._is_still_full("series", place[0], now_s):
            return False
        surplus, pool = quotas.full_pool(self._series, place[0], quotas.series_limit)
        if not surplus:
            return True
        idle = sorted((self._series[each].last_s, each) for each in pool if self._of_series(each) is None)[
            :surplus
        ]
        for last_s, each in idle:
            self.dropped += last_s > now_s - quotas.GONE_S  # it may still be in use
            del self._series[each]
        self._drop_entities({each[0] for _, each in idle})
        return bool(idle) or self._refuse("series", place[0], now_s)

    def _has_room_for_event(self, event: Event, now_s: float) -> bool:
        if self._is_still_full("events", event[0], now_s):
            return False
        surplus, pool = quotas.full_pool(self._events, event[0], quotas.event_limit)
        if not surplus:
            return True
        now_s = max(now_s, self._asked_s) if isfinite(self._asked_s) else now_s
        idle = sorted(
            (_last_s(self._events[each]), each) for each in pool if not self._is_needed(each, now_s)
        )
        for _, each in idle[:surplus]:
            del self._events[each]
            self._rejudge(each[0])
        self._drop_entities({each[0] for _, each in idle[:surplus]})
        return bool(idle) or self._refuse("events", event[0], now_s)

    def _refuse(self, what: str, entity: str, now_s: float) -> bool:
        """Count a refusal, and refuse more of the kind for a moment: each search costs milliseconds."""
        self.dropped += 1
        self._full_until_s[what, kind_of(entity)] = now_s + quotas.SEARCH_EVERY_S
        return False

    def _is_still_full(self, what: str, entity: str, now_s: float) -> bool:
        until_s = self._full_until_s.get((what, kind_of(entity)), -inf)
        is_full = until_s - quotas.SEARCH_EVERY_S <= now_s < until_s
        self.dropped += is_full
        return is_full

    def _is_needed(self, event: Event, now_s: float) -> bool:
        """Return True for a finding that stands, and for what ends findings: without it they would return."""
        if _ends_others(event):
            return True
        return any(self._of_event((owner, *event[1:]), now_s) for owner in self._owners_of(event[0]))

    def _drop_entities(self, entities: set[str]) -> None:
        """Drop those of `entities` that have no evidence left."""
        used = {NODE, *(each[0] for store in (self._series, self._events, self._grown) for each in store)}
        self.entities -= entities - used

    def forget(self, before_s: float) -> None:
        """Forget what ended before `before_s` and was not seen since, such as a disk that was removed.

        What stands is kept, however long ago it was last seen.
        """
        self._series = {
            place: held
            for place, held in self._series.items()
            if held.last_s >= before_s or self._of_series(place) is not None
        }
        ended, oldest_s = self._ended(before_s)
        # What ends a finding is needed for as long as older evidence is kept.
        limit_s = min(before_s, oldest_s)
        for event, variants in self._events.items():
            if _ends_others(event):
                ended += [(self._events, event, name) for name, b in variants.items() if b.last_s < limit_s]
        for store, event, name in ended:
            del store[event][name]
            if not store[event]:
                del store[event]
        self._drop_entities(set(self.entities))
        self._judged.clear()
        self._findings = None

    def _ended(self, before_s: float) -> tuple[list[tuple[dict[Event, Variants], Event, str]], float]:
        """Return the findings' evidence that may be forgotten, and the time of the oldest that is kept."""
        ended, oldest_s = [], inf
        for store in (self._events, self._grown):
            for event, variants in store.items():
                if event[1] in MARKS:
                    continue
                owners = self._owners_of(event[0])
                stands = any(self._judge_event((owner, *event[1:]), before_s)[0] for owner in owners)
                departed = self._devices.has_departed(event[0])
                limit_s = before_s + FORGET_S - DEPARTED_S if departed else before_s
                for name, each in variants.items():
                    if stands or each.last_s >= limit_s:
                        oldest_s = min(oldest_s, each.spans[0][0])
                    elif not _ends_others(event):
                        ended.append((store, event, name))
        return ended, oldest_s

    # -- the memory

    def dump(self) -> dict[str, Any]:
        """Return all evidence as JSON; an evaluator that loads it returns the same findings.

        Earlier agents read only `series` and `events`, so everything that they do not know has its own key.
        """
        return {
            "series": [
                [*place, held.series.dump(), sorted(held.heard), held.text]
                for place, held in self._series.items()
            ],
            "events": _rows(self._events),
            "grown": _rows(self._grown),
            "heard": [
                *([*place, None, "", _times(held.heard)] for place, held in self._series.items()),
                *(
                    [*event, name, _times(each.heard)]
                    for store in (self._events, self._grown)
                    for event, variants in store.items()
                    for name, each in variants.items()
                ),
            ],
            "unseen": [
                [*place, *unseen_s]
                for place, held in self._series.items()
                if any(unseen_s := [each.unseen_s for each in held.series.base])
            ],
            "devices": self._devices.dump(),
            "first_look_s": None if self._first_look_s == -inf else self._first_look_s,
        }

    def load(self, raw: Any) -> None:
        """Restore the dumped evidence. Raises ValueError, TypeError or KeyError if it is malformed.

        Evidence of checks that the policy no longer has is omitted.
        """
        self._findings = None
        heard = {
            (str(entity), str(check), None if code is None else int(code), str(variant)): times
            for entity, check, code, variant, times in raw.get("heard", ())
        }
        for entity, check, series, sources, text in raw["series"]:
            if str(check) in self.policy.rules:
                held = _Series(SampleSeries.load(series), text=str(text))
                held.series.fit(self.policy.rules[str(check)])
                times = {str(s): float(t) for s, t in heard.get((str(entity), str(check), None, ""), ())}
                held.heard = {str(each): times.get(str(each), held.last_s) for each in sources}
                self._series[str(entity), str(check)] = held
                self.entities.add(str(entity))
        for entity, check, *unseen_s in raw.get("unseen", ()):  # an earlier version did not measure it
            if (known := self._series.get((entity, check))) is not None:
                low, high = (
                    replace(each, unseen_s=float(s))
                    for each, s in zip(known.series.base, unseen_s, strict=True)
                )
                known.series.base = (low, high)
        for store, rows in ((self._events, raw["events"]), (self._grown, raw.get("grown", ()))):
            for entity, check, code, variant, bursts in rows:
                event = (str(entity), str(check), int(code))
                if self._is_event(event[1]) is (store is self._events) and self._has_check(event[1]):
                    made = EventBursts.load(bursts, heard.get((*event, str(variant)), ()))
                    store.setdefault(event, {})[str(variant)] = made
                    self.entities.add(event[0])
        if "grown" not in raw:
            self._note_standing_growth()
        self._judged.clear()
        self._owners.clear()
        self._eras.clear()
        self._devices.load(raw.get("devices", ()))
        first_look_s = raw.get("first_look_s")
        self._first_look_s = -inf if first_look_s is None else float(first_look_s)

    def _note_standing_growth(self) -> None:
        """Note the growth of counters that stands in the memory of an agent that did not note it."""
        for (entity, check), held in self._series.items():
            rule = self.policy.rules[check]
            unhealthy = held.series.levels(rule)[1]
            if rule.lasts and rule.unhealthy is not None and unhealthy.active:
                at_s = unhealthy.since_s
                made = EventBursts([(at_s, at_s)], heard=dict.fromkeys(held.heard, at_s))
                self._grown[entity, check, 0] = {"": made}

    def _has_check(self, check: str) -> bool:
        return check in ("xid", "sxid") or check in self.policy.rules


def _ends_others(event: Event) -> bool:
    """Return True for what may end findings about other events; without it they would return."""
    return event[1] in MARKS or event[1:] == ("xid", VERDICT_XID)


def _last_s(variants: Variants) -> float:
    return max(each.last_s for each in variants.values())


def _times(heard: Mapping[str, float]) -> list[list[Any]]:
    return [[source, at_s] for source, at_s in sorted(heard.items())]


def _rows(store: Mapping[Event, Variants]) -> list[list[Any]]:
    return [
        [*event, name, bursts.dump()]
        for event, variants in store.items()
        for name, bursts in variants.items()
    ]


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
