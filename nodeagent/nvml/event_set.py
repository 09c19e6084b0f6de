"""NVML's event set: every GPU that has events registered with it, and the wait for the next one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

from holdfast.beat import left_s
from nodeagent.nvml import inventory, library
from nodeagent.nvml.asking import Asker
from nodeagent.nvml.library import nvml
from nodeagent.sensor import WAIT_S

MAX_AT_ONCE = 256  # events of one wait: a storm must not keep the watchdog waiting

XID = nvml.nvmlEventTypeXidCriticalError
DOUBLE_BIT = nvml.nvmlEventTypeDoubleBitEccError
SINGLE_BIT_STORM = nvml.nvmlEventTypeSingleBitEccErrorStorm
FATAL_POISON = nvml.nvmlEventTypeFatalPoisonError
UNAVAILABLE = nvml.nvmlEventTypeGpuUnavailableError
RECOVERY_ACTION = nvml.nvmlEventTypeGpuRecoveryAction
WANTED = XID | DOUBLE_BIT | SINGLE_BIT_STORM | FATAL_POISON | UNAVAILABLE | RECOVERY_ACTION


class EventsFailed(Exception):
    """NVML gives no events now, though the driver is there: a GPU that is lost may end every wait."""


class EventSet:
    """One event set of one session. Every method may raise DriverGone, except `free`."""

    def __init__(self) -> None:
        """Create it, and register every GPU that takes part. Raises EventsFailed."""
        try:
            self._set = nvml.nvmlEventSetCreate()
        except library.Error as error:
            if error.value in library.DRIVER_GONE:
                raise library.driver_gone(error.value, "nvmlEventSetCreate") from None
            raise EventsFailed(f"nvmlEventSetCreate: {library.name(error.value)}") from None
        self._askers: dict[int, Asker] = {}  # by the handle's address
        try:
            for gpu in inventory.take().gpus:
                if self._registered(gpu.handle):
                    self._askers[_address(gpu.handle)] = Asker(gpu)
        except library.DriverGone:
            self.free()
            raise

    @property
    def empty(self) -> bool:
        return not self._askers

    def asker(self, data: Any) -> Asker | None:
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
            wanted = WANTED & _supported(handle)
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
            return int(XID)
        raise


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
