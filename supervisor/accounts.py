"""Drive the ledger from what the supervisor sees: steps, incidents, pauses, the end.

While an incident is open its time is not yet split: that is done when it closes, from the ranks' own marks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.messages import Marks
from supervisor.ledger import Bucket, Ledger
from supervisor.view import Memory, Open, View

_PAUSES = {"eval": Bucket.PRODUCTIVE, "checkpoint": Bucket.CHECKPOINT, "paused": Bucket.PAUSED}


class Accounts:
    """The ledger of one run."""

    def __init__(self, now_ns: int, held: Mapping[str, Any] | None) -> None:
        self.ledger = Ledger.restore(held) if held else Ledger(now_ns, Bucket.START)
        self._step = -1
        self._fresh = True

    def observe(self, view: View) -> None:
        """Book the steps that the whole group has done since the last look."""
        memory = view.memory
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
            self.ledger.secured(step if len(memory.placement) > 1 else _durable(view, step))
        else:
            self.ledger.advance(now_ns)

    def opened(self, incident: Open) -> None:
        """A fault: from its first symptom on the time is not training."""
        at_ns = max(incident.noticed_ns, self.ledger.at_ns)
        if self.ledger.activity is Bucket.PRODUCTIVE:
            self.ledger.noticed(min(incident.fault_ns, at_ns), at_ns)
        else:
            self.ledger.enter(Bucket.DETECT, at_ns)

    def closed(self, memory: Memory, incident: Open | None, marks: Marks, step_s: float) -> None:
        """The first new step is done: split the time since the fault by where it went."""
        resumed = memory.launch.restore.step if memory.launch and memory.launch.restore else 0
        stations = [
            (incident.noticed_ns if incident else 0, Bucket.DECIDE),
            (incident.decided_ns if incident else 0, Bucket.START),
            (marks.started_ns, Bucket.RENDEZVOUS),
            (marks.joined_ns, Bucket.RESTORE),
            (marks.restored_ns, Bucket.PRODUCTIVE),
        ]
        if incident is not None:
            self.ledger.rolled_back(resumed, self.ledger.at_ns)
        for at_ns, bucket in stations:
            self.ledger.enter(bucket, max(at_ns, self.ledger.at_ns))
        at_ns = max(marks.first_step_ns, self.ledger.at_ns)
        self.ledger.trained(resumed + 1, at_ns, int(step_s * 1e9) or None)
        self._step = resumed + 1

    def stopped(self, at_ns: int) -> None:
        self.ledger.enter(Bucket.STOP, max(at_ns, self.ledger.at_ns))


def _progress(view: View) -> tuple[list[int], set[str]]:
    steps: list[int] = []
    phases: set[str] = set()
    for member in view.members:
        if member.report is None or member.name not in view.memory.placement:
            continue
        for each in member.report.progress:
            steps.append(each.step)
            phases.add(each.phase)
    return steps, phases


def _durable(view: View, step: int) -> int:
    """One member alone: only what is on storage survives the loss of its node."""
    found = [m.report.durable.step for m in view.members if m.report is not None]
    return min(step, max(found, default=-1))
