"""Batches depend only on the step: they are the same after a fault, whichever process loads them."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import BadInput
from holdfast.protocol.launcher_messages import Launch, RankStart
from holdfast.training.batches import Batches
from holdfast.training.session import Session
from holdfast.training.world_sizes import SIZES_KEY, WorldSizes

torch.set_num_threads(1)

LAUNCH = Launch(3, 1, 1, "", 0, 0, 0.0)


class Noisy:
    """Samples that are augmented with all three kinds of randomness."""

    def __init__(self, size: int = 22) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        noise = [random.random(), float(torch.rand(())), float(np.random.rand())]
        return index, torch.tensor([float(index), *noise], dtype=torch.float64)


def summed(samples: list[Any]) -> float:
    return float(sum(values.sum() for _, values in samples)) + random.random()


def batches_of(rank: int = 0, world_size: int = 1, step: int = 0, **given: Any) -> Batches:
    launch = replace(LAUNCH, world_size=world_size, skip=given.pop("skip", ()))
    session = Session(launch, RankStart(rank, 0), None)
    state = session.protect()
    state.step = step
    return Batches(given.pop("dataset", Noisy()), given.pop("batch_size", 4), session, state, **given)


def run(batches: Batches, until: int) -> list[tuple[int, Any]]:
    """Return what a training loop sees."""
    seen = []
    for step, batch in batches.steps(until):
        seen.append((step, [each.tolist() for each in batch] if isinstance(batch, list) else batch))
        batches._state.commit()
    return seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_has_each_sample_at_most_once_on_one_rank(world_size: int) -> None:
    of_rank = [batches_of(rank, world_size) for rank in range(world_size)]
    steps = len(of_rank[0])
    assert steps == 22 // (4 * world_size)
    epochs = [
        [
            index
            for batches in of_rank
            for step in range(e * steps, (e + 1) * steps)
            for index in batches.indices(step)
        ]
        for e in range(3)
    ]
    for seen in epochs:
        assert len(set(seen)) == len(seen) == steps * 4 * world_size
        assert set(seen) <= set(range(22))
    assert len({tuple(seen) for seen in epochs}) == 3, "each epoch must have its own order"
    assert [of_rank[0].epoch(step) for step in (0, steps - 1, steps)] == [0, 0, 1]
    assert [step for step in range(2 * steps) if of_rank[0].ends_epoch(step)] == [steps - 1, 2 * steps - 1]
    assert of_rank[0].position(3) == 12 * world_size


def test_the_seed_determines_the_order_and_without_shuffling_the_dataset_does() -> None:
    assert batches_of().indices(0) == batches_of().indices(0) != batches_of(seed=1).indices(0)
    assert batches_of(shuffle=False).indices(1) == [4, 5, 6, 7]


def test_an_epoch_can_be_padded_with_samples_from_its_beginning() -> None:
    batches = batches_of(drop_last=False)
    assert len(batches) == 6
    epoch = [index for step in range(6) for index in batches.indices(step)]
    assert set(epoch) == set(range(22))
    assert epoch[22:] == epoch[:2]


@pytest.mark.parametrize("resumed", [1, 5, 7])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_loop_sees_the_batches_of_the_undisturbed_one(resumed: int, workers: int) -> None:
    whole = run(batches_of(), 12)
    assert run(batches_of(step=resumed, num_workers=workers), 12) == whole[resumed:]


@pytest.mark.parametrize("method", sorted(set(multiprocessing.get_all_start_methods()) - {"forkserver"}))
def test_the_batches_do_not_depend_on_the_processes_that_load_them(method: str) -> None:
    loaded = run(batches_of(num_workers=2, multiprocessing_context=method, persistent_workers=True), 6)
    assert loaded == run(batches_of(), 6)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_function_may_also_draw_random_numbers(workers: int) -> None:
    assert run(batches_of(num_workers=workers, collate_fn=summed), 3) == run(batches_of(collate_fn=summed), 3)


@pytest.mark.parametrize("workers", [0, 1])
def test_loading_does_not_change_the_random_numbers_of_the_training(workers: int) -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = (torch.rand(1), random.random(), np.random.rand())
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    run(batches_of(num_workers=workers), 2)
    assert (torch.rand(1), random.random(), np.random.rand()) == expected


def test_a_skipped_step_skips_only_its_own_batch() -> None:
    whole = run(batches_of(), 8)
    assert run(batches_of(skip=(2, 5)), 8) == [each for each in whole if each[0] not in (2, 5)]


def test_a_step_that_was_not_committed_has_the_same_batch_again() -> None:
    batches = batches_of()
    seen = []
    for step, batch in batches.steps(3):
        seen.append((step, batch[0].tolist()))
        if len(seen) != 2:
            batches._state.commit()
    assert [step for step, _ in seen] == [0, 1, 1, 2]
    assert seen[1] == seen[2]


def zipped(batches: Batches, until: int, batches_first: bool, given: Any = None) -> Iterator[tuple[int, Any]]:
    feed = batches if given is None else given
    if batches_first:
        yield from ((step, batch) for batch, step in zip(feed, batches._state.steps(until), strict=False))
    else:
        yield from zip(batches._state.steps(until), feed, strict=False)


@pytest.mark.parametrize("batches_first", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_can_be_zipped_with_the_steps_and_stay_in_line_with_them(
    batches_first: bool, workers: int
) -> None:
    batches = batches_of(step=3, skip=(3, 8, 12), num_workers=workers)
    tried, seen = [], []
    for step, (indices, _) in zipped(batches, 12, batches_first):
        assert indices.tolist() == batches.indices(step)
        tried.append(step)
        if step in (4, 7) and tried.count(step) < 3:
            continue  # an unusable batch: the step begins again
        seen.append(step)
        batches._state.commit()
    assert seen == [4, 5, 6, 7, 9, 10, 11]
    assert tried.count(4) == tried.count(7) == 3


@pytest.mark.parametrize("batches_first", [False, True])
def test_one_iterator_can_serve_consecutive_loops(batches_first: bool) -> None:
    batches = batches_of()
    feed, seen = iter(batches), []
    for epoch in range(3):
        for step, (indices, _) in zipped(batches, 3 * (epoch + 1), batches_first, feed):
            assert indices.tolist() == batches.indices(step)
            seen.append(step)
            batches._state.commit()
    assert seen == list(range(9))


def test_a_step_that_takes_no_batch_skips_its_own() -> None:
    batches = batches_of()
    feed = iter(batches)
    for step in batches._state.steps(9):
        if step % 3:
            assert next(feed)[0].tolist() == batches.indices(step)
        batches._state.commit()


def test_a_second_batch_in_one_step_is_refused_with_what_to_do() -> None:
    batches = batches_of()
    feed = iter(batches)
    for _ in batches._state.steps(1):
        next(feed)
        with pytest.raises(BadInput, match=r"a second batch .* in one step.*x\.chunk\(k\)"):
            next(feed)
        batches._state.commit()


def test_batches_is_exported() -> None:
    assert holdfast.Batches is Batches


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch_size": 0}, r"Batches\(batch_size=0\): expected a whole number of at least 1"),
        ({"batch_size": "4"}, r"Batches\(batch_size='4'\)"),
        ({"batch_size": 23}, "a step needs 23 samples on 1 ranks, but the dataset has 22"),
        ({"sampler": object()}, r"Batches\(sampler=\.\.\.\): Batches determines the order"),
        ({"shuffel": True}, r"Batches\(shuffel=\.\.\.\): not an option of .*; did you mean shuffle\?"),
        ({"prefetch_factor": 3}, r"Batches\(prefetch_factor=\.\.\.\): .*num_workers"),
        ({"dataset": iter([1])}, "must keep track of its position itself"),
    ],
)
def test_invalid_arguments_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        batches_of(**given)


SIZES = ((0, 3), (4, 2), (9, 3))  # the first steps of the world sizes


def sized(sizes: tuple[tuple[int, int], ...], rank: int, **given: Any) -> Batches:
    """Return the batches of a run in which the world size has changed."""
    world_size = sizes[-1][1]
    session = Session(replace(LAUNCH, world_size=world_size), RankStart(rank, 0), None)
    document = {SIZES_KEY: [list(each) for each in sizes]}
    session._rank.sizes.restore(document, sizes[-1][0])
    return Batches(given.pop("dataset", Noisy(60)), 2, session, session.protect(), **given)


def seen_by_all(until: int, **given: Any) -> list[tuple[int, int]]:
    """Return the epoch and the index of each sample that any rank sees before step `until`."""
    found = []
    for number, (first, world_size) in enumerate(SIZES):
        last = SIZES[number + 1][0] if number + 1 < len(SIZES) else until
        for rank in range(world_size):
            batches = sized(SIZES[: number + 1], rank, **given)
            for step in range(first, min(last, until)):
                found += [(batches.epoch(step), index) for index in batches.indices(step)]
    return found


def test_an_epoch_goes_on_with_the_samples_that_follow_if_the_number_of_ranks_changes() -> None:
    batches = sized(SIZES, 0)
    end = batches.first_step(1)
    assert end == 9 + (60 - 4 * 6 - 5 * 4) // 6
    seen = [index for epoch, index in seen_by_all(end) if epoch == 0]
    assert len(set(seen)) == len(seen), "no sample twice"
    assert [batches.position(step) for step in (4, 9, 10)] == [24, 44, 50]
    assert batches.ends_epoch(end - 1)
    assert batches.first_step(3) == end + 2 * len(batches)
    assert batches.epoch(batches.first_step(3)) == 3


def test_each_sample_of_an_epoch_is_seen_if_the_last_batch_is_filled_up() -> None:
    end = sized(SIZES, 0, drop_last=False).first_step(2)
    for epoch in range(2):
        seen = [index for each, index in seen_by_all(end, drop_last=False) if each == epoch]
        assert set(seen) == set(range(60))
        assert len(seen) < 60 + 6


def test_an_epoch_that_lacks_samples_for_a_larger_group_still_has_a_last_step() -> None:
    """Before the change, the epoch had one more step."""
    sizes = ((0, 1), (5, 3))
    batches = sized(sizes, 2, dataset=Noisy(12))
    assert (batches.epoch(5), batches.epoch(6)) == (0, 1)
    assert batches.ends_epoch(5)
    assert batches.first_step(1) == 6


@pytest.mark.parametrize("found", [3, [], [[1, 2]], [[0, 0]], [[0, 2], [0, 3]], [["a", 2]]])
def test_sizes_in_a_snapshot_that_are_not_valid_are_refused(found: object) -> None:
    with pytest.raises(BadInput, match="is not a list of steps"):
        WorldSizes(2).restore({SIZES_KEY: found}, 5)


def test_a_change_is_saved_with_the_state_and_replaces_later_ones_after_a_rollback() -> None:
    sizes = WorldSizes(2, saved_by=3)
    sizes.restore({}, 7)
    assert sizes.resized == (3, 2)
    assert sizes.document() == {SIZES_KEY: [[0, 3], [7, 2]]}
    again = WorldSizes(3, saved_by=2)
    again.restore(sizes.document(), 7)
    assert again.document() == {}, "no step was made with two ranks"
    later = WorldSizes(3, saved_by=2)
    later.restore(sizes.document(), 9)
    assert later.document() == {SIZES_KEY: [[0, 3], [7, 2], [9, 3]]}


def test_the_sizes_in_the_snapshot_take_precedence_over_what_the_supervisor_knows() -> None:
    told: list[tuple[int, int]] = []
    for now, saved_by, document, expected in (
        (3, 2, [[0, 3], [12, 2], [39, 3]], []),  # the growth was not recorded
        (2, 3, [[0, 3], [12, 2]], []),  # the loss was not recorded
        (2, 0, [[0, 2], [12, 3]], [(3, 2)]),
        (3, 2, [[0, 3], [12, 2]], [(2, 3)]),
    ):
        sizes = WorldSizes(now, saved_by)
        sizes.hook = lambda old, new: told.append((old, new))
        sizes.restore({SIZES_KEY: document}, 62)
        sizes.adapt({})
        assert told == expected
        assert sizes.steps[-1].world_size == now
        told.clear()


def test_a_script_without_a_hook_needs_batches_and_no_private_objects() -> None:
    sizes = WorldSizes(2, saved_by=3)
    assert "neither calls session.on_resize" in sizes.fixed_by({})
    sizes.is_known_to_batches = True
    assert sizes.fixed_by({}) == ""
    assert sizes.fixed_by({"sampler": object()}).startswith("each rank has its own sampler")
    with pytest.raises(BadInput, match="cannot resume on 2 ranks from a state saved by 3: each rank"):
        sizes.adapt({"sampler": object()})
    told = []
    sizes.hook = lambda old, new: told.append((old, new, sizes.resized))
    assert sizes.adapt({"sampler": object()})
    assert told == [(3, 2, (3, 2))]
    assert sizes.resized is None
    assert not sizes.adapt({})


def test_a_hook_is_a_function_and_registered_before_the_first_loop() -> None:
    session = Session(LAUNCH, RankStart(0, 0), None)
    assert session.on_resize(print) is print
    with pytest.raises(BadInput, match="expected a function of the old and the new world size"):
        session.on_resize(3)  # type: ignore[arg-type]
    state = session.protect()
    for _ in state.steps(1):
        state.commit()
    with pytest.raises(BadInput, match="after the first loop began"):
        session.on_resize(print)
