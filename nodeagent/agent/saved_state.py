"""The agent's state on disk: one small file, replaced as a whole, with the previous one beside it.

Every change is in the file before it is reported elsewhere, so after a restart no change is reported twice.
The file is JSON after a line with its checksum; a file that is torn, corrupt or hostile counts as missing.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.fileio import durable
from nodeagent.agent import clean_time
from nodeagent.agent.changes import FindingKey, ReportedFinding
from nodeagent.agent.clean_time import CleanTime
from nodeagent.model import Action, Level
from nodeagent.sensing.clock import Anchor

VERSION = 1
MAX_BYTES = 64 << 20
MAX_HISTORY = 2000  # changes; at ten a day half a year
NAME, BEFORE = "memory.json", "memory.before.json"


class WrittenByNewerAgent(Exception):
    """The memory was written by a newer agent, and is left as it is."""


@dataclass(slots=True)
class SavedState:
    """What is in the file."""

    anchor: Anchor | None = None
    last_s: float = 0.0  # the greatest agent time that was ever used
    told: dict[FindingKey, ReportedFinding] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)  # changes with their number `seq`
    next_seq: int = 1
    calm: CleanTime = field(default_factory=CleanTime)
    evidence: dict[str, Any] = field(default_factory=dict)  # the evaluator's
    positions: dict[str, Any] = field(default_factory=dict)  # by sensor: a log's cursor, baselines

    def add(self, changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Append changes to the history, numbered, and return them so."""
        numbered = [{"seq": self.next_seq + n, **each} for n, each in enumerate(changes)]
        self.next_seq += len(numbered)
        self.history = [*self.history, *numbered][-MAX_HISTORY:]
        return numbered


def save(folder: Path, memory: SavedState) -> None:
    """Replace the file, durably. Raises OSError; then the one before is as it was."""
    raw = json.dumps(_as_json(memory), separators=(",", ":")).encode()
    content = b"%08x %d\n" % (zlib.crc32(raw), len(raw)) + raw
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # the disk may have been full until now
    target = folder / NAME
    # A link, not a rename: there is no moment without a file.
    spare = durable.temporary_path(folder, BEFORE)
    try:
        os.link(target, spare)
        os.replace(spare, folder / BEFORE)
    except FileNotFoundError:
        pass
    finally:
        spare.unlink(missing_ok=True)
    durable.replace_file(target, content)


def load(folder: Path) -> tuple[SavedState, tuple[str, ...]]:
    """Return what is remembered, and one line for each file that could not be used.

    Raises:
        Newer: it was written by a newer agent.
        OSError: a file is there and cannot be read.
    """
    problems: list[str] = []
    for name in (NAME, BEFORE):
        path = folder / name
        try:
            return _read(path), tuple(problems)
        except FileNotFoundError:
            continue
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            problems.append(f"{path} is not used: {_brief(error)}")
    return SavedState(), tuple(problems)


def _read(path: Path) -> SavedState:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    head, _, raw = path.read_bytes().partition(b"\n")
    crc, size = head.split()
    if int(size) != len(raw) or int(crc, 16) != zlib.crc32(raw):
        raise ValueError("size or checksum is not what its first line says")
    found = json.loads(raw)
    if found["version"] > VERSION:
        raise WrittenByNewerAgent(
            f"{path} is of version {found['version']}, this agent reads up to {VERSION}"
        )
    return _from_json(found)


def _as_json(memory: SavedState) -> dict[str, Any]:
    at = memory.anchor
    return {
        "version": VERSION,
        "anchor": None if at is None else [at.boot_id, at.offset_s],
        "last_s": memory.last_s,
        "told": [[*key, int(t.level), int(t.action), t.since_s] for key, t in memory.told.items()],
        "history": memory.history,
        "next_seq": memory.next_seq,
        "calm": memory.calm.dump(),
        "evidence": memory.evidence,
        "positions": memory.positions,
    }


def _from_json(raw: Mapping[str, Any]) -> SavedState:
    at = raw["anchor"]
    told = {
        (str(entity), str(check), int(code)): ReportedFinding(Level(level), Action(action), float(since_s))
        for entity, check, code, level, action, since_s in raw["told"]
    }
    return SavedState(
        anchor=None if at is None else Anchor(str(at[0]), float(at[1])),
        last_s=float(raw["last_s"]),
        told=told,
        history=[dict(each) for each in raw["history"][-MAX_HISTORY:]],
        next_seq=int(raw["next_seq"]),
        calm=clean_time.load_clean_time(raw.get("calm", (None, None, None))),
        evidence=dict(raw["evidence"]),
        positions=dict(raw["positions"]),
    )


def _brief(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:200]
