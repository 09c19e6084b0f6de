from __future__ import annotations

from collections.abc import Iterable

from holdfast.fileio.checksum import RunningChecksum
from holdfast.fileio.safetensors import Layout, map_file, plan
from holdfast.snapshot.arena import Arena
from holdfast.snapshot.commit_records import CommitRecord


def layout(values: int = 500) -> Layout:
    return plan([("weight", "F32", (values,)), ("steps", "I64", (3,))], {"model": "test"})


def content(step: int, size: int) -> bytes:
    return bytes([step % 256]) * size


def snapshot(arena: Arena, generation: int, step: int, values: int = 500) -> CommitRecord:
    draft = arena.begin(layout(values), generation, step, 2)
    assert draft is not None
    draft.data[:] = content(step, len(draft.data))
    return draft.commit()


def take_in(
    arena: Arena, generation: int, step: int, pieces: Iterable[bytes], total_bytes: int, seal: int
) -> CommitRecord:
    """Receive a peer's snapshot of a group of two, piece by piece, as a transfer does."""
    incoming, running, at = arena.receive(generation, step, 2, total_bytes), RunningChecksum(), 0
    try:
        for piece in pieces:
            end = at + len(piece)
            incoming.back(at, end)
            incoming.memory[at:end] = piece
            running.update(piece)
            at = end
        return incoming.finish_with(running.crcs(), seal)
    finally:
        incoming.abandon()


def ages(arena: Arena) -> list[tuple[int, int]]:
    return [(record.generation, record.step) for record in arena.records()]


def assert_whole(arena: Arena, record: CommitRecord) -> None:
    with arena.pin(record) as path:
        found, mapping = map_file(path)
        assert mapping[found.data_offset :] == content(record.step, found.data_bytes)
        mapping.close()
    assert arena.verify(record)
