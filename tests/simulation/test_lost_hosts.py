"""Hosts lose their power, and connections fail, in simulated time: only a lost host costs a restart.

A healthy member that is away for some seconds when the group stops costs no step.
"""

from __future__ import annotations

import pytest

from holdfast.protocol.launcher_messages import Ending
from supervisor.view.model import Policy, Secure, Start
from tests.simulation.cluster.member import MS, Content
from tests.simulation.cluster.scripts import actions, remedies
from tests.simulation.cluster.world import BEGIN_NS, World

POLICY = Policy(members=3, standby=1, member_timeout_s=30.0, members_created_externally=True)
STEPS = 1500  # a minute
LOST_MS = 10_000
NOTICED_S = 5.0


def power_loss(world: World) -> str:
    """Let the host of rank 1 lose its power. Its connection stays open, and the others wait for its rank."""
    name = world.memory.placement[1]
    world.network.cut_from_supervisor(name, 600_000)
    world.members[name].lose()
    return name


def trained() -> World:
    return World(POLICY, STEPS, peers_hang=True)


def is_whole(world: World) -> bool:
    return world.ended is not None and world.ended.exit_code == 0 and world.final == Content(STEPS)


@pytest.mark.parametrize("later_ms", range(0, 1000, 90))
def test_a_host_without_power_is_noticed_within_five_seconds(later_ms: int) -> None:
    """The loss can follow the member's last report by any part of its interval."""
    lost: list[str] = []
    world = trained().at(LOST_MS + later_ms, lambda world: lost.append(power_loss(world))).run()
    (secured,) = actions(world, Secure)
    assert [(each.kind, each.member) for each in secured.faults] == [("member_lost", lost[0])]
    noticed_ns = next(view.now_ns for view, action, _ in world.journal if action is secured)
    assert noticed_ns - BEGIN_NS - (LOST_MS + later_ms) * MS < NOTICED_S * 1000 * MS
    ((kind, remedy, _),) = remedies(world)
    assert (kind, remedy) == ("member_lost", "swap")
    assert is_whole(world)


def test_without_an_answer_before_the_timeout_decides() -> None:
    """For example, a NetworkPolicy drops the probes."""

    def lose(world: World) -> None:
        world.network.unanswered.pop(power_loss(world))

    world = trained().at(LOST_MS, lose).run()
    first = next(view.now_ns for view, action, _ in world.journal if isinstance(action, Secure))
    assert first - BEGIN_NS > (LOST_MS + 20_000) * MS
    assert is_whole(world)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("for_ms", [4_000, 10_000, 29_000])
def test_members_that_only_the_supervisor_does_not_hear_train_on(
    count: int, answers: bool, for_ms: int
) -> None:
    """Frozen sidecars, cut connections, or a supervisor that is cut off."""

    def cut(world: World) -> None:
        for name in world.memory.placement[:count]:
            world.network.cut_from_supervisor(name, for_ms, answers)

    world = trained().at(LOST_MS, cut).run()
    assert actions(world, Secure) == []
    assert remedies(world) == []
    assert is_whole(world)


def test_a_member_that_is_out_of_reach_for_longer_than_the_timeout_trains_on_with_the_others() -> None:
    def cut(world: World) -> None:
        world.network.cut_from_supervisor(world.memory.placement[1], 45_000)

    world = trained().at(LOST_MS, cut).run()
    assert remedies(world) == []
    assert is_whole(world)


# -- members that come back. Snapshots are rare, and the others wait for a lost rank, as with NCCL, so only
# the member's own memory has the newest state.

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


def rarely_saved(policy: Policy) -> World:
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
    world = rarely_saved(cluster(standbys))
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

    (found,) = starts_of(rarely_saved(policy).at(KILLED_MS - 500, fail))
    assert found.placement == ("m0", "m1")
    assert found.resume.step > FIRST_SNAPSHOT
