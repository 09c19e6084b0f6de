from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from holdfast.checkpoint.catalog import StoredCheckpoint, scan, verify
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


def steps(root: Path) -> list[int]:
    return [found.step for found in scan(root)]


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def assert_whole(found: StoredCheckpoint) -> None:
    assert verify(found) is None
    assert (found.path / STATE).read_bytes() == state(found.step, found.generation)
