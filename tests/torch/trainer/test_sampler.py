import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.sampler import Sampler

seeds = st.integers(0, 2**40)
sizes = st.integers(1, 60)
few = st.integers(1, 4)


def samplers(size: int, batch: int, ranks: int, seed: int, accumulate: int) -> list[Sampler]:
    return [
        Sampler(size, batch, rank=rank, world_size=ranks, seed=seed, accumulate=accumulate)
        for rank in range(ranks)
    ]


@given(sizes, few, few, seeds, few, st.lists(st.integers(0, 40), max_size=5), st.integers(0, 40))
def test_a_batch_depends_only_on_step_rank_world_size_and_seed(
    size: int, batch: int, ranks: int, seed: int, accumulate: int, before: list[int], step: int
) -> None:
    torch.manual_seed(step)
    for used, fresh in zip(
        samplers(size, batch, ranks, seed, accumulate),
        samplers(size, batch, ranks, seed, accumulate),
        strict=True,
    ):
        for other in before:
            used.batch(other)
        assert torch.equal(used.batch(step), fresh.batch(step))
        assert used.batch(step).shape == (accumulate, batch)


@given(sizes, few, few, seeds, few, st.integers(1, 3))
def test_an_epoch_contains_every_sample_once(
    size: int, batch: int, ranks: int, seed: int, accumulate: int, epochs: int
) -> None:
    group = samplers(size, batch, ranks, seed, accumulate)
    taken: list[int] = []
    step = 0
    while len(taken) < epochs * size:
        parts = torch.stack([sampler.batch(step) for sampler in group], dim=1)  # pass, rank, sample
        taken += parts.flatten().tolist()
        step += 1
    for epoch in range(epochs):
        assert sorted(taken[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_each_epoch_and_seed_has_a_different_order() -> None:
    def order(seed: int, step: int) -> list[int]:
        samples: list[int] = Sampler(64, 64, rank=0, world_size=1, seed=seed).batch(step)[0].tolist()
        return samples

    assert len({tuple(order(seed, step)) for seed in range(3) for step in range(3)}) == 9


def test_position_and_first_sample_follow_the_step() -> None:
    sampler = Sampler(1000, 4, rank=1, world_size=2, seed=0, accumulate=3)
    assert (sampler.position, sampler.step_size) == (0, 24)
    sampler.batch(7)
    assert sampler.first(7) == 7 * 24
    assert sampler.position == 8 * 24
    resumed = Sampler(1000, 4, rank=1, world_size=2, seed=0, accumulate=3)
    resumed.load_state_dict(sampler.state_dict())
    assert resumed.position == sampler.position


def test_a_state_of_another_seed_is_refused_and_changes_nothing() -> None:
    saved = Sampler(10, 1, rank=0, world_size=1, seed=1)
    saved.batch(5)
    sampler = Sampler(10, 1, rank=0, world_size=1, seed=2)
    with pytest.raises(ValueError, match="has seed 1, but this run has --seed 2"):
        sampler.load_state_dict(saved.state_dict())
    assert sampler.position == 0


def test_no_global_random_state_is_used() -> None:
    before, python = torch.get_rng_state(), random.getstate()
    Sampler(977, 4, rank=0, world_size=1, seed=3).batch(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python
