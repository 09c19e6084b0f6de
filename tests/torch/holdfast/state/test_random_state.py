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
    "torch's second Gaussian": lambda: torch.randn(1).item(),
    "torch's second Gaussian in float64": lambda: torch.empty(1, dtype=torch.float64).normal_().item(),
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
    """Return generators that are read through memory, or through `getstate` as on other platforms."""
    if request.param == "getstate":
        monkeypatch.setattr(random_state, "_words_of", lambda _generator: 0)
        monkeypatch.setattr(random_state, "words_at", lambda _address: memoryview(b""))
        monkeypatch.setattr(random_state, "_region_of_torch", lambda: None)
    return RandomGenerators(torch.device("cpu"))


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_every_draw_is_detected_and_can_be_undone(
    generators: RandomGenerators, draw: Callable[[], object]
) -> None:
    states = []
    for _ in range(6):  # a cached Gaussian shows only in every second draw
        states.append(generators.read())
        assert generators.read() == states[-1]
        draw()
    drawn = [draw() for _ in range(3)]
    assert all(one != other for one, other in pairwise(states))
    for at, state in enumerate(states):
        generators.restore(dict(state))
        assert generators.read() == state
        assert [draw() for _ in range(9 - at)][-3:] == drawn


def test_the_layout_of_torchs_generator_is_known() -> None:
    assert random_state._region_of_torch() is not None


def test_finding_the_layout_of_torchs_generator_draws_no_number() -> None:
    random_state._region_of_torch.cache_clear()
    before = torch.get_rng_state()
    random_state._region_of_torch()
    assert torch.equal(torch.get_rng_state(), before)


def test_torchs_state_is_read_as_torch_returns_it(generators: RandomGenerators) -> None:
    for draw in (torch.rand, torch.randn, torch.randperm, torch.rand):
        draw(3)
        found = dict(generators.read())["torch"]
        assert found == random_state.tensor_bytes(torch.get_rng_state())


def test_a_new_seed_is_detected(generators: RandomGenerators) -> None:
    before = generators.read()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(7)
        after = generators.read()
        assert after != before
        before = after


def test_the_generators_words_are_found_in_this_python() -> None:
    assert random_state._words_of(random._inst), "otherwise every step uses the slow path"


def test_the_memory_of_an_unknown_generator_is_not_read() -> None:
    class Odd(random.Random):
        def getstate(self) -> tuple[object, ...]:  # type: ignore[override]
            return (3, (0,) * 625, None)

    assert random_state._words_of(Odd()) == 0
    assert random_state._words_of(None) == 0


@pytest.mark.parametrize("name", ["torch", "python", "numpy"])
def test_an_invalid_state_is_refused(generators: RandomGenerators, name: str) -> None:
    with pytest.raises(BadInput, match="cannot load its state"):
        generators.restore({name: b"short"})
