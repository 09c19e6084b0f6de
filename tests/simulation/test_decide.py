from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.view.model import Policy
from tests.simulation.cluster.group import FAULTS
from tests.simulation.cluster.scripts import SINGLE, STEPS, is_whole, remedies
from tests.simulation.cluster.world import World


@pytest.mark.parametrize(
    "name",
    ["a rank is killed", "a rank is stopped", "a member of three is lost and none stands by", "a bad number"],
)
def test_a_recovery_interrupted_at_any_point_is_completed_once_with_the_same_result(name: str) -> None:
    """Kill the supervisor after each decision, each order sent and each report received, one at a time."""
    script, expected = SINGLE[name]
    whole = script().run()
    _, formed, *_, settled, _, _ = whole.decided
    for point in range(formed + 1, settled + 3):
        world = script(kills=frozenset({point})).run()
        assert is_whole(world), point
        assert remedies(world) == expected, point
        assert list(world.closed.values()) == ["settled"], point


KINDS = [*(each for each in FAULTS if each != "leave"), "nan"]  # a rank that leaves ends the run


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Draw a group with a few faults at random steps, and a supervisor that dies at random points."""
    members, nproc = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    policy = Policy(
        members=members,
        nproc=nproc,
        standby=draw(st.integers(0, 2)),
        checkpoint_every_s=draw(st.sampled_from([0.0, 0.12])),
        max_restarts=1000,
        stall_limit_s=4.0,
    )
    where = st.tuples(st.integers(0, members * nproc - 1), st.integers(0, STEPS - 1))
    # No peer waits for a single rank, so its block is no fault.
    kinds = KINDS if members * nproc > 1 else [kind for kind in KINDS if kind != "block"]
    cues = draw(st.dictionaries(where, st.sampled_from(kinds), max_size=4))
    return World(
        policy,
        STEPS,
        snapshot_every=draw(st.sampled_from([0, 1, 3])),
        peers_hang=draw(st.booleans()),
        cues={place: (what, 1) for place, what in cues.items()},
        kills=frozenset(draw(st.sets(st.integers(1, 200), max_size=3))),
    )


@settings(max_examples=200)
@given(worlds())
def test_after_any_faults_the_run_ends_with_the_undisturbed_state(world: World) -> None:
    """The world asserts the invariants at every decision.

    When every state is lost and storage has none, the run ends instead of starting over.
    """
    world.run(300.0)
    assert world.ended is not None
    if world.ended.exit_code:
        assert "no state is left to resume from: storage has no checkpoint yet" in world.ended.why
        assert world.ended.cause is not None
        assert world.ended.cause.kind in ("member_lost", "lost_track")
    else:
        assert is_whole(world)
    assert set(world.closed) == set(range(1, world.memory.incidents + 1))
