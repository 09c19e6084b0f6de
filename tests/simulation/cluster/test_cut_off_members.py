"""Members do not reach each other, in simulated time: a standby replaces the one that is cut off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from holdfast.protocol.launcher_messages import Ending
from supervisor.decision.membership import cut_off_members
from supervisor.decision.unreachable_members import SIGNATURE
from supervisor.observability.bookkeeping import Bookkeeping
from supervisor.view.model import End, Policy, RunAction, Secure, View, Warn
from tests.simulation.cluster.links import Links
from tests.simulation.cluster.scripts import actions
from tests.simulation.cluster.world import BEGIN_NS, World

POLICY = Policy(members=4, standby=2, member_timeout_s=30.0, members_created_externally=True)
STEPS = 1000
CUT_MS = 10_000


def job(*cut: str, policy: Policy = POLICY, fails_ms: int = 0, **given: object) -> World:
    """Return a job in which the members `cut` lose their links after 10 s."""
    made = World(policy, STEPS, peers_hang=True, links=Links(fails_ms), **given)  # type: ignore[arg-type]

    def cut_off(world: World) -> None:
        assert world.links is not None
        world.links.cut(*cut)

    return made.at(CUT_MS, cut_off) if cut else made


def unready(world: World, name: str = "m4") -> None:
    world.members[name].parked.clear()
    world.members[name].filling = True
    world.network.tell(world.members[name])


def ready(world: World, name: str = "m4") -> None:
    world.members[name]._fill()


def links_of(*names: str) -> Callable[[World], None]:
    def cut(world: World) -> None:
        for name in names:
            assert world.links is not None
            world.links.cut(name)

    return cut


def seconds(world: World, action: object) -> float:
    """Return when the action was decided, in seconds after the cut."""
    at_ns = next(view.now_ns for view, each, _ in world.journal if each is action)
    return (at_ns - BEGIN_NS) / 1e9 - CUT_MS / 1000


def cut_off(world: World) -> list[tuple[str, float]]:
    """Return the members that were found to be cut off, and when, in seconds after the cut."""
    return [
        (fault.member, round(seconds(world, action), 1))
        for action in actions(world, Secure)
        for fault in action.faults
        if fault.signature == SIGNATURE
    ]


def test_a_standby_replaces_a_member_that_is_cut_off() -> None:
    world = job("m2").run()
    ((name, after_s),) = cut_off(world)
    assert name == "m2"
    assert after_s < 12.0
    assert [each.placement for each in world.starts[1:]] == [("m0", "m1", "m4", "m3")]
    assert world.final.step == STEPS


@pytest.mark.parametrize("late", ["m0", "m2", "m3"])
def test_the_member_that_is_cut_off_is_replaced_although_another_reports_late(late: str) -> None:
    """A standby becomes ready while reports are missing."""

    def reconnect(world: World) -> None:
        world.network.cut_off(late, 2000)

    world = job("m1", policy=replace(POLICY, standby=1)).at(CUT_MS - 1000, unready)
    world.at(CUT_MS + 45_000, reconnect).at(CUT_MS + 46_000, ready).run(300)
    assert [name for name, _ in cut_off(world)] == ["m1"]
    assert world.final.step == STEPS


@pytest.mark.parametrize("late", ["m0", "m2"])
def test_so_it_is_after_another_sidecar_has_restarted(late: str) -> None:
    """The new sidecar has never reached the member that is cut off, so it does not confirm the report."""
    world = job("m1", policy=replace(POLICY, standby=1)).at(CUT_MS - 1000, unready)
    world.at(CUT_MS + 5000, lambda world: world.members[late].restart_sidecar())
    world.at(CUT_MS + 46_000, ready).run(300)
    assert [name for name, _ in cut_off(world)] == ["m1"]
    assert world.final.step == STEPS


def test_a_member_that_is_cut_off_is_replaced_although_its_own_sidecar_has_restarted() -> None:
    world = job("m1").at(CUT_MS + 6000, lambda world: world.members["m1"].restart_sidecar()).run(300)
    ((name, after_s),) = cut_off(world)
    assert name == "m1"
    assert after_s < 55.0
    assert world.final.step == STEPS


@pytest.mark.parametrize("fails_ms", [0, 300])
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_member_that_is_cut_off_while_another_one_is_lost_is_found_after_it(
    is_silent: bool, fails_ms: int
) -> None:
    def lose(world: World) -> None:
        if is_silent:
            world.network.cut_off("m3", 600_000)
        else:
            world.remove("m3")

    world = job(fails_ms=fails_ms).at(CUT_MS, lose).at(CUT_MS + 50, links_of("m1")).run(200)
    ((name, after_s),) = cut_off(world)
    assert name == "m1"
    assert after_s < 80.0
    assert world.final.step == STEPS


@pytest.mark.parametrize("stuck", ["m0", "m1", "m2"])
def test_a_sidecar_that_always_reports_the_same_duration_does_not_prevent_the_replacement(stuck: str) -> None:
    world = job("m1")
    assert world.links is not None
    world.links.stuck.add(stuck)
    world.run(300)
    ((name, after_s),) = cut_off(world)
    assert name == "m1"
    assert 40.0 < after_s < 55.0
    assert world.final.step == STEPS


@pytest.mark.parametrize("fails_ms", [0, 300])
@pytest.mark.parametrize("after_ms", [100, 6000])
def test_so_is_one_of_two_members_whose_sidecar_has_restarted(after_ms: int, fails_ms: int) -> None:
    """Its new sidecar has never reached the other member, so it is asked to, and then confirms the report."""
    world = job("m1", policy=replace(POLICY, members=2), fails_ms=fails_ms)
    world.at(CUT_MS + after_ms, lambda world: world.members["m1"].restart_sidecar()).run(400)
    ((name, after_s),) = cut_off(world)
    assert name == "m1"
    assert after_s < 100.0
    assert any("m1 does not confirm this" in each.why for each in actions(world, Warn))
    assert world.final.step == STEPS


@pytest.mark.parametrize(
    ("fails_ms", "restart_ms", "kill_ms", "ready_ms"),
    [
        (0, 9500, 0, 0),
        (0, 10_500, 45_000, 0),
        (0, 100, 20_000, 100_000),
        *product((300,), (100, 9500), (0, 20_000, 50_000), (0, 100_000)),
    ],
)
def test_so_it_is_if_the_group_has_started_again_before_the_pair_is_confirmed(
    fails_ms: int, restart_ms: int, kill_ms: int, ready_ms: int
) -> None:
    """The sidecar is asked to confirm although it reached no neighbour in an earlier generation."""
    world = job("m1", policy=replace(POLICY, members=2, standby=1), fails_ms=fails_ms)
    world.at(CUT_MS + restart_ms, lambda world: world.members["m1"].restart_sidecar())
    if kill_ms:
        world.at(CUT_MS + kill_ms, lambda world: world.kill_supervisor())
    if ready_ms:
        world.at(CUT_MS - 1000, lambda world: unready(world, "m2"))
        world.at(CUT_MS + ready_ms, lambda world: ready(world, "m2"))
    world.run(400)
    ((name, after_s),) = cut_off(world)
    assert name == "m1"
    assert after_s < 145.0
    assert world.final.step == STEPS


def test_so_it_is_if_the_user_has_already_been_warned_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_off_members, "MOST_WARNINGS", 0)
    world = job("m1", policy=replace(POLICY, members=2), fails_ms=300)
    world.at(CUT_MS + 100, lambda world: world.members["m1"].restart_sidecar()).run(400)
    assert [name for name, _ in cut_off(world)] == ["m1"]
    assert not actions(world, Warn)
    assert world.final.step == STEPS
    assert not world.memory.asked


def test_a_member_that_trained_with_the_standby_is_not_suspected_any_longer() -> None:
    policy = replace(POLICY, members=2, standby=3)
    world = job("m1", policy=policy).at(CUT_MS + 20_000, links_of("m2")).run(300)
    assert [name for name, _ in cut_off(world)] == ["m1", "m2"]
    assert world.starts[-1].placement == ("m0", "m3")
    assert world.final.step == STEPS


class AwayAtStops(World):
    """A job whose standby m4 loses its connection for a moment whenever the group stops."""

    def _carry_out(self, view: View, action: RunAction, accounts: Bookkeeping) -> None:
        super()._carry_out(view, action, accounts)
        if isinstance(action, Secure):
            self.network.cut_off("m4", 2500)


def test_a_standby_that_is_away_for_a_moment_is_waited_for() -> None:
    made = AwayAtStops(replace(POLICY, standby=1), STEPS, peers_hang=True, links=Links())
    world = made.at(CUT_MS, links_of("m2")).run(200)
    assert [name for name, _ in cut_off(world)] == ["m2"]
    assert [each.remedy for each in world.starts[1:]] == ["swap"]
    assert world.final.step == STEPS


# -- standbys that are cut off, too


def test_a_standby_that_is_cut_off_like_its_predecessor_is_replaced_by_a_healthy_one() -> None:
    world = job().at(CUT_MS, links_of("m2", "m4")).run(200)
    assert [name for name, _ in cut_off(world)] == ["m2", "m4"]
    assert cut_off(world)[1][1] < 50.0
    assert [each.placement[2] for each in world.starts] == ["m2", "m4", "m5"]
    assert world.final.step == STEPS


@pytest.mark.parametrize("lost", ["m0", "m1"])
@pytest.mark.parametrize("members", [2, 4])
def test_so_is_a_standby_that_has_replaced_a_lost_member(lost: str, members: int) -> None:
    lost = min(lost, f"m{members - 1}")
    bad = f"m{members}"
    policy = replace(POLICY, members=members)
    world = job(policy=policy).at(CUT_MS - 1000, links_of(bad))
    world.at(CUT_MS, lambda world: world.remove(lost)).run(200)
    assert [name for name, _ in cut_off(world)] == [bad]
    assert cut_off(world)[0][1] < 40.0
    assert f"m{members + 1}" in world.starts[-1].placement
    assert world.final.step == STEPS


def test_a_group_grows_without_a_member_that_is_cut_off() -> None:
    policy = replace(POLICY, min_members=3)
    world = job(policy=policy, resizes=True)
    world.at(3000, lambda world: unready(world, "m4")).at(3000, lambda world: unready(world, "m5"))
    world.at(4000, links_of("m4")).at(4000, lambda world: setattr(world, "boot_ms", 600_000))
    world.at(CUT_MS, lambda world: world.remove("m3"))
    world.at(CUT_MS + 15_000, lambda world: ready(world, "m4"))
    world.at(CUT_MS + 15_000, lambda world: ready(world, "m5"))
    world.steps = 3000
    world.run(400)
    assert [name for name, _ in cut_off(world)] == ["m4"]
    assert world.starts[-1].placement == ("m0", "m1", "m2", "m5")
    assert world.final.step == 3000


@pytest.mark.parametrize("lost", ["m1", "m2"])
def test_if_sidecars_cannot_reach_each_other_at_all_nobody_is_cut_off(lost: str) -> None:
    """A network policy allows only the connections of the ranks, and the new ranks load for a minute."""
    world = job()
    assert world.links is not None
    world.links.only_sidecars = True
    for name in ("m0", "m1", "m2", "m3", "m4", "m5"):
        world.links.cut(name)
    world.at(CUT_MS - 1, lambda world: setattr(world.links, "loads_ms", 55_000))
    world.at(CUT_MS, lambda world: world.remove(lost)).run(400)
    assert not cut_off(world)
    assert len(world.starts) == 2
    assert world.final.step == STEPS


# -- a network policy that forbids connections to a member, but none from it


def closed(for_ms: int) -> World:
    """Return a job in which nobody can connect to m1 for a while, and the ranks wait."""
    world = job()
    links = world.links
    assert links is not None
    return world.at(CUT_MS, lambda _: links.closed.add("m1")).at(
        CUT_MS + for_ms, lambda _: links.closed.clear()
    )


def test_a_member_that_reaches_its_neighbours_is_not_cut_off_although_they_do_not_reach_it() -> None:
    world = closed(for_ms=60_000).run(500)
    assert not cut_off(world)
    assert any("does not confirm" in each.why for each in actions(world, Warn))
    assert {each.placement for each in world.starts} == {("m0", "m1", "m2", "m3")}, "nobody has moved"
    assert world.final.step == STEPS


def test_it_is_replaced_if_the_leader_changes_in_the_meantime() -> None:
    """To a new leader, its sidecar may be new. No new generation could include it anyway."""
    world = closed(for_ms=60_000)
    world.at(CUT_MS + 5_000, lambda world: world.kill_supervisor())
    world.run(500)
    ((name, after_s),) = cut_off(world)
    assert name == "m1"
    assert after_s > 5.0 + cut_off_members.UNCONFIRMED_S
    assert world.final.step == STEPS


# -- ranks that fail at once instead of waiting


def crash(world: World) -> None:
    rank = world.group.ranks(world.memory.generation)[3]
    world.group.end(rank, Ending(world.now_ns, None, 11))


@pytest.mark.parametrize("fails_ms", [300, 2000, 8000])
@pytest.mark.parametrize("links", [("m2",), ("m1", "m2")])
def test_ranks_that_fail_at_once_when_they_cannot_connect_do_not_end_the_run(
    links: tuple[str, ...], fails_ms: int
) -> None:
    world = job(*links, fails_ms=fails_ms).run(200)
    ((name, after_s),) = cut_off(world)
    assert name == "m2"
    assert after_s < 35.0
    assert [each.remedy for each in world.starts[1:]] == ["restart", "swap"]
    assert world.final.step == STEPS


def test_nor_do_they_after_a_crash() -> None:
    world = job("m1", "m2", fails_ms=300).at(CUT_MS + 100, crash).run(200)
    ((name, _),) = cut_off(world)
    assert name == "m2"
    assert world.final.step == STEPS


def test_a_standby_that_comes_later_is_waited_for() -> None:
    """Meanwhile, restarts in place would not help."""
    world = job("m2", policy=replace(POLICY, standby=1), fails_ms=300)
    world.at(CUT_MS - 1000, unready).at(CUT_MS + 100_000, ready).run(400)
    ((name, after_s),) = cut_off(world)
    assert name == "m2"
    assert 100.0 <= after_s < 101.0
    assert [each.remedy for each in world.starts[1:]] == ["restart", "swap"]
    assert world.final.step == STEPS


def test_if_the_network_works_again_the_group_starts_again_in_place() -> None:
    def mend(world: World) -> None:
        assert world.links is not None
        world.links.down.clear()

    world = job("m2", policy=replace(POLICY, standby=0), fails_ms=300).at(CUT_MS + 100_000, mend).run(400)
    assert not cut_off(world)
    assert [each.remedy for each in world.starts[1:]] == ["restart", "restart"]
    assert seconds(world, world.starts[-1]) < 105.0
    assert world.final.step == STEPS


def test_without_evidence_the_run_ends_as_before_after_some_tens_of_seconds() -> None:
    world = job("m2", fails_ms=300)
    assert world.links is not None
    world.links.only_ranks = True
    world.run(200)
    (end,) = actions(world, End)
    assert end.exit_code == 1
    assert "the same failure 5 times at step 225; this is a bug, not a fault" in end.why
    assert 20.0 < seconds(world, end) < 90.0


@pytest.mark.parametrize("kind", ["raise", "crash"])
def test_a_bug_in_the_script_ends_the_run_as_quickly_as_before(kind: str) -> None:
    world = World(POLICY, STEPS, peers_hang=True, links=Links(), cues={(1, 225): (kind, 9)}).run()
    (end,) = actions(world, End)
    assert "this is a bug" in end.why
    assert seconds(world, end) < 5.0


def test_a_stop_does_not_wait_for_evidence() -> None:
    def stop(world: World) -> None:
        world.stop = "graceful"
        world.look()

    world = job("m2", fails_ms=300).at(CUT_MS + 3000, stop).run()
    (end,) = actions(world, End)
    assert seconds(world, end) < 6.0
