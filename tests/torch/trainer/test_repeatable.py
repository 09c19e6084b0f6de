import random

import numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.repeatable import mix, seed_everything

Draws = tuple[float, float, float]


def draws() -> Draws:
    return random.random(), torch.rand(()).item(), float(numpy.random.rand())


def test_each_seed_and_rank_has_different_random_numbers_in_every_library() -> None:
    found: list[Draws] = []
    for seed, rank in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        seed_everything(seed, rank)
        first = draws()
        seed_everything(seed, rank)
        assert draws() == first
        found.append(first)
    assert all(len(set(column)) == 4 for column in zip(*found, strict=True))


@given(st.integers(0, 2**64), st.integers(0, 2**20))
def test_a_mixed_seed_is_accepted_by_every_library(seed: int, rank: int) -> None:
    assert 0 <= mix(seed, rank) < 2**32
    assert mix(seed, rank) == mix(seed, rank)


def test_words_are_mixed_separately() -> None:
    assert mix(1, 23) != mix(12, 3)
