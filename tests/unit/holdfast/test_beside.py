from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast import beside
from holdfast.beside import Beside
from holdfast.errors import PeerLost
from holdfast.private import PrivateStore

GENERATION = 3


@pytest.fixture
def store(memory: Path) -> PrivateStore:
    return PrivateStore(memory / "private-00001.bin", 1, capacity_bytes=64)


@pytest.fixture
def side(memory: Path) -> Beside:
    return Beside(memory / "private-00001.bin", 1, GENERATION)


def taken(side: Beside, step: int) -> tuple[bytes, bool] | None:
    side.start(step, b"mine", False)
    return side.finish()


def silent(side: Beside, step: int) -> bool:
    try:
        taken(side, step)
    except PeerLost as error:
        return "rank 1" in str(error) and f"step {step}" in str(error)
    return False


def test_what_stays_as_it_is_need_not_be_kept(store: PrivateStore, side: Beside) -> None:
    for step in range(20):
        store.put(GENERATION, step, b"state")
        assert taken(side, step) is None


def test_what_may_be_stored_anew_is_to_be_kept_as_it_is(store: PrivateStore, side: Beside) -> None:
    store.put(GENERATION, 7, b"early", final=False)
    assert taken(side, 7) == (b"early", True)
    store.put(GENERATION, 7, b"changed")
    assert taken(side, 7) is None


def test_a_rank_that_is_ahead_has_stored_the_step(store: PrivateStore, side: Beside) -> None:
    store.put(GENERATION, 4, b"four")
    store.put(GENERATION, 4 + 16, b"in the same place of the ruler")
    assert taken(side, 4) is None


@pytest.mark.parametrize(("generation", "step"), [(GENERATION - 1, 6), (GENERATION + 1, 6), (GENERATION, 2)])
def test_another_generation_or_an_older_step_is_waited_out(
    generation: int, step: int, store: PrivateStore, side: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "LIMIT_S", 0.0)
    store.put(generation, step, b"other")
    assert silent(side, 6)


def test_a_store_that_never_comes_is_a_lost_peer(side: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "LIMIT_S", 0.0)
    assert silent(side, 1)


def test_the_wait_ends_when_the_state_is_there_also_in_a_store_that_grew(
    store: PrivateStore, side: Beside
) -> None:
    assert silent_until_put(store, side, 5, b"small") is None
    assert silent_until_put(store, side, 6, b"more than the store had room for" * 8) is None


def silent_until_put(store: PrivateStore, side: Beside, step: int, blob: bytes) -> object:
    """Put while `side` waits; return what it has found."""
    looked, found = threading.Event(), list[object]()
    seen = side._store.stored

    def stored(generation: int, wanted: int) -> object:
        result = seen(generation, wanted)
        looked.set()
        return result

    side._store.stored = stored  # type: ignore[method-assign, assignment]
    waiting = threading.Thread(target=lambda: found.append(taken(side, step)))
    waiting.start()
    assert looked.wait(10.0)
    assert not found
    store.put(GENERATION, step, blob)
    waiting.join(10.0)
    del side._store.stored
    assert len(found) == 1
    return found[0]


def test_a_state_that_is_being_written_is_waited_for(store: PrivateStore, side: Beside) -> None:
    store.put(GENERATION, 3, b"early", final=False)
    get, torn = side._store.get, [None, None]
    side._store.get = lambda *a: torn.pop() if torn else get(*a)  # type: ignore[method-assign]
    assert taken(side, 3) == (b"early", True)
    assert not torn
