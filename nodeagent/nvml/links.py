"""The GPU's links: PCIe, NVLink, and the state of the NVLink fabric."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref
from typing import Any

from nodeagent.nvml import library, thermal
from nodeagent.nvml.asking import Asker, Reading
from nodeagent.nvml.library import nvml

# Counters of errors, by generation: for all links together up to Hopper; for each link; NVLink 5.
_TOTALS = (
    nvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    nvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
)
_OF_EACH_LINK = (
    (
        nvml.NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY,
        nvml.NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY,
        nvml.NVML_FI_DEV_NVLINK_ERROR_DL_CRC,
    ),
    (nvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS, nvml.NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS),
)


def pcie_link(asker: Asker) -> Iterator[Reading]:
    """The width against the most that GPU and slot have in common; of a GPU at rest only if it is full."""
    widest = asker.ask(nvml.nvmlDeviceGetMaxPcieLinkWidth)
    width = asker.ask(nvml.nvmlDeviceGetCurrPcieLinkWidth) if widest else None
    if widest and width is not None and (width >= widest or thermal.busy(asker)):
        yield Reading("pcie_link", width / widest, f"x{width} of x{widest}")


def pcie_replays(asker: Asker) -> Iterator[Reading]:
    count = asker.ask(nvml.nvmlDeviceGetPcieReplayCounter)
    if count is not None:
        yield Reading("pcie_replay", count)


def links_up(asker: Asker) -> dict[int, bool]:
    """Return whether each NVLink that the GPU has is up; nothing if it has none."""
    found: dict[int, bool] = {}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        active = asker.ask(nvml.nvmlDeviceGetNvLinkState, link)
        if active is not None:
            found[link] = bool(active)
    return found


def nvlink_down(up_now: dict[int, bool], were_up: set[int]) -> Iterator[Reading]:
    """Tell of links that are down; one that was never up is not wired. Links that are up enter `were_up`."""
    were_up.update(link for link, up in up_now.items() if up)
    if up_now and were_up:
        down = sorted(link for link in were_up if not up_now.get(link, True))
        text = f"of {len(were_up)} links down: {', '.join(map(str, down))}" if down else ""
        yield Reading("nvlink_down", len(down), text)


def nvlink_errors(asker: Asker) -> Iterator[Reading]:
    totals = [each for each in asker.fields(*((field, 0) for field in _TOTALS)) if each is not None]
    for fields in _OF_EACH_LINK:
        if totals:
            break
        keys = ((field, link) for link in range(_link_count(asker)) for field in fields)
        totals = [each for each in asker.fields(*keys) if each is not None]
    if totals:
        yield Reading("nvlink_errors", sum(totals))


def _link_count(asker: Asker) -> int:
    (count,) = asker.fields((nvml.NVML_FI_DEV_NVLINK_LINK_COUNT, 0))
    return min(int(count or 0), int(nvml.NVML_NVLINK_MAX_LINKS))


# -- the fabric

HEALTHY, IN_PROGRESS, LIMITED, UNHEALTHY = range(4)  # the states of the check `fabric`
_BY_STATE = {
    nvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: (IN_PROGRESS, "not started"),
    nvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: (IN_PROGRESS, ""),
}
_BY_SUMMARY = {
    nvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY: HEALTHY,
    nvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY: UNHEALTHY,
    nvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_LIMITED_CAPACITY: LIMITED,
}
# Of the health mask, gravest first: where the two bits are, what it means when they say that it is so.
_MASK = (
    (nvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY, UNHEALTHY, "route unhealthy"),
    (nvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY, UNHEALTHY, "access timeout"),
    (nvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW, LIMITED, "degraded bandwidth"),
    (nvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY, LIMITED, "route recovery"),
)
_CONFIGURED = (0, nvml.NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE)


def fabric(asker: Asker) -> Iterator[Reading]:
    info = asker.ask(_fabric_v3)
    summary = info.healthSummary if info is not None else 0
    if info is None:
        info = asker.ask(_fabric_v2)
    if info is not None and info.state != nvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        state, why = fabric_state(info.state, info.status, summary, info.healthMask)
        yield Reading("fabric", state, why)


def fabric_state(state: int, status: int, summary: int, mask: int) -> tuple[int, str]:
    """Return the check's value, and what NVML says of it. Pure.

    Args:
        state, status: How far the GPU has come in joining the fabric, and the code that it ended with.
        summary: 0 from drivers and GPUs that give the mask alone.
    """
    if state in _BY_STATE:
        return _BY_STATE[state]
    if status:
        return UNHEALTHY, f"the GPU could not join: {library.name(status)}"
    wrong = [(value, words) for shift, value, words in _MASK if mask >> shift & 0x3 == 1]
    configuration = mask >> nvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION & 0xF
    if configuration not in _CONFIGURED:
        wrong.append((LIMITED, f"incorrect configuration {configuration}"))
    why = ", ".join(words for _, words in wrong)
    if summary in _BY_SUMMARY:
        return _BY_SUMMARY[summary], why
    return max((value for value, _ in wrong), default=HEALTHY), why


def _fabric_v2(handle: Any) -> Any:
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
    return info


def _fabric_v3(handle: Any) -> Any:
    info = nvml.c_nvmlGpuFabricInfo_v3_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
    return info
