from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.snapshot.private_store import FEW_BYTES, PrivateBlob, PrivateReader, PrivateStore, StoredEntry
from tests.samples.privates import put, state, steps_of
from tests.sandbox import in_child, limit_file_size


def test_a_stored_state_is_available_to_any_process(memory: Path) -> None:
    store = PrivateStore(memory / "rank-0", 0)
    store.put(1, 5, b"five")
    store.put(1, 6, b"six", final=False)

    for reader in (store, PrivateReader(memory / "rank-0"), PrivateStore(memory / "rank-0", 0)):
        assert reader.held() == (StoredEntry(1, 6, False, 3), StoredEntry(1, 5, True, 4))
        assert reader.get(5) == PrivateBlob(1, 5, True, b"five")
        assert reader.get(6, 1) == PrivateBlob(1, 6, False, b"six")
        assert reader.get(6, 2) is None
        assert reader.get(7) is None


def test_a_missing_store_contains_nothing_until_it_is_created(memory: Path) -> None:
    reader = PrivateReader(memory / "rank-0")
    assert reader.held() == ()
    assert reader.get(1) is None

    put(PrivateStore(memory / "rank-0", 0), range(3))
    assert steps_of(reader) == [2, 1, 0]


def test_kept_steps_include_multiples_of_powers_of_two_and_of_every(memory: Path) -> None:
    store = PrivateStore(memory / "rank-0", 0, capacity_bytes=512, every=100)
    put(store, range(1000))

    assert {999, 998, 997, 996, 900, 800, 700, 600, 992, 984, 960, 896, 768, 512, 256, 0} <= set(
        steps_of(store)
    )
    assert len(steps_of(store)) == len(set(steps_of(store)))
    for step in steps_of(store):
        blob = store.get(step)
        assert blob is not None
        assert blob.data == state(step)


def test_the_highest_generation_of_a_step_takes_precedence(memory: Path) -> None:
    store = PrivateStore(memory / "rank-0", 0, every=4)
    store.put(1, 4, b"first")
    store.put(1, 20, b"takes the place of the ruler")
    store.put(1, 8, b"other")
    store.put(2, 4, b"second")

    assert store.get(4) == PrivateBlob(2, 4, True, b"second")
    assert store.held()[0] == StoredEntry(2, 4, True, 6)


def test_an_empty_state_is_a_valid_state(memory: Path) -> None:
    store = PrivateStore(memory / "rank-0", 0)
    store.put(1, 1, b"")
    assert store.get(1) == PrivateBlob(1, 1, True, b"")


def test_a_state_beyond_the_capacity_creates_a_larger_store_with_all_held_states(
    memory: Path,
) -> None:
    store = PrivateStore(memory / "rank-0", 0, capacity_bytes=512, every=10)
    reader = PrivateReader(memory / "rank-0")
    put(store, range(100))
    before = reader.held()

    store.put(1, 100, state(100, 5000))

    assert store.capacity_bytes >= 5000
    assert set(before) - set(reader.held()) <= {StoredEntry(1, step, True, 300) for step in (60, 84)}
    found = reader.get(100)
    assert found is not None
    assert found.data == state(100, 5000)
    assert [path.name for path in memory.iterdir()] == ["rank-0"]


def test_a_reopened_store_keeps_its_states_whatever_the_new_settings(memory: Path) -> None:
    put(PrivateStore(memory / "rank-0", 0, capacity_bytes=512), range(50))
    for capacity, every in ((512, 0), (4096, 0), (64, 0), (64, 10), (64, 0)):
        store = PrivateStore(memory / "rank-0", 0, capacity_bytes=capacity, every=every)
        assert {49, 48, 47, 46, 32, 16, 0} <= set(steps_of(store))
        assert store.capacity_bytes >= 512


@pytest.mark.parametrize("content", [b"", b"junk", bytes(5000)])
def test_a_file_that_is_not_a_store_is_treated_as_empty_and_replaced(memory: Path, content: bytes) -> None:
    (memory / "rank-0").write_bytes(content)
    assert PrivateReader(memory / "rank-0").held() == ()
    put(PrivateStore(memory / "rank-0", 0), range(2))
    assert steps_of(PrivateReader(memory / "rank-0")) == [1, 0]


def test_the_store_of_another_rank_is_not_reused(memory: Path) -> None:
    put(PrivateStore(memory / "rank", 0), range(2))
    assert PrivateStore(memory / "rank", 1).held() == ()


