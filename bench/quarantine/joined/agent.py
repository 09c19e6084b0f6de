"""A real agent on a simulated machine: its sensors' readings, its restarts, its reports.

Everything behind the sensors is real: the agent's loop, the inbox, the evaluator, the policy, the reader of
kernel lines, the history of the GPUs, and the report.

A sensor takes readings at its rule's period only around a change: from three readings before the change until
it can no longer affect any limit, window or clear time of the rule. Between changes, each reading would equal
the previous one, and the evaluator would merely fold it into that reading, so these readings are left out. A
test compares the result with the result of an agent that gets all readings.

An equal reading matters in two other cases. After a reset or an operator's command, it shows that the state
is still the same, so all readings of the entity are repeated. And the evaluator forgets what it has not seen
for `FORGET_S`, such as which disks are the node's own, so each reading is repeated once per `RENEW_S`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from typing import Any

from bench.quarantine.joined.machine import ReadingPlace, SimulatedMachine
from nodeagent.agent.agent import Agent
from nodeagent.agent.saved_state import SavedState
from nodeagent.agent.sensor_threads import FittedSensor, SensorStatus, SensorThread
from nodeagent.evaluation.retention import FORGET_S
from nodeagent.kernel.line_reader import LinePatterns, LineReader
from nodeagent.model import HealthFinding, Level, Observation, kind_of
from nodeagent.nvml.gpu_roster import GpuHistory, NodeGpus, load_history
from nodeagent.policy import kernel_lines, loading
from nodeagent.policy.rules import HealthPolicy, Rule, RuleKind
from nodeagent.sensing import clock
from nodeagent.server.report import health_report

EPOCH_S = 1.8e9  # agent time is about the time since 1970
BRANCH = 575
VERSION = "1"
BEFORE = 3  # readings before a change
RENEW_S = FORGET_S - 86400.0  # the longest time between two readings, with a day to spare
SENSORS = ("kmsg", "nvml-events", "nvml-polling", "sysfs", "host", "operator")
SEE_XIDS = ("kmsg", "nvml-events")
SENSOR_OF = {"gpu": "nvml-polling", "driver": "nvml-polling", "port": "sysfs", "disk": "host", "node": "host"}
PATTERNS = LinePatterns(
    kernel_lines.load_lines((loading.FOLDER / kernel_lines.FILE).read_text(encoding="utf-8"))
)


class _Sensor:
    """Stands in for a sensor whose thread never runs: its observations are put into the inbox directly."""

    period_s = 0.0

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self) -> None: ...

    def read(self) -> Iterable[Observation]:
        return ()

    def close(self) -> None: ...


class _Watched(SensorThread):
    def status(self) -> SensorStatus:
        return SensorStatus(self.sensor.name, True, "", 1, 0, 0.0, False)


class _Clock(clock.Clock):
    def __init__(self, at: clock.Anchor, machine: SimulatedMachine) -> None:
        super().__init__(at)
        self._machine = machine
        self.simulated_s = 0.0

    def now_s(self) -> float:
        return self.at(self.simulated_s)

    def at(self, simulated_s: float) -> float:
        return simulated_s - self._machine.booted_s + self.anchor.offset_s


Span = tuple[float, float]  # first and last time


def span_to_reach(rule: Rule, changed_s: float) -> Span:
    """Return the time within which readings that begin at a change reach a bound, if they ever do."""
    bounds = [each for each in (rule.degraded, rule.unhealthy) if each]
    waits = [each.for_s for each in bounds] + [each.for_s for each in rule.states.values()]
    counts = [each.of * rule.period_s for each in bounds]
    return changed_s, changed_s + max([0.0, *waits, *counts]) + BEFORE * rule.period_s


def spans_to_read(rule: Rule, changed_s: float) -> tuple[Span, ...]:
    """Return the times after a change at which a reading matters even if it equals the previous one.

    An unchanged counter matters again when its last growth leaves the window.
    """
    first, spare_s = span_to_reach(rule, changed_s), BEFORE * rule.period_s
    if rule.kind is not RuleKind.RATE:
        return ((changed_s, first[1] + rule.clear_s),)
    leaves_s = changed_s + rule.window_s
    return first, (leaves_s - spare_s, leaves_s + rule.clear_s + spare_s)


def next_s(rule: Rule, spans: Iterable[Span], now_s: float) -> float:
    """Return the next multiple of the rule's period that is in one of the spans; infinity if none is."""
    following = []
    for first_s, last_s in spans:
        at_s = (max(now_s, first_s - rule.period_s) // rule.period_s + 1) * rule.period_s
        following.append(at_s if at_s <= last_s else inf)
    return min(following, default=inf)


class NodeAgent:
    """The agent of one machine. `stop` and then `start` restart it; its saved state survives as JSON."""

    def __init__(self, machine: SimulatedMachine, policy: HealthPolicy, whole: bool = False) -> None:
        """Create the agent without starting it. If `whole` is True, its sensors leave out no readings."""
        self.machine, self.policy, self._whole = machine, policy, whole
        self._state = SavedState()
        self._starts = 0
        self._agent: Agent | None = None
        self._gpus = NodeGpus()
        self._seen: dict[ReadingPlace, float] = {}  # the newest readings
        self._noticed: dict[ReadingPlace, float] = {}  # the newest values, whether or not they were read yet
        self._spans: dict[ReadingPlace, list[Span]] = {}  # when a value is read at its rule's period
        self._next_s: dict[ReadingPlace, float] = {}
        self._logged = 0  # lines of the kernel log that were read
        self._lines = LineReader(PATTERNS, "kmsg")
        self.observations = 0

    @property
    def runs(self) -> bool:
        return self._agent is not None

    @property
    def wake_s(self) -> float:
        """When the agent next reads something or its findings may change."""
        if self._agent is None:
            return inf
        until_s = self._agent.evaluator.until_s - self._clock.at(0.0)
        return min(until_s, min(self._next_s.values(), default=inf))

    def start(self, now_s: float) -> None:
        machine, saved = self.machine, self._state
        anchor = clock.anchor(
            saved.anchor, saved.last_s, machine.boot_id, now_s - machine.booted_s, EPOCH_S + now_s
        )
        if saved.anchor is None or saved.anchor.boot_id != machine.boot_id:
            self._logged = 0
        self._clock = _Clock(anchor, machine)
        self._clock.simulated_s = now_s
        self._agent = Agent(self.policy, self._clock, saved, None, lambda _: None, lambda: BRANCH)
        self._agent.watched = [
            _Watched(
                FittedSensor(_Sensor(name), sees_xids=name in SEE_XIDS), self._agent.inbox, self._clock.now_s
            )
            for name in SENSORS
        ]
        self._starts += 1
        self._gpus = load_history(json.loads(json.dumps(self._gpus.dump())))
        self._lines = LineReader(PATTERNS, "kmsg")
        for place, value in machine.readings().items():
            self._read(place, value, now_s)
            self._plan(place, now_s)
        self.look(now_s)

    def stop(self, now_s: float) -> None:
        """Stop the agent. The next `start` reads its state from JSON, as after any restart."""
        if self._agent is None:
            return
        self._clock.simulated_s = now_s
        self._agent.run_cycle(last=True)
        state = self._agent.state
        self._state = replace(state, evidence=json.loads(json.dumps(state.evidence)))
        self._agent = None

    def look(self, now_s: float) -> None:
        """Read new log lines and all values that have changed or are due, and run the agent's loop once."""
        if self._agent is None:
            return
        self._clock.simulated_s = now_s
        self._read_log(now_s)
        readings = self.machine.readings()
        for place, value in readings.items():
            if self._noticed.get(place) != value:
                self._noticed[place] = value
                self._stir(place, now_s)
        for place, due_s in list(self._next_s.items()):
            if due_s <= now_s:
                if place in readings:
                    self._read(place, readings[place], now_s)
                self._plan(place, now_s)
        self._agent.run_cycle()

    def log(self, now_s: float, text: str, *, also_events: bool = True) -> None:
        """Write a line to the kernel log.

        If the agent is running, NVML's events also report the line's Xids.
        """
        self.machine.log.append((now_s, text))
        if self._agent is None or not also_events:
            return
        for fact in PATTERNS.read(text):
            if fact.check == "xid":
                code = int(fact.value)
                seen = replace(fact, variant="", text=f"Xid {code}", facts=())
                self._put(seen.at(self._clock.at(now_s) + 0.01, "nvml-events"))

    def see(self, seen: Observation) -> None:
        """Report an observation that does not come from the machine, such as a wrong reading."""
        self._put(seen)

    def clear(self, entity: str, now_s: float) -> None:
        """Have an operator declare an entity healthy."""
        if self._agent is not None:
            self._put(
                Observation(self._clock.at(now_s), "cleared", entity, "operator", text="holdfast node clear")
            )
            self._repeat_all(entity, now_s)

    def agent_s(self, now_s: float) -> float:
        return self._clock.at(now_s)

    def levels(self) -> dict[str, int]:
        """Return the level of each entity with a finding, as the agent published it."""
        if self._agent is None:
            return {}
        return {each.entity: int(each.level) for each in self._agent.published.verdicts if each.findings}

    def findings(self) -> tuple[HealthFinding, ...]:
        """Return the unhealthy findings, as the agent published them."""
        if self._agent is None:
            return ()
        found = (each for verdict in self._agent.published.verdicts for each in verdict.findings)
        return tuple(each for each in found if each.level is Level.UNHEALTHY)

    def marks(self) -> object:
        """Return an object that is the same until the findings change."""
        return None if self._agent is None else self._agent.published.verdicts

    def report(self, now_s: float) -> dict[str, Any]:
        """Return the report as JSON."""
        assert self._agent is not None
        self.look(now_s)
        about = {"node": self.machine.name, "boot_id": self.machine.boot_id, "version": VERSION}
        return health_report(self._agent.published, about)

    # -- readings

    def _put(self, seen: Observation) -> None:
        assert self._agent is not None
        self.observations += self._agent.inbox.put((seen,))

    def _read_log(self, now_s: float) -> None:
        fresh = self.machine.log[self._logged :]
        self._logged = len(self.machine.log)
        for at_s, text in fresh:
            for seen in self._lines.read(text, self._clock.at(at_s)):
                self._put(seen)

    def _stir(self, place: ReadingPlace, now_s: float) -> None:
        """Begin to take readings at the rule's period, after repeating the newest reading `BEFORE` times."""
        if place in self._seen:
            period_s = self.policy.rules[place[1]].period_s
            latest_s = now_s // period_s * period_s
            for at in range(BEFORE, 0, -1):
                self._sample(place, self._seen[place], latest_s - (at - 1) * period_s)
        self._begin(place, now_s)

    def _begin(self, place: ReadingPlace, now_s: float) -> None:
        """Note that something has changed."""
        spans = self._spans.setdefault(place, [])
        spans += spans_to_read(self.policy.rules[place[1]], now_s)
        self._plan(place, now_s)

    def _repeat_all(self, entity: str, now_s: float) -> None:
        """Read an entity again, because an event that ends findings may have left its state unchanged."""
        for place in [each for each in self.machine.readings() if each[0] == entity]:
            self._spans.setdefault(place, []).append(span_to_reach(self.policy.rules[place[1]], now_s))
            self._plan(place, now_s)

    def _plan(self, place: ReadingPlace, now_s: float) -> None:
        """Plan the next reading."""
        spans = (
            [(0.0, inf)] if self._whole else [each for each in self._spans.get(place, ()) if each[1] > now_s]
        )
        self._spans[place] = spans
        renewed_s = (now_s // RENEW_S + 1) * RENEW_S
        self._next_s[place] = min(next_s(self.policy.rules[place[1]], spans, now_s), renewed_s)

    def _read(self, place: ReadingPlace, value: float, now_s: float) -> None:
        if place in self._seen and self._seen[place] != value:
            self._begin(place, now_s)
        self._seen[place] = self._noticed[place] = value
        self._sample(place, value, now_s)
        if kind_of(place[0]) == "gpu":
            self._mark(place, value, now_s)

    def _sample(self, place: ReadingPlace, value: float, at_s: float) -> None:
        entity, check = place
        facts: tuple[tuple[str, str], ...] = ()
        if check == "gpu_state":
            facts = next(gpu.facts for gpu in self.machine.gpus if gpu.entity == entity)
        source = "nvml-polling" if check == "gpu_count" else SENSOR_OF[kind_of(entity)]
        self._put(Observation(self._clock.at(at_s), check, entity, source, value, facts=facts))

    def _mark(self, place: ReadingPlace, value: float, now_s: float) -> None:
        """Report what the sensor concludes from a reading: a reset, or another GPU in the slot."""
        entity, check = place
        gpu = next(each for each in self.machine.gpus if each.entity == entity)
        known = self._gpus.gpus.get(gpu.pci)
        if known is None:
            known = self._gpus.gpus[gpu.pci] = GpuHistory(gpu.uuid)
        elif known.uuid != gpu.uuid:
            text = f"{gpu.uuid} in place of {known.uuid}"
            known = self._gpus.gpus[gpu.pci] = GpuHistory(gpu.uuid)
            self._put(Observation(self._clock.at(now_s), "replaced", entity, "nvml-polling", text=text))
        if (
            (check == "gpu_state" and known.take_state(int(value), present=True))
            or (check == "recovery_action" and known.take_recovery(int(value)))
            or (check == "ecc_dbe" and known.take_uncorrected(value, self._starts))
        ):
            self._put(Observation(self._clock.at(now_s), "gpu_reset", entity, "nvml-polling", text=check))
            self._repeat_all(entity, now_s)
