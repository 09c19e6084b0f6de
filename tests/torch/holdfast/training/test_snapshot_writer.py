from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.fileio.safetensors import map_file
from holdfast.snapshot.arena import Arena
from holdfast.training.protection.snapshot_writer import MAX_INTERVAL, SnapshotWriter, snapshot_interval
from tests.samples.snapshots import take_in
from tests.torch.holdfast.state.changes.test_cached_capture import CHANGES, group


@given(
    st.floats(0.0, 100.0),
    st.floats(1e-6, 100.0),
    st.floats(1e-4, 1.0),
    st.floats(0.0, 10.0),
)
def test_the_interval_is_the_least_power_of_two_within_the_budget(
    cost_s: float, step_s: float, budget: float, seldom_s: float
) -> None:
    def suits(every: int) -> bool:
        return cost_s <= budget * step_s * every and step_s * every >= seldom_s

    every = snapshot_interval(cost_s, step_s, budget, seldom_s)
    assert every & (every - 1) == 0
    assert 1 <= every <= MAX_INTERVAL
    assert suits(every) or every == MAX_INTERVAL
    assert every == 1 or not suits(every // 2)


def receive_again(arena: Arena) -> None:
    """Receive the newest snapshot a second time, into the other slot."""
    [record, *_] = arena.records()
    content, seal = record.path.read_bytes(), arena.seal(record)
    take_in(arena, record.generation, record.step, [content], len(content), seal)


def held(snapshots: SnapshotWriter) -> list[tuple[int, int]]:
    return [(each.generation, each.step) for each in snapshots.arena.records()]


def test_the_last_two_snapshots_are_held(memory: Path) -> None:
    model = nn.Linear(3, 2)
    snapshots = SnapshotWriter(memory, {"model": model}, 1)
    for step in range(4):
        with torch.no_grad():
            model.weight.fill_(step)
        assert snapshots.write(1, step) is not None
    assert held(snapshots) == [(1, 3), (1, 2)]
    assert snapshots.held(1, 2)
    assert not snapshots.held(2, 3)
    [newest, _] = snapshots.arena.records()
    layout, mapping = map_file(newest.path)
    entry = layout["model.weight"]
    raw = mapping[layout.data_offset + entry.begin : layout.data_offset + entry.end]
    assert torch.frombuffer(bytearray(raw), dtype=torch.float32).tolist() == [3.0] * 6
    mapping.close()


def test_an_extra_snapshot_is_overwritten_before_any_other(memory: Path) -> None:
    snapshots = SnapshotWriter(memory, {"model": nn.Linear(3, 2)}, 1)
    for step in (4, 33):
        snapshots.write(1, step)
    snapshots.overwrite_first = 1, 33
    snapshots.write(1, 48)
    assert held(snapshots) == [(1, 48), (1, 4)]
    snapshots.write(1, 64)
    assert held(snapshots) == [(1, 64), (1, 48)]
    snapshots.overwrite_first = 1, 64
    assert snapshots.forget(1, 48)
    snapshots.write_just_in_time(1, 70)
    assert held(snapshots) == [(1, 70), (1, 64)], "an empty slot goes first"
    snapshots.write_just_in_time(1, 71)
    assert held(snapshots) == [(1, 71), (1, 70)]


def test_a_snapshot_of_a_void_step_is_overwritten_before_a_good_one(memory: Path) -> None:
    """The sidecar drops the void snapshot a little later. With fast steps, the next snapshot comes first."""
    late: set[int] = set()
    objects = {"model": nn.Linear(3, 2)}
    snapshots = SnapshotWriter(memory, objects, 1, void=lambda: frozenset(late))
    for step in (4, 16):
        snapshots.write(1, step)
    late.add(16)
    snapshots.write(1, 32)
    assert held(snapshots) == [(1, 32), (1, 4)]
    late.add(32)
    with snapshots.arena.pin(snapshots.arena.records()[0]):
        assert snapshots.write(1, 48) is None, "the good snapshot stays while the other is being read"
    snapshots.overwrite_first = 1, 4
    snapshots.write_just_in_time(1, 48)
    assert held(snapshots) == [(1, 48), (1, 4)]
    late |= {4, 48}
    snapshots.write(1, 64)
    assert held(snapshots) == [(1, 64), (1, 48)], "if all are void, the newest stays"
    after = SnapshotWriter(memory, objects, 1, base=(1, 64), void=lambda: frozenset({66}))
    after.write(2, 66)
    after.write(2, 67)
    assert held(after) == [(2, 67), (1, 64)], "the base of the resume is good"
    after.write(2, 68)
    assert held(after) == [(2, 68), (2, 67)]


def contents(snapshots: SnapshotWriter) -> dict[str, bytes]:
    """Return the contents of the newest snapshot by name."""
    layout, mapping = map_file(snapshots.arena.records()[0].path)
    with mapping:
        return {
            entry.name: mapping[layout.data_offset + entry.begin : layout.data_offset + entry.end]
            for entry in layout.entries
        }


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_snapshot_holds_the_current_state_after_any_change_of_the_objects(
    memory: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    objects = group()
    snapshots = SnapshotWriter(memory / "old", objects, 1)
    for step in range(3):
        assert snapshots.write(1, step) is not None
    change(objects)
    assert snapshots.write(1, 3) is not None
    anew = SnapshotWriter(memory / "new", objects, 1)
    anew.write(1, 3)
    found, expected = contents(snapshots), contents(anew)
    assert {k: v.rstrip() for k, v in found.items()} == {k: v.rstrip() for k, v in expected.items()}


def test_the_base_of_a_resume_is_kept_until_the_new_generation_has_two_snapshots(memory: Path) -> None:
    model = {"model": nn.Linear(3, 2)}
    before = SnapshotWriter(memory, model, 1)
    before.write(1, 4)
    before.write(1, 9)  # rolled back because it was bad
    after = SnapshotWriter(memory, model, 1, base=(1, 4))
    after.write(2, 5)
    assert held(after) == [(2, 5), (1, 4)]
    after.write(2, 6)
    assert held(after) == [(2, 6), (2, 5)]


def test_a_slot_that_is_being_read_is_left_alone(memory: Path) -> None:
    snapshots = SnapshotWriter(memory, {"model": nn.Linear(3, 2)}, 1)
    snapshots.write(1, 1)
    snapshots.write(1, 2)
    with snapshots.arena.pin(snapshots.arena.records()[1]):
        assert snapshots.write(1, 3) is None
    assert held(snapshots) == [(1, 2), (1, 1)]


def test_a_copy_just_in_time_overwrites_the_newer_slot_if_the_older_one_is_being_read(memory: Path) -> None:
    snapshots = SnapshotWriter(memory, {"model": nn.Linear(3, 2)}, 1)
    snapshots.write(1, 1)
    snapshots.write(1, 2)
    with snapshots.arena.pin(snapshots.arena.records()[1]):
        assert snapshots.write_just_in_time(1, 3) is not None
        assert held(snapshots) == [(1, 3), (1, 1)]


def test_a_copy_just_in_time_keeps_the_base_while_a_checkpoint_is_written_from_it(memory: Path) -> None:
    """A checkpoint of gigabytes takes seconds. A fault in that time once cost all steps since the restart."""
    model = {"model": nn.Linear(3, 2)}
    before = SnapshotWriter(memory, model, 1)
    before.write(1, 4)
    after = SnapshotWriter(memory, model, 1, base=(1, 4))
    after.write(2, 8)
    assert held(after) == [(2, 8), (1, 4)]
    with before.arena.pin(after.arena.records()[1]):
        assert after.write_just_in_time(2, 30) is not None
        assert held(after) == [(2, 30), (1, 4)]


def test_a_copy_just_in_time_overwrites_the_base_if_another_valid_slot_is_being_read(
    memory: Path,
) -> None:
    """A hung checkpoint occupies its slot for several generations."""
    model = {"model": nn.Linear(3, 2)}
    before = SnapshotWriter(memory, model, 1)
    before.write(1, 4)
    before.write(1, 9)
    after = SnapshotWriter(memory, model, 1, base=(1, 9), second_base=(1, 4))
    with before.arena.pin(before.arena.records()[1]):
        assert after.write(2, 12) is None
        assert after.write_just_in_time(2, 13) is not None
        assert held(after) == [(2, 13), (1, 4)]


def test_a_copy_just_in_time_waits_for_a_reader_if_the_other_slot_is_the_base(memory: Path) -> None:
    model = {"model": nn.Linear(3, 2)}
    before = SnapshotWriter(memory, model, 1)
    before.write(1, 4)
    before.write(1, 9)
    after = SnapshotWriter(memory, model, 1, base=(1, 4))
    with ExitStack() as reading:
        reading.enter_context(before.arena.pin(before.arena.records()[0]))
        reader = threading.Timer(0.05, reading.pop_all().close)
        reader.start()
        assert after.write_just_in_time(2, 5) is not None
    reader.join()
    assert held(after) == [(2, 5), (1, 4)]


@pytest.mark.parametrize("slot", [0, 1])
def test_a_copy_just_in_time_overwrites_the_other_of_two_equal_snapshots_while_one_is_being_read(
    memory: Path, slot: int
) -> None:
    """A member that receives a state from a peer may hold it twice. One copy is enough to resume from."""
    model = {"model": nn.Linear(3, 2)}
    before = SnapshotWriter(memory, model, 1)
    before.write(1, 4)
    receive_again(before.arena)
    after = SnapshotWriter(memory, model, 1, base=(1, 4))
    assert held(after) == [(1, 4), (1, 4)]
    with before.arena.pin(after.arena.records()[slot]):
        assert after.write_just_in_time(2, 5) is not None
    assert held(after) == [(2, 5), (1, 4)]


@pytest.mark.parametrize("base", [(1, 4), (1, 9)])
@pytest.mark.parametrize("extra", [None, (1, 9), (2, 9)])
@pytest.mark.parametrize("generation", [1, 2])
def test_a_copy_over_the_other_snapshot_never_overwrites_what_an_ordinary_copy_would(
    tmp_path_factory: pytest.TempPathFactory,
    base: tuple[int, int],
    extra: tuple[int, int] | None,
    generation: int,
) -> None:
    def overwritten(write: Callable[[SnapshotWriter], Callable[[int, int], float | None]]) -> set[Any]:
        snapshots = SnapshotWriter(
            tmp_path_factory.mktemp("arena"), {"model": nn.Linear(3, 2)}, 1, base=base, second_base=(1, 9)
        )
        for step in (4, 9):
            assert snapshots.write(1, step) is not None
        snapshots.overwrite_first = extra
        before = set(held(snapshots))
        assert write(snapshots)(generation, 12) is not None
        return before - set(held(snapshots))

    usual, other = overwritten(lambda each: each.write), overwritten(lambda each: each.write_over)
    both_resumable = generation == 1 or base == (1, 4)
    assert (usual != other) == both_resumable
    assert len(usual) == len(other) == 1


def test_a_model_that_grows_gets_a_new_layout(memory: Path) -> None:
    objects = {"model": nn.Sequential(nn.Linear(3, 2))}
    snapshots = SnapshotWriter(memory, objects, 1)
    snapshots.write(1, 1)
    objects["model"].append(nn.Linear(2, 2))
    snapshots.write(1, 2)
    sizes = [each.total_bytes for each in snapshots.arena.records()]
    assert sizes[0] > sizes[1]


def test_a_step_that_another_rank_of_the_member_has_written_is_not_written_again(memory: Path) -> None:
    model = {"model": nn.Linear(3, 2)}
    one, other = SnapshotWriter(memory, model, 2), SnapshotWriter(memory, model, 2)
    one.write(1, 1)
    one.write(1, 2)
    assert other.write(1, 2) is None
    assert other.write_just_in_time(1, 2) is None
    assert held(other) == [(1, 2), (1, 1)]
