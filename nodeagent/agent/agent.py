"""The agent's loop: takes observations, evaluates them, saves its state, then reports the changes.

One thread runs the loop. Each cycle takes the sensors' observations from the inbox, gets the findings from
the evaluator, publishes the verdicts, and hands the state to the writer (`state_writer`). A change is
reported after it has been saved, or when saving has failed or takes too long. Nothing blocks this thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from holdfast.process.clock import seconds_to_next_tick
from nodeagent.agent import changes, saved_state
from nodeagent.agent.claim import Claim
from nodeagent.agent.clean_time import CleanTime
from nodeagent.agent.inbox import Inbox
from nodeagent.agent.missed import MissedObservations
from nodeagent.agent.policy_file import PolicyFile, PolicyInForce
from nodeagent.agent.recent_faults import RecentFaults
from nodeagent.agent.saved_state import SavedState
from nodeagent.agent.sensor_threads import (
    FittedSensor,
    SensorStatus,
    SensorThread,
    gpus_unseen,
    slow_sensors,
    stuck_calls,
    xids_are_unseen,
)
from nodeagent.agent.state_writer import StateWriter
from nodeagent.evaluation.evaluator import Evaluator, verdicts
from nodeagent.evaluation.evidence import LAST_SEEN
from nodeagent.evaluation.retention import FORGET_S
from nodeagent.kernel.line_reader import LostRecords
from nodeagent.model import NODE, STATE_LOST, HealthFinding, HealthVerdict, Observation, kind_of
from nodeagent.policy.rules import HealthPolicy
from nodeagent.sensing.clock import Clock
from nodeagent.sensing.pauses import LoopPauses
from nodeagent.sensing.sensor import WAIT_S

LOOK_S = WAIT_S  # the longest time between two cycles; sensors that wait for events also wake up this often
STUCK_LOOK_S = 1.0  # the same while a sensor hangs, because each cycle reports how long it has hung
SOON_S = 0.05  # the shortest time between two cycles without new observations
SAVE_S = 0.2  # the shortest time between two saves, so that a storm of changes is saved once
SAVE_AT_REST_S = 60.0  # the longest time between two saves, for cursors and baselines
SAVE_DEADLINE_S = 5.0  # changes are reported without being saved if the disk takes longer
LAST_SAVE_S = 0.5  # limit for the last save; the agent exits within 2 s of SIGTERM even if the disk hangs
FORGET_EVERY_S = 3600.0
# how often the loss of the state is reported while its disk hangs: well within its hold time
LOST_EVERY_S = 60.0
XIDS, MEMORY, OWN_LOSSES = "sensor/xids", "sensor/memory", "sensor/agent"
NO_SENSORS = (XIDS, MEMORY, OWN_LOSSES)  # what the agent reports about itself
DESCRIBING = ("gpu_state", "nvml")  # the checks whose facts describe the entity
MAX_DESCRIBED = 256
JOIN_S = 0.5  # limit for all sensors to stop; the agent exits within 2 s of SIGTERM even if they hang

Note = Mapping[str, Any]  # a line of the log: an event's name, and its fields


@dataclass(frozen=True, slots=True)
class Published:
    """The state that other threads read: replaced as a whole, never modified."""

    at_s: float
    verdicts: tuple[HealthVerdict, ...] = ()
    sensors: tuple[SensorStatus, ...] = ()
    events: tuple[dict[str, Any], ...] = ()  # the history, oldest first
    dropped: int = 0  # observations
    problems: tuple[
        str, ...
    ] = ()  # with the saved state, the policy file, an address, or evidence of one entity
    policy_rejected: bool = False  # the policy file has a mistake, and the last good policy is in force
    clean_time: CleanTime = field(default_factory=CleanTime)
    facts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # about the driver and each GPU
    released: Released | None = None
    state_id: str = ""  # of the agent's memory: see `SavedState.id`
    recent_faults: RecentFaults = field(default_factory=RecentFaults)

    @property
    def ready(self) -> bool:
        """True if every sensor has been tried."""
        return bool(self.sensors) and all(each.tried for each in self.sensors)


@dataclass(frozen=True, slots=True)
class Released:
    """A release of the GPUs at an operator's request."""

    until_s: float  # agent time
    closed: bool  # no sensor uses the GPUs


