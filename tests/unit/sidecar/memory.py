"""The content of a member's memory, created as its ranks create it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.fileio.safetensors import plan
from holdfast.snapshot.arena import Arena
from holdfast.snapshot.commit_records import CommitRecord
from holdfast.snapshot.private_store import PrivateStore
from sidecar.state.holdings import Holdings
from tests.sandbox import memory_directory

WORLD_SIZE = 2


@contextmanager
def member() -> Iterator[Path]:
    """Yield the empty directory of a member."""
    with memory_directory() as path:
        (path / "arena").mkdir()
        yield path


def holdings(path: Path) -> Holdings:
    return Holdings(path / "arena", path / "restore")


def snapshot(path: Path, generation: int, step: int, fill: int = 1, size: int = 1000) -> CommitRecord:
    """Write a snapshot whose tensor has `size` bytes of `fill`."""
    arena = Arena(path / "arena")
    layout = plan([("w", "U8", (size,))], {})
    draft = arena.begin(layout, generation, step, WORLD_SIZE)
    assert draft is not None
    with draft:
        draft.data[:] = bytes([fill]) * size
        record = draft.commit()
    arena.close()
    return record


def private(
    path: Path, rank: int, generation: int, step: int, data: bytes = b"own", kept: bool = False
) -> None:
    name = f"{'kept' if kept else 'private'}-{rank:05d}.bin"
    store = PrivateStore(path / "arena" / name, rank)
    store.put(generation, step, data)
    store.close()


def flip(record: CommitRecord) -> None:
    """Change one bit of the snapshot's content."""
    with record.path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
