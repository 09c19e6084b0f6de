from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch

from holdfast.errors import BadInput
from holdfast.state import random_state
from holdfast.state.random_state import RandomGenerators

DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(1).item(),
    "python": random.random,
    "python's second Gaussian": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy's second Gaussian": np.random.randn,
}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    yield
    random.seed()


@pytest.fixture(params=["words", "getstate"])
def generators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RandomGenerators:
    """As on CPython with a new NumPy, and as elsewhere."""
    if request.param == "getstate":
        monkeypatch.setattr(random_state, "_words_of", lambda _generator: 0)
        monkeypatch.setattr(random_state, "words_at", lambda _address: memoryview(b""))
    return RandomGenerators(torch.device("cpu"))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_every_draw_is_seen_and_undone(generators: RandomGenerators, draw: Callable[[], object]) -> None:
    states = []
    for _ in range(6):  # a Gaussian that is kept shows at every second
        states.append(generators.read())
        assert generators.read() == states[-1]
        draw()
    drawn = [draw() for _ in range(3)]
    assert all(one != other for one, other in pairwise(states))
    for at, state in enumerate(states):
        generators.restore(dict(state))
        assert generators.read() == state
        assert [draw() for _ in range(9 - at)][-3:] == drawn


def test_a_new_seed_is_seen(generators: RandomGenerators) -> None:
    before = generators.read()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)
        after = generators.read()
        assert after != before
        before = after


def test_the_words_are_found_in_this_python() -> None:
    assert random_state._words_of(random._inst), "or the slow way is taken on every step"


def test_a_generator_of_another_make_is_not_looked_into() -> None:
    class Odd(random.Random):
        def getstate(self) -> tuple[object, ...]:  # type: ignore[override]
            return (3, (0,) * 625, None)

    assert random_state._words_of(Odd()) == 0
    assert random_state._words_of(None) == 0


@pytest.mark.parametrize("name", ["torch", "python", "numpy"])
def test_a_state_that_is_none_is_refused(generators: RandomGenerators, name: str) -> None:
    with pytest.raises(BadInput, match="cannot load its state"):
        generators.restore({name: b"short"})
