"""Book a run's time in the ledger: steps, incidents, pauses and the end, as the supervisor's views show them.

The time of an incident is divided among the buckets only when the incident closes, because this requires the
ranks' start times (`StartTimes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.protocol.launcher_messages import StartTimes
from holdfast.protocol.progress import Phase, name_of
from supervisor.decision.redundancy import node_loss
from supervisor.observability.ledger import Bucket, Ledger
from supervisor.view import reports
from supervisor.view.model import JobState, OpenIncident, View

_PAUSES = {
    name_of(Phase.EVAL): Bucket.PRODUCTIVE,
    name_of(Phase.CHECKPOINT): Bucket.CHECKPOINT,
    name_of(Phase.PAUSED): Bucket.PAUSED,
}


class Bookkeeping:
    """The ledger of one run."""

    def __init__(self, now_ns: int, held: Mapping[str, Any] | None, *, queues: bool = False) -> None:
        """Continue the ledger `held`, or begin a new one at `now_ns`.

        If `queues` is true, a system outside Holdfast creates the members, and time without enough members is
        booked as queued.
        """
        self._queues = queues
        self.ledger = Ledger.restore(held) if held else Ledger(now_ns, Bucket.START)
        self._step = -1
        self._fresh = True

    def observe(self, view: View) -> None:
        """Book the steps that the whole group has completed since the last call."""
        memory = view.memory
        if self._queues and memory.phase in ("forming", "securing"):
            self._observe_queue(view)
        if memory.phase != "running" or not memory.settled:
            return
        steps, phases = _progress(view)
        if len(steps) < memory.world_size:
            return
        step, now_ns = min(steps), max(view.now_ns, self.ledger.at_ns)
        activity = Bucket.PRODUCTIVE
        if phases and phases <= set(_PAUSES):
            activity = _PAUSES[sorted(phases)[0]]
        if self.ledger.activity is not activity:
            self.ledger.enter(activity, now_ns)
        if step != self._step:
            self.ledger.trained(step, now_ns)
            self._step = step
            if not reports.script_keeps_own_state(view):
                self.ledger.secured(self._secured(view, step))
        else:
            self.ledger.advance(now_ns)

    def _secured(self, view: View, step: int) -> int:
        """Return the newest step up to `step` whose state survives if any one member or node is lost."""
        if self._queues:
            return node_loss.secured_step(view, step)
        # Each member acts as a node.
        return step if len(view.memory.placement) > 1 else node_loss.durable_step(view, step)

    def _observe_queue(self, view: View) -> None:
        """Switch to booking time as queued when members are missing, and back when they exist again."""
        memory, ledger = view.memory, self.ledger
        is_short = sum(each.exists for each in view.members) * memory.nproc < memory.world_size
        if is_short == (ledger.activity is Bucket.QUEUED):
            return
        if is_short and memory.incident is not None:
            self._split(((memory.incident.noticed_ns, Bucket.DECIDE),))
        after = Bucket.START if memory.phase == "forming" else Bucket.DECIDE
        ledger.enter(Bucket.QUEUED if is_short else after, max(view.now_ns, ledger.at_ns))

    def caught_up(self, memory: JobState, now_ns: int) -> None:
        """Book the completed steps that `memory` records, which a predecessor observed."""
        if memory.phase == "running" and memory.settled and memory.reached >= 0:
            self.ledger.caught_up(memory.reached, max(now_ns, self.ledger.at_ns))

    def opened(self, incident: OpenIncident, overtaken: OpenIncident | None = None) -> None:
        """Book the time from the first symptom of a fault as detection.

        `overtaken` is the previous incident, if the group had completed no new step when this one began.
        """
        if overtaken is not None:
            self._decided(overtaken)
            self._split(((min(incident.fault_ns, incident.noticed_ns), Bucket.DETECT),))
        at_ns = max(incident.noticed_ns, self.ledger.at_ns)
        if self.ledger.activity is Bucket.PRODUCTIVE:
            self.ledger.noticed(min(incident.fault_ns, at_ns), at_ns)
        else:
            self.ledger.enter(Bucket.DETECT, at_ns)

    def closed(
        self, memory: JobState, incident: OpenIncident | None, marks: StartTimes, step_s: float
    ) -> None:
        """Divide the time from the fault to the end of the first new step among the buckets."""
        resumed = memory.launch.restore.step if memory.launch and memory.launch.restore else 0
        self._decided(incident)
        stages = (
            (marks.started_ns, Bucket.RENDEZVOUS),
            (marks.joined_ns, Bucket.RESTORE),
            (marks.restored_ns, Bucket.PRODUCTIVE),
        )
        self._split(stages)
        at_ns = max(marks.first_step_ns, self.ledger.at_ns)
        self.ledger.trained(resumed + 1, at_ns, int(step_s * 1e9) or None)
        self._step = resumed + 1

    def saving(self, at_ns: int, incident: OpenIncident | None = None) -> None:
        """Book the time from now on as saving. All ranks have finished, possibly during `incident`."""
        self._decided(incident)
        self.ledger.enter(Bucket.CHECKPOINT, max(at_ns, self.ledger.at_ns))

    def stopped(self, at_ns: int, incident: OpenIncident | None = None, *, finished: bool = False) -> None:
        """Book the end of the run, possibly during `incident`.

        `finished` is true if the script has finished.
        """
        self._decided(incident)
        self.ledger.enter(Bucket.STOP, max(at_ns, self.ledger.at_ns))
        if finished:
            self.ledger.finished(self.ledger.at_ns)

    def so_far(self, view: View) -> Ledger:
        """Return the ledger up to now, for people: an open incident is divided as far as it has got.

        The run's own ledger does not change. It books an incident only when that closes, because the start
        times are not known before.
        """
        memory, ledger = view.memory, self.ledger
        if memory.phase == "ended" or (memory.phase == "running" and memory.settled):
            return ledger
        shown = Bookkeeping(0, ledger.snapshot(), queues=self._queues)
        if memory.phase in ("securing", "running") and ledger.activity is not Bucket.QUEUED:
            shown._decided(memory.incident)
            shown._split(_stations(view) if memory.phase == "running" else ())
        shown.ledger.advance(max(view.now_ns, shown.ledger.at_ns))
        return shown.ledger

    def _decided(self, incident: OpenIncident | None) -> None:
        """Book the steps that were rolled back for `incident`, and the time up to the decision."""
        if incident is None:
            return
        resumed = incident.resume
        if resumed is not None and incident.lost is None:
            self.ledger.begun_again(self.ledger.at_ns)
        elif resumed is not None and (resumed.source != "none" or incident.lost):
            self.ledger.rolled_back(resumed.step, self.ledger.at_ns)
        self._split(((incident.noticed_ns, Bucket.DECIDE),))
        if incident.decided_ns:
            self._split(((incident.decided_ns, Bucket.START),))

    def _split(self, stages: tuple[tuple[int, Bucket], ...]) -> None:
        for at_ns, bucket in stages:
            self.ledger.enter(bucket, max(at_ns, self.ledger.at_ns))


def _stations(view: View) -> tuple[tuple[int, Bucket], ...]:
    """Return the stages of its start that all ranks of the current generation have reached."""
    marks = [rank.marks for rank in reports.ranks(view)]
    if len(marks) < view.memory.world_size:
        return ()
    stations = (
        ([each.started_ns for each in marks], Bucket.RENDEZVOUS),
        ([each.joined_ns for each in marks], Bucket.RESTORE),
        ([each.restored_ns for each in marks], Bucket.WARMUP),
    )
    return tuple((max(at_ns), bucket) for at_ns, bucket in stations if all(at_ns))


def _progress(view: View) -> tuple[list[int], set[str]]:
    """Return how many steps each rank has completed, and the current phases of the ranks."""
    found = reports.last_progress(view)
    return [each.step for each in found], {each.phase for each in found}