@dataclass(frozen=True, slots=True)
class _Submitted:
    """Changes handed to the writer, and the time of the handover."""

    number: int  # the number of the submission
    since: float  # monotonic
    changes: list[dict[str, Any]]


@dataclass(slots=True)
class Agent:
    """Runs the agent's loop. Saves each change, then passes it once to `report`, as JSON."""

    policy: HealthPolicy
    clock: Clock
    state: SavedState
    folder: Path | None  # None: nothing is saved
    report: Callable[[Sequence[dict[str, Any]]], None]
    branch: Callable[[], int | None] = lambda: None
    problems: tuple[str, ...] = ()  # found at startup
    policy_file: PolicyFile | None = None  # None: `policy` remains in force
    note: Callable[[Note], None] = lambda _: None  # writes to the log
    claim: Claim | None = None  # the folder's claim; None: not possible yet, or nothing is saved
    released_until_s: Callable[[], float] = lambda: -inf  # when an operator's release of the GPUs ends
    more_problems: Callable[[], tuple[str, ...]] = tuple  # current ones of the program itself
    lost: str = ""  # why the agent starts without a saved state that it should have; "" if it has it
    missed: MissedObservations | None = None  # keeps what must be added to the state when its disk answers
    superseded: bool = field(init=False, default=False)  # another agent has taken over the folder
    inbox: Inbox = field(init=False)
    evaluator: Evaluator = field(init=False)
    published: Published = field(init=False)
    watched: list[SensorThread] = field(init=False, default_factory=list)
    looked: threading.Condition = field(init=False, default_factory=threading.Condition)
    _statuses: tuple[SensorStatus, ...] = field(init=False, default=())  # as of the last cycle
    _xids_unseen: bool | None = field(init=False, default=None)
    _was_released: bool = field(init=False, default=False)
    _in_force: PolicyInForce = field(init=False)
    _noted: set[str] = field(init=False, default_factory=set)
    _facts: dict[str, dict[str, str]] = field(init=False, default_factory=dict)
    _stuck: set[str] = field(init=False, default_factory=set)
    _slow: set[str] = field(init=False, default_factory=set)
    _pauses: LoopPauses = field(init=False, default_factory=lambda: LoopPauses(LOOK_S))
    # sensors whose calls did not return before the agent's restart, until they have been tried again
    _stuck_before: set[str] = field(init=False, default_factory=set)
    _pending: list[dict[str, Any]] = field(init=False, default_factory=list)
    _writer: StateWriter | None = field(init=False, default=None)
    _unreported: list[_Submitted] = field(init=False, default_factory=list)  # handed to the writer
    _events: tuple[dict[str, Any], ...] = field(init=False, default=())  # the history that was reported
    _save_noted: tuple[int, str] = field(init=False, default=(0, ""))  # the newest save that was reported
    _judged: tuple[tuple[HealthFinding, ...], frozenset[str], tuple[HealthVerdict, ...]] = field(
        init=False, default=((), frozenset(), ())
    )
    _saved: float = field(init=False, default=float("-inf"))  # monotonic
    _forgot: float = field(init=False, default=float("-inf"))
    _lost_due_s: float = field(init=False, default=-inf)  # when the loss of the state is reported next
    _losses: LostRecords = field(init=False)
    _stopping: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.inbox = Inbox(self.policy)
        self._in_force = PolicyInForce(self.policy)
        if self.policy_file is not None:
            self.policy_file.notify = self.inbox.wake
        self.evaluator = Evaluator(self.policy)
        self.problems += self._recall()
        self._stuck_before = {each.removeprefix("sensor/") for each in self.evaluator.sampled("sensor_stuck")}
        self._slow = {each.removeprefix("sensor/") for each in self.evaluator.sampled("sensor_slow")}
        self.evaluator.begin(self.clock.now_s(), knew_more=bool(self.lost))
        self._report_loss(self.clock.now_s())
        self._losses = LostRecords(
            self.clock, "agent", "there was no room in the queue or in the stored evidence"
        )
        self._count_losses()
        self._events = tuple(self.state.history)
        if self.folder is not None:
            self._writer = StateWriter(self.folder, self.claim, self.inbox.wake, self._give_way)
        self.state.anchor = self.clock.anchor
        self.state.clean_time = self.state.clean_time.resumed(
            self.state.last_s, self.clock.now_s(), self.released_until_s()
        )
        # Until the sensors have been tried, the agent serves what it knows from before the restart: it must
        # not report a bad GPU as healthy, or its history as empty, even for a moment.
        now_s = self.clock.now_s()
        self.published = Published(
            now_s,
            self._verdicts(self.evaluator.findings(now_s)),
            events=self._events,
            problems=self.problems,
            clean_time=self.state.clean_time,
            state_id=self.state.id,
            recent_faults=self.state.recent_faults,
        )

    def _recall(self) -> tuple[str, ...]:
        before = self.state.anchor
        try:
            if self.state.evidence:
                self.evaluator.load(self.state.evidence)
        except saved_state.MALFORMED as error:
            self.evaluator = Evaluator(self.policy)
            why = f"the saved evidence is not used: {error}"
            self.state.id = saved_state.new_id()
            self.lost = why if self.folder is not None else ""  # a reader reports this as a problem
            return (why,)
        if before is not None and before.boot_id != self.clock.anchor.boot_id:
            booted_s = self.clock.anchor.offset_s  # CLOCK_BOOTTIME 0
            before_s = ((LAST_SEEN, repr(self.state.last_s)),)
            self.evaluator.add(
                Observation(booted_s, "boot", NODE, "agent", text="another boot id", facts=before_s)
            )
        return ()

    def _report_loss(self, now_s: float) -> None:
        """Report that the state is lost: once, or repeatedly while its disk hangs, because nothing is saved.

        The report is part of the new state, so it outlives a restart.
        """
        if self.lost and now_s >= self._lost_due_s:
            self._lost_due_s = now_s + LOST_EVERY_S if self.folder is None else inf
            self.evaluator.add(Observation(now_s, STATE_LOST, MEMORY, "agent", text=self.lost))

    def _give_way(self) -> None:
        self.superseded = True
        self.stop()

    def watch(self, sensors: Sequence[FittedSensor]) -> None:
        """Start the sensors, each in a separate thread."""
        now_s = self.clock.now_s
        self.watched = [
            SensorThread(each, self.inbox, now_s, lambda: now_s() < self.released_until_s(), self._pauses)
            for each in sensors
        ]
        names = {each.sensor.name for each in sensors}
        self._end_findings_of_others(names)
        self.state.clean_time = self.state.clean_time.with_sensors(names)
        for each in self.watched:
            each.start()

    def _end_findings_of_others(self, names: set[str]) -> None:
        """End findings about sensors that only an earlier agent had, because nothing else would end them."""
        now_s, kept = self.clock.now_s(), {*NO_SENSORS, *(f"sensor/{each}" for each in names)}
        about = {each.entity for each in self.evaluator.findings(now_s)}
        for entity in sorted(each for each in about - kept if kind_of(each) == "sensor"):
            text = "this agent does not have the sensor"
            self.evaluator.add(Observation(now_s, "cleared", entity, "agent", text=text))
        self._stuck_before &= names

    def gpus_are_closed(self) -> bool:
        """Return True if every sensor of the GPUs is closed for a release. May be called from any thread."""
        return all(each.is_released for each in self.watched if each.fitted.releases)

    def run(self) -> None:
        """Repeat `run_cycle` until `stop` is called; then save and return, even if sensors hang."""
        while not self._stopping:
            self.inbox.wait(self._patience_s())
            self.run_cycle()
        self.close()

    def _patience_s(self) -> float:
        if self._pending:
            return SAVE_S
        if self._unreported:
            overdue_s = self._unreported[0].since + SAVE_DEADLINE_S - time.monotonic()
            return min(LOOK_S, max(SOON_S, overdue_s))
        until_s = self.evaluator.until_s - self.clock.now_s()
        return min(seconds_to_next_tick(STUCK_LOOK_S if self._stuck else LOOK_S), max(SOON_S, until_s))

    def stop(self) -> None:
        """Make `run` return soon. May be called from a signal handler, and more than once."""
        self._stopping = True
        self.inbox.wake()

    def take_over(self, missed: MissedObservations, from_offset_s: float) -> None:
        """Add what an agent has seen that could not load this state, or report its loss if that is too much.

        `from_offset_s` is the offset of that agent's clock, which was of the same boot.
        """
        if missed.dropped and not self.lost:
            self.lost = f"{missed.dropped} observations could not be kept while the disk hung"
            self.state.id = saved_state.new_id()
        self.evaluator.branch = self.branch()
        for each in missed.on_another_clock(self.clock.anchor.offset_s - from_offset_s):
            self.evaluator.add(each)

    def close(self, save_s: float = LAST_SAVE_S) -> bool:
        """Stop the sensors, then run a last cycle and save. Takes about a second if something hangs.

        Returns False if the state is not saved within `save_s`.
        """
        for each in self.watched:
            each.stop()
        until = time.monotonic() + JOIN_S
        for each in self.watched:
            each.join(max(0.0, until - time.monotonic()))
        self.run_cycle(last=True)
        is_saved = self._writer is not None and self._writer.finish(save_s)
        if unsaved := self._take_reportable(everything=True):
            self.report(unsaved)
        return is_saved and self._writer is not None and not self._writer.outcome.problem

    def run_cycle(self, *, last: bool = False) -> Published:
        """Run one cycle: take the inbox, evaluate, hand over the state, publish, and report changes."""
        now_s = self.clock.now_s()
        self._pauses.note_cycle(time.monotonic())
        # Read the positions before the inbox, so that this cycle's observations include everything that the
        # positions cover.
        positions = {each.sensor.name: each.position for each in self.watched}
        # Also read the statuses before the inbox, so that a sensor counts as tried only in a cycle that
        # includes its first observations.
        self._statuses = tuple(each.status() for each in self.watched)
        self._follow_policy()
        self._evaluate_inbox(now_s)
        findings = self.evaluator.findings(now_s)
        found, self.state.reported = changes.find_changes(self.state.reported, findings, now_s)
        self._pending += [changes.change_as_json(each) for each in found]
        released = self._take_release(now_s)
        self.state.clean_time = self.state.clean_time.after(
            now_s, findings, self.published.ready, released=released, blind=self._blind()
        )
        self.state.recent_faults = self.state.recent_faults.after(now_s, findings)
        since_s = time.monotonic() - self._saved
        if last or since_s >= SAVE_AT_REST_S or (self._pending and since_s >= SAVE_S):
            self._submit(now_s, positions)
        reported = self._take_reportable()
        self._note_saved(now_s)
        self._publish(now_s, findings)
        if reported:
            self.report(reported)
        return self.published

    def _take_release(self, now_s: float) -> bool:
        """Return whether the GPUs were released since the last cycle, and wake the sensors after a change."""
        released, before = now_s < self.released_until_s(), self._was_released
        if released != before:
            self._was_released = released
            for each in self.watched:
                each.nudge()
        return released or before

    def _blind(self) -> list[str]:
        """Return the sensors that cannot measure now, for any reason, and needed ones that are missing."""
        blind = [each.name for each in self._statuses if not each.sees]
        return [*blind, *self.state.clean_time.missing([each.name for each in self._statuses])]

    def _follow_policy(self) -> None:
        """Use the policy that is in force now, and log a change or a rejected file."""
        before, now = self._in_force, self._in_force if self.policy_file is None else self.policy_file.current
        if now is before:
            return
        self._in_force = now
        if now.policy is not before.policy:
            self.policy = now.policy
            self.inbox.policy = now.policy
            self.evaluator.use(now.policy)
            self.note({"event": "policy_loaded", "policy": now.policy.version})
        if now.problem:
            self.note({"event": "policy_problem", "policy": now.policy.version, "why": now.problem})

    def _note_evidence_problems(self) -> None:
        """Write new problems with evidence to the log."""
        for each in self.evaluator.problems.values():
            if each not in self._noted:
                self._noted.add(each)
                self.note({"event": "evidence_problem", "why": each})

    def _problems(self) -> tuple[str, ...]:
        """Return everything that the agent itself could not do."""
        of_policy = (self._in_force.problem,) if self._in_force.problem else ()
        return (*self.problems, *self.more_problems(), *of_policy, *self.evaluator.problems.values())

    def _evaluate_inbox(self, now_s: float) -> None:
        for each in self.inbox.drain():
            self.evaluator.add(each)
            if self.missed is not None:
                self.missed.add(each, self.policy)
            if each.check in DESCRIBING:
                self._describe(each)
        self._retry_stuck()
        for each in stuck_calls(self.watched, self._statuses, self._stuck, now_s):
            self.evaluator.add(each)
        for each in slow_sensors(self._statuses, self._slow, now_s):
            self.evaluator.add(each)
        self._judge_xid_sensors(now_s)
        self._count_losses()
        self._report_loss(now_s)
        self.evaluator.branch = self.branch()
        # Until the sensors have been tried, the meaning of a fault may be unknown, because it may depend on a
        # GPU's model, which a sensor reports.
        if self.published.ready and now_s - self._forgot >= FORGET_EVERY_S:
            self._forgot = now_s
            self.evaluator.forget(now_s - FORGET_S)
            known = self.evaluator.entities
            self._facts = {entity: facts for entity, facts in self._facts.items() if entity in known}

    def _judge_xid_sensors(self, now_s: float) -> None:
        """Report when no sensor can see Xids, and when one can again."""
        both = zip(self.watched, self._statuses, strict=True)
        of_xids = [status for each, status in both if each.fitted.sees_xids]
        unseen = xids_are_unseen(of_xids)
        if unseen is None or unseen == self._xids_unseen:
            return
        self._xids_unseen = unseen
        if unseen or XIDS in self.evaluator.entities:
            gpus = ", ".join(gpu for each in of_xids if each.sees for gpu in gpus_unseen(each))
            text = f"not seen: {gpus}" if unseen and gpus else ""
            self.evaluator.add(Observation(now_s, "xids_unseen", XIDS, "agent", float(unseen), text=text))

    def _count_losses(self) -> None:
        """Report how many observations were lost; 0 at the start, so that the first loss counts as growth."""
        self._losses.count = self._dropped
        for each in self._losses.due_readings():
            self.evaluator.add(each)

    def _retry_stuck(self) -> None:
        """Also watch the sensors that hung before the restart, to report when their calls return."""
        if self._stuck_before:
            tried = {each.name for each in self._statuses if each.tried}
            self._stuck |= self._stuck_before & tried
            self._stuck_before -= tried

    def _describe(self, seen: Observation) -> None:
        """Replace the facts of an entity.

        A GPU that is gone has no facts, and is removed from the report's `gpus`.
        """
        if not seen.facts and seen.check == "gpu_state":
            self._facts.pop(seen.entity, None)
        elif seen.facts and (seen.entity in self._facts or len(self._facts) < MAX_DESCRIBED):
            self._facts[seen.entity] = dict(seen.facts)

    @property
    def _dropped(self) -> int:
        """The number of observations lost because the queue or the stored evidence had no room."""
        return self.inbox.dropped + self.evaluator.dropped

    def _submit(self, now_s: float, positions: Mapping[str, Any]) -> None:
        """Number the pending changes, and hand the state to the writer."""
        numbered = self.state.add(self._pending)
        self._pending = []
        self.state.last_s = max(self.state.last_s, now_s)
        self.state.evidence = self.evaluator.dump()
        self.state.positions.update({k: v for k, v in positions.items() if v is not None})
        self._saved = time.monotonic()
        number = 0  # treated as saved, because this agent does not save its state
        if self._writer is not None:
            number = self._writer.submit(saved_state.encode(self.state))
        if numbered or self._writer is not None:
            self._unreported.append(_Submitted(number, self._saved, numbered))

    def _take_reportable(self, *, everything: bool = False) -> list[dict[str, Any]]:
        """Return the changes to report now, even if saving failed, because every fault must be reported.

        The writer has saved these changes, has failed to save them, or has had them for too long.
        """
        finished = 0 if self._writer is None else self._writer.outcome.number
        found: list[dict[str, Any]] = []
        for each in self._unreported:
            if everything or each.number <= finished or self._is_overdue(each):
                found += each.changes
                each.changes.clear()
        waiting = [each for each in self._unreported if each.number > finished]
        # Keep the oldest save even if its changes have been reported: it shows how long the disk has not
        # answered.
        self._unreported = [each for n, each in enumerate(waiting) if n == 0 or each.changes]
        if found:
            last = found[-1]["seq"]
            self._events = tuple(each for each in self.state.history if each["seq"] <= last)
        return found

    def _is_overdue(self, submitted: _Submitted) -> bool:
        """Return True if the disk has had a save for too long while the agent ran."""
        now = time.monotonic()
        return now - submitted.since - self._pauses.within_s(submitted.since, now) >= SAVE_DEADLINE_S

    def _note_saved(self, now_s: float) -> None:
        """Report whether the state is saved, after each save and when a save is overdue."""
        if self._writer is None:
            return
        outcome = self._writer.outcome
        number, problem = outcome.number, outcome.problem
        if self._unreported and self._is_overdue(self._unreported[0]):
            problem = f"the state is not saved: the disk has not answered for {SAVE_DEADLINE_S:g} s"
        if (number, problem) == self._save_noted:
            return
        self._save_noted = number, problem
        if problem or MEMORY in self.evaluator.entities:
            state = 1.0 if problem else 0.0
            self.inbox.put((Observation(now_s, "memory_lost", MEMORY, "agent", state, text=problem),))

    def _verdicts(self, findings: tuple[HealthFinding, ...]) -> tuple[HealthVerdict, ...]:
        """Return one verdict per entity. Returns the same tuple until the findings or entities change."""
        entities = self.evaluator.entities
        if findings is not self._judged[0] or entities != self._judged[1]:
            self._judged = findings, frozenset(entities), verdicts(findings, entities)
        return self._judged[2]

    def _publish(self, now_s: float, findings: tuple[HealthFinding, ...]) -> None:
        self._note_evidence_problems()
        published = Published(
            now_s,
            self._verdicts(findings),
            self._statuses,
            self._events,
            self._dropped,
            self._problems(),
            self._in_force.rejected,
            self.state.clean_time,
            dict(self._facts),
            Released(self.released_until_s(), self.gpus_are_closed()) if self._was_released else None,
            self.state.id,
            self.state.recent_faults,
        )
        with self.looked:
            self.published = published
            self.looked.notify_all()
