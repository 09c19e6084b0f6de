"""The checks of one GPU that use NVML: temperature, memory errors, links, NVLink fabric."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from ctypes import byref
from functools import lru_cache
from typing import Any, TypeVar

from nodeagent.nvml import library
from nodeagent.nvml.gpu_query import FieldKey, GpuQuery, GpuReading
from nodeagent.nvml.library import nvml
from nodeagent.sensing.counter_sum import CounterSum

F = TypeVar("F", bound=Callable[..., Any])


def _calls(name: str) -> Callable[[F], F]:
    """Give a function the name of the NVML call that it makes, for findings about calls that fail or hang."""

    def named(function: F) -> F:
        function.__name__ = name
        return function

    return named


# Reasons for clocks below their maximum: bits defined in nvml.h.
IDLE = 0x1
_BY_HARDWARE = {0x8: "slowdown", 0x40: "thermal slowdown", 0x80: "power brake"}


def temperature_margin(query: GpuQuery) -> Iterator[GpuReading]:
    """Yield the margin to the slowdown temperature.

    GPUs before Hopper, and drivers before R550, report only the two temperatures, not the margin.
    """
    left = query.ask(nvml.nvmlDeviceGetMarginTemperature)
    if left is not None:
        yield GpuReading("gpu_temperature_margin", left)
        return
    limit = query.ask(nvml.nvmlDeviceGetTemperatureThreshold, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    now = query.ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU) if limit else None
    if limit and now is not None:
        yield GpuReading("gpu_temperature_margin", limit - now, f"{now} °C, slowdown at {limit} °C")


def throttled(query: GpuQuery) -> Iterator[GpuReading]:
    reasons = _clock_reasons(query)
    if reasons is None:
        return
    why = [word for bit, word in _BY_HARDWARE.items() if reasons & bit]
    cut = bool(why) and not reasons & IDLE
    yield GpuReading("gpu_throttled", float(cut), ", ".join(why))


def busy(query: GpuQuery) -> bool:
    """Return True if the GPU is busy and its links should be active, or if it does not report its load."""
    if (_clock_reasons(query) or 0) & IDLE:
        return False
    rates = query.once(nvml.nvmlDeviceGetUtilizationRates)
    return rates is None or rates.gpu > 0


def _clock_reasons(query: GpuQuery) -> int | None:
    reasons = query.once(nvml.nvmlDeviceGetCurrentClocksEventReasons)
    if reasons is None:  # the name of this call in drivers before R535
        reasons = query.once(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    return None if reasons is None else int(reasons)


def uncorrected_errors(query: GpuQuery) -> Iterator[GpuReading]:
    count = query.ask(
        nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    )
    if count is not None:
        yield GpuReading("ecc_dbe", count)


def corrected_errors(query: GpuQuery) -> Iterator[GpuReading]:
    count = query.ask(
        nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC
    )
    if count is not None:
        yield GpuReading("ecc_sbe", count)


def sram_threshold(query: GpuQuery) -> Iterator[GpuReading]:
    status = query.ask(_sram_status)
    if status is not None:
        total = status.aggregateUncParity + status.aggregateUncSecDed
        yield GpuReading(
            "ecc_sram_threshold", float(status.bThresholdExceeded != 0), f"{total} uncorrectable in all"
        )


def remapped_rows(query: GpuQuery) -> Iterator[GpuReading]:
    rows = query.ask(nvml.nvmlDeviceGetRemappedRows)
    if rows is not None:
        by_correctable, by_uncorrectable, pending, failure = rows
        text = f"rows remapped: {by_correctable} for correctable errors, {by_uncorrectable} for uncorrectable"
        yield GpuReading("row_remap_pending", float(pending != 0), text)
        yield GpuReading("row_remap_failure", float(failure != 0), text)


def retired_pages(query: GpuQuery) -> Iterator[GpuReading]:
    by_single, by_double, pending = query.fields(
        (nvml.NVML_FI_DEV_RETIRED_SBE, 0),
        (nvml.NVML_FI_DEV_RETIRED_DBE, 0),
        (nvml.NVML_FI_DEV_RETIRED_PENDING, 0),
    )
    if by_single is not None or by_double is not None:
        total = (by_single or 0) + (by_double or 0)
        yield GpuReading("retired_pages", total, f"{by_double or 0:g} of them for double-bit errors")
    if pending is not None:
        yield GpuReading("retired_pages_pending", float(pending != 0))


def inforom(query: GpuQuery) -> Iterator[GpuReading]:
    corrupted = query.ask(_valid, answers={library.CORRUPTED_INFOROM: 1.0})
    if corrupted is not None:
        yield GpuReading("inforom", corrupted)


@_calls("nvmlDeviceValidateInforom")
def _valid(handle: Any) -> float:
    nvml.nvmlDeviceValidateInforom(handle)
    return 0.0


@_calls("nvmlDeviceGetSramEccErrorStatus")
def _sram_status(handle: Any) -> Any:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    nvml.nvmlDeviceGetSramEccErrorStatus(handle, byref(status))
    return status


# Error counters by GPU generation: one for all links together up to Hopper; one per link; NVLink 5.
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


def pcie_link(query: GpuQuery) -> Iterator[GpuReading]:
    """Yield the width as a share of the width that GPU and slot support.

    An idle GPU yields only the full width, because an idle link is narrowed.
    """
    widest = query.constant(nvml.nvmlDeviceGetMaxPcieLinkWidth)
    width = query.ask(nvml.nvmlDeviceGetCurrPcieLinkWidth) if widest else None
    if widest and width is not None and (width >= widest or busy(query)):
        yield GpuReading("pcie_link", width / widest, f"x{width} of x{widest}")


def pcie_generation(query: GpuQuery) -> Iterator[GpuReading]:
    """Yield how many generations the link is below the newest that GPU and slot support.

    An idle GPU yields only 0, because an idle link slows down to save power.
    """
    newest = query.constant(nvml.nvmlDeviceGetMaxPcieLinkGeneration)
    now = query.ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration) if newest else None
    if newest and now and (now >= newest or busy(query)):
        yield GpuReading("pcie_generation", max(0, newest - now), f"generation {now} of {newest}")


def pcie_replays(query: GpuQuery) -> Iterator[GpuReading]:
    count = query.ask(nvml.nvmlDeviceGetPcieReplayCounter)
    if count is not None:
        yield GpuReading("pcie_replay", count)


def links_up(query: GpuQuery, were_up: Collection[int] = ()) -> dict[int, bool]:
    """Return whether each NVLink of the GPU is up, by link; empty if the GPU has no links or no link answers.

    A link that was down when it last answered stays down until it answers again. A link that has answered in
    this session, or was up in an earlier session, is known to exist. It is queried again even if the driver
    reports that it does not exist.
    """
    call = nvml.nvmlDeviceGetNvLinkState
    links = query.nvlinks if query.nvlinks is not None else range(nvml.NVML_NVLINK_MAX_LINKS)
    states = {link: query.ask(call, link) for link in links}
    found = {link: bool(state) for link, state in states.items() if state is not None}
    query.link_states.update(found)
    if len(found) == len(states):
        return found
    query.never.difference_update((call, (link,)) for link in {*query.link_states, *were_up})
    query.nvlinks = tuple(link for link in links if (call, (link,)) not in query.never)
    silent_down = {link: False for link, up in query.link_states.items() if not up and link not in found}
    return found | silent_down if found else {}


def mig_mode(query: GpuQuery) -> tuple[bool, bool] | None:
    """Return whether MIG is on, and whether it will be on after the next reset; None without MIG support."""
    modes = query.once(nvml.nvmlDeviceGetMigMode)
    return None if modes is None else (bool(modes[0]), bool(modes[1]))


def persistence_mode(query: GpuQuery) -> bool | None:
    """Return whether the driver keeps the GPU's state and counters while no program uses the GPU."""
    mode = query.ask(nvml.nvmlDeviceGetPersistenceMode)
    return None if mode is None else bool(mode)


