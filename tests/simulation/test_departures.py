"""A member that is about to end is replaced before it ends, and no completed step is repeated."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.view.model import Departure, Policy, Secure, Start
from tests.simulation.cluster.member import Content
from tests.simulation.cluster.scripts import actions, remedies
from tests.simulation.cluster.world import World

STEPS = 60  # of 40 ms; the first steps begin after 500 ms, and the standby is ready after a second
TWO = Policy(members=2, standby=1, checkpoint_every_s=0.2, max_restarts=0)
AT_MS = 1500
DRAIN = Departure("its node is drained")


def world(policy: Policy = TWO, **given: object) -> World:
    return World(policy, STEPS, **given)  # type: ignore[arg-type]


def is_whole(ended: World) -> bool:
    return ended.ended is not None and ended.ended.exit_code == 0 and ended.final == Content(STEPS)


def swaps(ended: World) -> list[tuple[str, str, tuple[str, ...], int | None]]:
    """Return cause, remedy, placement and the number of lost steps of each start but the first."""
    found = [(a, after) for _, a, after in ended.journal if isinstance(a, Start)][1:]
    lost = [after.incident.lost if after.incident else None for _, after in found]
    return [
        (a.cause.kind if a.cause else "", a.remedy, a.placement, steps)
        for (a, _), steps in zip(found, lost, strict=True)
    ]


def drained(name: str = "m1", **given: int | bool) -> World:
    return world().at(AT_MS, lambda w: w.announce(name, **given))  # type: ignore[arg-type]


@pytest.mark.parametrize("has_begun", [False, True], ids=["announced", "begun"])
@pytest.mark.parametrize("name", ["m0", "m1"])
def test_a_standby_takes_the_ranks_of_a_member_before_it_ends(name: str, has_begun: bool) -> None:
    """This costs no step and no restart of the budget, which is 0 here."""
    ended = drained(name, ends_ms=30_000, has_begun=has_begun).run()
    assert is_whole(ended)
    places = ("m2", "m1") if name == "m0" else ("m0", "m2")
    assert swaps(ended) == [("departure", "swap", places, 0)]
    assert not ended.memory.history
    assert ended.closed == {1: "settled"}


def test_a_member_that_has_moved_and_whose_end_has_begun_is_dismissed_after_the_first_new_step() -> None:
    ended = drained(ends_ms=30_000, has_begun=True).run()
    assert "m1" in ended.memory.lost
    assert is_whole(ended)


def test_a_member_that_has_moved_and_whose_end_has_not_begun_is_left_alone() -> None:
    ended = drained().run()
    assert "m1" not in ended.memory.lost
    assert "m1" not in ended.memory.placement


def test_without_a_standby_an_announced_end_interrupts_nothing() -> None:
    ended = world(replace(TWO, standby=0)).at(AT_MS, lambda w: w.announce("m1")).run()
    assert is_whole(ended)
    assert remedies(ended) == []


def test_without_a_standby_a_member_whose_end_has_begun_counts_as_lost() -> None:
    policy = replace(TWO, standby=0, max_restarts=9)
    ended = world(policy).at(AT_MS, lambda w: w.announce("m1", ends_ms=30_000, has_begun=True)).run()
    assert is_whole(ended)
    [(kind, remedy, places, lost)] = swaps(ended)
    assert (kind, remedy, lost) == ("member_lost", "swap", 0)
    assert "m1" not in places


def test_a_single_member_moves_with_its_state() -> None:
    """If it counted as lost, the state would be lost with it: storage is off."""
    policy = replace(TWO, members=1, checkpoint_every_s=0.0)
    ended = world(policy).at(AT_MS, lambda w: w.announce("m0", ends_ms=30_000, has_begun=True)).run()
    assert is_whole(ended)
    assert swaps(ended) == [("departure", "swap", ("m1",), 0)]


def test_a_single_member_trains_until_the_standby_is_ready() -> None:
    policy = replace(TWO, members=1, checkpoint_every_s=0.0)
    made = world(policy).at(900, lambda w: w.remove("m1"))
    ended = made.at(1200, lambda w: w.announce("m0", ends_ms=30_000, has_begun=True)).run()
    assert is_whole(ended)
    assert swaps(ended) == [("departure", "swap", ("m2",), 0)]


def test_two_members_that_are_about_to_end_move_together() -> None:
    def both(now: World) -> None:
        now.departures["m0"] = now.departures["m1"] = replace(DRAIN)
        now.look()

    ended = world(replace(TWO, standby=2)).at(AT_MS, both).run()
    assert is_whole(ended)
    assert swaps(ended) == [("departure", "swap", ("m2", "m3"), 0)]


def test_with_one_standby_the_member_that_ends_first_moves() -> None:
    def both(now: World) -> None:
        now.departures["m0"] = replace(DRAIN, ends_ns=now.now_ns + 900_000_000_000)
        now.announce("m1", ends_ms=100_000)

    ended = world().at(AT_MS, both).run()
    assert is_whole(ended)
    assert swaps(ended) == [("departure", "swap", ("m0", "m2"), 0)]


def test_with_one_standby_for_two_members_that_are_being_ended_the_state_moves_to_it_first() -> None:
    """The second member counts as lost only when the standby has the state: storage is off."""

    def both(now: World) -> None:
        now.departures["m0"] = replace(DRAIN, has_begun=True)
        now.departures["m1"] = replace(DRAIN, has_begun=True)
        now.look()

    policy = replace(TWO, checkpoint_every_s=0.0, max_restarts=1)
    ended = world(policy).at(AT_MS, both).run()
    assert is_whole(ended)
    first, second = swaps(ended)
    assert first == ("departure", "swap", ("m2", "m1"), 0)
    assert (second[0], second[3]) == ("member_lost", 0)
    assert second[2][0] == "m2"


def test_a_standby_that_is_about_to_end_gets_no_ranks() -> None:
    ended = world().at(AT_MS, lambda w: w.announce("m2")).at(AT_MS + 50, lambda w: w.announce("m1")).run()
    assert is_whole(ended)
    assert remedies(ended) == []


def test_a_standby_that_is_about_to_end_does_not_replace_a_lost_member() -> None:
    policy = replace(TWO, max_restarts=9)
    ended = world(policy).at(AT_MS, lambda w: w.announce("m2")).at(AT_MS + 50, lambda w: w.remove("m1")).run()
    assert is_whole(ended)
    [(kind, _, places, _)] = swaps(ended)
    assert kind == "member_lost"
    assert "m2" not in places


def test_a_departure_that_is_withdrawn_before_a_standby_is_ready_changes_nothing() -> None:
    policy = replace(TWO, standby=0)
    ended = world(policy).at(AT_MS, lambda w: w.announce("m1")).at(AT_MS + 200, lambda w: w.withdraw("m1"))
    assert is_whole(ended.run())
    assert remedies(ended) == []


def test_a_departure_that_is_withdrawn_during_the_swap_costs_no_step() -> None:
    """The group has stopped already, so it resumes, wherever its members are wanted now."""
    for later_ms in range(1, 12):
        ended = drained().at(AT_MS + later_ms, lambda w: w.withdraw("m1")).run()
        assert is_whole(ended)
        [(kind, _, places, lost)] = swaps(ended)
        assert (kind, lost) == ("departure", 0)
        assert places in (("m0", "m1"), ("m0", "m2"))


@pytest.mark.parametrize("victim", ["m0", "m1", "m2"])
def test_the_loss_of_a_member_during_the_swap_is_a_fault_of_its_own(victim: str) -> None:
    policy = replace(TWO, max_restarts=9)
    for later_ms in range(0, 60, 7):
        ended = world(policy).at(AT_MS, lambda w: w.announce("m1", ends_ms=30_000, has_begun=True))
        ended.at(AT_MS + later_ms, lambda w: w.remove(victim)).run()
        assert is_whole(ended), later_ms
        assert sum(lost or 0 for *_, lost in swaps(ended)) <= 1, later_ms


def test_a_member_that_ends_before_the_standby_is_ready_counts_as_lost() -> None:
    policy = replace(TWO, max_restarts=9)
    made = world(policy, boot_ms=500)
    ended = made.at(900, lambda w: w.remove("m2")).at(920, lambda w: w.announce("m1", ends_ms=50)).run()
    assert is_whole(ended)
    assert [kind for kind, *_ in swaps(ended)] == ["member_lost"]


def test_a_swap_that_is_interrupted_at_any_point_is_completed_once_without_losing_a_step() -> None:
    """Kill the supervisor after each decision, each order sent and each report received, one at a time."""
    whole = drained(ends_ms=60_000, has_begun=True).run()
    [at] = [number for number, (_, a, _) in enumerate(whole.journal) if isinstance(a, Secure)]
    first, last = whole.decided[at] - 3, whole.decided[at + 2] + 3
    for point in range(first, last):
        made = drained(ends_ms=60_000, has_begun=True)
        made.kills = frozenset({point})
        ended = made.run()
        assert is_whole(ended), point
        assert swaps(ended) == [("departure", "swap", ("m0", "m2"), 0)], point
        assert list(ended.closed.values()) == ["settled"], point
        assert not actions(ended, Secure)[1:], point


@pytest.mark.parametrize("kill", range(61, 65))
def test_a_group_that_finishes_before_it_is_stopped_for_a_swap_repeats_nothing(kill: int) -> None:
    """The supervisor is killed once it has decided the swap; the ranks finish before a successor leads."""
    made = World(replace(TWO, max_restarts=9), STEPS, snapshot_every=0, kills=frozenset({kill}))
    made.at(1476, lambda w: w.announce("m1", ends_ms=30)).at(2659, lambda w: w.announce("m0", ends_ms=400))
    ended = made.run()
    assert is_whole(ended)
    assert swaps(ended) == [("departure", "swap", ("m0", "m2"), 0)]


@st.composite
def disturbed(draw: st.DrawFn) -> World:
    """Draw a group whose members are about to end at random times, with a few faults and takeovers."""
    members = draw(st.integers(1, 3))
    made = World(
        Policy(members=members, standby=draw(st.integers(0, 2)), checkpoint_every_s=0.2, max_restarts=1000),
        STEPS,
        snapshot_every=draw(st.sampled_from([0, 1, 3])),
        kills=frozenset(draw(st.sets(st.integers(1, 300), max_size=2))),
    )
    for _ in range(draw(st.integers(1, 4))):
        name, at_ms = f"m{draw(st.integers(0, members + 1))}", draw(st.integers(600, 3000))
        begun, ends_ms = draw(st.booleans()), draw(st.sampled_from([30, 400, 60_000]))
        made.at(at_ms, partial(_announce, name=name, ends_ms=ends_ms, has_begun=begun))
        if draw(st.booleans()):
            made.at(at_ms + draw(st.integers(1, 500)), partial(_withdraw, name=name))
    if draw(st.booleans()):
        lost = f"m{draw(st.integers(0, members))}"
        made.at(draw(st.integers(600, 3000)), partial(_lose, name=lost))
    return made


def _announce(world: World, *, name: str, ends_ms: int, has_begun: bool) -> None:
    if name in world.exists:
        world.announce(name, ends_ms=ends_ms, has_begun=has_begun)


def _withdraw(world: World, *, name: str) -> None:
    if name in world.departures and not world.departures[name].has_begun:
        world.withdraw(name)


def _lose(world: World, *, name: str) -> None:
    if name in world.exists:
        world.remove(name)


@settings(max_examples=150, deadline=None)
@given(disturbed())
def test_whatever_is_announced_and_withdrawn_the_run_ends_with_the_undisturbed_state(world: World) -> None:
    """The world asserts the invariants at every decision.

    When every state is lost and storage has none, the run ends instead of starting over.
    """
    ended = world.run(2000.0)
    assert ended.ended is not None
    if ended.ended.exit_code:
        assert "no state is left to resume from" in ended.ended.why
    else:
        assert is_whole(ended)
    assert set(ended.closed) == set(range(1, ended.memory.incidents + 1))
    for cause, _, _, lost in swaps(ended):
        assert cause != "departure" or not lost
