"""The sensor that waits for NVML's events: Xids, and GPUs that have become unusable."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from holdfast.process.clock import seconds_to_next_tick
from nodeagent import model
from nodeagent.model import VERDICT_XID, Observation
from nodeagent.nvml import gpu_checks, inventory, library
from nodeagent.nvml.driver import NvmlDriver, NvmlSession
from nodeagent.nvml.gpu_query import GpuGone, GpuQuery, GpuReading
from nodeagent.nvml.gpu_roster import GpuHistory
from nodeagent.nvml.library import DriverGone, nvml
from nodeagent.sensing.clock import Clock
from nodeagent.sensing.progress import CallProgress
from nodeagent.sensing.sensor import WAIT_S, Unavailable

MAX_AT_ONCE = 256  # events per wait: a storm must not delay the watchdog
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

WHOLE_GPU = 0xFFFFFFFF  # an event's instance ids, unless it concerns a MIG instance
MAX_FAILED = 4  # waits that may fail in a row

# The check that an event reports directly, and the reading that an event triggers.
_CHECK_OF = {FATAL_POISON_EVENT: "poison_fatal", GPU_UNAVAILABLE_EVENT: "gpu_unavailable"}
_READ_AT: dict[int, Callable[[GpuQuery], Iterator[GpuReading]]] = {
    DOUBLE_BIT_EVENT: gpu_checks.uncorrected_errors,
    SINGLE_BIT_STORM_EVENT: gpu_checks.corrected_errors,
    RECOVERY_ACTION_EVENT: gpu_checks.recovery_action,
}
# Every check that the sensor reports.
CHECKS = frozenset({*_CHECK_OF.values(), "ecc_dbe", "ecc_sbe", "recovery_action", "gpu_reset"})


class EventsFailed(Exception):
    """Raised if NVML delivers no events although the driver is loaded, for example because a GPU is lost."""


class NvmlEventSet:
    """One event set of one session. Every method may raise DriverGone, except `free`."""

    def __init__(self, progress: CallProgress) -> None:
        """Create the set and register every GPU that supports events. Raises EventsFailed."""
        self._progress = progress
        progress.mark("nvmlEventSetCreate")
        try:
            self._set = nvml.nvmlEventSetCreate()
        except library.Error as error:
            if error.value in library.DRIVER_GONE:
                raise library.driver_gone(error.value, "nvmlEventSetCreate") from None
            raise EventsFailed(f"nvmlEventSetCreate: {library.name(error.value)}") from None
        self._queries: dict[int, GpuQuery] = {}  # by the handle's address
        try:
            for gpu in inventory.list_gpus(progress).gpus:
                progress.mark("nvmlDeviceRegisterEvents", gpu.pci)
                if self._registered(gpu.handle):
                    self._queries[_address(gpu.handle)] = GpuQuery(gpu, progress)
        except library.DriverGone:
            self.free()
            raise

    @property
    def empty(self) -> bool:
        return not self._queries

    def query(self, data: Any) -> GpuQuery | None:
        """Return the query for the GPU that an event is about."""
        return self._queries.get(_address(data.device))

    def free(self) -> None:
        """Free the set. Never raises."""
        try:
            nvml.nvmlEventSetFree(self._set)
        except library.Error:
            pass  # freed when the driver was unloaded

    def wait(self) -> Iterator[Any]:
        """Yield the events in order; return after about `WAIT_S` if none arrive. Raises EventsFailed."""
        wait_ms = int(seconds_to_next_tick(WAIT_S) * 1000)
        for _ in range(MAX_AT_ONCE):
            self._progress.mark("nvmlEventSetWait")
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
        """Register a GPU; return True if it will report events."""
        try:
            wanted = WANTED_EVENTS & _supported(handle)
            if wanted:
                nvml.nvmlDeviceRegisterEvents(handle, wanted, self._set)
            return bool(wanted)
        except library.Error as error:
            if error.value in library.DRIVER_GONE:
                raise library.driver_gone(error.value, "nvmlDeviceRegisterEvents") from None
            return False  # the GPU is lost or does not support events; the polling sensor reports a lost one


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
    """Reports events within milliseconds; see `sensor.Sensor`.

    If the driver is gone, the sensor is Unavailable until NVML can be initialised again. It then registers
    all GPUs again.
    """

    name = "nvml-events"
    period_s = 0.0

    def __init__(
        self, driver: NvmlDriver, clock: Clock, pause: Callable[[float], object] = time.sleep
    ) -> None:
        self.progress = CallProgress()
        self._driver = driver
        self._clock = clock
        self._pause = pause
        self._session: NvmlSession | None = None
        self._set: NvmlEventSet | None = None
        self._failed = 0  # waits that have failed in a row
        self._requested: dict[str, GpuHistory] = {}  # by UUID: the last recovery action

    def open(self) -> None:
        self._failed = 0
        self._join()

    def read(self) -> list[Observation]:
        """Wait for events for at most about `WAIT_S`. Raises Unavailable if the driver is gone."""
        events = self._set
        if events is None or self._session is None or not self._driver.usable(self._session):
            events = self._join()
        if events.empty:
            self._pause(WAIT_S)  # waiting on a set without GPUs may fail immediately
            return []
        seen: list[Observation] = []
        try:
            for data in events.wait():
                seen += self._observations(data, events.query(data))
            self._failed = 0
        except EventsFailed as failed:
            self._wait_failed(failed, bool(seen))
        except DriverGone as gone:
            if not seen:
                self._lose(gone)
            # Return the events collected so far first; the next wait will also find the driver gone.
        return seen

    def _wait_failed(self, failed: EventsFailed, seen_any: bool) -> None:
        """Pause, then register the responding GPUs again; raise Unavailable after `MAX_FAILED` waits."""
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
        self.progress.mark("nvmlShutdown")
        self._driver.leave(self.name)

    def _join(self) -> NvmlEventSet:
        """Join NVML and return its event set. Raises Unavailable."""
        self.close()
        self.progress.mark("nvmlInit")
        try:
            self._session = self._driver.join(self.name)
            self._set = NvmlEventSet(self.progress)
            return self._set
        except DriverGone as gone:
            self._lose(gone)
        except EventsFailed as failed:
            self.close()
            raise Unavailable(str(failed)) from None

    def _lose(self, gone: DriverGone) -> NoReturn:
        """End the session and leave NVML. Always raises Unavailable."""
        if self._session is not None:
            self._driver.lose(self._session, gone)
        self.close()
        nothing = not inventory.gpus_on_bus(self._driver.sysfs)
        where = ", and no NVIDIA GPU on the PCI bus" if nothing else ""
        raise Unavailable(f"no NVIDIA driver{where}: {gone}", nothing_there=nothing) from None

    def _observations(self, data: Any, query: GpuQuery | None) -> Iterator[Observation]:
        at_s = self._clock.now_s()
        kind, code = int(data.eventType), int(data.eventData)
        entity = query.gpu.entity if query else model.DRIVER
        facts = _facts(data, query)
        if kind == XID_EVENT:
            text = f"NVML: Xid {code}"
            yield Observation(at_s, "xid", entity, self.name, float(code), text=text, facts=facts)
        elif kind in _CHECK_OF:
            text = f"NVML event {kind:#x}, data {code}"
            yield Observation(at_s, _CHECK_OF[kind], entity, self.name, text=text, facts=facts)
        ask = gpu_checks.recovery_action if kind == XID_EVENT and code == VERDICT_XID else _READ_AT.get(kind)
        if query is not None and ask is not None:
            yield from self._queried(query, ask)

    def _queried(
        self, query: GpuQuery, ask: Callable[[GpuQuery], Iterator[GpuReading]]
    ) -> Iterator[Observation]:
        gpu = query.gpu
        text = "read after an event"
        try:
            for each in ask(query):
                at_s, value = self._clock.now_s(), float(each.value)
                yield Observation(at_s, each.check, gpu.entity, self.name, value, text=text)
                if each.check == "recovery_action":
                    known = self._requested.setdefault(gpu.uuid, GpuHistory(gpu.uuid))
                    if known.take_recovery(int(value)):
                        yield Observation(at_s, "gpu_reset", gpu.entity, self.name, text=text)
        except GpuGone:
            pass  # the polling sensor reports it


def _facts(data: Any, query: GpuQuery | None) -> tuple[tuple[str, str], ...]:
    facts = [("uuid", query.gpu.uuid)] if query else []
    for name, number in (("gpu_instance", data.gpuInstanceId), ("compute_instance", data.computeInstanceId)):
        if number != WHOLE_GPU:
            facts.append((name, str(number)))
    return tuple(facts)
