"""Implements `holdfast node clear`: the command appends to a file, which a sensor reads.

The file is beside the saved state. To clear an entity this way, an operator needs only write permission. It
works while the agent is down, and the file remains as a record.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from math import isfinite
from pathlib import Path
from typing import Any

from nodeagent.model import Observation
from nodeagent.sensing.sensor import WAIT_S, Unavailable

FILE = "cleared.jsonl"
MAX_BYTES = 64 << 10  # read at a time
MAX_LINE = 1024


def record_clear(folder: Path, entity: str, why: str, wall_s: float) -> None:
    """Append a line that declares an entity healthy. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    line = json.dumps({"entity": entity[:200], "why": why[:500], "wall_s": round(wall_s, 3)})
    descriptor = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, f"{line}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class OperatorClear:
    """Reads new lines of the file. Each takes effect at the wall-clock time that it contains.

    Therefore a line that is read again, after the saved state was lost, does not clear a later finding.
    """

    name = "operator"
    period_s = WAIT_S

    def __init__(self, folder: Path, now_s: Callable[[], float], position: Any = None) -> None:
        self._path = folder / FILE
        self._now_s = now_s
        self._offset = position if type(position) is int and position >= 0 else 0

    def open(self) -> None: ...

    def close(self) -> None: ...

    def position(self) -> int:
        """Return the number of bytes read so far."""
        return self._offset

    def read(self) -> Iterable[Observation]:
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0  # the file has been replaced
                file.seek(self._offset)
                raw = file.read(MAX_BYTES)
        except FileNotFoundError:
            self._offset = 0
            return
        except OSError as error:
            raise Unavailable(f"{self._path} cannot be read: {error.strerror}") from None
        whole, newline, _ = raw.rpartition(b"\n")
        if not newline and len(raw) == MAX_BYTES:
            whole = raw  # the line is longer than any that the agent writes
        self._offset += len(whole) + len(newline)
        for line in whole.split(b"\n"):
            entity, said_s = _parse(line)
            if entity:
                at_s = min(said_s, self._now_s())
                yield Observation(at_s, "cleared", entity, self.name, text=line.decode(errors="replace"))


def _parse(line: bytes) -> tuple[str, float]:
    """Return a line's entity and time; "" as the entity if the line is malformed."""
    try:
        found = json.loads(line[:MAX_LINE])
    except (ValueError, RecursionError):
        return "", 0.0
    if not isinstance(found, dict):
        return "", 0.0
    entity, said_s = found.get("entity"), found.get("wall_s")
    if not isinstance(entity, str) or not isinstance(said_s, (int, float)) or not isfinite(said_s):
        return "", 0.0
    return entity, float(said_s)