def nvlink_down(up_now: dict[int, bool], were_up: set[int], mig: bool = False) -> Iterator[GpuReading]:
    """Yield the number of links that are down. A link that was never up is assumed not to be wired.

    Updates `were_up` with the links that are up now.

    Args:
        were_up: The links that were up in the GPU's present MIG mode.
        mig: Whether MIG is on, which may make all links inactive.
    """
    were_up.update(link for link, up in up_now.items() if up)
    if up_now and not were_up and mig:
        yield GpuReading("nvlink_down", 0, "MIG is on, and no link was ever up in this mode")
    elif up_now and were_up:
        down = sorted(link for link in were_up if up_now.get(link) is False)
        if not down and were_up - up_now.keys():
            return  # a link that was up does not answer, for example after a restart: it may still be down
        text = f"of {len(were_up)} links down: {', '.join(map(str, down))}" if down else ""
        yield GpuReading("nvlink_down", len(down), text)


def nvlink_errors(query: GpuQuery, total: CounterSum) -> Iterator[GpuReading]:
    """Yield the errors of all links: the sum of the first set of counters that the GPU has.

    Yields nothing while one of these counters cannot be read. Never adds counters of different sets.
    """
    for keys, names in _counter_sets(query):
        values = query.fields(*keys)
        if None in values:
            held = [n for n, key in enumerate(keys) if key not in query.never]
            if not held:
                continue
            names, values = tuple(names[n] for n in held), tuple(values[n] for n in held)
        count = total.add({n: None if v is None else int(v) for n, v in zip(names, values, strict=True)})
        if count is not None:
            yield GpuReading("nvlink_errors", count)
        return


