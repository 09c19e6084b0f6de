"""Every check of a GPU that NVML answers, and what asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from nodeagent.nvml import links, memory, thermal
from nodeagent.nvml.asking import Asker, Reading
from nodeagent.nvml.history import GpuHistory
from nodeagent.nvml.library import nvml

Read = Callable[[Asker, GpuHistory], Iterable[Reading]]


@dataclass(frozen=True, slots=True)
class Probe:
    """Asks for the values of some checks at once."""

    checks: frozenset[str]
    read: Read


def recovery_action(asker: Asker) -> Iterator[Reading]:
    """What the driver says is to be done with the GPU: from R565 on."""
    (action,) = asker.fields((nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0))
    if action is not None:
        yield Reading("recovery_action", action)


def _alone(read: Callable[[Asker], Iterator[Reading]], *checks: str) -> Probe:
    return Probe(frozenset(checks), lambda asker, _history: read(asker))


PROBES = (
    _alone(recovery_action, "recovery_action"),
    _alone(memory.uncorrected, "ecc_dbe"),
    _alone(memory.corrected, "ecc_sbe"),
    _alone(memory.sram, "ecc_sram_threshold"),
    _alone(memory.remapped_rows, "row_remap_pending", "row_remap_failure"),
    _alone(memory.retired_pages, "retired_pages", "retired_pages_pending"),
    _alone(memory.inforom, "inforom"),
    _alone(thermal.margin, "gpu_temperature_margin"),
    _alone(thermal.throttled, "gpu_throttled"),
    _alone(links.pcie_link, "pcie_link"),
    _alone(links.pcie_replays, "pcie_replay"),
    Probe(
        frozenset({"nvlink_down"}),
        lambda asker, history: links.nvlink_down(links.links_up(asker), history.links),
    ),
    _alone(links.nvlink_errors, "nvlink_errors"),
    _alone(links.fabric, "fabric"),
)
# All that `NvmlPolling` tells as samples: what it is given the periods of.
CHECKS = frozenset({"nvml", "gpu_state", "gpu_count"}).union(*(probe.checks for probe in PROBES))
