"""A lineage determines which states are void."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.lineage import MOST, Lineage, extended, merged, valid


def grown(resumed: list[int]) -> tuple[Lineage, ...]:
    """Return the whole lineage of generations 1, 2, ... that resumed from these steps."""
    return tuple(Lineage(number, step) for number, step in enumerate(resumed, 1))


def pruned(resumed: list[int]) -> tuple[Lineage, ...]:
    found: tuple[Lineage, ...] = ()
    for each in grown(resumed):
        found = extended(found, each.generation, each.step)
    return found


def test_a_state_is_void_when_a_later_generation_resumed_from_before_it() -> None:
    known = (Lineage(2, 9),)
    assert valid(1, 9, known)
    assert not valid(1, 10, known)
    assert valid(2, 10, known)
    assert valid(3, 10, known)


@given(st.lists(st.integers(0, 12), max_size=10))
def test_a_pruned_lineage_judges_every_state_like_the_whole_one(resumed: list[int]) -> None:
    whole, short = grown(resumed), pruned(resumed)
    for generation in range(len(resumed) + 2):
        for at in range(14):
            assert valid(generation, at, short) == valid(generation, at, whole)


@given(st.lists(st.integers(0, 12), max_size=10), st.data())
def test_the_merged_lineage_of_several_sources_is_the_history(
    resumed: list[int], data: st.DataObject
) -> None:
    ends = data.draw(st.lists(st.integers(0, len(resumed)), max_size=3))
    known = [pruned(resumed[:end]) for end in ends]
    assert merged(*known) == (pruned(resumed[: max(ends)]) if ends else ())


def test_the_first_source_that_knows_a_generation_is_believed() -> None:
    assert merged((Lineage(2, 5),), (Lineage(2, 9), Lineage(3, 11))) == (Lineage(2, 5), Lineage(3, 11))


def test_a_lineage_is_bounded() -> None:
    found = pruned(list(range(MOST + 10)))
    assert len(found) == MOST
    assert found[-1] == Lineage(MOST + 10, MOST + 9)
