"""Divide a run's wall clock time into buckets without gaps or overlap. Pure.

This module is shaped by three facts:

- Training time becomes *productive* only when its step is secured, because a fault turns unsecured steps into
  rework.
- Prometheus counters cannot go down.
- The buckets must add up to the clock exactly, so time is counted in whole nanoseconds.

Training time is therefore pending at first. It is recorded per step, and settles into exactly one bucket when
its step is secured or rolled back. For a script that keeps its own state, the time settles when the script is
restarted or finishes. The time of the step in progress is pending too, and gets its step number when the step
ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from supervisor.view.model import SECOND_NS

FORMAT = 1
MAX_PENDING = 1024  # entries beyond this are merged; without snapshots, no entry would ever settle
HOUR_NS, DAY_NS = 3600 * SECOND_NS, 86_400 * SECOND_NS


class Bucket(str, Enum):
    PRODUCTIVE = "productive"  # training whose steps are secured; the activity of this name is all training
    LOST = "lost"  # training that was rolled back later; this is never an activity
    # Training before the restart of a script that keeps its own state. This is never an activity.
    UNKNOWN = "unknown"
    CHECKPOINT = "checkpoint"  # a save blocked the training
    DETECT = "detect"  # a fault had occurred but was not noticed yet
    DECIDE = "decide"
    STOP = "stop"
    START = "start"
    RENDEZVOUS = "rendezvous"
    RESTORE = "restore"
    WARMUP = "warmup"  # the extra time that the first step of a generation took
    QUEUED = "queued"  # waiting for capacity
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class _Trained:
    """Time spent on the steps `first` to `last`, inclusive."""

    first: int
    last: int
    took_ns: int

    def up_to(self, step: int) -> int:
        """Return the part of the time that belongs to steps <= `step`."""
        if step >= self.last:
            return self.took_ns
        if step < self.first:
            return 0
        return self.took_ns * (step - self.first + 1) // (self.last - self.first + 1)


class Ledger:
    """Nanoseconds per bucket. The buckets plus the pending time always add up to the elapsed time.

    All times are nanoseconds of one clock that never goes backwards. A method that raises `ValueError` has
    changed nothing.
    """

    def __init__(self, opened_ns: int, activity: Bucket = Bucket.QUEUED) -> None:
        self._opened_ns = self._at_ns = self._stretch_ns = opened_ns
        self._activity = _allowed(activity)
        self._settled = dict.fromkeys(Bucket, 0)
        self._pending: list[_Trained] = []
        self._pending_ns = self._tail_ns = 0  # pending time: completed steps, step in progress
        self._secured_step: int | None = None
        self._hour, self._day = Window(60 * SECOND_NS, 60), Window(900 * SECOND_NS, 96)

    def enter(self, activity: Bucket, at_ns: int) -> None:
        """Begin `activity` at `at_ns`. From then on, time is booked to this activity."""
        _allowed(activity)
        self.advance(at_ns)
        if activity is not self._activity:
            self._activity, self._stretch_ns = activity, at_ns

    def advance(self, to_ns: int) -> None:
        """Book the time since the last call to the current activity."""
        if to_ns < self._at_ns:
            raise ValueError(f"clock went backwards: {self._at_ns} to {to_ns} ns")
        training = self._activity is Bucket.PRODUCTIVE
        good_ns = self.good_ns
        for window in (self._hour, self._day):
            window.advance(self._at_ns, to_ns, good_ns, training)
        if training:
            self._tail_ns += to_ns - self._at_ns
        else:
            self._settled[self._activity] += to_ns - self._at_ns
        self._at_ns = to_ns

    def trained(self, step: int, at_ns: int, usual_ns: int | None = None) -> None:
        """Book the training time since the last step to `step`, which ended at `at_ns`.

        For the first step of a generation, `usual_ns` is given, and the time beyond it is booked as warm-up.
        If `step` was already reported, and is therefore not newer than the last known step, the time is added
        to that last step.
        """
        self.advance(at_ns)
        took_ns, self._tail_ns = self._tail_ns, 0
        self._stretch_ns = at_ns
        if usual_ns is not None and took_ns > max(usual_ns, 0):
            self._settled[Bucket.WARMUP] += took_ns - max(usual_ns, 0)
            took_ns = max(usual_ns, 0)
        if self._secured_step is not None and step <= self._secured_step:
            self._settled[Bucket.PRODUCTIVE] += took_ns
            return
        self._pending_ns += took_ns
        if self._pending and step <= self._pending[-1].last:
            entry = self._pending[-1]
            self._pending[-1] = _Trained(entry.first, entry.last, entry.took_ns + took_ns)
        else:
            self._pending.append(_Trained(step, step, took_ns))
            if len(self._pending) > MAX_PENDING:
                self._merge()

    def caught_up(self, step: int, at_ns: int) -> None:
        """Divide the training time since the last known step evenly among the steps up to `step`.

        A successor needs this for steps that ended under its predecessor, which did not record their times.
        """
        self.advance(at_ns)
        steps = (self._secured_step, self._pending[-1].last if self._pending else None)
        known = max((each for each in steps if each is not None), default=None)
        if known is None or step <= known or not self._tail_ns:
            return
        took_ns, self._tail_ns = self._tail_ns, 0
        self._stretch_ns = at_ns
        self._pending_ns += took_ns
        self._pending.append(_Trained(known + 1, step, took_ns))

    def secured(self, step: int) -> None:
        """Settle the time of steps <= `step` as productive, because no single fault can undo them now."""
        if self._secured_step is None or step > self._secured_step:
            self._secured_step = step
        self._settle(step, Bucket.PRODUCTIVE, keep_newer=True)

    def rolled_back(self, step: int, at_ns: int) -> None:
        """Settle the time of steps > `step`, including the step in progress, as lost."""
        self.advance(at_ns)
        self._settle(step, Bucket.LOST, keep_newer=False)
        self._settled[Bucket.LOST] += self._tail_ns
        self._tail_ns = 0
        if self._secured_step is not None:
            self._secured_step = min(self._secured_step, step)

    def begun_again(self, at_ns: int) -> None:
        """Settle the pending time as unknown, because only the script knows how much of it is repeated."""
        self.advance(at_ns)
        self._settle_all(Bucket.UNKNOWN)
        self._secured_step = None

    def finished(self, at_ns: int) -> None:
        """Settle the pending time as productive, because no fault can undo the result of a finished run."""
        self.advance(at_ns)
        self._settle_all(Bucket.PRODUCTIVE)

    def noticed(self, since_ns: int, at_ns: int) -> None:
        """Book the time since the fault's first symptom at `since_ns` as detection, and enter DETECT.

        Only the time of the step in progress can be rebooked. A symptom from before the end of the last step,
        or before the last change of activity, is moved to that time.
        """
        self.advance(at_ns)
        if self._activity is Bucket.PRODUCTIVE:
            moved_ns = min(max(0, at_ns - max(since_ns, self._stretch_ns)), self._tail_ns)
            self._tail_ns -= moved_ns
            self._settled[Bucket.DETECT] += moved_ns
        self._activity, self._stretch_ns = Bucket.DETECT, at_ns

    @property
    def activity(self) -> Bucket:
        return self._activity

    @property
    def at_ns(self) -> int:
        return self._at_ns

    @property
    def pending_ns(self) -> int:
        """The training time that is neither secured nor lost yet."""
        return self._pending_ns + self._tail_ns

    @property
    def tail_ns(self) -> int:
        """The training time since the last step ended; 0 while no rank trains."""
        return self._tail_ns if self._activity is Bucket.PRODUCTIVE else 0

    @property
    def good_ns(self) -> int:
        """The sum of the productive and the pending time."""
        return self._settled[Bucket.PRODUCTIVE] + self.pending_ns

    @property
    def total_ns(self) -> int:
        """The time since the ledger was opened: the sum of the buckets and the pending time."""
        return self._at_ns - self._opened_ns

    def buckets_ns(self) -> dict[Bucket, int]:
        """Return the settled time of each bucket, which never decreases."""
        return dict(self._settled)

    def ettr(self, still_ns: int = 0) -> float | None:
        """Return the effective training time ratio (ETTR) of the run. Pending time is treated as good.

        Returns None if it is unknown how much work was repeated. The last `still_ns` of the step in progress
        are not counted as good, because a rank without progress may be hanging.
        """
        if self._settled[Bucket.UNKNOWN]:
            return None
        return self._progress_ns(still_ns) / self.total_ns if self.total_ns else 0.0

    def ettr_over(self, window_s: float, now_ns: int, still_ns: int = 0) -> float | None:
        """Return the ETTR over the `window_s` seconds before `now_ns`. The window is at most a day.

        `still_ns` and None have the same meaning as in `ettr`. This call books the time up to `now_ns`, so it
        changes nothing if `now_ns` equals `at_ns`.
        """
        if now_ns != self._at_ns:
            self.advance(now_ns)
        if self._settled[Bucket.UNKNOWN]:
            return None
        width_ns = min(int(window_s * SECOND_NS), DAY_NS)
        window = self._hour if width_ns <= HOUR_NS else self._day
        return window.share(width_ns, now_ns, self._progress_ns(still_ns))

    def _progress_ns(self, still_ns: int) -> int:
        """Return the good time without the last `still_ns` of the step in progress."""
        return self.good_ns - min(max(0, still_ns), self._tail_ns)

    def snapshot(self) -> dict[str, Any]:
        """Return the whole ledger, for JSON."""
        return {
            "format": FORMAT,
            "opened_ns": self._opened_ns,
            "at_ns": self._at_ns,
            "stretch_ns": self._stretch_ns,
            "activity": self._activity.value,
            "settled_ns": {bucket.value: spent for bucket, spent in self._settled.items()},
            "pending": [[entry.first, entry.last, entry.took_ns] for entry in self._pending],
            "tail_ns": self._tail_ns,
            "secured_step": self._secured_step,
            "hour": self._hour.snapshot(),
            "day": self._day.snapshot(),
        }

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> Ledger:
        """Return a ledger that continues from the result of `snapshot`, with the same activity.

        Raises `ValueError` if `state` is not valid.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"ledger: expected an object, got {type(state).__name__}")
        if state.get("format") != FORMAT:
            raise ValueError(f"ledger: format {state.get('format')!r}; expected {FORMAT}")
        opened_ns, at_ns, stretch_ns, tail_ns = integers(state, "opened_ns", "at_ns", "stretch_ns", "tail_ns")
        try:
            ledger = cls(opened_ns, Bucket(state.get("activity")))
            settled_ns = {Bucket.UNKNOWN.value: 0, **state["settled_ns"]}  # missing in older journals
            ledger._settled = {bucket: settled_ns[bucket.value] for bucket in Bucket}
            ledger._pending = [_Trained(*map(int, entry)) for entry in state["pending"]]
            ledger._pending_ns = sum(entry.took_ns for entry in ledger._pending)
            ledger._hour.restore(state["hour"])
            ledger._day.restore(state["day"])
        except (
            KeyError,
            TypeError,
            OverflowError,
        ) as error:  # `json` accepts Infinity, which is not an integer
            raise ValueError(f"ledger: incomplete: {error!r}") from error
        integers(settled_ns, *(bucket.value for bucket in Bucket))
        ledger._at_ns, ledger._stretch_ns, ledger._tail_ns = at_ns, stretch_ns, tail_ns
        if state.get("secured_step") is not None:
            [ledger._secured_step] = integers(state, "secured_step")
        if sum(ledger._settled.values()) + ledger.pending_ns != ledger.total_ns:
            raise ValueError("ledger: the buckets do not add up to the clock")
        return ledger

    def _settle(self, step: int, bucket: Bucket, *, keep_newer: bool) -> None:
        kept: list[_Trained] = []
        for entry in self._pending:
            older_ns = entry.up_to(step)
            newer_ns = entry.took_ns - older_ns
            self._settled[bucket] += older_ns if keep_newer else newer_ns
            if keep_newer and step < entry.last:
                kept.append(_Trained(max(entry.first, step + 1), entry.last, newer_ns))
            elif not keep_newer and step >= entry.first:
                kept.append(_Trained(entry.first, min(entry.last, step), older_ns))
        self._pending = kept
        self._pending_ns = sum(entry.took_ns for entry in kept)

    def _settle_all(self, bucket: Bucket) -> None:
        self._settled[bucket] += self.pending_ns
        self._pending, self._pending_ns, self._tail_ns = [], 0, 0

    def _merge(self) -> None:
        """Merge the older half of the entries in pairs.

        Recent steps stay exact, because they may be rolled back.
        """
        half = MAX_PENDING // 4 * 2
        older, newer = self._pending[:half], self._pending[half:]
        self._pending = [
            _Trained(a.first, b.last, a.took_ns + b.took_ns)
            for a, b in zip(older[::2], older[1::2], strict=True)
        ] + newer


