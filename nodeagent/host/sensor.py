"""The sensor of the host: /proc, the local file systems and the clock, each check at its own period."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nodeagent.host.filesystems import FileSystems
from nodeagent.host.resources import ResourceUsage
from nodeagent.host.stuck_threads import StuckThreads
from nodeagent.host.wall_clock import WallClock
from nodeagent.model import Observation
from nodeagent.sensing.clock import Clock
from nodeagent.sensing.sensor import Omission, Unavailable
from nodeagent.sensing.small_files import PROCFS, SYSFS, exists
from nodeagent.sensing.sweep import Sweep

CHECKS = ResourceUsage.checks | FileSystems.checks | WallClock.checks | StuckThreads.checks


class HostSensor:
    """Reads the checks that are due. Needs no privilege except those in `cli.privileges`."""

    name = "host"
    period_s = 5.0

    def __init__(
        self,
        clock: Clock,
        periods_s: Mapping[str, float],
        remembered: Mapping[str, Any] | None = None,
        proc: Path = PROCFS,
        root: Path | None = None,
        sys: Path = SYSFS,
    ) -> None:
        """Create a sensor that has not read anything yet.

        Args:
            clock: Provides the times of the observations.
            periods_s: The seconds between two samples, by check; a check without an entry is not read.
            remembered: The result of `remembered` before the last restart.
            proc: The procfs to read; in a container, the path where the host's procfs is mounted.
            root: In a container, the path where the host's file systems are mounted; None: use the
                mounts of this process.
            sys: The sysfs in which to look up the block devices of the mounts.
        """
        self._proc = proc
        where = None if root is None else str(root)
        self._disks = FileSystems(str(proc), where, clock.anchor.boot_id, remembered or {}, str(sys))
        groups = (ResourceUsage(str(proc)), self._disks, WallClock(), StuckThreads(str(proc)))
        self._sweep = Sweep(self.name, self.period_s, clock, periods_s, groups)

    def open(self) -> None:
        """Check that there is a procfs. Raises Unavailable."""
        if not exists(f"{self._proc}/loadavg"):
            raise Unavailable(f"{self._proc} is not a procfs: mount the host's and give its path with --proc")

    def read(self) -> tuple[Observation, ...]:
        return self._sweep.read()

    def close(self) -> None:
        """Do nothing, because no file is kept open."""

    def left_out(self) -> tuple[Omission, ...]:
        """Return the omissions of the last read, for the checks that have a period."""
        return self._sweep.left_out()

    def remembered(self) -> dict[str, Any]:
        """Return the state for the next process, as JSON; a new object at each call."""
        return self._disks.remembered()
