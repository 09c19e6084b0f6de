"""The agent's state on disk: one small file, replaced as a whole, with the previous version beside it.

Every change is saved before it is reported elsewhere, so no change is reported again after a restart. The
file contains a line with a checksum, then JSON. A torn, corrupt, unreadable or hostile file is treated as
missing. It is never used in part: with its log positions but without its evidence, the lines before these
positions would be lost. Each generation of owners (`claim`) has its own files.
"""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

from holdfast.fileio import durable
from nodeagent.agent import clean_time, recent_faults, unsaved
from nodeagent.agent.changes import FindingKey, ReportedFinding
from nodeagent.agent.clean_time import CleanTime
from nodeagent.agent.recent_faults import RecentFaults
from nodeagent.evaluation import memory
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import Action, Level
from nodeagent.policy.loading import shipped
from nodeagent.sensing.clock import Anchor

VERSION = 1
MAX_BYTES = 64 << 20
MAX_HISTORY = 2000  # changes: half a year at ten a day
NAME, BEFORE = "memory.json", "memory.before.json"
_DAMAGED = "damaged"  # in the name of a file that was set aside: memory.damaged.json
# What a file with the right checksum may raise if its content is malformed.
MALFORMED = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError)
_NAMES = re.compile(r"memory(?:\.(\d{1,9}))?(?:\.before)?\.json")
_SET_ASIDE = re.compile(rf"memory[.\d]*(?:\.before)?\.(?:{_DAMAGED}|version-.*)\.json")
_HEAD = re.compile(rb"[0-9a-f]{8} \d{1,12}")
MAX_ID = 64  # characters
# The errors of file systems without hard links, and of mounts that refuse them.
_NO_LINKS = (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class _WrittenByNewerAgent(Exception):
    """A newer agent wrote the file; `version` is its version."""

    def __init__(self, version: object) -> None:
        self.version = str(version)[:20]
        super().__init__(f"it has version {self.version}; this agent reads versions up to {VERSION}")


def new_id() -> str:
    """Return the id of a memory that starts now; no other has it."""
    return os.urandom(8).hex()


@dataclass(slots=True)
class SavedState:
    """The content of the file."""

    anchor: Anchor | None = None
    last_s: float = 0.0  # the greatest agent time ever used
    reported: dict[FindingKey, ReportedFinding] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)  # numbered changes (`seq`)
    next_seq: int = 1
    clean_time: CleanTime = field(default_factory=CleanTime)
    recent_faults: RecentFaults = field(default_factory=RecentFaults)
    evidence: dict[str, Any] = field(default_factory=dict)  # the evidence that the evaluator stores
    positions: dict[str, Any] = field(default_factory=dict)  # by sensor: the cursor in a log, or baselines
    # The id stays the same as long as nothing is lost, so evidence that ends under the same id has not just
    # been forgotten.
    id: str = field(default_factory=new_id, compare=False)

    def add(self, changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Number changes, append them to the history, and return them with their numbers."""
        numbered = [{"seq": self.next_seq + n, **each} for n, each in enumerate(changes)]
        self.next_seq += len(numbered)
        self.history = [*self.history, *numbered][-MAX_HISTORY:]
        return numbered


def save(folder: Path, state: SavedState, generation: int = 0) -> None:
    """Replace the file durably. Raises OSError and leaves the previous file unchanged."""
    write(folder, encode(state), generation)


def encode(state: SavedState) -> bytes:
    """Return the content of the file.

    If it would be too long for `load`, the texts of the evidence, which only people read, are left out.
    """
    content = _encoded(state)
    if len(content) <= MAX_BYTES:
        return content
    return _encoded(replace(state, evidence=memory.without_texts(state.evidence)))


def _encoded(state: SavedState) -> bytes:
    raw = json.dumps(_as_json(state), separators=(",", ":")).encode()
    return b"%08x %d\n" % (zlib.crc32(raw), len(raw)) + raw


def write(folder: Path, content: bytes, generation: int = 0) -> None:
    """Replace the file of a generation durably. Raises OSError and leaves the previous file unchanged.

    It also raises OSError if the content is too long for `load`.
    """
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"it has {len(content)} bytes; at most {MAX_BYTES} can be read again")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # an earlier attempt may have failed on a full disk
    name, before = names(generation)
    _keep_previous(folder, name, before)
    durable.replace_file(folder / name, content)


def _keep_previous(folder: Path, name: str, before: str) -> None:
    # Link the file instead of renaming it, so that it exists at every moment.
    spare = durable.temporary_path(folder, before)
    try:
        os.link(folder / name, spare)
        os.replace(spare, folder / before)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with suppress(FileNotFoundError):
            os.replace(folder / name, folder / before)  # until the write, `load` finds the previous version
    finally:
        spare.unlink(missing_ok=True)


def names(generation: int) -> tuple[str, str]:
    """Return the names of the file and of its previous version, for one generation of owners (`claim`)."""
    return (f"memory.{generation}.json", f"memory.{generation}.before.json") if generation else (NAME, BEFORE)


def return_to_first_generation(folder: Path) -> None:
    """Give the newest file the name of the first generation, and remove all others. Raises OSError.

    May be called again after an interruption. No other process may be writing to the folder.
    """
    later = [each for each in _generations(folder) if each]
    # `load` uses the greatest generation, and those in between are greater than the first. They are therefore
    # removed while the newest generation still has its own name.
    for each in (each for generation in later[1:] for each in names(generation)):
        (folder / each).unlink(missing_ok=True)
    if later:
        durable.sync_directory(folder)
        name, before = names(later[0])
        if (folder / name).exists():
            with suppress(FileNotFoundError):
                os.replace(folder / before, folder / BEFORE)
        else:
            name = before
        os.replace(folder / name, folder / NAME)


def _generations(folder: Path) -> list[int]:
    """Return the generations that have written files, newest first."""
    try:
        with os.scandir(folder) as found:
            matches = [_NAMES.fullmatch(each.name) for each in found]
    except FileNotFoundError:
        return []
    return sorted({int(each[1] or 0) for each in matches if each}, reverse=True)


def load(folder: Path, *, set_aside: bool = False) -> tuple[SavedState, tuple[str, ...]]:
    """Return the newest saved state, and one line for each file that could not be used.

    If there is such a line, the state has a new id, because a part of it, or all of it, is lost. If there are
    only files that an earlier agent has set aside, one line lists them, because that agent has not saved its
    state. A file that is out of date because a later save failed (`unsaved`) is used, but causes a line. If
    there is no file at all, nothing is lost.

    Args:
        folder: The folder of the files.
        set_aside: True to rename a file that cannot be used, to protect it and the previous version from
            `save`.

    Raises:
        OSError: a file cannot be read and no other file can be used, or this user may not read a file.
    """
    problems: list[str] = []
    unread: OSError | None = None
    for name in (name for generation in _generations(folder) for name in names(generation)):
        path = folder / name
        try:
            found = _read(path)
            if problems:
                problems[-1] += f"; {name}, an earlier version, is used instead"
            if _head(path) in unsaved.marks(folder):
                problems.append(f"{path} is out of date: a later state could not be saved")
            return replace(found, id=new_id()) if problems else found, tuple(problems)
        except FileNotFoundError:
            continue
        except PermissionError:
            raise
        except _WrittenByNewerAgent as error:
            why, label = str(error), f"version-{error.version}"
        except OSError as error:
            why, label, unread = error.strerror or str(error), _DAMAGED, unread or error
        except MALFORMED as error:
            why, label = _brief(error), _DAMAGED
        problems.append(f"{path} is not used: {why}{_set_aside(path, label) if set_aside else ''}")
    if unread is not None:
        raise unread
    if problems:
        problems[-1] += "; no other file can be used, so the agent starts a new state"
    return SavedState(), tuple(problems or _unused(folder))


def mark_unsaved(folder: Path, generation: int) -> None:
    """Record that the file which `load` would use is out of date. Raises OSError."""
    paths = [folder / name for each in _generations(folder) for name in names(each)]
    unsaved.mark(folder, generation, next((_head(each) for each in paths if each.exists()), unsaved.NO_FILE))


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline(unsaved.SIZE).strip()


def _unused(folder: Path) -> list[str]:
    """Return a line if the folder has no file that can be used, but should have one."""
    if unsaved.NO_FILE in unsaved.marks(folder):
        return [f"{folder} has no saved state: an earlier agent could not save any"]
    try:
        kept = sorted(each.name for each in folder.iterdir() if _SET_ASIDE.fullmatch(each.name))
    except FileNotFoundError:
        return []
    return [f"{folder} has only files that could not be used: {', '.join(kept[:3])}"] if kept else []


def _set_aside(path: Path, label: str) -> str:
    """Rename a file, so that a newer agent or a person can still use it. Return a clause for the message."""
    kept = path.with_name(f"{path.stem}.{label}.json")
    try:
        path.replace(kept)
    except OSError as error:
        return f"; it cannot be renamed to {kept.name}: {error.strerror}"
    return f"; it is kept as {kept.name}"


def _read(path: Path) -> SavedState:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    head, _, raw = path.read_bytes().partition(b"\n")
    if not _HEAD.fullmatch(head):
        raise ValueError("its first line is not a checksum and a size, as in every file of this agent")
    crc, size = head.split()
    if int(size) != len(raw) or int(crc, 16) != zlib.crc32(raw):
        raise ValueError("its size or checksum is not that of its first line, so it is torn or damaged")
    found = json.loads(raw, parse_float=_finite, parse_constant=_finite)
    if not isinstance(found, dict) or not isinstance(found.get("version"), int):
        raise ValueError("its content is damaged: it is not an object with a version")
    if found["version"] > VERSION:
        raise _WrittenByNewerAgent(found["version"])
    try:
        return _from_json(found)
    except MALFORMED as error:
        raise ValueError(f"its content is damaged ({type(error).__name__}: {_brief(error)})") from error


def _finite(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text[:20]} is not a finite number")
    return value


def _as_json(state: SavedState) -> dict[str, Any]:
    at = state.anchor
    return {
        "version": VERSION,
        "anchor": None if at is None else [at.boot_id, at.offset_s],
        "last_s": state.last_s,
        "told": [[*key, int(t.level), int(t.action), t.since_s] for key, t in state.reported.items()],
        "history": state.history,
        "next_seq": state.next_seq,
        "calm": state.clean_time.dump(),
        # The name is from a version in which only a release paused the counts.
        "calm_released_s": list(state.clean_time.paused_s),
        "calm_needs": [sorted(each) for each in state.clean_time.needs],
        "recent": state.recent_faults.dump(),
        "evidence": state.evidence,
        "positions": state.positions,
        "id": state.id,
    }


def _from_json(raw: Mapping[str, Any]) -> SavedState:
    at = raw["anchor"]
    reported = {
        (str(entity), str(check), int(code)): ReportedFinding(Level(level), Action(action), float(since_s))
        for entity, check, code, level, action, since_s in raw["told"]
    }
    return SavedState(
        anchor=None if at is None else Anchor(str(at[0]), float(at[1])),
        last_s=float(raw["last_s"]),
        reported=reported,
        history=[{**each, "seq": int(each["seq"])} for each in raw["history"][-MAX_HISTORY:]],
        next_seq=int(raw["next_seq"]),
        clean_time=clean_time.load_clean_time(
            raw.get("calm", (None, None, None)),
            raw.get("calm_released_s", (0.0, 0.0)),
            raw.get("calm_needs", ((), ())),
        ),
        recent_faults=recent_faults.load_recent_faults(raw.get("recent")),
        evidence=_sound_evidence(raw["evidence"]),
        positions=dict(raw["positions"]),
        id=str(raw.get("id") or new_id())[:MAX_ID],  # an earlier agent wrote none
    )


def _sound_evidence(raw: Any) -> dict[str, Any]:
    """Return the evidence if an evaluator can load it; otherwise, raise an error of `MALFORMED`."""
    evidence = dict(raw)
    if evidence:
        Evaluator(shipped()).load(evidence)
    return evidence


def _brief(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:200]
