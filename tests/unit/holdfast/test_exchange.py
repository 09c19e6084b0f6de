from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.exchange import Exchange


@given(st.integers(1, 8), st.integers(1, 8))
def test_every_state_has_a_second_home_on_another_member_or_at_least_another_rank(
    members: int, nproc: int
) -> None:
    world_size = members * nproc
    sides = [Exchange(rank, world_size, nproc) for rank in range(world_size)]
    assert [sides[side.to].source for side in sides] == list(range(world_size))
    for rank, side in enumerate(sides):
        assert side.useful == (world_size > 1)
        assert (side.to // nproc != rank // nproc) == (members > 1)
        assert (side.to != rank) == (world_size > 1)
