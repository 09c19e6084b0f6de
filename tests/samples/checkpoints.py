from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from holdfast.checkpoint.catalog import LATEST, StoredCheckpoint, each_checkpoint, verify
from holdfast.checkpoint.manifest import InvalidCheckpoint
from holdfast.checkpoint.writer import write
from holdfast.protocol.lineage import Lineage

STATE, PRIVATE = "replicated.safetensors", "rank-00000.bin"


def save(
    root: Path,
    step: int,
    generation: int = 1,
    more: Mapping[str, bytes] = MappingProxyType({}),
    known: tuple[Lineage, ...] = (),
    epoch: int = 0,
) -> Path:
    files: dict[str, Path | bytes] = {STATE: state(step, generation), PRIVATE: b"private"}
    return write(
        root,
        generation=generation,
        step=step,
        world_size=2,
        files={**files, **more},
        meta={"model": "test", "generation": generation},
        created_at=1000.0 + step,
        known=known,
        epoch=epoch,
    )


def state(step: int, generation: int) -> bytes:
    return random.Random(step * 1000 + generation).randbytes(3000)


def scan(root: Path | str) -> tuple[StoredCheckpoint, ...]:
    """Return the checkpoints in `root`, newest step first. Raises OSError if it is unreadable."""
    return tuple(found for _, found in each_checkpoint(Path(root)) if isinstance(found, StoredCheckpoint))


def broken(root: Path | str) -> tuple[tuple[Path, str], ...]:
    """Return the invalid directories that are named like checkpoints, newest first, with the reasons."""
    return tuple(
        (path, str(why)) for path, why in each_checkpoint(Path(root)) if isinstance(why, InvalidCheckpoint)
    )


def newest_whole(root: Path | str) -> tuple[StoredCheckpoint | None, tuple[str, ...]]:
    """Return the newest checkpoint that verifies, and a note for each newer one that does not.

    Raises OSError if `root` cannot be read; a missing one holds no checkpoint.
    """
    notes: list[str] = []
    for path, found in each_checkpoint(Path(root)):
        why = str(found) if isinstance(found, InvalidCheckpoint) else verify(found)
        if isinstance(found, StoredCheckpoint) and why is None:
            return found, tuple(notes)
        notes.append(f"checkpoint {path.name} is not used: {why}")
    return None, tuple(notes)


def latest(root: Path | str) -> str | None:
    """Return the name in the link `latest`, which people and scripts use."""
    path = Path(root) / LATEST
    return path.read_text().strip() if path.exists() else None


def steps(root: Path) -> list[int]:
    return [found.step for found in scan(root)]


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def assert_whole(found: StoredCheckpoint) -> None:
    assert verify(found) is None
    assert (found.path / STATE).read_bytes() == state(found.step, found.generation)
