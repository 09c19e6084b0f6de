"""The sensor that waits for NVML's events: Xids, and GPUs that have become unusable."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from holdfast.process.clock import left_s
from nodeagent import model
from nodeagent.model import VERDICT_XID, Observation
from nodeagent.nvml import gpu_checks, inventory, library
from nodeagent.nvml.driver import NvmlDriver, NvmlSession
from nodeagent.nvml.gpu_query import GpuGone, GpuQuery, GpuReading
from nodeagent.nvml.gpu_roster import GpuHistory
from nodeagent.nvml.library import DriverGone, nvml
from nodeagent.sensing.clock import Clock
from nodeagent.sensing.sensor import WAIT_S, Unavailable

MAX_AT_ONCE = 256  # events of one wait: a storm must not keep the watchdog waiting
XID_EVENT = nvml.nvmlEventTypeXidCriticalError
DOUBLE_BIT_EVENT = nvml.nvmlEventTypeDoubleBitEccError
SINGLE_BIT_STORM_EVENT = nvml.nvmlEventTypeSingleBitEccErrorStorm
FATAL_POISON_EVENT = nvml.nvmlEventTypeFatalPoisonError
GPU_UNAVAILABLE_EVENT = nvml.nvmlEventTypeGpuUnavailableError
RECOVERY_ACTION_EVENT = nvml.nvmlEventTypeGpuRecoveryAction
WANTED_EVENTS = (
    XID_EVENT
    | DOUBLE_BIT_EVENT
    | SINGLE_BIT_STORM_EVENT
    | FATAL_POISON_EVENT
    | GPU_UNAVAILABLE_EVENT
    | RECOVERY_ACTION_EVENT
)

WHOLE_GPU = 0xFFFFFFFF  # an event's instance ids, where it is about no MIG instance
MAX_FAILED = 4  # waits in a row

# What an event says by itself, and what it bids to look at.
_SAYS = {FATAL_POISON_EVENT: "poison_fatal", GPU_UNAVAILABLE_EVENT: "gpu_unavailable"}
_ASKS: dict[int, Callable[[GpuQuery], Iterator[GpuReading]]] = {
    DOUBLE_BIT_EVENT: gpu_checks.uncorrected_errors,
    SINGLE_BIT_STORM_EVENT: gpu_checks.corrected_errors,
    RECOVERY_ACTION_EVENT: gpu_checks.recovery_action,
}


class EventsFailed(Exception):
    """NVML gives no events now, though the driver is there: a GPU that is lost may end every wait."""


class NvmlEventSet:
    """One event set of one session. Every method may raise DriverGone, except `free`."""

    def __init__(self) -> None:
        """Create it, and register every GPU that takes part. Raises EventsFailed."""
        try:
            self._set = nvml.nvmlEventSetCreate()
        except library.Error as error:
            if error.value in library.DRIVER_GONE:
                raise library.driver_gone(error.value, "nvmlEventSetCreate") from None
            raise EventsFailed(f"nvmlEventSetCreate: {library.name(error.value)}") from None
        self._askers: dict[int, GpuQuery] = {}  # by the handle's address
        try:
            for gpu in inventory.list_gpus().gpus:
                if self._registered(gpu.handle):
                    self._askers[_address(gpu.handle)] = GpuQuery(gpu)
        except library.DriverGone:
            self.free()
            raise

    @property
    def empty(self) -> bool:
        return not self._askers

    def asker(self, data: Any) -> GpuQuery | None:
        """Return what asks the GPU that an event is about."""
        return self._askers.get(_address(data.device))

    def free(self) -> None:
        """Let go of the set. Never raises."""
        try:
            nvml.nvmlEventSetFree(self._set)
        except library.Error:
            pass  # it went with the driver

    def wait(self) -> Iterator[Any]:
        """Give what has come, in order; nothing if nothing comes in about `WAIT_S`. Raises EventsFailed."""
        wait_ms = int(left_s(WAIT_S) * 1000)
        for _ in range(MAX_AT_ONCE):
            try:
                data = nvml.nvmlEventSetWait_v2(self._set, wait_ms)
            except library.Error as error:
                if error.value == library.TIMEOUT:
                    return
                if error.value in library.DRIVER_GONE:
                    raise library.driver_gone(error.value, "nvmlEventSetWait") from None
                raise EventsFailed(f"nvmlEventSetWait: {library.name(error.value)}") from None
            yield data
            wait_ms = 0

    def _registered(self, handle: Any) -> bool:
        """Say whether the GPU tells its events from now on."""
        try:
            wanted = WANTED_EVENTS & _supported(handle)
            if wanted:
                nvml.nvmlDeviceRegisterEvents(handle, wanted, self._set)
            return bool(wanted)
        except library.Error as error:
            if error.value in library.DRIVER_GONE:
                raise library.driver_gone(error.value, "nvmlDeviceRegisterEvents") from None
            return False  # it is lost, or has no events: the polling sensor tells which


def _supported(handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetSupportedEventTypes(handle))
    except library.Error as error:
        if error.value in library.NEVER:
            return int(XID_EVENT)
        raise


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


class NvmlEvents:
    """Tells events within milliseconds; see `sensor.Sensor`.

    After the driver was gone it is Unavailable until it can be opened again, and then has registered anew.
    """

    name = "nvml-events"
    period_s = 0.0

    def __init__(
        self, driver: NvmlDriver, clock: Clock, pause: Callable[[float], object] = time.sleep
    ) -> None:
        self._driver = driver
        self._clock = clock
        self._pause = pause
        self._session: NvmlSession | None = None
        self._set: NvmlEventSet | None = None
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

    def _join(self) -> NvmlEventSet:
        """Return the event set of a session that goes on. Raises Unavailable."""
        self.close()
        try:
            self._session = self._driver.join(self.name)
            self._set = NvmlEventSet()
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
        nothing = not inventory.gpus_on_bus(self._driver.sysfs)
        where = ", and no NVIDIA GPU on the PCI bus" if nothing else ""
        raise Unavailable(f"no NVIDIA driver{where}: {gone}", nothing_there=nothing) from None

    def _told(self, data: Any, asker: GpuQuery | None) -> Iterator[Observation]:
        at_s = self._clock.now_s()
        kind, code = int(data.eventType), int(data.eventData)
        entity = asker.gpu.entity if asker else model.DRIVER
        facts = _facts(data, asker)
        if kind == XID_EVENT:
            text = f"NVML: Xid {code}"
            yield Observation(at_s, "xid", entity, self.name, float(code), text=text, facts=facts)
        elif kind in _SAYS:
            text = f"NVML event {kind:#x}, data {code}"
            yield Observation(at_s, _SAYS[kind], entity, self.name, text=text, facts=facts)
        ask = gpu_checks.recovery_action if kind == XID_EVENT and code == VERDICT_XID else _ASKS.get(kind)
        if asker is not None and ask is not None:
            yield from self._asked(asker, ask)

    def _asked(
        self, asker: GpuQuery, ask: Callable[[GpuQuery], Iterator[GpuReading]]
    ) -> Iterator[Observation]:
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


def _facts(data: Any, asker: GpuQuery | None) -> tuple[tuple[str, str], ...]:
    facts = [("uuid", asker.gpu.uuid)] if asker else []
    for name, number in (("gpu_instance", data.gpuInstanceId), ("compute_instance", data.computeInstanceId)):
        if number != WHOLE_GPU:
            facts.append((name, str(number)))
    return tuple(facts)
