"""Hosts lose their power, and connections fail, in simulated time: only a lost host costs a restart."""

from __future__ import annotations

import pytest

from supervisor.view.model import Policy, Secure
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
