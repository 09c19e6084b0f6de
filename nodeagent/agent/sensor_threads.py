"""Runs each sensor in a separate thread, and reports calls that do not return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.process.clock import seconds_to_next_tick
from nodeagent.agent.inbox import Inbox
from nodeagent.model import Observation, kind_of
from nodeagent.sensing.pauses import LoopPauses
from nodeagent.sensing.progress import CallProgress, MarksProgress
from nodeagent.sensing.sensor import WAIT_S, Omission, Sensor, Unavailable

RETRY_S = 30.0  # the retry interval of a blind sensor: a driver's pod takes about as long to restart
REPORT_AFTER_S = 5.0  # longer calls are reported in every cycle
# A sensor whose reads take so long, so many times in a row, finds faults late. It is three of the sensors'
# periods of 5 s: of a longer time between two samples, only three periods count.
SLOW_S, SLOW_READS = 15.0, 3
SEEING, BLIND = 0.0, 1.0
NOT_YET = "it has not been read yet"
RELEASED = "closed, because an operator has released the GPUs"


@dataclass(frozen=True, slots=True)
class SensorStatus:
    """The current state of a sensor."""

    name: str
    sees: bool
    why: str  # the reason why the sensor is blind
    calls: int
    observations: int
    call_s: float  # duration of the last call, or the elapsed time of the current call
    in_call: bool
    left_out: tuple[Omission, ...] = ()  # the checks and entities that it omits, with reasons
    nothing_there: bool = False  # blind only because the node has nothing to observe
    released: bool = False  # closed only because an operator has released the GPUs
    step: str = ""  # the driver call within the current call, if the sensor marks its driver calls
    step_s: float = 0.0  # the duration of the step; if the sensor marks none, of the current call
    is_slow: bool | None = None  # its reads take so long that it finds faults late; None: unknown

    @property
    def tried(self) -> bool:
        """True if the sensor has been read, has reported that it is blind, or hangs."""
        return self.why != NOT_YET or (self.in_call and self.call_s >= REPORT_AFTER_S)


@dataclass(slots=True)
class FittedSensor:
    """A sensor, with functions that return its position and its omissions."""

    sensor: Sensor
    position: Callable[[], Any] = lambda: None  # where the sensor continues after a restart
    left_out: Callable[[], tuple[Omission, ...]] = tuple
    releases: bool = False  # it is closed while an operator has released the GPUs
    sees_xids: bool = False
    reads_state: bool = False  # it uses the disk of the saved state


class SensorThread:
    """A sensor and its daemon thread: a hung call does not keep the process alive."""

    def __init__(
        self,
        fitted: FittedSensor,
        inbox: Inbox,
        now_s: Callable[[], float],
        released: Callable[[], bool] = lambda: False,
        pauses: LoopPauses | None = None,
    ) -> None:
        """Create the object without starting the thread.

        Args:
            fitted: Its `position` and its `left_out` are called in the sensor's thread after each read; its
                `left_out` is also called by this constructor.
            released: Returns whether the GPUs are released now.
            pauses: When the agent did not run; None: it always did.
        """
        self.fitted = fitted
        self.position: Any = None  # everything read up to this position is in the inbox
        self._left_out = fitted.left_out()
        self._progress = (
            fitted.sensor.progress if isinstance(fitted.sensor, MarksProgress) else CallProgress()
        )
        self._inbox = inbox
        self._now_s = now_s
        self._released = released
        self._pauses = pauses or LoopPauses(WAIT_S)
        self._read_s: float | None = None  # the duration of the last read
        self._slow_reads = 0  # in a row, the newest ones
        self._stop, self._nudge = threading.Event(), threading.Event()
        name = f"sensor-{self.sensor.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._began = 0.0  # start of the current call, monotonic; 0 between calls
        self._took_s = 0.0
        self._sees, self._why, self._nothing_there = False, NOT_YET, False
        self._calls = self._observations = 0
        self.is_released = False  # closed for a release

    @property
    def sensor(self) -> Sensor:
        return self.fitted.sensor

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; it ends when its current call returns."""
        self._stop.set()
        self._nudge.set()

    def nudge(self) -> None:
        """End the pause between two calls, to make the thread notice a change of `released`."""
        self._nudge.set()

    def join(self, timeout_s: float) -> bool:
        """Return True if the thread has ended within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def status(self) -> SensorStatus:
        began = self._began
        now = time.monotonic()
        took_s = now - began if began else self._took_s
        step, marked = self._progress.newest()
        step, step_s = (step if marked >= began > 0 else ""), now - max(began, marked) if began else 0.0
        if step_s >= REPORT_AFTER_S:
            step_s -= self._pauses.within_s(now - step_s, now)
        sees, why, nothing_there = self._sees, self._why, self._nothing_there
        is_slow = self._is_slow()
        if is_slow and sees:
            sees, why = False, self._why_slow()
        if step_s >= REPORT_AFTER_S:  # its earlier readings do not show the current state
            sees, why, nothing_there = False, f"a call has not returned{f': {step}' if step else ''}", False
        return SensorStatus(
            self.sensor.name, sees, why, self._calls, self._observations, took_s, began > 0,
            self._left_out, nothing_there, self.is_released, step, step_s, is_slow,
        )  # fmt: skip

    def _is_slow(self) -> bool | None:
        """Return True after `SLOW_READS` slow reads in a row, False after one in time, otherwise None."""
        if self._slow_reads:
            return True if self._slow_reads >= SLOW_READS else None
        return None if self._read_s is None else False

    def _why_slow(self) -> str:
        return (
            f"each of its last {SLOW_READS} sweeps took more than {SLOW_S:g} s, the last one "
            f"{self._read_s or 0.0:.0f} s, so it finds faults late"
        )

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._is_to_be_released():
                self._sees, self._why, self.is_released = False, RELEASED, True
                self._pause(seconds_to_next_tick(WAIT_S))
                continue
            self.is_released = False
            try:
                self._call(self.sensor.open)
                self._read_until_blind()
            except Unavailable as error:
                self._nothing_there = error.nothing_there
                self._report_state(BLIND, str(error))
            except Exception as error:  # a bug in one sensor must not blind the node: report, close, retry
                self._nothing_there = False
                self._report_state(BLIND, f"{type(error).__name__}: {error}")
            self._call(self.sensor.close)
            if not self._is_interrupted():
                self._pause(RETRY_S)

    def _is_to_be_released(self) -> bool:
        return self.fitted.releases and self._released()

    def _is_interrupted(self) -> bool:
        return self._stop.is_set() or self._is_to_be_released()

    def _pause(self, seconds: float) -> None:
        self._nudge.wait(seconds)
        self._nudge.clear()

    def _read_until_blind(self) -> None:
        while not self._is_interrupted():
            self._observations += self._inbox.put(self._call(self._collect))
            self._note_duration(self._took_s)
            self.position = self.fitted.position()
            self._left_out = self.fitted.left_out()
            self._report_state(SEEING, "")
            if self.sensor.period_s:
                self._pause(seconds_to_next_tick(self.sensor.period_s))

    def _note_duration(self, took_s: float) -> None:
        """Count the reads in a row that took too long; those of the state's disk are reported otherwise."""
        sweeps = self.sensor.period_s > 0 and not self.fitted.reads_state
        if sweeps and took_s > SLOW_S:
            now = time.monotonic()
            took_s -= self._pauses.within_s(now - took_s, now)
        self._read_s = took_s
        self._slow_reads = self._slow_reads + 1 if sweeps and took_s > SLOW_S else 0

    def _collect(self) -> Iterable[Observation]:
        return tuple(self.sensor.read())

    def _call(self, call: Callable[[], Iterable[Observation] | None]) -> Iterable[Observation]:
        self._began = time.monotonic()
        try:
            return call() or ()
        finally:
            self._took_s, self._began = time.monotonic() - self._began, 0.0
            self._calls += 1

    def _report_state(self, state: float, why: str) -> None:
        changed = (state == SEEING) != self._sees or why != self._why
        self._sees, self._why = state == SEEING, why
        if changed:
            seen = Observation(
                self._now_s(), "sensor_lost", f"sensor/{self.sensor.name}", "agent", state, text=why
            )
            self._inbox.put((seen,))


