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
from nodeagent.nvml.inventory import Gpu
from nodeagent.nvml.library import DriverGone, nvml
from nodeagent.sensing.clock import Clock
from nodeagent.sensing.progress import CallProgress
from nodeagent.sensing.sensor import WAIT_S, Omission, Unavailable

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
# How often the registration of a GPU is repeated after a failure, because the driver may have been busy.
REGISTER_S = 60.0
# If a registration fails with one of these codes, it is repeated only in the next session: the GPU does not
# support it, or is gone, and the polling sensor renews the session to find a GPU that is back.
_FINAL = library.NEVER | library.GONE

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
        self._unseen: dict[str, Omission] = {}  # by the address of a GPU that NVML has opened
        self._to_repeat: list[Gpu] = []
        try:
            found = inventory.list_gpus(progress)
            for gpu in found.gpus:
                self._register(gpu)
        except library.DriverGone:
            self.free()
            raise
        self.count = found.count
        self._unopened = found.count - len(found.gpus)

    @property
    def sees_none(self) -> bool:
        """True if NVML lists GPUs, but reports the Xids of none of them."""
        return 0 < self.count <= len(self._unseen) + self._unopened

    @property
    def left_out(self) -> tuple[Omission, ...]:
        """The GPUs whose Xids NVML does not report."""
        if not self._unopened:
            return tuple(self._unseen.values())
        why = f"NVML cannot open {self._unopened} of {self.count} GPUs"
        return (*self._unseen.values(), Omission("xid", why))

    @property
    def is_incomplete(self) -> bool:
        """True if `register_again` may succeed for a GPU that is left out."""
        return bool(self._to_repeat)

    def register_again(self) -> None:
        """Repeat the registrations that may succeed now. Raises DriverGone."""
        again, self._to_repeat = self._to_repeat, []
        for gpu in again:
            self._register(gpu)

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

    def _register(self, gpu: Gpu) -> None:
        """Register a GPU, or note why NVML does not report its Xids. Raises DriverGone."""
        self._progress.mark("nvmlDeviceRegisterEvents", gpu.pci)
        self._unseen.pop(gpu.pci, None)
        code, is_open = int(library.NOT_SUPPORTED), False
        try:
            wanted = WANTED_EVENTS & _supported(gpu.handle)
            if wanted:
                nvml.nvmlDeviceRegisterEvents(gpu.handle, wanted, self._set)
                self._queries[_address(gpu.handle)] = GpuQuery(gpu, self._progress)
            if wanted & XID_EVENT:
                return
        except library.Error as error:
            code = int(error.value)
            if code in library.DRIVER_GONE:
                raise library.driver_gone(code, "nvmlDeviceRegisterEvents") from None
            if is_open := code not in _FINAL:
                self._to_repeat.append(gpu)
        why = f"its Xids are not reported: {library.name(code)}"
        self._unseen[gpu.pci] = Omission(gpu.entity, why, is_open)


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
        self._registered_s = 0.0  # when GPUs were last registered
        # By UUID: the last recovery action since the sensor joined NVML. Between two sessions, the driver may
        # forget its request without a reset; `polling` compares across them.
        self._requested: dict[str, GpuHistory] = {}

    def open(self) -> None:
        self._failed = 0
        self._join()

    def read(self) -> list[Observation]:
        """Wait for events for at most about `WAIT_S`.

        Raises Unavailable if the driver is gone, or reports the Xids of no GPU.
        """
        events = self._set
        if events is None or self._session is None or not self._driver.usable(self._session):
            events = self._join()
        if not events.count:
            self._pause(WAIT_S)  # waiting on a set without GPUs may fail immediately
            return []
        seen: list[Observation] = []
        try:
            self._complete(events)
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

    def left_out(self) -> tuple[Omission, ...]:
        """Return the GPUs whose Xids NVML does not report."""
        return () if self._set is None else self._set.left_out

    def _complete(self, events: NvmlEventSet) -> None:
        """Repeat the registrations that may succeed, every `REGISTER_S`. Raises DriverGone."""
        if events.is_incomplete and self._clock.now_s() - self._registered_s >= REGISTER_S:
            self._registered_s = self._clock.now_s()
            events.register_again()

    def close(self) -> None:
        if self._set is not None:
            self._set.free()
        self._set = self._session = None
        self._requested.clear()
        self.progress.mark("nvmlShutdown")
        self._driver.leave(self.name)

    def _join(self) -> NvmlEventSet:
        """Join NVML and return its event set. Raises Unavailable."""
        self.close()
        self.progress.mark("nvmlInit")
        try:
            self._session = self._driver.join(self.name)
            self._set = events = NvmlEventSet(self.progress)
            self._registered_s = self._clock.now_s()
        except DriverGone as gone:
            self._lose(gone)
        except EventsFailed as failed:
            self.close()
            raise Unavailable(str(failed)) from None
        if why := self._blindness(events):
            self.close()
            raise Unavailable(why)
        return events

    def _blindness(self, events: NvmlEventSet) -> str:
        """Return why the sensor can see no GPU's Xids; "" if it can, or if there is no GPU."""
        if events.sees_none:
            first = events.left_out[0]
            return f"NVML reports the Xids of none of {events.count} GPUs ({first.what}: {first.why})"
        if not events.count and inventory.gpu_bus(self._driver.sysfs, self._driver.devices).expected:
            return "NVML lists no GPU, although the driver has claimed some"
        return ""

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
