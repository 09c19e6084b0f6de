"""The supervisor's memory on disk: one JSON line for each decision, with the view it was taken from.

A line is whole when its newline is there; what comes after the last newline was torn by a kill or a full disk
and does not exist. What was decided is written, and on disk, before anything is done about it.

A whole line that cannot be read (damaged, or written by a version that knows more) costs that line, never the
supervisor: the line before it counts. Fields that a later version added are passed over.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from holdfast.fileio import durable
from holdfast.protocol import codec
from supervisor.store.leadership import Lead
from supervisor.view.model import Action, JobState, Policy, View

log = logging.getLogger(__name__)

_ACTIONS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Action)}
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of the journal."""

    view: View
    policy: Policy
    action: Action
    after: JobState


@dataclass(frozen=True, slots=True)
class LastEntry:
    """What the journal knows last. `decision` is None where all but the memory of its line is unreadable."""

    memory: JobState
    ledger: Any
    decision: Decision | None  # what its taker did about it, it may not have finished
    epoch: int = 0  # of its taker


class Journal:
    """Appends lines. One writer at a time: the run directory is locked, and who is replaced has no lead."""

    def __init__(self, path: Path, lead: Lead | None = None) -> None:
        """Open or create the journal, and cut off a line that a kill tore.

        One that cannot be opened is no reason not to supervise: each write tries again.
        """
        self._path = path
        self._descriptor = -1
        self._lead = lead or Lead()
        try:
            with self._lead.acting():
                self._open()
        except OSError as error:
            log.error("journal not opened", extra={"error": str(error)})

    def _open(self) -> None:
        if self._descriptor >= 0:
            return
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._size = _whole_bytes(self._path)
            os.ftruncate(descriptor, self._size)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def write(self, view: View, policy: Policy, action: Action, after: JobState, ledger: Any) -> None:
        """Write one decision.

        Raises `OSError` when it is not on disk on return; then it is not in the journal either, and the next
        one can be written all the same. Raises `Deposed`, with the journal as it was, when another supervisor
        has taken the run over.
        """
        with self._lead.acting():
            self._write(view, policy, action, after, ledger)

    def _write(self, view: View, policy: Policy, action: Action, after: JobState, ledger: Any) -> None:
        seen = asdict(view)
        if view.memory.history == after.history:  # up to half of the line: once is enough
            del seen["memory"]["history"]
        line = {
            "format": 1,
            "epoch": self._lead.epoch,
            "wall_s": view.wall_s,
            "action": type(action).__name__,
            "what": asdict(action),
            "view": seen,
            "policy": asdict(policy),
            "after": asdict(after),
            "ledger": ledger,
        }
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        self._open()
        found = os.fstat(self._descriptor)
        if not found.st_nlink:  # somebody has removed it: nobody could read what is written to it
            self._name_again()
        if found.st_size != self._size:
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

    def _name_again(self) -> None:
        """Give the journal its name back, with all that it holds. Raises `OSError`."""
        with durable.replacement(self._path) as temporary:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            descriptor = os.open(temporary, flags, 0o600)
            try:
                at = 0
                while at < self._size and (part := os.pread(self._descriptor, _BLOCK_BYTES, at)):
                    at += os.write(descriptor, part)
                os.fdatasync(descriptor)
                os.replace(temporary, self._path)
            except OSError:
                os.close(descriptor)
                raise
        os.close(self._descriptor)
        self._descriptor = descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def last(path: Path) -> LastEntry | None:
    """Return what the newest line holds whose memory can be read; None when there is none."""
    unread: list[str] = []
    held: LastEntry | None = None
    try:
        for line in _backwards(path):
            found = _parse(line)
            if found is None:
                continue
            try:
                held = _held(found)
                break
            except ValueError as error:
                unread.append(str(error))
    except OSError as error:  # the members tell what they run, and storage what it has
        unread.append(str(error))
    if unread:
        log.warning("journal lines passed over", extra={"lines": len(unread), "newest": unread[0]})
    return held


def _held(found: dict[str, Any]) -> LastEntry:
    memory = codec.from_json(JobState, found["after"], lenient=True)
    try:
        decision = _decision(found)
    except ValueError as error:
        log.warning("decision in the journal not read", extra={"error": str(error)})
        decision = None
    epoch = found.get("epoch")  # lines of earlier versions have none
    return LastEntry(memory, found.get("ledger"), decision, epoch if type(epoch) is int else 0)


def has_lines_since(path: Path, offset_bytes: int) -> bool:
    """True when a whole line was written after the first `offset_bytes`, as far as that can be read."""
    try:
        with path.open("rb") as file:
            file.seek(offset_bytes)
            return any(_parse(line) is not None for line in file)
    except OSError:
        return False


def decisions(path: Path) -> Iterator[Decision]:
    """Yield every decision that can be read, for replay."""
    with path.open("rb") as file:
        for line in file:
            found = _parse(line) if line.endswith(b"\n") else None
            if found is not None:
                with contextlib.suppress(ValueError):
                    yield _decision(found)


def _decision(found: dict[str, Any]) -> Decision:
    """Raises `ValueError` when anything in it is not what this version knows."""
    kind = _ACTIONS.get(str(found.get("action")))
    if kind is None:
        raise ValueError(f"an action {found.get('action')!r}, which this version does not know")
    return Decision(
        codec.from_json(View, _present(found.get("view"), found["after"]), lenient=True),
        codec.from_json(Policy, found.get("policy"), lenient=True),
        codec.from_json(kind, found.get("what"), lenient=True),
        codec.from_json(JobState, found["after"], lenient=True),
    )


def _present(view: Any, after: Any) -> Any:
    """Return a view in full, and as it is now: before, there was at most one checkpoint in it."""
    if not isinstance(view, dict):
        return view
    memory = view.get("memory")
    if isinstance(memory, dict) and isinstance(after, dict) and "history" in after:
        view = {**view, "memory": {"history": after["history"], **memory}}
    if "checkpoint" not in view or "stored" in view:
        return view
    known = [] if view["checkpoint"] is None else [view["checkpoint"]]
    return {**view, "stored": {"checkpoints": known}}


def size(path: Path) -> int:
    """Return the bytes of the whole lines: what is beyond them is cut off by the next who writes.

    Raises `OSError`; a journal that is not there has none.
    """
    try:
        return _whole_bytes(path)
    except FileNotFoundError:
        return 0


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
    except (ValueError, RecursionError):
        return None
    whole = isinstance(found, dict) and found.get("format") == 1 and "after" in found
    return found if whole else None
