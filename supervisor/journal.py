"""The supervisor's memory on disk: one JSON line for each decision, with the view it was taken from.

A line is complete or it is not there: the last one may be torn by a kill and is then left out. What was
decided is written, and on disk, before anything is done about it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast import wire
from supervisor import view as views
from supervisor.view import Action, Memory, Policy, View

_ACTIONS = {
    name: getattr(views, name)
    for name in ("Wait", "Look", "Secure", "Start", "Settle", "Save", "Replace", "End", "Done")
}
_TAIL_BYTES = 8 << 20  # a line is a few KiB; the last whole one is always in here


class Journal:
    """Appends lines. One writer at a time: the run directory is locked."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab")
        self._mend()

    def _mend(self) -> None:
        """End a line that a kill tore, so that the next one stands alone."""
        size = self._file.tell()
        if not size:
            return
        with self._path.open("rb") as file:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                self._file.write(b"\n")
                self._file.flush()

    def write(self, view: View, policy: Policy, action: Action, after: Memory, ledger: Any) -> None:
        """Write one decision. Raises `OSError` when it is not on disk on return."""
        line = {
            "format": 1,
            "wall_s": view.wall_s,
            "action": type(action).__name__,
            "what": asdict(action),
            "view": asdict(view),
            "policy": asdict(policy),
            "after": asdict(after),
            "ledger": ledger,
        }
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def last(path: Path) -> tuple[Memory, Any, float] | None:
    """Return memory, ledger and wall time of the newest whole line; None when there is none."""
    for line in _backwards(path):
        found = _parse(line)
        if found is not None:
            return wire.from_json(Memory, found["after"]), found["ledger"], float(found["wall_s"])
    return None


def decisions(path: Path) -> Iterator[tuple[View, Policy, Action]]:
    """Yield every decision with its view, for replay. Torn lines are left out."""
    with path.open("rb") as file:
        for line in file:
            found = _parse(line)
            if found is not None:
                kind = _ACTIONS[found["action"]]
                yield (
                    wire.from_json(View, found["view"]),
                    wire.from_json(Policy, found["policy"]),
                    wire.from_json(kind, found["what"]),
                )


def _backwards(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return
    yield from reversed(lines)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(found, dict) and found.get("format") == 1 and "after" in found
    return found if whole else None
