from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.protocol.member_messages import StateSource
from supervisor.decision import state_sources
from tests.unit.supervisor.job_views import memory

SOURCES = st.lists(
    st.builds(StateSource, st.sampled_from("abc"), st.integers(-1, 9), st.integers(0, 2), st.integers(0, 1)),
    max_size=30,
    unique=True,
)


@given(SOURCES)
def test_grouped_sources_name_the_same_states(sources: list[StateSource]) -> None:
    found = state_sources.grouped(sources)
    assert len(found) <= len(sources)
    assert set(state_sources.of_each_rank(found)) == set(sources)
    assert len(state_sources.of_each_rank(found)) == len(sources)


def test_consecutive_ranks_of_one_holder_are_one_source() -> None:
    mine = [StateSource("a", rank, 3, 7) for rank in range(4)]
    other = [StateSource("b", rank, 3, 7) for rank in (0, 1, 3)]
    assert state_sources.grouped([StateSource("a", -1, 3, 7), *mine, *other]) == (
        StateSource("a", -1, 3, 7),
        StateSource("a", 0, 3, 7, 4),
        StateSource("b", 0, 3, 7, 2),
        StateSource("b", 3, 3, 7),
    )


def test_in_a_small_group_every_holder_of_the_snapshot_is_named() -> None:
    sources = tuple(StateSource(url, -1, 1, 5) for url in "abc")
    assert state_sources.holders(memory(sources=sources), 2) == sources


def test_in_a_large_group_holders_are_named_in_turn() -> None:
    sources = tuple(StateSource(str(n), -1, 1, 5) for n in range(10))
    found = [each.url for each in state_sources.holders(memory(sources=sources), 13)]
    assert found == ["3", "4", "5", "6", "7", "8", "9", "0"]