def _allowed(activity: Bucket) -> Bucket:
    if activity in (Bucket.LOST, Bucket.UNKNOWN):
        raise ValueError(f"activity: {activity.value} is a bucket for settled time, not an activity")
    return activity


class Window:
    """The good share of the last hour or day, computed from samples of the good time at fixed intervals.

    Between samples, the good time is interpolated linearly. It drops when work that was counted as good is
    lost later, so the share is clamped to 0..1. Memory use is bounded.
    """

    def __init__(self, slot_ns: int, slots: int) -> None:
        self.slot_ns = slot_ns
        self.width_ns = slot_ns * slots
        self._samples: deque[tuple[int, int]] = deque(maxlen=slots + 2)

    def advance(self, at_ns: int, to_ns: int, good_ns: int, grows: bool) -> None:
        """Add the samples from `at_ns` to `to_ns`. At `at_ns`, the good time was `good_ns`.

        `grows` is True if all of that time counts as good.
        """
        kept = self._samples.maxlen or 1
        first = at_ns // self.slot_ns + 1
        last = to_ns // self.slot_ns
        if not self._samples:
            self._samples.append((at_ns, good_ns))
        for slot in range(max(first, last - kept + 1), last + 1):
            edge_ns = slot * self.slot_ns
            self._samples.append((edge_ns, good_ns + (edge_ns - at_ns if grows else 0)))

    def share(self, width_ns: int, at_ns: int, good_ns: int) -> float:
        """Return the good share of the `width_ns` before `at_ns`, limited to the time that samples cover."""
        if not self._samples:
            return 0.0
        start_ns = max(at_ns - width_ns, self._samples[0][0])
        if at_ns <= start_ns:
            return 0.0
        gained = good_ns - self._at(start_ns, (at_ns, good_ns))
        return min(1.0, max(0.0, gained / (at_ns - start_ns)))

    def snapshot(self) -> list[list[int]]:
        return [list(sample) for sample in self._samples]

    def restore(self, samples: object) -> None:
        """Restore the result of `snapshot`. Raises `ValueError` for anything else."""
        if not isinstance(samples, list):
            raise ValueError(f"ledger window: expected a list, got {type(samples).__name__}")
        given = [(int(at_ns), int(good_ns)) for at_ns, good_ns in samples]
        if given != sorted(given, key=lambda sample: sample[0]):
            raise ValueError("ledger window: not in chronological order")
        self._samples.clear()
        self._samples.extend(given)

    def _at(self, start_ns: int, end: tuple[int, int]) -> float:
        before = self._samples[0]
        for sample in (*self._samples, end):
            if sample[0] > start_ns:
                share = (start_ns - before[0]) / (sample[0] - before[0])
                return before[1] + share * (sample[1] - before[1])
            before = sample
        return before[1]


def integers(state: Mapping[str, Any], *keys: str) -> list[int]:
    """Return the values of `keys` in `state`.

    Raises `ValueError` if a value is not an integer. The message names the first such value.
    """
    for key in keys:
        if type(state.get(key)) is not int:
            raise ValueError(f"ledger: {key} is {state.get(key)!r}; expected an integer")
    return [state[key] for key in keys]
