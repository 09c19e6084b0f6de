"""Checks of the temperatures in hwmon: each device's margin to its critical temperature."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from nodeagent.sensing.sensor import Omission
from nodeagent.sensing.small_files import exists, list_names, parse_number, parse_text, try_read
from nodeagent.sensing.sweep import CachedList, Reading
from nodeagent.sysfs.pci import nearest_address

MAX_PARTS = 512
# Firmware that knows no critical temperature writes 0, 255 or 65535; values outside these limits are ignored.
CRITICAL_MIN_C, CRITICAL_MAX_C = 40.0, 150.0
MIN_C, MAX_C = -40.0, 200.0

_INPUT = re.compile(r"(temp\d{1,4})_input")
_PACKAGE = re.compile(r"coretemp Package id \d+")


@dataclass(frozen=True, slots=True)
class TemperatureInput:
    """One temperature that has a critical value."""

    entity: str
    path: str
    label: str
    critical_c: float


def critical_c(raw: bytes | None) -> float | None:
    """Parse a critical temperature given in thousandths of a degree; None if it is implausible. Pure."""
    value = parse_number(raw)
    found = None if value is None else value / 1000
    return found if found is not None and CRITICAL_MIN_C <= found <= CRITICAL_MAX_C else None


def margin_c(raw: bytes | None, critical: float) -> float | None:
    """Return the degrees below `critical`; None for an implausible temperature. Pure."""
    value = parse_number(raw)
    return critical - value / 1000 if value is not None and MIN_C <= value / 1000 <= MAX_C else None


class Temperatures:
    """Checks the hwmon devices of one sysfs."""

    checks = frozenset({"host_temperature_margin"})

    def __init__(self, root: str) -> None:
        self._listing = CachedList(lambda: list_inputs(root))

    def read(self, due: frozenset[str], now_s: float) -> Iterable[Reading]:
        least: dict[str, Reading] = {}
        for part in self._listing.at(now_s):
            margin = margin_c(try_read(part.path), part.critical_c)
            if margin is None:
                continue
            words = f"{part.label}: {part.critical_c - margin:g} of {part.critical_c:g} °C"
            reading = Reading("host_temperature_margin", part.entity, round(margin, 3), words)
            before = least.get(part.entity)
            least[part.entity] = reading if before is None or margin < before.value else before
        return tuple(least.values())

    def left_out(self) -> tuple[Omission, ...]:
        if self._listing.last:
            return ()
        return (Omission("host_temperature_margin", "no device shows a critical temperature in hwmon"),)


def list_inputs(root: str) -> tuple[TemperatureInput, ...]:
    """Return the temperatures to check now."""
    found: list[TemperatureInput] = []
    base = f"{root}/class/hwmon"
    for name in list_names(base):
        folder = f"{base}/{name}"
        found += _of_one_package(_chip_inputs(folder))
    return tuple(found[:MAX_PARTS])


def _chip_inputs(folder: str) -> list[TemperatureInput]:
    entity = _entity(folder)
    chip = parse_text(try_read(f"{folder}/name")) or folder.rpartition("/")[2]
    found = []
    for each in list_names(folder):
        if match := _INPUT.fullmatch(each):
            critical = critical_c(try_read(f"{folder}/{match[1]}_crit"))
            if critical is not None:
                label = parse_text(try_read(f"{folder}/{match[1]}_label")) or match[1]
                found.append(TemperatureInput(entity, f"{folder}/{each}", f"{chip} {label}", critical))
    return found


def _of_one_package(found: list[TemperatureInput]) -> list[TemperatureInput]:
    """Return only the package's temperature if there is one.

    This is the temperature of the hottest core, so one read replaces a hundred.
    """
    packages = [each for each in found if _PACKAGE.fullmatch(each.label)]
    return packages or found


def _entity(folder: str) -> str:
    """Return the device's PCI address, otherwise the kernel's name: `device/coretemp.0`."""
    path = os.path.realpath(f"{folder}/device")
    if exists(f"{folder}/device"):
        return f"device/{nearest_address(path) or path.rpartition('/')[2]}"
    return f"device/{parse_text(try_read(f'{folder}/name')) or folder.rpartition('/')[2]}"
