"""Stores the evidence about a node's entities, and finds the part about the GPU in a slot. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from nodeagent.evaluation import company
from nodeagent.evaluation.bursts import (
    DETAILED,
    MAX_BURSTS,
    SENSORS_APART_S,
    Burst,
    EventBursts,
    TimeOff,
    gaps,
    merged_bursts,
    thinned_marks,
)
from nodeagent.evaluation.company import CONTAINMENT_XIDS, TOGETHER_S, RecentTimes
from nodeagent.evaluation.devices import DeviceSlots, Era, GpuModels, Model
from nodeagent.evaluation.events import AFTER_S, BEFORE_S, EndMarks
from nodeagent.evaluation.samples import SampleSeries
from nodeagent.model import DRIVER, NODE, VERDICT_XID, HealthFinding, Observation, kind_of
from nodeagent.policy.rules import HealthPolicy, Rule

MARKS = ("gpu_reset", "boot", "replaced", "cleared")
NEVER_GONE = (NODE, DRIVER, "gpu", "sensor")  # kinds whose absence is itself a fault
MAX_GONE = 512
NO_ACTION = "none"  # the driver's verdict that ends findings
LAST_SEEN = "last_s"  # in the facts of a boot: the last agent time before it

Place = tuple[str, str]  # entity, check
Event = tuple[str, str, int]  # entity, check, code
Variants = dict[str, EventBursts]


@dataclass(slots=True)
class HeldSeries:
    """The samples of one check of one entity, and the resulting finding."""

    series: SampleSeries
    heard: dict[str, float] = field(default_factory=dict)  # by sensor: its newest sample
    text: str = ""
    finding: HealthFinding | None = None  # the current finding, valid while `known`
    known: bool = False

    @property
    def last_s(self) -> float:
        return self.series.samples[-1][0] if self.series.samples else -inf


def time_off(boot: Observation) -> Burst | None:
    """Return the period without a running agent before a boot, if the observation of the boot states it."""
    last_s = dict(boot.facts).get(LAST_SEEN)
    return None if last_s is None or float(last_s) >= boot.at_s else (float(last_s), boot.at_s)


def ends_others(event: Event) -> bool:
    """Return True for an event that may end findings about other events; without it, they would return."""
    return event[1] in MARKS or event[1:] == ("xid", VERDICT_XID)


def is_end_mark(event: Event, variant: str) -> bool:
    """Return True for an event whose times end findings, and separate their recurrences: see `EndMarks`."""
    return event[1] in MARKS or (*event[1:], variant) == ("xid", VERDICT_XID, NO_ACTION)


def _accompanied(bursts: EventBursts, at_s: float, codes: set[int]) -> None:
    bursts.company = {} if bursts.company is None else bursts.company
    company.note(bursts.company, at_s, codes)


def _times(bursts: EventBursts) -> list[float]:
    """Return the known times of an event, oldest first. Marks in one burst may end two faults."""
    return sorted({at_s for span in bursts.moments for at_s in span})


class Evidence:
    """All evidence, by entity and check, and the GPUs in the slots. If a GPU moves, its evidence follows."""

    def __init__(self) -> None:
        self.series: dict[Place, HeldSeries] = {}
        self.events: dict[Event, Variants] = {}
        self.grown: dict[Event, Variants] = {}  # the growth of counters with `lasts`; the code is 0
        self.devices = DeviceSlots()
        self.models = GpuModels()
        self.branch: int | None = None  # the driver's, such as 575, as last known
        self.entities: set[str] = {NODE}  # all entities with evidence
        self.first_look_s = -inf
        self.knew_more = (
            False  # an earlier agent knew of what is older than the first look; its state is lost
        )
        self.gone_s: dict[str, float] = {}  # by entity, oldest first: when its sensor last found it gone
        self._recent: dict[str, RecentTimes] = {}  # by entity
        self._owners: dict[str, tuple[str, ...]] = {}
        self._eras: dict[str, tuple[Era, ...]] = {}
        self._boots: list[float] | None = None  # None: not computed since the last change

    @property
    def stores(self) -> tuple[dict[Event, Variants], dict[Event, Variants]]:
        """Everything that is kept as bursts."""
        return self.events, self.grown

    def fit(self, policy: HealthPolicy) -> None:
        """Adopt another policy: drop the evidence of checks that it does not have."""
        self.series = {place: held for place, held in self.series.items() if place[1] in policy.rules}
        for (_, check), held in self.series.items():
            held.series.fit(policy.rules[check])
            held.known = False
        for store in self.stores:
            for event in [each for each in store if not policy.has_check(each[1])]:
                del store[event]
        self._eras.clear()

    def renew(self) -> None:
        """Recompute where the evidence about each GPU is, after a GPU was moved or the node booted."""
        self._owners.clear()
        self._eras.clear()
        self._boots = None

    # -- samples

    def series_for(self, entity: str, rule: Rule) -> HeldSeries:
        """Return the series of an entity's check; if there is none, a new series, which is not stored yet."""
        held = self.series.get((entity, rule.check))
        if held is None:
            held = HeldSeries(SampleSeries([]))
            for at_s in self.times(entity, "cleared"):
                held.series.clear(rule, at_s)
        return held

    def note_boots(self, held: HeldSeries, rule: Rule) -> None:
        """If a boot restarts the counter, start it with its first reading after the newest boot."""
        if not rule.restarts_at_boot:
            return
        boots = self.boots()
        for at_s in boots[bisect_right(boots, held.series.base_s) :]:
            if at_s < held.last_s:
                held.series.restart(rule, at_s)
                held.known = False

    def note_mark(self, seen: Observation, policy: HealthPolicy) -> None:
        """Apply a mark to the samples of its entity; apply a boot to the samples of all entities."""
        for (entity, check), held in self.series.items():
            held.known = False  # its GPU may have been in the slot of the mark
            if seen.check == "boot":
                self.note_boots(held, policy.rules[check])
            elif seen.check == "cleared" and entity == seen.entity:
                held.series.clear(policy.rules[check], seen.at_s)

    def is_of_gone(self, entity: str, at_s: float) -> bool:
        """Return True for a late sample: the entity's sensor has found the entity gone since."""
        return at_s < self.gone_s.get(entity, -inf)

    def end_gone(self, entity: str, at_s: float) -> bool:
        """Drop the samples of an entity that no longer exists. Its successor starts without samples."""
        if kind_of(entity) in NEVER_GONE:
            return False
        self.gone_s[entity] = max(at_s, self.gone_s.pop(entity, at_s))
        while len(self.gone_s) > MAX_GONE:
            del self.gone_s[next(iter(self.gone_s))]
        ended = [place for place, held in self.series.items() if place[0] == entity and held.last_s < at_s]
        for place in ended:
            del self.series[place]
        self.drop_unused({entity})
        return bool(ended)

    # -- the GPUs in the slots

    def see_gpu(self, seen: Observation) -> bool:
        """Note what the inventory reports: which GPU is in a slot, its name and its MIG mode.

        Returns:
            True if that changes what the evidence is about, or what codes may mean.
        """
        moved = self._see_device(seen)
        return self.models.see(self.devices.names(seen.entity)[0], seen) or moved

    def _see_device(self, seen: Observation) -> bool:
        before = self.devices.device(seen.entity)
        changed = self.devices.see(seen, self.boots())
        if self.devices.device(seen.entity) == before and not changed:
            return False
        self.renew()
        for held in self.series.values():
            held.known = False  # what counts as a remedy for another GPU may have changed, too
        for entity, seen_s in changed.items():
            self._end_series(entity, seen_s)
        return True

    def model_of(self, entity: str) -> Model:
        """Return the model of the GPU in a slot as it was last seen."""
        return self.models.newest(*self.devices.names(entity))

    def models_during(self, entity: str, burst: Burst) -> tuple[Model, ...]:
        """Return the models that a slot's present GPU had during a burst; its MIG mode may have changed."""
        return self.models.during(*burst, *self.devices.names(entity))

    def _end_series(self, entity: str, seen_s: float) -> None:
        """Drop the samples of the GPU that was last seen in this slot at `seen_s`."""
        for place, held in list(self.series.items()):
            if place[0] != entity:
                continue
            later = [each for each in held.series.samples if each[0] > seen_s]
            if later:
                held.series, held.known = SampleSeries(later), False
            else:
                del self.series[place]

    def owners_of(self, entity: str) -> tuple[str, ...]:
        """Return the entities whose findings depend on the evidence of this entity."""
        if entity not in self._owners:
            self._owners[entity] = self.devices.owners(entity)
        return self._owners[entity]

    def eras_of(self, entity: str) -> tuple[Era, ...]:
        """Return where and when the evidence about the GPU in this slot was collected."""
        if entity not in self._eras:
            self._eras[entity] = self.devices.eras(entity, self.boots())
        return self._eras[entity]

    def bursts_of(self, event: Event) -> Mapping[str, EventBursts]:
        """Return the bursts of an event by variant, from each slot that the entity's GPU has been in."""
        return self._collected(self.events, event)

    def growth_of(self, event: Event) -> Mapping[str, EventBursts]:
        """Return the times when a counter has grown, from each slot that the entity's GPU has been in."""
        return self._collected(self.grown, event)

    def _collected(self, store: Mapping[Event, Variants], event: Event) -> Mapping[str, EventBursts]:
        entity, check, code = event
        eras = self.eras_of(entity)
        if len(eras) == 1 and (eras[0].from_s, eras[0].until_s) == (-inf, inf):
            return store.get((eras[0].entity, check, code), {})
        found: Variants = {}
        for era in eras:
            for name, each in store.get((era.entity, check, code), {}).items():
                part = each.within(era.from_s, era.until_s)
                if part.all_spans:
                    exact = is_end_mark(event, name)
                    found.setdefault(name, EventBursts(exact=exact)).join(part)
        return found

    # -- what was reported with an event

    def keep_company(self, event: Event, variant: str, at_s: float) -> None:
        """Note what was reported with a new event, and that it was reported with others (`company`)."""
        entity, check, code = event
        if check not in ("xid", "sxid"):
            return
        recent = self._recent.setdefault(entity, RecentTimes())
        variants = self.events[event]
        is_verdict = (check, code) == ("xid", VERDICT_XID)
        if not variant or is_verdict:
            codes = recent.xids(at_s - AFTER_S, at_s + BEFORE_S) - {code} if is_verdict else set[int]()
            if not variant and recent.has_details(
                check, code, at_s - SENSORS_APART_S, at_s + SENSORS_APART_S
            ):
                codes.add(DETAILED)
            _accompanied(variants[variant], at_s, codes)
        if variant and (plain := variants.get("")) is not None and plain.company is not None:
            company.accompany(plain.company, DETAILED, at_s - SENSORS_APART_S, at_s + SENSORS_APART_S)
        if check == "xid" and not is_verdict:
            for verdict in self.events.get((entity, "xid", VERDICT_XID), {}).values():
                if verdict.company is not None:
                    company.accompany(verdict.company, code, at_s - BEFORE_S, at_s + AFTER_S)
            if code in CONTAINMENT_XIDS:
                self._accompany_growth(entity, code, at_s)
        recent.note(check, code, at_s, detailed=bool(variant))

    def _accompany_growth(self, entity: str, code: int, at_s: float) -> None:
        for event, amounts in self.grown.items() if self.grown else ():
            for grown in amounts.values() if event[0] == entity else ():
                if grown.company is not None:
                    company.accompany(grown.company, code, at_s - TOGETHER_S, at_s + TOGETHER_S)

    def grown_with(self, entity: str, at_s: float) -> tuple[int, ...]:
        """Return the Xids, of those that matter, that were reported with a counter's growth at `at_s`."""
        if (recent := self._recent.get(entity)) is None:
            return ()
        found = recent.xids(at_s - TOGETHER_S, at_s + TOGETHER_S)
        return tuple(each for each in CONTAINMENT_XIDS if each in found)

    def recall_recent(self) -> None:
        """Restore the known times of the loaded events, so that what arrives now is compared with them."""
        self._recent.clear()
        for (entity, check, code), variants in self.events.items():
            if check in ("xid", "sxid"):
                recent = self._recent.setdefault(entity, RecentTimes())
                for name, bursts in variants.items():
                    for at_s in _times(bursts)[-company.MAX_RECENT :]:
                        recent.note(check, code, at_s, detailed=bool(name))

    def drivers_verdicts(self, entity: str) -> Mapping[str, EventBursts]:
        """Return the driver's verdicts on an entity (Xid 154), by variant."""
        return self.bursts_of((entity, "xid", VERDICT_XID))

    def marks(self, entity: str) -> EndMarks:
        """Return the times of everything that may end findings about an entity."""
        over = self.drivers_verdicts(entity).get(NO_ACTION)
        return EndMarks(
            resets=self.times(entity, "gpu_reset"),
            boots=self.boots(),
            replaced=self._exchanges(entity),
            cleared=self.times(entity, "cleared"),
            over=_times(over) if over else [],
            off=TimeOff(self.off()),
        )

    def _exchanges(self, entity: str) -> list[float]:
        """Return the times when the GPU was replaced, oldest first, unless the eras account for them."""
        found: list[float] = []
        for era in self.eras_of(entity):
            for each in self.events.get((era.entity, "replaced", 0), {}).values():
                marks = _times(each.within(era.from_s, era.until_s))
                found += [at_s for at_s in marks if not self.devices.explains(era.entity, at_s)]
        return sorted(found)

    def boots(self) -> list[float]:
        """Return the times when the node booted, oldest first. The list must not be changed."""
        if self._boots is None:
            self._boots = sorted(last for _, last in self._boot_spans())
        return self._boots

    def off(self) -> list[Burst]:
        """Return the periods when the node was off, oldest first: from the agent's last time to the boot."""
        return sorted(span for span in self._boot_spans() if span[0] < span[1])

    def _boot_spans(self) -> list[Burst]:
        return [span for each in self._boots_by_variant() for span in each.moments]

    def _boots_by_variant(self) -> Iterable[EventBursts]:
        return self.events.get((NODE, "boot", 0), {}).values()

    def thin_marks(self, event: Event, variant: str) -> None:
        """Keep only marks that separate or end faults, however many came since (`thinned_marks`)."""
        each = self.events[event][variant]
        if len(each.moments) > MAX_BURSTS:
            signs_s = self._signs_of_all_s() if event[1] == "boot" else self._signs_s(event[0])
            each.moments = thinned_marks(each.moments, signs_s, self._pairs)

    def _signs_of_all_s(self) -> list[float]:
        """Return the times of the known events except boots, and of the sightings of GPUs, in order."""
        return self._times_of(bursts for event, _, bursts in self._stored() if event[1] != "boot")

    def _signs_s(self, entity: str) -> list[float]:
        """Return the times of an entity's events except marks, and of the sightings of GPUs, in order."""
        return self._times_of(
            bursts
            for event, name, bursts in self._stored()
            if event[0] == entity and not is_end_mark(event, name)
        )

    def _stored(self) -> Iterator[tuple[Event, str, EventBursts]]:
        for store in self.stores:
            for event, variants in store.items():
                for name, bursts in variants.items():
                    yield event, name, bursts

    def _times_of(self, kept: Iterable[EventBursts]) -> list[float]:
        times = {at_s for bursts in kept for span in bursts.moments for at_s in span}
        return sorted(times.union(self.devices.sightings_s()))

    def _pairs(self, marks: Sequence[Burst]) -> Iterator[Burst]:
        """Yield the intervals in which a mark makes a difference to the evidence (`thinned_marks`).

        These are the intervals between successive events of the same kind about one GPU, which a mark makes
        two faults, and the one that tells when a GPU was exchanged.
        """
        times = [at_s for _, at_s in marks]
        for seen_s in self.devices.sightings_s():
            if before := bisect_right(times, seen_s):
                yield times[before - 2] if before > 1 else -inf, seen_s
        for store in self.stores:
            about: dict[Event, list[Sequence[Burst]]] = {}
            for (entity, check, code), variants in store.items():
                for owner in self.owners_of(entity) if check not in MARKS else ():
                    about.setdefault((owner, check, code), []).extend(
                        each.moments for each in variants.values()
                    )
            for series in about.values():
                for each in series:
                    yield from gaps(each)
                if len(series) > 1:
                    yield from gaps(merged_bursts(series, 0.0))

    def times(self, entity: str, check: str) -> list[float]:
        """Return the times when a mark was seen, oldest first."""
        variants = self.bursts_of((entity, check, 0))
        return sorted(at_s for each in variants.values() for at_s in _times(each))

    def drop_unused(self, entities: set[str]) -> None:
        """Drop the entities in `entities` that have no evidence left."""
        used = {NODE, *(each[0] for store in (self.series, self.events, self.grown) for each in store)}
        self.entities -= entities - used
        for each in [each for each in self._recent if each not in self.entities]:
            del self._recent[each]
