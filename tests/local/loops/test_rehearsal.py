"""A rehearsal does not change the random numbers that the script draws."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.state.random_state import RandomGenerators
from holdfast.training.rehearsal import rehearse

pytestmark = pytest.mark.local


@pytest.fixture(params=["MT19937", "PCG64"])
def generators(request: pytest.FixtureRequest) -> Iterator[RandomGenerators]:
    numpy: Any = np.random  # its stubs do not export all of it
    before = numpy.get_bit_generator()
    numpy.set_bit_generator(getattr(numpy, request.param)(3))
    yield RandomGenerators(torch.device("cpu"))
    numpy.set_bit_generator(before)


def test_every_random_generator_is_restored(generators: RandomGenerators) -> None:
    random.gauss(0, 1), np.random.randn(), torch.randn(3)
    before = generators.read()
    rehearse(torch.device("cpu"))
    assert generators.read() == before
    assert not torch.distributed.is_initialized()
