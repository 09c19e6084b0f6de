"""The supervisor's journal on disk. Each JSON line holds one decision and the view that it is based on.

A decision is written before it is carried out, but does not wait long for the disk
(`supervisor.controller.journal_writer`). A line is complete if it ends with a newline. Bytes after the last
newline are ignored, because they come from a write that a kill or a full disk cut short.

A complete line is unreadable if it is damaged or from a later version. The supervisor skips such a line and
starts from the previous one. Fields that a later version added are ignored.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from holdfast.fileio import durable
from holdfast.protocol import codec
from supervisor.store.recorded import recorded
from supervisor.store.run_lead import Lead
from supervisor.view.model import JobState, Policy, RunAction, View

log = logging.getLogger(__name__)

_ACTIONS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(RunAction)}
RETRY_S = 5.0  # the pause before another attempt to write a line
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of the journal."""

    view: View
    policy: Policy
    action: RunAction
    after: JobState


@dataclass(frozen=True, slots=True)
class LastEntry:
    """The newest readable line. `decision` is None if only the job's state can be read from it."""

    memory: JobState
    ledger: Any
    decision: Decision | None  # the supervisor that made it may not have carried it out completely
    epoch: int = 0  # the epoch of the supervisor that made the decision


class Journal:
    """Appends lines.

    Only the supervisor that holds `lead` can write, so there is only one writer at a time.
    """

    def __init__(self, path: Path, lead: Lead | None = None) -> None:
        """Open or create the journal, and remove an incomplete last line.

        If the journal cannot be opened, supervision continues and each write tries to open it again.
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
            self._size = _complete_bytes(self._path)
            os.ftruncate(descriptor, self._size)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def write(self, view: View, policy: Policy, action: RunAction, after: JobState, ledger: Any) -> None:
        """Write one decision to disk.

        Raises `OSError` if it cannot be written. The journal then lacks the decision, but the next one can
        still be written. If another supervisor has taken over, raises `Deposed` and leaves the journal
        unchanged.
        """
        with self._lead.acting():
            self._write(view, policy, action, after, ledger)

    def _write(self, view: View, policy: Policy, action: RunAction, after: JobState, ledger: Any) -> None:
        seen = recorded(view)
        # The history can make up half of the line, so it is written only once.
        if view.memory.history == after.history:
            del seen["memory"]["history"]
        line = {
            "format": 1,
            "epoch": self._lead.epoch,
            "wall_s": view.wall_s,
            "action": type(action).__name__,
            "what": recorded(action),
            "view": seen,
            "policy": recorded(policy),
            "after": recorded(after),
            "ledger": ledger,
        }
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        self._open()
        found = os.fstat(self._descriptor)
        if not found.st_nlink:  # the file was removed, so readers could no longer find its lines
            self._restore_name()
        if found.st_size != self._size:
            os.ftruncate(self._descriptor, self._size)
        try:
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
            os.fdatasync(self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):  # if this fails too, the next write truncates the file
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)

    def _restore_name(self) -> None:
        """Copy the removed journal to a new file of the same name, and continue there. Raises `OSError`."""
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
    """Return the newest line with a readable state of the job; None if there is none."""
    unread: list[str] = []
    entry: LastEntry | None = None
    try:
        for line in _backwards(path):
            found = _parse(line)
            if found is None:
                continue
            try:
                entry = _entry(found)
                break
            except ValueError as error:
                unread.append(str(error))
    except OSError as error:  # the state can also be derived from members and storage
        unread.append(str(error))
    if unread:
        log.warning("unreadable journal lines skipped", extra={"lines": len(unread), "newest": unread[0]})
    return entry


def _entry(found: dict[str, Any]) -> LastEntry:
    memory = codec.from_json(JobState, found["after"], lenient=True)
    try:
        decision = _decision(found)
    except ValueError as error:
        log.warning("decision in the journal not read", extra={"error": str(error)})
        decision = None
    epoch = found.get("epoch")  # lines of earlier versions do not contain it
    return LastEntry(memory, found.get("ledger"), decision, epoch if type(epoch) is int else 0)


def has_lines_since(path: Path, offset_bytes: int) -> bool:
    """True if there is a valid line after the first `offset_bytes`; False if the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(offset_bytes)
            return any(_parse(line) is not None for line in file)
    except OSError:
        return False


def decisions(path: Path) -> Iterator[Decision]:
    """Yield all readable decisions, for replay."""
    with path.open("rb") as file:
        for line in file:
            found = _parse(line) if line.endswith(b"\n") else None
            if found is not None:
                with contextlib.suppress(ValueError):
                    yield _decision(found)


def _decision(found: dict[str, Any]) -> Decision:
    """Return the decision in a parsed line. Raises `ValueError` if this version cannot read it."""
    kind = _ACTIONS.get(str(found.get("action")))
    if kind is None:
        raise ValueError(f"unknown action {found.get('action')!r}")
    return Decision(
        codec.from_json(View, _in_present_format(found.get("view"), found["after"]), lenient=True),
        codec.from_json(Policy, found.get("policy"), lenient=True),
        codec.from_json(kind, found.get("what"), lenient=True),
        codec.from_json(JobState, found["after"], lenient=True),
    )


def _in_present_format(view: Any, after: Any) -> Any:
    """Return `view` in the current format and with its history. Older views have at most one checkpoint."""
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
    """Return the size of all complete lines. The next writer truncates the file to this size.

    Returns 0 if there is no journal. Raises `OSError`.
    """
    try:
        return _complete_bytes(path)
    except FileNotFoundError:
        return 0


def _complete_bytes(path: Path) -> int:
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
    """Yield the complete lines, newest first. Memory use depends only on the longest line."""
    try:
        end = _complete_bytes(path)
    except FileNotFoundError:
        return
    with path.open("rb") as file:
        later = b""
        while end > 0:
            # Until the start of a long line is found, each read is twice as large as the previous one.
            begin = max(0, end - max(_BLOCK_BYTES, len(later)))
            file.seek(begin)
            first, *whole = (file.read(end - begin) + later).split(b"\n")
            yield from reversed(whole)
            end, later = begin, first
        yield later


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line of the journal; None for anything else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    valid = isinstance(found, dict) and found.get("format") == 1 and "after" in found
    return found if valid else None
