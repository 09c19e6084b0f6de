"""Which sensors see a check. A table, from what the sensors say of themselves. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from nodeagent.host import sensor as host
from nodeagent.nvml import polling
from nodeagent.policy.overriding import KERNEL
from nodeagent.sysfs import sensor as sysfs

LOGS = ("kmsg", "journal")
_IN_LOGS = frozenset({"cleared", "observations_dropped"})  # besides the checks of kernel lines
_SEES: Mapping[str, frozenset[str]] = {
    "nvml-events": frozenset(
        {"recovery_action", "ecc_dbe", "ecc_sbe", "gpu_unavailable", "poison_fatal", "gpu_reset"}
    ),
    "nvml-polling": polling.CHECKS | {"gpu_reset", "replaced"},
    "host": host.CHECKS,
    "sysfs": sysfs.CHECKS,
    "agent": frozenset({"boot", "sensor_stuck", "sensor_lost", "memory_lost", "observations_dropped"}),
    "operator": frozenset({"cleared"}),
    **dict.fromkeys(LOGS, _IN_LOGS),
}
SENSORS = tuple(_SEES)  # `agent` is what the agent sees of itself


def sensors(check: str) -> tuple[str, ...]:
    """Return the names of the sensors that see a check; none for a name that there is not."""
    if check.startswith(KERNEL):
        return LOGS
    return tuple(name for name, checks in _SEES.items() if check in checks)
