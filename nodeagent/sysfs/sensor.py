"""The sensor of sysfs: PCI devices, InfiniBand and network ports, temperatures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nodeagent.model import Observation
from nodeagent.sensing import baselines
from nodeagent.sensing.baselines import ForgetRequests, ForgottenBaselines
from nodeagent.sensing.clock import Clock
from nodeagent.sensing.sensor import Omission, Unavailable
from nodeagent.sensing.small_files import SYSFS, exists
from nodeagent.sensing.sweep import Sweep
from nodeagent.sysfs.infiniband import ExpectedPorts, InfiniBandPorts
from nodeagent.sysfs.network import NetworkInterfaces
from nodeagent.sysfs.pci import PciDevices
from nodeagent.sysfs.temperature import Temperatures

CHECKS = PciDevices.checks | InfiniBandPorts.checks | NetworkInterfaces.checks | Temperatures.checks
NOTHING_EXPECTED = ExpectedPorts()


class SysfsSensor:
    """Reads the checks that are due. Needs no privilege, but needs the host's sysfs, not the container's."""

    name = "sysfs"
    period_s = 5.0

    def __init__(
        self,
        clock: Clock,
        periods_s: Mapping[str, float],
        remembered: Mapping[str, Any] | None = None,
        root: Path = SYSFS,
        expected: ExpectedPorts = NOTHING_EXPECTED,
        forgets: ForgetRequests | None = None,
    ) -> None:
        """Create a sensor that has not read anything yet.

        Args:
            clock: Provides the times of the observations.
            periods_s: The seconds between two samples, by check; a check without an entry is not read.
            remembered: The result of `remembered` before the last restart.
            root: The root of a sysfs.
            expected: The number and rate of the InfiniBand ports that an operator expects to be up.
            forgets: Operators' requests to forget baselines; None for none.
        """
        self._root = root
        before = remembered or {}
        self._devices = PciDevices(
            str(root),
            _mapping(before.get("link_widths")),
            before.get("known_devices"),
            _mapping(before.get("device_counts")),
        )
        self._infiniband = InfiniBandPorts(
            str(root),
            expected,
            _mapping(before.get("port_gbps")),
            _mapping(before.get("port_counts")),
            before.get("known_ports"),
            before.get("port_roster"),
        )
        self._boot_id = clock.anchor.boot_id
        if before.get("boot_id", self._boot_id) != self._boot_id:
            self._infiniband.rebase_counts()
        self._interfaces = NetworkInterfaces(str(root), before.get("net_up"), before.get("known_interfaces"))
        self._forgotten = ForgottenBaselines(forgets, before.get("forgets_done"))
        self._forget: Mapping[str, Callable[[str], None]] = {
            baselines.WIDTHS: self._devices.forget,
            baselines.PORTS: self._infiniband.forget,
            baselines.INTERFACES: self._interfaces.forget,
        }
        groups = (self._devices, self._infiniband, self._interfaces, Temperatures(str(root)))
        self._sweep = Sweep(self.name, self.period_s, clock, periods_s, groups)

    def open(self) -> None:
        """Check that there is a sysfs. Raises Unavailable."""
        if not exists(f"{self._root}/class"):
            raise Unavailable(f"{self._root} is not a sysfs: mount the host's and give its path with --sys")

    def read(self) -> tuple[Observation, ...]:
        for request in self._forgotten.take():
            if forget := self._forget.get(request.baseline):
                forget(request.entity)
        return self._sweep.read()

    def close(self) -> None:
        """Do nothing, because no file is kept open."""

    def left_out(self) -> tuple[Omission, ...]:
        """Return the omissions of the last read, for the checks that have a period."""
        return self._sweep.left_out()

    def remembered(self) -> dict[str, Any]:
        """Return the state for the next process, as JSON; a new object at each call."""
        return {
            "boot_id": self._boot_id,
            "link_widths": self._devices.remembered(),
            "port_gbps": self._infiniband.remembered(),
            "port_counts": self._infiniband.remembered_counts(),
            "port_roster": self._infiniband.roster.remembered(),
            "net_up": self._interfaces.remembered(),
            "known_devices": self._devices.known.remembered(),
            "known_ports": self._infiniband.known.remembered(),
            "known_interfaces": self._interfaces.known.remembered(),
            "device_counts": self._devices.remembered_counts(),
            "forgets_done": self._forgotten.position(),
        }


def _mapping(raw: object) -> Mapping[Any, Any]:
    return raw if isinstance(raw, dict) else {}
