"""Evaluates the evidence: derives the finding of each series of samples and each event at one time. Pure.

The results are kept until evidence or time changes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf

from nodeagent.evaluation import events, growth, quotas, samples
from nodeagent.evaluation.bursts import DETAILED, GAP_S, Burst, EventBursts, merged_bursts
from nodeagent.evaluation.company import CONTAINED_XID
from nodeagent.evaluation.devices import UNKNOWN_MODEL, Model
from nodeagent.evaluation.evidence import (
    MARKS,
    NO_ACTION,
    Event,
    Evidence,
    HeldSeries,
    Place,
    ends_others,
)
from nodeagent.model import VERDICT_XID, Action, HealthFinding, Level, kind_of, origin_of
from nodeagent.policy.nvlink import NEW_LAYOUT
from nodeagent.policy.rules import CLEARED_BY, Clears, HealthPolicy, Meaning

BEFORE_STANDING_S = 600.0  # the samples that led to a finding are at most this much older than the finding
RECOVERY = "recovery_action"
DISK = "disk"  # the kind of entity of block devices
VOLUME = "user_volume"  # the check whose value 0 means that a block device is the node's own
MAX_PROBLEMS = 32


class Judge:
    """Applies one policy, depending on the model of each GPU and the driver's branch."""

    def __init__(self, evidence: Evidence, policy: HealthPolicy) -> None:
        self.policy = policy
        self.problems: dict[Place, str] = {}  # evidence that could not be evaluated since the start
        self._evidence = evidence
        # by entity: the finding, and when it clears
        self._judged: dict[str, dict[Event, tuple[HealthFinding | None, float]]] = {}
        # The next two are by entity, and are kept as long as its events' judgements.
        self._marks: dict[str, events.EndMarks] = {}
        self._judged_by_driver: dict[str, dict[int, list[Burst]]] = {}
        self._policies: dict[Model, HealthPolicy] = {}

    def use(self, policy: HealthPolicy) -> None:
        """Apply another policy from now on."""
        self.policy = policy
        self._policies.clear()
        self.revise()

    def policy_of(self, entity: str) -> HealthPolicy:
        """Return the policy for an entity; some codes have a different meaning for some models."""
        return self._policy_for(self._evidence.model_of(entity))

    def _policy_for(self, model: Model) -> HealthPolicy:
        if model not in self._policies:
            self._policies[model] = self.policy.for_gpu(model[0], mig=model[1])
        return self._policies[model]

    def policies_during(self, entity: str, burst: Burst) -> list[HealthPolicy]:
        """Return the policies for a slot's GPU, one for each MIG mode that it had during a burst."""
        return [self._policy_for(each) for each in self._evidence.models_during(entity, burst)]

    def kind_of_variant(self, event: Event, name: str) -> quotas.VariantKind:
        """Return the kind of a variant of an event."""
        meanings = self._meanings(event, name, [self.policy_of(event[0])])
        return quotas.VariantKind(max(map(events.gravity, meanings)), meanings)

    def recurring(self, event: Event, name: str, bursts: EventBursts) -> list[Burst]:
        """Return the bursts at which a variant had recurred, or that followed while that was in force."""
        own = bursts.spans_apart(self._marks_of(event[0]).boots)
        return self._recurring(event, name, bursts, own, any_rule=False)

    def recurring_by_any_rule(self, event: Event, name: str, now_s: float = inf) -> list[Burst]:
        """Return the same for all rules, including those that also count the bursts of other variants.

        Args:
            now_s: The time of the evaluation; infinity if no more events can arrive late.
        """
        variants, boots = self._evidence.events[event], self._marks_of(event[0]).boots
        spans = merged_bursts((each.spans_apart(boots) for each in variants.values()), GAP_S, boots)
        return self._recurring(event, name, variants[name], spans, any_rule=True, now_s=now_s)

    def _recurring(
        self,
        event: Event,
        name: str,
        bursts: EventBursts,
        all_spans: list[Burst],
        *,
        any_rule: bool,
        now_s: float = inf,
    ) -> list[Burst]:
        marks = self._marks_of(event[0])
        meanings = dict.fromkeys(self._meanings(event, name, [self.policy_of(event[0])]))
        own = bursts.spans_apart(marks.boots)
        found = [
            burst
            for each in meanings
            if each.recurs is not None and (any_rule or each.recurs.same_variant)
            for burst in events.recurring(each, own, all_spans, marks, now_s)
        ]
        return [span for span in bursts.spans if any(span[0] <= first <= span[1] for first, _ in found)]

    def _meanings(self, event: Event, name: str, policies: Iterable[HealthPolicy]) -> tuple[Meaning, ...]:
        """Return the meanings that an event's variant may have: more than one while the branch is unknown."""
        _, check, code = event
        branch = self._evidence.branch
        branches = (None, NEW_LAYOUT - 1, NEW_LAYOUT) if branch is None else (branch,)
        return tuple(policy.meaning(check, code, name, each) for policy in policies for each in branches)

    def level_of_new(self, event: Event, name: str) -> Level:
        """Return the level of an event's first burst; the worst possible level while the model is unknown."""
        if ends_others(event):
            return Level.UNHEALTHY
        try:
            meanings = self._meanings(event, name, self._possible_policies(event[0]))
        except Exception as error:  # as in `of_event`
            self.set_aside(event[:2], error)
            return Level.UNHEALTHY
        level = max(each.level for each in meanings)
        limited = self._may_be_users(event[0]) and not any(each.overridden for each in meanings)
        return min(level, Level.DEGRADED) if limited else level

    def level_of(self, event: Event, now_s: float) -> Level | None:
        """Return the worst level of the findings that depend on an event; None if there are none."""
        if ends_others(event):
            return Level.UNHEALTHY  # without it, the findings that it has ended would return
        owned = [(owner, *event[1:]) for owner in self._evidence.owners_of(event[0])]
        found = [self._limited(self.of_event(each, now_s)) for each in owned]
        levels = [each.level for each in found if each is not None]
        differs = event[1] == "xid" and any(each.code == event[2] for each in self.policy.models)
        if differs and not levels and any(self.may_stand(each, now_s) for each in owned):
            return Level.UNHEALTHY
        return max(levels, default=None)

    def recurrence(self, event: Event, now_s: float) -> Level | None:
        """Return the level that an event's bursts may still help to reach; None if they no longer count."""
        policy, branch = self.policy_of(event[0]), self._evidence.branch
        try:
            said = [
                (policy.meaning(*event[1:], name, branch).recurs, bursts.last_s)
                for name, bursts in self._evidence.events[event].items()
            ]
        except Exception as error:  # as in `of_event`
            self.set_aside(event[:2], error)
            return Level.UNHEALTHY
        off = self._marks_of(event[0]).off
        counted = [
            each.level
            for each, last_s in said
            if each and last_s >= off.window_start_s(now_s - each.within_s, now_s)
        ]
        return max(counted, default=None)

    def revise(self) -> None:
        """Evaluate all events again."""
        self._judged.clear()
        self._marks.clear()
        self._judged_by_driver.clear()

    def revise_events_of(self, entity: str) -> None:
        """Evaluate again the events that depend on an entity's evidence."""
        for owner in self._evidence.owners_of(entity):
            self._judged.pop(owner, None)
            self._marks.pop(owner, None)
            self._judged_by_driver.pop(owner, None)

    def revise_event(self, event: Event, at_s: float) -> None:
        """Evaluate again everything that depends on a new occurrence of an event at `at_s`.

        Besides the event itself, this is the growth of counters, which is compared with Xids, and the
        driver's verdict, which is ignored for Xids that the operator has overridden. If the event is a
        verdict, or ends findings, all events of its entity are evaluated again. The same holds if a later
        verdict is known, because it may be about this event instead of another one.
        """
        entity, check, code = event
        verdicts = self._evidence.events.get((entity, "xid", VERDICT_XID), {})
        if ends_others(event) or (check == "xid" and any(e.last_s >= at_s for e in verdicts.values())):
            self.revise_events_of(entity)
            return
        for owner in self._evidence.owners_of(entity):
            self._judged_by_driver.pop(owner, None)
            judged = self._judged.get(owner, {})
            judged.pop((owner, check, code), None)
            if check == "xid":
                judged.pop((owner, "xid", VERDICT_XID), None)
                for each in [each for each in judged if not self.policy.is_event(each[1])]:
                    del judged[each]

    def _marks_of(self, entity: str) -> events.EndMarks:
        if entity not in self._marks:
            self._marks[entity] = self._evidence.marks(entity)
        return self._marks[entity]

    @property
    def until_s(self) -> float:
        """The earliest time when an event's result changes without new evidence."""
        return min((t for each in self._judged.values() for _, t in each.values()), default=inf)

    def current(self, now_s: float) -> Iterator[HealthFinding]:
        """Yield all findings at `now_s`, in no particular order."""
        for place in tuple(self._evidence.series):
            if (found := self.of_series(place)) is not None:
                yield self._since_the_first_look(found)
        for store in self._evidence.stores:
            events_now = {
                (owner, check, code)
                for entity, check, code in store
                if check not in MARKS
                for owner in self._evidence.owners_of(entity)
            }
            for event in events_now:
                if (limited := self._limited(self.of_event(event, now_s))) is not None:
                    yield self._since_the_first_look(limited)

    def _completed(self, found: HealthFinding) -> HealthFinding:
        """Return a finding with its GPU, the origins of its evidence, and whether it is about the GPUs."""
        is_sample = not self.policy.is_event(found.check)
        rule = self.policy.rules.get(found.check)
        return replace(
            found,
            origins=tuple(sorted({origin_of(each, found.entity, is_sample) for each in found.sources})),
            device=self._evidence.devices.device(found.entity),
            of_gpus=rule is not None and rule.of_gpus,
        )

    def _since_the_first_look(self, found: HealthFinding) -> HealthFinding:
        """Return a finding with its age and level limited to what the agent has observed itself.

        A fault in the log of this boot that only a boot ends cannot have been remedied. After the loss of the
        state, a fault that was present may be among those in the log, so none of them is taken as remedied.
        """
        evidence = self._evidence
        if found.since_s >= evidence.first_look_s:
            return found
        past = found.last_s < evidence.first_look_s and found.level is Level.UNHEALTHY
        may_be_over = past and not (found.until_boot or evidence.knew_more)
        return replace(
            found,
            since_s=evidence.first_look_s,
            level=Level.DEGRADED if may_be_over and self._needs_no_action(found.entity) else found.level,
        )

    def _limited(self, finding: HealthFinding | None) -> HealthFinding | None:
        """Limit a finding about a block device that is not the node's own: it may be a user's volume."""
        if finding is None or finding.overridden == "operator":
            return finding
        if not self._may_be_users(finding.entity):
            return finding
        level = min(finding.level, Level.DEGRADED)
        return replace(finding, level=level, action=min(finding.action, Action.RESTART_APP))

    def _may_be_users(self, entity: str) -> bool:
        return kind_of(entity) == DISK and not self._is_nodes_own(entity)

    def _is_nodes_own(self, device: str) -> bool:
        """Return True if a reading since the boot shows it; a boot may give the name to another device."""
        held = self._evidence.series.get((device, VOLUME))
        if held is None or not held.series.samples or held.series.samples[-1][1]:
            return False
        return held.last_s >= max(self._evidence.boots(), default=-inf)

    def decisive_series(self) -> set[Place]:
        """Return the series on which the level of an event's finding depends.

        These are `user_volume` for the node's own devices with kernel lines, and `recovery_action` for GPUs
        with faults from before the first observation.
        """
        found: set[Place] = set()
        for (entity, check, _), variants in self._evidence.events.items():
            if check in MARKS:
                continue
            if kind_of(entity) == DISK and self._is_nodes_own(entity):
                found.add((entity, VOLUME))
            elif min(each.first_s for each in variants.values()) < self._evidence.first_look_s:
                owners = self._evidence.owners_of(entity)
                found |= {(owner, RECOVERY) for owner in owners if self._needs_no_action(owner)}
        return found

    def _needs_no_action(self, entity: str) -> bool:
        """Return True if the driver has reported since the first observation that the GPU needs no action."""
        held = self._evidence.series.get((entity, RECOVERY))
        return (
            held is not None
            and held.last_s >= self._evidence.first_look_s
            and held.series.samples[-1][1] == 0
        )

    def of_series(self, place: Place) -> HealthFinding | None:
        """Return the finding of one series of samples."""
        held = self._evidence.series[place]
        if not held.known:
            held.finding, held.known = self._judged_series(place, held), True
        found = held.finding
        if found is not None and found.level is Level.UNHEALTHY:
            grown = self._evidence.grown.get((*place, 0), {})
            if growth.counted(self.policy.rules[place[1]], grown):
                return None  # the finding about the counter's growth takes its place
        return found

    def _judged_series(self, place: Place, held: HeldSeries) -> HealthFinding | None:
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
            self.set_aside(place, error)
            return None

    def _is_remedied(self, found: HealthFinding, last_s: float) -> bool:
        """Return True if the remedy came after the newest sample, so only a new sample shows the state."""
        done = events.remedies(CLEARED_BY.get(found.action, Clears.TIME), self._evidence.marks(found.entity))
        return any(times and times[-1] > last_s for times in done)

    def of_event(self, event: Event, now_s: float) -> HealthFinding | None:
        """Return the finding about one event, or about a counter's growth."""
        judged = self._judged.setdefault(event[0], {})
        if event not in judged or now_s >= judged[event][1]:
            try:
                found, until_s = self.judge_event(event, now_s)
                judged[event] = found and self._completed(found), until_s
            except Exception as error:  # as above
                self.set_aside(event[:2], error)
                judged[event] = None, inf
        return judged[event][0]

    def may_stand(self, event: Event, now_s: float) -> bool:
        """Return True if an event has a finding or, while the GPU's model is unknown, may have one."""
        try:
            policies = self._possible_policies(event[0])
            if len(policies) == 1:
                return self.judge_event(event, now_s)[0] is not None
            # The gravest meaning may end earlier than that of one model which has recurred.
            choices = [policies, *([each] for each in policies)]
            return any(self._is_active(event, now_s, each) for each in choices)
        except Exception as error:  # as in `of_event`
            self.set_aside(event[:2], error)
            return True

    def _is_active(self, event: Event, now_s: float, policies: list[HealthPolicy]) -> bool:
        return self.judge_event(event, now_s, lambda _: policies)[0] is not None

    def _possible_policies(self, entity: str) -> list[HealthPolicy]:
        """Return the policy for an entity; for a GPU of unknown model, the policies for all models."""
        if kind_of(entity) != "gpu" or self._evidence.model_of(entity) != UNKNOWN_MODEL:
            return [self.policy_of(entity)]
        models = {UNKNOWN_MODEL, *((each.model, False) for each in self.policy.models)}
        return [self._policy_for(each) for each in models]

    def judge_event(
        self, event: Event, now_s: float, policies_at: events.PoliciesAt | None = None
    ) -> tuple[HealthFinding | None, float]:
        """Return the finding about an event at `now_s`, and when it changes without new evidence.

        Args:
            policies_at: Returns the policies that apply to a burst; None: the policies for the GPU's model.
        """
        entity, check, code = event
        if not self.policy.is_event(check):
            return self._judge_growth(event, now_s)
        variants = self._unsettled(event, self._evidence.bursts_of(event))
        if not variants:
            return None, inf
        verdicts, marks = self._evidence.drivers_verdicts(entity), self._marks_of(entity)
        policy = self.policy_of(entity)
        return events.event_finding(
            entity, check, code, variants, verdicts, marks, policy, self._evidence.branch, now_s,
            policies_at or (lambda burst: self.policies_during(entity, burst)),
            self._other_codes(event) if verdicts else (),
        )  # fmt: skip

    def _other_codes(self, event: Event) -> list[Burst]:
        """Return the moments of the other Xids with which the driver sends verdicts, in order, disjoint."""
        entity, check, code = event
        if check != "xid":
            return []
        if entity not in self._judged_by_driver:
            self._judged_by_driver[entity] = self._codes_with_verdicts(entity)
        return merged_bursts(
            (each for other, each in self._judged_by_driver[entity].items() if other != code), 0.0
        )

    def _codes_with_verdicts(self, entity: str) -> dict[int, list[Burst]]:
        policy, branch = self.policy_of(entity), self._evidence.branch
        slots = {era.entity for era in self._evidence.eras_of(entity)}
        codes = {each[2] for each in self._evidence.events if each[0] in slots and each[1] == "xid"}
        found = {}
        for code in codes - {VERDICT_XID}:
            bursts = self._evidence.bursts_of((entity, "xid", code))
            if any(
                events.sends_verdict(policy.meaning("xid", code, each, branch), branch) for each in bursts
            ):
                found[code] = merged_bursts((each.moments for each in bursts.values()), 0.0)
        return found

    def _judge_growth(self, event: Event, now_s: float) -> tuple[HealthFinding | None, float]:
        entity, check, _ = event
        rule = self.policy.rules[check]
        grown = growth.counted(rule, self._evidence.growth_of(event))
        if not grown:
            return None, inf
        contained = self.policy_of(entity).meaning("xid", CONTAINED_XID, "", self._evidence.branch)
        return growth.growth_finding(entity, rule, grown, contained, self._marks_of(entity), now_s)

    def _unsettled(self, event: Event, variants: Mapping[str, EventBursts]) -> Mapping[str, EventBursts]:
        """Return the events without the driver's verdicts on only codes that the operator has overridden."""
        entity, check, code = event
        if (check, code) != ("xid", VERDICT_XID):
            return variants
        policy = self.policy_of(entity)

        def settles(codes: Collection[int]) -> bool:
            with_it = [each for each in codes if each != DETAILED]
            return bool(with_it) and all(policy.meaning("xid", each).overridden for each in with_it)

        if not any(settles(codes) for each in variants.values() for codes in each.company or ()):
            return variants
        found = {}
        for name, each in variants.items():
            rest = {codes: times for codes, times in (each.company or {}).items() if not settles(codes)}
            if name == NO_ACTION or each.company is None or len(rest) == len(each.company):
                found[name] = each
            elif rest:
                found[name] = each.only_company(rest)
        return found

    def set_aside(self, place: Place, error: Exception) -> None:
        """Continue without evidence that cannot be evaluated: drop samples, keep events without a finding."""
        entity, check = place
        dropped = self._evidence.series.pop(place, None) is not None
        lost = "its samples were dropped" if dropped else "its events are not evaluated"
        if len(self.problems) < MAX_PROBLEMS:
            self.problems[place] = (
                f"{entity}: evaluating {check} failed, so {lost}: {type(error).__name__}: {error}"
            )
