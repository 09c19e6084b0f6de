"""Small checkpoints in object storage."""

from __future__ import annotations

import random
from pathlib import Path

from holdfast.checkpoint import writer
from holdfast.checkpoint.catalog import StoredCheckpoint
from holdfast.protocol.lineage import Lineage
from sidecar.storage.object_storage import ObjectStorage

STATE, PRIVATE = "replicated.safetensors", "rank-00000.bin"
PREFIX = "runs/gpt"


def save(
    storage: ObjectStorage,
    step: int,
    generation: int = 1,
    *,
    epoch: int = 0,
    size: int = 3000,
    known: tuple[Lineage, ...] = (),
) -> Path:
    return writer.write(
        storage,
        generation=generation,
        step=step,
        world_size=2,
        files={STATE: state(step, generation, size), PRIVATE: b"private", "rank-00001.bin": b""},
        meta={"generation": generation},
        created_at=1000.0 + step,
        known=known,
        epoch=epoch,
    )


def state(step: int, generation: int = 1, size: int = 3000) -> bytes:
    return random.Random(step * 1000 + generation).randbytes(size)


def steps(storage: ObjectStorage) -> dict[int, int]:
    """Return the generation of each valid checkpoint by its step, newest first."""
    return {
        found.step: found.generation
        for _, found in storage.each_checkpoint()
        if isinstance(found, StoredCheckpoint)
    }


def defects(storage: ObjectStorage) -> list[str]:
    return [str(found) for _, found in storage.each_checkpoint() if not isinstance(found, StoredCheckpoint)]


def folder(storage: ObjectStorage, step: int) -> str:
    """Return the key of the folder with the files of a checkpoint."""
    found = storage.load(f"step-{step:08d}")
    assert found.objects is not None
    return f"{PREFIX}/{found.path.name}/{found.objects.folder}"