def stuck_calls(
    all_watched: Iterable[SensorThread],
    statuses: Iterable[SensorStatus],
    reported: set[str],
    now_s: float,
) -> Iterator[Observation]:
    """Yield the duration of each sensor's current call while it is overdue, and 0 when it has returned.

    If the sensor marks the driver calls that it makes, the duration of the newest driver call is used,
    because a sweep of many slow calls is not a hang.

    Args:
        statuses: The status of each sensor.
        reported: The names of the sensors reported earlier; it is updated.
    """
    for watched, status in zip(all_watched, statuses, strict=True):
        long = status.in_call and status.step_s >= REPORT_AFTER_S
        if long or status.name in reported:
            yield _duration(status, now_s, long=long, reads_state=watched.fitted.reads_state)
        if long:
            reported.add(status.name)


def _duration(status: SensorStatus, now_s: float, *, long: bool, reads_state: bool) -> Observation:
    value = status.step_s if long else 0.0
    entity = f"sensor/{status.name}"
    if reads_state:  # a hung disk of the saved state is no reason to reboot the node
        text = f"the disk has not answered the sensor {status.name} for {value:.0f} s" if long else ""
        return Observation(now_s, "memory_lost", entity, "agent", float(long), text=text)
    text = f"in {status.step}" if long and status.step else ""
    return Observation(now_s, "sensor_stuck", entity, "agent", value, text=text)


def slow_sensors(statuses: Iterable[SensorStatus], reported: set[str], now_s: float) -> Iterator[Observation]:
    """Yield the sensors that have become too slow since the last call, and those that no longer are.

    Args:
        statuses: The status of each sensor.
        reported: The names of the sensors that are reported as too slow; it is updated.
    """
    for status in statuses:
        if status.is_slow is not None and status.is_slow != (status.name in reported):
            reported ^= {status.name}
            text = status.why if status.is_slow else ""
            yield Observation(
                now_s, "sensor_slow", f"sensor/{status.name}", "agent", float(status.is_slow), text=text
            )


def xids_are_unseen(statuses: Iterable[SensorStatus]) -> bool | None:
    """Return True if no sensor can see the Xids of some GPU now, although the node has GPUs.

    Returns None while that is unknown, because a sensor has not been tried yet or an operator has released
    the GPUs.
    """
    found = tuple(statuses)
    if any(each.nothing_there or (each.sees and not gpus_unseen(each)) for each in found) or not found:
        return False
    return None if any(each.released or not each.tried for each in found) else True


def gpus_unseen(status: SensorStatus) -> tuple[str, ...]:
    """Return the GPUs whose Xids a sensor omits, or what it says instead of naming them."""
    return tuple(each.what for each in status.left_out if each.what == "xid" or kind_of(each.what) == "gpu")
