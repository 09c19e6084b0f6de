"""Runs each sensor in a separate thread, and reports calls that do not return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.process.clock import seconds_to_next_tick
from nodeagent.agent.inbox import Inbox
from nodeagent.model import Observation
from nodeagent.sensing.progress import CallProgress, MarksProgress
from nodeagent.sensing.sensor import Omission, Sensor, Unavailable

RETRY_S = 30.0  # the retry interval of a blind sensor: a driver's pod takes about as long to restart
REPORT_AFTER_S = 5.0  # longer calls are reported in every cycle
SEEING, BLIND = 0.0, 1.0
NOT_YET = "it has not been read yet"


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
    step: str = ""  # the driver call within the current call, if the sensor marks them
    step_s: float = 0.0  # its duration; of the current call if the sensor marks none

    @property
    def tried(self) -> bool:
        """True once the sensor has been read, has reported that it is blind, or hangs."""
        return self.why != NOT_YET or (self.in_call and self.call_s >= REPORT_AFTER_S)


class SensorThread:
    """A sensor and its thread. It is a daemon thread, so that a hung call does not keep the process alive."""

    def __init__(
        self,
        sensor: Sensor,
        inbox: Inbox,
        now_s: Callable[[], float],
        position: Callable[[], Any] = lambda: None,
        left_out: Callable[[], tuple[Omission, ...]] = tuple,
    ) -> None:
        """Create the object without starting the thread.

        Args:
            position: Returns where the sensor continues after a restart. Called in the
                sensor's thread after each read.
            left_out: Returns the sensor's omissions. Called at the same times, and by this constructor.
        """
        self.sensor = sensor
        self.position: Any = None  # everything read up to this position is in the inbox
        self._position_of = position
        self._left_out_of, self._left_out = left_out, left_out()
        self._progress = sensor.progress if isinstance(sensor, MarksProgress) else CallProgress()
        self._inbox = inbox
        self._now_s = now_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sensor-{sensor.name}", daemon=True)
        self._began = 0.0  # start of the current call, monotonic; 0 between calls
        self._took_s = 0.0
        self._sees, self._why, self._nothing_there = False, NOT_YET, False
        self._calls = self._observations = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Request that the thread end; it ends once its current call returns."""
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Return True if the thread has ended within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def status(self) -> SensorStatus:
        began = self._began
        now = time.monotonic()
        took_s = now - began if began else self._took_s
        step, marked = self._progress.newest()
        step_s = now - max(began, marked) if began else 0.0
        return SensorStatus(
            self.sensor.name, self._sees, self._why, self._calls, self._observations, took_s, began > 0,
            self._left_out, self._nothing_there, step if marked >= began > 0 else "", step_s,
        )  # fmt: skip

    def _run(self) -> None:
        while not self._stop.is_set():
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
            self._stop.wait(RETRY_S)

    def _read_until_blind(self) -> None:
        while not self._stop.is_set():
            self._observations += self._inbox.put(self._call(self._collect))
            self.position = self._position_of()
            self._left_out = self._left_out_of()
            self._report_state(SEEING, "")
            if self.sensor.period_s:
                self._stop.wait(seconds_to_next_tick(self.sensor.period_s))

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
    all_watched: Iterable[SensorThread], reported: set[str], now_s: float
) -> Iterator[Observation]:
    """Yield the duration of each sensor's current call while it is overdue, and 0 once it has returned.

    If the sensor marks the driver calls that it makes, the duration is that of the newest one: a sweep of
    many slow calls does not hang.

    `reported` holds the names of the sensors reported earlier, and is updated.
    """
    for watched in all_watched:
        status = watched.status()
        long = status.in_call and status.step_s >= REPORT_AFTER_S
        if long or status.name in reported:
            value, text = (status.step_s, f"in {status.step}" if status.step else "") if long else (0.0, "")
            yield Observation(now_s, "sensor_stuck", f"sensor/{status.name}", "agent", value, text=text)
        if long:
            reported.add(status.name)
