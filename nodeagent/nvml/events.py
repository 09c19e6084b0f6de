"""The sensor that waits for what NVML tells by itself: Xids, and that a GPU is beyond use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from nodeagent import observation
from nodeagent.clock import Clock
from nodeagent.nvml import event_set, memory, presence, probes
from nodeagent.nvml.asking import Asker, GpuGone, Reading
from nodeagent.nvml.driver import Driver, Session
from nodeagent.nvml.event_set import EventSet, EventsFailed
from nodeagent.nvml.history import GpuHistory
from nodeagent.nvml.library import DriverGone
from nodeagent.observation import Observation
from nodeagent.sensor import WAIT_S, Unavailable

WHOLE_GPU = 0xFFFFFFFF  # an event's instance ids, where it is about no MIG instance
MAX_FAILED = 4  # waits in a row
VERDICT = 154  # the Xid by which the driver says what is to be done

# What an event says by itself, and what it bids to look at.
_SAYS = {event_set.FATAL_POISON: "poison_fatal", event_set.UNAVAILABLE: "gpu_unavailable"}
_ASKS: dict[int, Callable[[Asker], Iterator[Reading]]] = {
    event_set.DOUBLE_BIT: memory.uncorrected,
    event_set.SINGLE_BIT_STORM: memory.corrected,
    event_set.RECOVERY_ACTION: probes.recovery_action,
}


class NvmlEvents:
    """Tells events within milliseconds; see `sensor.Sensor`.

    After the driver was gone it is Unavailable until it can be opened again, and then has registered anew.
    """

    name = "nvml-events"
    period_s = 0.0

    def __init__(self, driver: Driver, clock: Clock, pause: Callable[[float], object] = time.sleep) -> None:
        self._driver = driver
        self._clock = clock
        self._pause = pause
        self._session: Session | None = None
        self._set: EventSet | None = None
        self._failed = 0  # waits in a row
        self._asked_for: dict[str, GpuHistory] = {}  # by UUID: what the driver wanted done

    def open(self) -> None:
        self._failed = 0
        self._join()

    def read(self) -> list[Observation]:
        """Wait for events, about `WAIT_S` at most. Raises Unavailable: the driver is gone."""
        events = self._set
        if events is None or self._session is None or not self._driver.usable(self._session):
            events = self._join()
        if events.empty:
            self._pause(WAIT_S)  # the wait of a set without GPUs may be an error at once
            return []
        seen: list[Observation] = []
        try:
            for data in events.wait():
                seen += self._told(data, events.asker(data))
            self._failed = 0
        except EventsFailed as failed:
            self._wait_failed(failed, bool(seen))
        except DriverGone as gone:
            if not seen:
                self._lose(gone)
            # What was seen goes first; the next wait finds the driver gone just as well.
        return seen

    def _wait_failed(self, failed: EventsFailed, seen_any: bool) -> None:
        """Have the GPUs that still answer registered anew; not in a tight loop, nor in silence for ever."""
        self._failed += 1
        if self._failed > MAX_FAILED and not seen_any:
            self.close()
            raise Unavailable(str(failed)) from None
        self._pause(WAIT_S)
        if self._set is not None:
            self._set.free()
        self._set = None

    def close(self) -> None:
        if self._set is not None:
            self._set.free()
        self._set = self._session = None
        self._driver.leave(self.name)

    def _join(self) -> EventSet:
        """Return the event set of a session that goes on. Raises Unavailable."""
        self.close()
        try:
            self._session = self._driver.join(self.name)
            self._set = EventSet()
            return self._set
        except DriverGone as gone:
            self._lose(gone)
        except EventsFailed as failed:
            self.close()
            raise Unavailable(str(failed)) from None

    def _lose(self, gone: DriverGone) -> NoReturn:
        """Leave NVML to whoever initialises it anew. Always raises Unavailable."""
        if self._session is not None:
            self._driver.lose(self._session, gone)
        self.close()
        nothing = not presence.gpus_on_bus(self._driver.sysfs)
        where = ", and no NVIDIA GPU on the PCI bus" if nothing else ""
        raise Unavailable(f"no NVIDIA driver{where}: {gone}", nothing_there=nothing) from None

    def _told(self, data: Any, asker: Asker | None) -> Iterator[Observation]:
        at_s = self._clock.now_s()
        kind, code = int(data.eventType), int(data.eventData)
        entity = asker.gpu.entity if asker else observation.DRIVER
        facts = _facts(data, asker)
        if kind == event_set.XID:
            text = f"NVML: Xid {code}"
            yield Observation(at_s, "xid", entity, self.name, float(code), text=text, facts=facts)
        elif kind in _SAYS:
            text = f"NVML event {kind:#x}, data {code}"
            yield Observation(at_s, _SAYS[kind], entity, self.name, text=text, facts=facts)
        ask = probes.recovery_action if kind == event_set.XID and code == VERDICT else _ASKS.get(kind)
        if asker is not None and ask is not None:
            yield from self._asked(asker, ask)

    def _asked(self, asker: Asker, ask: Callable[[Asker], Iterator[Reading]]) -> Iterator[Observation]:
        gpu = asker.gpu
        text = "asked for at an event"
        try:
            for each in ask(asker):
                at_s, value = self._clock.now_s(), float(each.value)
                yield Observation(at_s, each.check, gpu.entity, self.name, value, text=text)
                if each.check == "recovery_action":
                    known = self._asked_for.setdefault(gpu.uuid, GpuHistory(gpu.uuid))
                    if known.take_recovery(int(value)):
                        yield Observation(at_s, "gpu_reset", gpu.entity, self.name, text=text)
        except GpuGone:
            pass  # the polling sensor tells it


def _facts(data: Any, asker: Asker | None) -> tuple[tuple[str, str], ...]:
    facts = [("uuid", asker.gpu.uuid)] if asker else []
    for name, number in (("gpu_instance", data.gpuInstanceId), ("compute_instance", data.computeInstanceId)):
        if number != WHOLE_GPU:
            facts.append((name, str(number)))
    return tuple(facts)
