"""The GPU's memory: ECC errors, remapped rows, retired pages, and the InfoROM that counts them."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref
from typing import Any

from nodeagent.nvml import library
from nodeagent.nvml.asking import Asker, Reading
from nodeagent.nvml.library import nvml


def uncorrected(asker: Asker) -> Iterator[Reading]:
    count = asker.ask(
        nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    )
    if count is not None:
        yield Reading("ecc_dbe", count)


def corrected(asker: Asker) -> Iterator[Reading]:
    count = asker.ask(
        nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC
    )
    if count is not None:
        yield Reading("ecc_sbe", count)


def sram(asker: Asker) -> Iterator[Reading]:
    status = asker.ask(_sram_status)
    if status is not None:
        total = status.aggregateUncParity + status.aggregateUncSecDed
        yield Reading(
            "ecc_sram_threshold", float(status.bThresholdExceeded != 0), f"{total} uncorrectable in all"
        )


def remapped_rows(asker: Asker) -> Iterator[Reading]:
    rows = asker.ask(nvml.nvmlDeviceGetRemappedRows)
    if rows is not None:
        by_correctable, by_uncorrectable, pending, failure = rows
        text = f"rows remapped: {by_correctable} for correctable errors, {by_uncorrectable} for uncorrectable"
        yield Reading("row_remap_pending", float(pending != 0), text)
        yield Reading("row_remap_failure", float(failure != 0), text)


def retired_pages(asker: Asker) -> Iterator[Reading]:
    by_single, by_double, pending = asker.fields(
        (nvml.NVML_FI_DEV_RETIRED_SBE, 0),
        (nvml.NVML_FI_DEV_RETIRED_DBE, 0),
        (nvml.NVML_FI_DEV_RETIRED_PENDING, 0),
    )
    if by_single is not None or by_double is not None:
        total = (by_single or 0) + (by_double or 0)
        yield Reading("retired_pages", total, f"{by_double or 0:g} of them for double-bit errors")
    if pending is not None:
        yield Reading("retired_pages_pending", float(pending != 0))


def inforom(asker: Asker) -> Iterator[Reading]:
    corrupted = asker.ask(_valid, answers={library.CORRUPTED_INFOROM: 1.0})
    if corrupted is not None:
        yield Reading("inforom", corrupted)


def _valid(handle: Any) -> float:
    nvml.nvmlDeviceValidateInforom(handle)
    return 0.0


def _sram_status(handle: Any) -> Any:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    nvml.nvmlDeviceGetSramEccErrorStatus(handle, byref(status))
    return status
