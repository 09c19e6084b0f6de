"""What the agent remembers over its own death: one small file, replaced whole, with the one before beside it.

Everything that is told is in it before it is told elsewhere, so after a restart nothing is told twice. The
file is JSON behind a line with its checksum; one that is torn, flipped or hostile counts as missing.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast import durable
from nodeagent import calm
from nodeagent.calm import Calm
from nodeagent.changes import Key, Told
from nodeagent.clock import Anchor
from nodeagent.verdict import Action, Level

VERSION = 1
MAX_BYTES = 64 << 20
MAX_HISTORY = 2000  # changes; at ten a day half a year
NAME, BEFORE = "memory.json", "memory.before.json"


class Newer(Exception):
    """The memory was written by a newer agent, and is left as it is."""


@dataclass(slots=True)
class Memory:
    """What is in the file."""

    anchor: Anchor | None = None
    last_s: float = 0.0  # the greatest agent time that was ever used
    told: dict[Key, Told] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)  # changes with their number `seq`
    next_seq: int = 1
    calm: Calm = field(default_factory=Calm)
    evidence: dict[str, Any] = field(default_factory=dict)  # the evaluator's
    positions: dict[str, Any] = field(default_factory=dict)  # by sensor: a log's cursor, baselines

    def add(self, changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Append changes to the history, numbered, and return them so."""
        numbered = [{"seq": self.next_seq + n, **each} for n, each in enumerate(changes)]
        self.next_seq += len(numbered)
        self.history = [*self.history, *numbered][-MAX_HISTORY:]
        return numbered


def save(folder: Path, memory: Memory) -> None:
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


def load(folder: Path) -> tuple[Memory, tuple[str, ...]]:
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
    return Memory(), tuple(problems)


def _read(path: Path) -> Memory:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    head, _, raw = path.read_bytes().partition(b"\n")
    crc, size = head.split()
    if int(size) != len(raw) or int(crc, 16) != zlib.crc32(raw):
        raise ValueError("size or checksum is not what its first line says")
    found = json.loads(raw)
    if found["version"] > VERSION:
        raise Newer(f"{path} is of version {found['version']}, this agent reads up to {VERSION}")
    return _from_json(found)


def _as_json(memory: Memory) -> dict[str, Any]:
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


def _from_json(raw: Mapping[str, Any]) -> Memory:
    at = raw["anchor"]
    told = {
        (str(entity), str(check), int(code)): Told(Level(level), Action(action), float(since_s))
        for entity, check, code, level, action, since_s in raw["told"]
    }
    return Memory(
        anchor=None if at is None else Anchor(str(at[0]), float(at[1])),
        last_s=float(raw["last_s"]),
        told=told,
        history=[dict(each) for each in raw["history"][-MAX_HISTORY:]],
        next_seq=int(raw["next_seq"]),
        calm=calm.load(raw.get("calm", (None, None, None))),
        evidence=dict(raw["evidence"]),
        positions=dict(raw["positions"]),
    )


def _brief(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:200]
