from __future__ import annotations

import itertools
import random
from collections import Counter

from bench.soak.faults import KINDS, bag
from holdfast.protocol.drills import DRILLS


def test_each_kind_occurs_equally_often_in_an_order_that_the_seed_determines() -> None:
    drawn = list(itertools.islice(bag(random.Random(1), KINDS), 3 * len(KINDS)))
    assert set(Counter(drawn).values()) == {3}
    assert drawn == list(itertools.islice(bag(random.Random(1), KINDS), 3 * len(KINDS)))
    assert drawn[: len(KINDS)] != drawn[len(KINDS) : 2 * len(KINDS)]


def test_every_drill_is_injected_and_a_launcher_is_killed() -> None:
    assert [each for each in KINDS if each != "launcher"] == list(DRILLS)
