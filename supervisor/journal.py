"""The supervisor's memory on disk: one JSON line for each decision, with the view it was taken from.

A line is whole when its newline is there; what comes after the last newline was torn by a kill or a full disk
and does not exist. What was decided is written, and on disk, before anything is done about it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast import wire
from supervisor import view as views
from supervisor.view import Action, Memory, Policy, View

_ACTIONS = {
    name: getattr(views, name)
    for name in ("Wait", "Look", "Secure", "Start", "Settle", "Save", "Replace", "End", "Done")
}
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of the journal."""

    view: View
    policy: Policy
    action: Action
    after: Memory


class Journal:
    """Appends lines. One writer at a time: the run directory is locked."""

    def __init__(self, path: Path) -> None:
        """Open or create the journal, and cut off a line that a kill tore. Raises `OSError`."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = _whole_bytes(path)
        os.ftruncate(self._descriptor, self._size)

    def write(self, view: View, policy: Policy, action: Action, after: Memory, ledger: Any) -> None:
        """Write one decision.

        Raises `OSError` when it is not on disk on return; then it is not in the journal either, and the next
        one can be written all the same.
        """
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
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if os.fstat(self._descriptor).st_size != self._size:
            os.ftruncate(self._descriptor, self._size)
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
            os.fdatasync(self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):  # if this fails too, the next write does it
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        os.close(self._descriptor)


def last(path: Path) -> tuple[Memory, Any, float] | None:
    """Return memory, ledger and wall time of the newest whole line; None when there is none."""
    for line in _backwards(path):
        found = _parse(line)
        if found is not None:
            return wire.from_json(Memory, found["after"]), found["ledger"], float(found["wall_s"])
    return None


def last_decision(path: Path) -> Decision | None:
    """Return the newest decision: what its taker did about it, it may not have finished."""
    for line in _backwards(path):
        found = _parse(line)
        if found is not None:
            return _decision(found)
    return None


def has_lines_since(path: Path, offset_bytes: int) -> bool:
    """True when a whole line was written after the first `offset_bytes`."""
    try:
        with path.open("rb") as file:
            file.seek(offset_bytes)
            return any(_parse(line) is not None for line in file)
    except FileNotFoundError:
        return False


def decisions(path: Path) -> Iterator[Decision]:
    """Yield every decision, for replay."""
    with path.open("rb") as file:
        for line in file:
            found = _parse(line) if line.endswith(b"\n") else None
            if found is not None:
                yield _decision(found)


def _decision(found: dict[str, Any]) -> Decision:
    return Decision(
        wire.from_json(View, found["view"]),
        wire.from_json(Policy, found["policy"]),
        wire.from_json(_ACTIONS[found["action"]], found["what"]),
        wire.from_json(Memory, found["after"]),
    )


def _whole_bytes(path: Path) -> int:
    """Return the size of the file up to its last newline."""
    end = path.stat().st_size
    with path.open("rb") as file:
        while end > 0:
            begin = max(0, end - _BLOCK_BYTES)
            file.seek(begin)
            at = file.read(end - begin).rfind(b"\n")
            if at >= 0:
                return begin + at + 1
            end = begin
    return 0


def _backwards(path: Path) -> Iterator[bytes]:
    """Yield the whole lines, newest first, in bounded memory but for the line itself."""
    try:
        end = _whole_bytes(path)
    except FileNotFoundError:
        return
    with path.open("rb") as file:
        later = b""
        while end > 0:
            begin = max(0, end - max(_BLOCK_BYTES, len(later)))  # twice as much each time, for a long line
            file.seek(begin)
            first, *whole = (file.read(end - begin) + later).split(b"\n")
            yield from reversed(whole)
            end, later = begin, first
        yield later


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(found, dict) and found.get("format") == 1 and "after" in found
    return found if whole else None
