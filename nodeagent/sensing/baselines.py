"""Implements `holdfast node forget`: the command appends to a file, which the sensors with baselines read.

A baseline is what a sensor has seen of a node and expects from then on: its GPUs, the NVLinks that were up,
the widths of its PCIe links. After an intended change of the hardware, an operator has the sensor forget it.
The file is beside the saved state, as that of `operator_requests`; it works while the agent is down, and
remains as a record. A sensor learns the baseline again from what it sees next.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

FILE = "forgotten.jsonl"
MAX_BYTES = 64 << 10  # read at a time
MAX_LINE = 1024

GPUS, NVLINKS, WIDTHS, PORTS, INTERFACES = "gpus", "nvlinks", "pcie-widths", "ports", "interfaces"
BASELINES: Mapping[str, str] = MappingProxyType(
    {
        GPUS: "how many GPUs the node had",
        NVLINKS: "which NVLinks of each GPU were up",
        WIDTHS: "the greatest width of each PCIe link",
        PORTS: "which InfiniBand ports were up, and their best rates",
        INTERFACES: "which network interfaces were up",
    }
)


def record_forget(folder: Path, baseline: str, entity: str, why: str, wall_s: float) -> None:
    """Append a line that has a baseline forgotten, of one entity unless it is empty. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    line = {"baseline": baseline, "entity": entity[:200], "why": why[:500], "wall_s": round(wall_s, 3)}
    descriptor = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, f"{json.dumps(line)}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Forgotten:
    """An operator's request to forget a baseline."""

    baseline: str
    entity: str = ""  # "": of all entities


class ForgottenBaselines:
    """Reads the new lines of the file, for one sensor. Each line takes effect once, also across restarts."""

    def __init__(self, folder: Path | None, position: Any = None) -> None:
        """Take the state folder, None for none, and what `position` returned before a restart."""
        self._path = None if folder is None else folder / FILE
        self._offset = position if type(position) is int and position >= 0 else 0

    def position(self) -> int:
        """Return the number of bytes read so far."""
        return self._offset

    def take(self) -> Iterator[Forgotten]:
        """Yield the new requests. A file that cannot be read has none."""
        try:
            if self._path is None or (size := self._path.stat().st_size) == self._offset:
                return
            if size < self._offset:
                self._offset = 0  # the file has been replaced
            with self._path.open("rb") as file:
                file.seek(self._offset)
                raw = file.read(MAX_BYTES)
        except OSError:
            return
        whole, newline, _ = raw.rpartition(b"\n")
        if not newline and len(raw) == MAX_BYTES:
            whole = raw  # the line is longer than any that the agent writes
        self._offset += len(whole) + len(newline)
        for line in whole.split(b"\n"):
            if (found := _parse(line)) is not None:
                yield found


def _parse(line: bytes) -> Forgotten | None:
    """Return a line's request; None if the line is malformed."""
    try:
        found = json.loads(line[:MAX_LINE])
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    baseline, entity = found.get("baseline"), found.get("entity", "")
    if not isinstance(baseline, str) or baseline not in BASELINES or not isinstance(entity, str):
        return None
    return Forgotten(baseline, entity)
