"""One NVML session shared by the sensors: the first to join opens it, the last to leave closes it.

Each sensor calls NVML from its own thread, between `join` and `leave`, and holds no lock during the call, so
a call that never returns does not block the other sensors. All calls belong to a session. A sensor that finds
the driver gone ends the session; the other sensors leave it before their next calls. NVML counts its
initialisations, so it can be shut down and reinitialised only after the last sensor has left. A sensor stuck
in a call prevents this, but then the driver's module cannot be replaced either. `join` then raises DriverGone
instead of waiting.

The only lock is never held during a call to NVML: a sensor marks the driver busy before it initialises NVML
or shuts it down.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from nodeagent.nvml import inventory, library
from nodeagent.nvml.library import DriverGone, nvml
from nodeagent.sensing.small_files import SYSFS

# How long to wait for another sensor's init, which takes seconds if no persistence daemon keeps the GPUs
# awake.
PATIENCE_S = 5.0
# Without this flag, init fails if every GPU has fallen off the bus. An empty list says more than that error.
_FLAGS = nvml.NVML_INIT_FLAG_NO_GPUS


@dataclass(frozen=True, slots=True)
class NvmlSession:
    """NVML from one init to its shutdown. Handles are valid within one session."""

    number: int
    driver: str = ""  # version: "575.57.08"
    nvml: str = ""
    branch: int | None = None  # the driver's branch, such as 575
    load: str = ""  # identifies the load of the kernel module: see `inventory.driver_load`
    after_loss: bool = False  # the previous session ended because the driver was gone


@dataclass(frozen=True, slots=True)
class _Ended:
    state: int
    why: str
    renewal: bool  # the session was healthy, and was ended only to search for GPUs again


class NvmlDriver:
    """The session and its users; see the module's docstring. May be used from any thread."""

    def __init__(
        self, sysfs: Path = SYSFS, patience_s: float = PATIENCE_S, devices: Path = inventory.DEVICES
    ) -> None:
        self.sysfs = sysfs
        self.devices = devices
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._busy = ""  # the sensor that is in nvmlInit or nvmlShutdown
        self._users: set[str] = set()
        self._session: NvmlSession | None = None
        self._ended: _Ended | None = None
        self._lost = False  # the driver was lost since the last session that started successfully
        self._number = 0
        self.branch: int | None = None  # the branch of the driver last seen

    def join(self, who: str) -> NvmlSession:
        """Return the open session, or open one.

        Blocks for the duration of nvmlInit, and for at most `patience_s` while another sensor initialises
        NVML or has not yet left an ended session.

        Raises:
            DriverGone: NVML is currently unusable.
        """
        with self._changed:
            self._users.discard(who)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._busy and not self._stayed(), self._patience_s)
            if self._busy:
                raise DriverGone(library.FAILED, f"an init or shutdown by {self._busy} has not returned")
            if self._ended is not None and self._users:
                if not self._ended.renewal:
                    others = ", ".join(sorted(self._users))
                    raise DriverGone(self._ended.state, f"{self._ended.why}; {others} is still in a call")
                self._ended = None
            if self._session is not None and self._ended is None:
                self._users.add(who)
                return self._session
            old, self._session, self._ended, self._busy = self._session, None, None, who
        return self._begin(who, old)

    def _stayed(self) -> bool:
        return self._ended is not None and bool(self._users)

    def _begin(self, who: str, old: NvmlSession | None) -> NvmlSession:
        session = None
        try:
            if old is not None:
                _shut_down()
            session = self._initialise()
        except DriverGone as gone:
            self._lost = self._lost or gone.state != library.FAILED
            raise
        finally:
            with self._changed:
                self._busy = ""
                self._session = session
                if session is not None:
                    self._lost = False
                    self._users.add(who)
                    self.branch = session.branch
                self._changed.notify_all()
        return session

    def _initialise(self) -> NvmlSession:
        during = "nvmlInit"
        begun = False
        try:
            nvml.nvmlInitWithFlags(_FLAGS)
            begun = True
            during = "nvmlSystemGetDriverVersion"
            version = str(nvml.nvmlSystemGetDriverVersion())
            library_version = str(nvml.nvmlSystemGetNVMLVersion())
        except library.Error as error:
            if begun:
                _shut_down()
            library.unload()
            raise library.driver_gone(error.value, during) from None
        self._number += 1
        load = inventory.driver_load(self.sysfs)
        return NvmlSession(self._number, version, library_version, branch_of(version), load, self._lost)

    def usable(self, session: NvmlSession) -> bool:
        """Return True if the session is still open. Takes no lock. Call before every blocking call."""
        return self._session is session and self._ended is None

    def lose(self, session: NvmlSession, gone: DriverGone) -> None:
        """End a session because NVML reports that the driver is gone. The caller must then call `leave`."""
        self._end(session, _Ended(gone.state, str(gone), renewal=False))

    def renew(self, session: NvmlSession) -> None:
        """End a session to detect GPUs that have come back. All sensors leave it and join the next one."""
        self._end(session, _Ended(library.OK, "", renewal=True))

    def _end(self, session: NvmlSession, ended: _Ended) -> None:
        with self._changed:
            if self._session is session and (self._ended is None or self._ended.renewal):
                self._ended = ended
                self._lost = self._lost or ended.state not in (library.OK, library.FAILED)
                self._changed.notify_all()

    def leave(self, who: str) -> None:
        """Stop using NVML; the last sensor shuts it down, which closes the GPUs' device files.

        Never raises; may be called repeatedly.
        """
        with self._changed:
            if who not in self._users:
                return
            self._users.discard(who)
            self._changed.notify_all()
            if self._users or self._session is None:
                return
            self._session, self._ended, self._busy = None, None, who
        _shut_down()
        with self._changed:
            self._busy = ""
            self._changed.notify_all()


def branch_of(version: str) -> int | None:
    """Return the branch of a driver's version: 575 of "575.57.08"."""
    first = version.partition(".")[0]
    return int(first) if first.isascii() and first.isdigit() and len(first) <= 6 else None


def _shut_down() -> None:
    try:
        nvml.nvmlShutdown()
    except library.Error:
        pass  # the driver is gone already