def test_a_truncated_store_holds_nothing(memory: Path) -> None:
    put(PrivateStore(memory / "rank-0", 0), range(9))
    with open(memory / "rank-0", "r+b") as file:
        file.truncate(5000)
    assert PrivateReader(memory / "rank-0").held() == ()


@pytest.mark.parametrize("size", [0, -1, 2**40])
def test_an_impossible_capacity_is_refused(memory: Path, size: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        PrivateStore(memory / "rank-0", 0, capacity_bytes=size)


def test_a_flipped_bit_is_never_accepted_as_a_state(memory: Path) -> None:
    path = memory / "rank-0"
    put(PrivateStore(path, 0, capacity_bytes=320), range(20))
    whole = path.read_bytes()
    used = [at for at in range(len(whole)) if whole[at]]
    chance = random.Random(5)
    lost = 0
    for _ in range(60):
        raw = bytearray(whole)
        at = chance.choice(used)
        raw[at] ^= 1 << chance.randrange(8)
        path.write_bytes(raw)
        for step in (19, 18, 17, 16, 8, 0):
            found = PrivateReader(path).get(step)
            assert found is None or found.data == state(step)
            lost += found is None
    assert lost > 8


def test_lack_of_space_to_grow_is_an_error_and_keeps_every_state(memory: Path) -> None:
    store = PrivateStore(memory / "rank-0", 0, capacity_bytes=512)
    put(store, range(20))
    before = store.held()

    def child() -> None:
        limit_file_size(100_000)
        with pytest.raises(OSError, match="large"):
            store.put(1, 20, bytes(50_000))
        assert store.held() == before
        store.put(1, 20, state(20))
        assert steps_of(store)[0] == 20

    assert in_child(child) == 0
    assert [path.name for path in memory.iterdir()] == ["rank-0"]
    assert set(before) - {StoredEntry(1, 4, True, 300)} <= set(PrivateReader(memory / "rank-0").held())


def test_large_states_take_less_than_ten_times_their_size(memory: Path) -> None:
    size = 8 << 20
    store = PrivateStore(memory / "rank-0", 0, pins=lambda: (3, 7))
    blob = bytes(size)
    for step in range(40):
        store.put(1, step, blob)
    assert (memory / "rank-0").stat().st_blocks * 512 < 10 * size
    assert {39, 38, 37, 36, 7, 3} <= set(steps_of(PrivateReader(memory / "rank-0")))


def test_a_pinned_state_is_kept_however_many_follow(memory: Path) -> None:
    store = PrivateStore(memory / "rank-0", 0, pins=lambda: (483, 487))
    put(store, range(483, 3000))
    found = store.get(483)
    assert found is not None
    assert found.data == state(483)
    assert 487 in steps_of(store)


@pytest.mark.parametrize("large", [False, True])
@settings(max_examples=60, deadline=None)
@given(gaps=st.lists(st.integers(1, 150), min_size=1, max_size=12), again=st.booleans())
def test_every_snapshot_has_its_private_state_whatever_its_step(
    gaps: list[int], again: bool, large: bool
) -> None:
    """Of two slots, the older is overwritten. Snapshots can be any number of steps apart, as with pauses."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rank"
        slots: list[int] = []
        pins = slots.copy  # the store's content at the time of the query
        capacity = FEW_BYTES + 1 if large else 512
        store = PrivateStore(path, 0, capacity_bytes=capacity, pins=pins)
        step = 0
        for gap in gaps:
            for _ in range(gap):
                step += 1
                store.put(1, step, state(step))
                for each in slots:
                    found = store.get(each)
                    assert found is not None
                    assert found.data == state(each)
            slots[:] = [*slots[-1:], step]
            if again:  # the next generation's process, with room for larger states
                store.close()
                capacity += 4096
                store = PrivateStore(path, 0, capacity_bytes=capacity, pins=pins)
        assert set(slots) <= set(steps_of(store))
        store.close()


def test_repeating_a_step_replaces_its_pinned_state(memory: Path) -> None:
    store = PrivateStore(memory / "rank-0", 0, capacity_bytes=512, pins=lambda: (13, 17))
    put(store, range(100))
    for generation in range(2, 8):
        for step in range(13, 100):
            store.put(generation, step, state(step))
        found = {(held.generation, held.step) for held in store.held()}
        assert {(generation, 13), (generation, 17)} <= found