def _counter_sets(query: GpuQuery) -> Iterator[tuple[tuple[FieldKey, ...], tuple[str, ...]]]:
    """Yield each set of counters that a GPU may have, with their names."""
    yield _named(*((field, 0) for field in _TOTALS))
    links = range(_link_count(query))
    for fields in _OF_EACH_LINK:
        yield _named(*((field, link) for link in links for field in fields))


@lru_cache(maxsize=8)
def _named(*keys: FieldKey) -> tuple[tuple[FieldKey, ...], tuple[str, ...]]:
    return keys, tuple(f"{field}/{link}" for field, link in keys)


def _link_count(query: GpuQuery) -> int:
    (count,) = query.fields((nvml.NVML_FI_DEV_NVLINK_LINK_COUNT, 0))
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
# The health mask, most severe first: the position of the two bits, and the state and text if they are set.
_MASK = (
    (nvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY, UNHEALTHY, "route unhealthy"),
    (nvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ACCESS_TIMEOUT_RECOVERY, UNHEALTHY, "access timeout"),
    (nvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_DEGRADED_BW, LIMITED, "degraded bandwidth"),
    (nvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_RECOVERY, LIMITED, "route recovery"),
)
_CONFIGURED = (0, nvml.NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NONE)


def fabric(query: GpuQuery) -> Iterator[GpuReading]:
    info = query.ask(_fabric_v3)
    summary = info.healthSummary if info is not None else 0
    if info is None:
        info = query.ask(_fabric_v2)
    if info is not None and info.state != nvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
        state, why = fabric_state(info.state, info.status, summary, info.healthMask)
        yield GpuReading("fabric", state, why)


def fabric_state(state: int, status: int, summary: int, mask: int) -> tuple[int, str]:
    """Return the check's value and its reason. Pure.

    Args:
        state, status: The GPU's progress in joining the fabric, and the result code of joining it.
        summary: 0 if the driver or the GPU reports only the mask.
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


@_calls("nvmlDeviceGetGpuFabricInfoV")
def _fabric_v2(handle: Any) -> Any:
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
    return info


@_calls("nvmlDeviceGetGpuFabricInfoV")
def _fabric_v3(handle: Any) -> Any:
    info = nvml.c_nvmlGpuFabricInfo_v3_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, byref(info))
    return info


def recovery_action(query: GpuQuery) -> Iterator[GpuReading]:
    """Yield the recovery action that the driver requests; drivers before R565 do not report one."""
    (action,) = query.fields((nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, 0))
    if action is not None:
        yield GpuReading("recovery_action", action)
