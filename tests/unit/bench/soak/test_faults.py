from __future__ import annotations

import itertools
import random
from collections import Counter

from bench.soak.faults import KINDS, bag
from holdfast.protocol.drills import DRILLS


def test_each_kind_comes_equally_often_in_an_order_that_the_seed_gives() -> None:
    drawn = list(itertools.islice(bag(random.Random(1), KINDS), 3 * len(KINDS)))
    assert set(Counter(drawn).values()) == {3}
    assert drawn == list(itertools.islice(bag(random.Random(1), KINDS), 3 * len(KINDS)))
    assert drawn[: len(KINDS)] != drawn[len(KINDS) : 2 * len(KINDS)]


def test_every_drill_is_injected_and_the_death_of_a_launcher() -> None:
    assert [each for each in KINDS if each != "launcher"] == list(DRILLS)
