"""A healthy member that is away for some seconds when the group stops, in simulated time, costs no step.

Snapshots are rare, and the others wait for a lost rank, as with NCCL: only the member's own memory has the
newest state.
"""

from __future__ import annotations

import pytest

from holdfast.protocol.launcher_messages import Ending
from supervisor.view.model import Policy, Start
from tests.simulation.cluster.scripts import actions
from tests.simulation.cluster.world import World

STEPS = 1500
KILLED_MS = 15_000
KILLED = 9
FIRST_SNAPSHOT = 200


def cluster(standbys: int) -> Policy:
    return Policy(
        members=2,
        standby=standbys,
        member_timeout_s=30.0,
        members_created_externally=True,
        checkpoint_every_s=0.0,
        has_storage=False,
    )


def trained(policy: Policy) -> World:
    return World(policy, STEPS, snapshot_every=FIRST_SNAPSHOT, peers_hang=True).at(KILLED_MS, kill_rank_0)


def kill_rank_0(world: World) -> None:
    found = next(each for each in world.group.ranks(1) if each.number == 0)
    world.group.end(found, Ending(world.now_ns, None, KILLED))


def starts_of(world: World) -> list[Start]:
    return actions(world.run(limit_s=200.0), Start)[1:]


@pytest.mark.parametrize("standbys", [0, 1])
@pytest.mark.parametrize("late_ms", [100, 2500, 6000, 10_000, 14_000])
def test_a_member_that_is_late_at_a_new_leader_is_waited_for_if_only_it_has_the_newest_state(
    late_ms: int, standbys: int
) -> None:
    """After a leader has frozen, some members notice it seconds later than others."""
    world = trained(cluster(standbys))
    world.supervisor_ms = 9000
    world.network.late_ms["m1"] = late_ms
    (found,) = starts_of(world.at(10_000, World.kill_supervisor))
    assert found.placement == ("m0", "m1")
    assert found.resume.step > FIRST_SNAPSHOT


@pytest.mark.parametrize(
    ("policy", "away_ms"),
    [
        *((Policy(members=2, checkpoint_every_s=0.0), away_ms) for away_ms in (200, 1500, 3000, 4000)),
        *((cluster(standbys), away_ms) for standbys in (0, 1) for away_ms in (200, 1500, 3000, 8000, 20_000)),
    ],
)
def test_a_sidecar_that_comes_back_has_time_to_secure_its_ranks_state(policy: Policy, away_ms: int) -> None:
    def fail(world: World) -> None:
        world.sidecar_ms = away_ms
        world.members["m1"].restart_sidecar()

    (found,) = starts_of(trained(policy).at(KILLED_MS - 500, fail))
    assert found.placement == ("m0", "m1")
    assert found.resume.step > FIRST_SNAPSHOT
