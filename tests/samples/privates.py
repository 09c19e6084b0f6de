from __future__ import annotations

import random

from holdfast.snapshot.private_store import PrivateReader, PrivateStore


def state(step: int, size: int = 300) -> bytes:
    return random.Random(step).randbytes(size)


def put(store: PrivateStore, steps: range, generation: int = 1) -> None:
    for step in steps:
        store.put(generation, step, state(step))


def steps_of(store: PrivateReader) -> list[int]:
    return [held.step for held in store.held()]
