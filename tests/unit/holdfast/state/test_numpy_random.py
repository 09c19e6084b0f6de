from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from holdfast.errors import BadInput
from holdfast.state import random_state
from holdfast.state.random_state import NumpyGenerator

RANDOM: Any = np.random  # its stubs do not export all of it
OTHERS = ("PCG64", "PCG64DXSM", "Philox", "SFC64")


@pytest.fixture(autouse=True)
def twister_afterwards() -> Iterator[None]:
    before = RANDOM.get_bit_generator()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # NumPy warns if it cannot return a state
        yield
    RANDOM.set_bit_generator(before)


@pytest.mark.parametrize("kind", OTHERS)
def test_another_bit_generator_is_restored_to_its_state(kind: str) -> None:
    RANDOM.set_bit_generator(getattr(RANDOM, kind)(5))
    generator = NumpyGenerator(np)
    states, drawn = [], []
    for _ in range(4):  # a second Gaussian is kept at every other one, half of a word at every other integer
        states.append(generator.read())
        drawn.append((RANDOM.randn(), RANDOM.randint(1 << 20, dtype=np.uint32)))
    assert len(set(states)) == len(states)
    RANDOM.set_bit_generator(getattr(RANDOM, kind)(6))
    for at, (name, content) in enumerate(states):
        random_state.restore_numpy(np, {name: content})
        assert generator.read() == (name, content)
        assert [(RANDOM.randn(), RANDOM.randint(1 << 20, dtype=np.uint32)) for _ in drawn[at:]] == drawn[at:]


def test_a_generator_set_later_is_the_one_that_is_read() -> None:
    generator = NumpyGenerator(np)
    names = [generator.read()[0]]
    for kind in ("PCG64", "MT19937", "SFC64"):
        RANDOM.set_bit_generator(getattr(RANDOM, kind)(5))
        names.append(generator.read()[0])
    assert names == ["numpy", "numpy:other", "numpy", "numpy:other"]


@pytest.mark.parametrize(("kind", "other"), [("MT19937", "PCG64"), ("PCG64", "MT19937"), ("PCG64", "SFC64")])
def test_the_state_of_another_generator_type_is_refused(kind: str, other: str) -> None:
    RANDOM.set_bit_generator(getattr(RANDOM, kind)(5))
    name, content = NumpyGenerator(np).read()
    RANDOM.set_bit_generator(getattr(RANDOM, other)(5))
    with pytest.raises((ValueError, TypeError), match=f"is {other} now, but was {kind}"):
        random_state.restore_numpy(np, {name: content})


@pytest.mark.parametrize(
    "content", [b"", b"{", b"7", b"{}", b"[]", b'{"uint64": ["a"]}', b'{"uint32": [-1]}']
)
def test_an_invalid_state_is_refused(content: bytes) -> None:
    RANDOM.set_bit_generator(RANDOM.PCG64(5))
    before = NumpyGenerator(np).read()
    with pytest.raises((ValueError, TypeError, LookupError, OverflowError)):
        random_state.restore_numpy(np, {before[0]: content})
    assert NumpyGenerator(np).read() == before


def test_a_state_with_more_than_numbers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    RANDOM.set_bit_generator(RANDOM.PCG64(5))
    monkeypatch.setattr(RANDOM, "get_state", lambda legacy: {"bit_generator": "Odd", "state": object()})
    with pytest.raises(BadInput, match="'Odd' contains an object, which cannot be saved"):
        NumpyGenerator(np).read()


@pytest.mark.parametrize("kind", ["MT19937", *OTHERS])
def test_reseeding_keeps_the_generator_type(kind: str) -> None:
    RANDOM.set_bit_generator(getattr(RANDOM, kind)(5))
    generator = NumpyGenerator(np)
    before = generator.read()
    random_state.reseed_numpy(np)
    after = generator.read()
    assert after[0] == before[0]
    assert after[1] != before[1]
    assert type(RANDOM.get_bit_generator()).__name__ == kind


def test_a_numpy_that_does_not_expose_its_generator_uses_a_twister(monkeypatch: pytest.MonkeyPatch) -> None:
    RANDOM.seed(3)
    expected = NumpyGenerator(np).read()
    monkeypatch.delattr(RANDOM, "get_bit_generator")
    assert NumpyGenerator(np).read() == expected
    random_state.reseed_numpy(np)
    assert NumpyGenerator(np).read() != expected
