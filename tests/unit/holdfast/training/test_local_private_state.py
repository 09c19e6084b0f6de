"""In a group of one member, a rank waits for the store of the previous rank."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from holdfast.errors import PeerLost
from holdfast.snapshot.private_store import PrivateStore, StoredEntry
from holdfast.training.protection.private_exchange import LocalPrivateState

GENERATION = 3


@pytest.fixture
def store(memory: Path) -> PrivateStore:
    return PrivateStore(memory / "private-00001.bin", 1, capacity_bytes=64)


@pytest.fixture
def side(memory: Path) -> LocalPrivateState:
    return LocalPrivateState(memory / "private-00001.bin", 1, GENERATION)


def impatient(memory: Path) -> LocalPrivateState:
    return LocalPrivateState(memory / "private-00001.bin", 1, GENERATION, limit_s=0.0)


def waited(side: LocalPrivateState, step: int) -> None:
    side.send(step, b"mine", False)
    side.receive()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of requested sleeps, without sleeping."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def silent(side: LocalPrivateState, step: int) -> bool:
    try:
        waited(side, step)
    except PeerLost as error:
        return "rank 1" in str(error) and f"step {step}" in str(error)
    return False


@pytest.mark.parametrize("final", [True, False])
def test_an_existing_state_is_returned_without_waiting(
    store: PrivateStore, side: LocalPrivateState, final: bool, pauses: list[float]
) -> None:
    for step in range(20):
        store.put(GENERATION, step, b"state", final)
        waited(side, step)
    assert pauses == []


def test_a_rank_that_is_ahead_has_stored_the_step(
    store: PrivateStore, side: LocalPrivateState, pauses: list[float]
) -> None:
    store.put(GENERATION, 4, b"four")
    store.put(GENERATION, 4 + 16, b"in the same place of the ruler")
    waited(side, 4)
    assert pauses == []


@pytest.mark.parametrize(("generation", "step"), [(GENERATION - 1, 6), (GENERATION + 1, 6), (GENERATION, 2)])
def test_another_generation_or_an_older_step_keeps_the_rank_waiting(
    generation: int, step: int, store: PrivateStore, memory: Path
) -> None:
    store.put(generation, step, b"other")
    assert silent(impatient(memory), 6)


def test_a_store_that_never_appears_is_a_lost_peer(memory: Path) -> None:
    assert silent(impatient(memory), 1)


def test_the_wait_ends_when_the_state_appears_even_in_a_store_that_grew(
    store: PrivateStore, side: LocalPrivateState
) -> None:
    assert waits_until_put(store, side, 5, b"small")
    assert waits_until_put(store, side, 6, b"more than the store had room for" * 8)


def waits_until_put(store: PrivateStore, side: LocalPrivateState, step: int, blob: bytes) -> bool:
    """Store the state once `side` has looked in vain. Return True if `side` waited exactly until then."""
    looked, done = threading.Event(), threading.Event()
    seen = side._store.stored

    def stored(generation: int, wanted: int) -> StoredEntry | None:
        result = seen(generation, wanted)
        looked.set()
        return result

    def wait() -> None:
        waited(side, step)
        done.set()

    side._store.stored = stored  # type: ignore[method-assign, assignment]
    waiting = threading.Thread(target=wait)
    waiting.start()
    assert looked.wait(10.0)
    was_waiting = not done.is_set()
    store.put(GENERATION, step, blob)
    waiting.join(10.0)
    del side._store.stored
    return was_waiting and done.is_set()
