"""The GPU's heat, and what the hardware does against it; whether the GPU is at work."""

from __future__ import annotations

from collections.abc import Iterator

from nodeagent.nvml.asking import Asker, Reading
from nodeagent.nvml.library import nvml

# Bits of the reasons why clocks are not at their maximum, of nvml.h.
IDLE = 0x1
_BY_HARDWARE = {0x8: "slowdown", 0x40: "thermal slowdown", 0x80: "power brake"}


def margin(asker: Asker) -> Iterator[Reading]:
    """How far it is to the slowdown: GPUs before Hopper, and drivers before R550, tell only the two ends."""
    left = asker.ask(nvml.nvmlDeviceGetMarginTemperature)
    if left is not None:
        yield Reading("gpu_temperature_margin", left)
        return
    limit = asker.ask(nvml.nvmlDeviceGetTemperatureThreshold, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    now = asker.ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU) if limit else None
    if limit and now is not None:
        yield Reading("gpu_temperature_margin", limit - now, f"{now} °C, slowdown at {limit} °C")


def throttled(asker: Asker) -> Iterator[Reading]:
    reasons = _reasons(asker)
    if reasons is None:
        return
    why = [word for bit, word in _BY_HARDWARE.items() if reasons & bit]
    cut = bool(why) and not reasons & IDLE
    yield Reading("gpu_throttled", float(cut), ", ".join(why))


def busy(asker: Asker) -> bool:
    """Say whether the GPU is at work, so that its links should be; True if it does not tell."""
    if (_reasons(asker) or 0) & IDLE:
        return False
    rates = asker.ask(nvml.nvmlDeviceGetUtilizationRates)
    return rates is None or rates.gpu > 0


def _reasons(asker: Asker) -> int | None:
    reasons = asker.ask(nvml.nvmlDeviceGetCurrentClocksEventReasons)
    if reasons is None:  # the name that drivers before R535 have for it
        reasons = asker.ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    return None if reasons is None else int(reasons)
