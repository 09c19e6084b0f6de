"""Decisions after a request to stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from holdfast import exit_codes
from supervisor.decision.decide import decide
from supervisor.decision.orders import order_for
from supervisor.view.model import Done, End, Policy, Save, StopRequest, Wait
from tests.simulation.cluster.scripts import STEPS, TWO, actions, cued
from tests.simulation.cluster.world import World
from tests.unit.supervisor.job_views import S, launcher, member, progress, rank, report, view


def test_a_graceful_stop_leaves_a_checkpoint_of_the_last_step() -> None:
    world = World(TWO, STEPS, snapshot_every=0).at(700, ask("graceful")).run()
    assert world.ended is not None
    assert world.ended.exit_code == exit_codes.INTERRUPTED
    assert len(actions(world, Save)) == 1
    newest = world.store.newest()
    assert newest is not None
    assert newest.step == world.group.reached[1]
    assert world.ended.why == f"stopped as requested, with a checkpoint of step {newest.step}"


@pytest.mark.parametrize("when_ms", [100, 510, 700])
def test_an_immediate_stop_waits_for_nothing(when_ms: int) -> None:
    world = World(TWO, STEPS).at(when_ms, ask("now")).at(when_ms + 1, World.look).run()
    assert world.ended is not None
    assert world.ended.exit_code == exit_codes.INTERRUPTED
    assert actions(world, Save) == []


@pytest.mark.parametrize(("copy_s", "waits_s"), [(0.0, 2), (4.0, 14)], ids=["small", "large"])
def test_survivors_have_the_time_that_a_copy_of_their_state_takes(copy_s: float, waits_s: int) -> None:
    told = report("m0", launcher(rank(0)), progress=(replace(progress(0, 7), snapshot_s=copy_s),))
    seen = view(member("m0", told), now_s=101.0, phase="securing", since_ns=100 * S, placement=("m0",))
    waits = decide(seen, Policy())
    assert isinstance(waits, Wait)
    assert waits.until_ns == (100 + waits_s) * S


def test_a_second_request_ends_a_stop_that_waits_for_its_checkpoint() -> None:
    world = World(TWO, STEPS).at(700, ask("graceful"))
    world.at(730, ask("now")).run()
    assert world.ended is not None
    assert world.ended.why == "stopped immediately, as requested"
    assert [type(a) for _, a, _ in world.journal][-3:] == [Save, End, Done]


def test_a_stop_while_the_group_recovers_saves_what_was_secured() -> None:
    world = cued(1, 5, "hang", snapshot_every=0).at(1450, ask("graceful")).run()
    assert world.ended is not None
    assert world.ended.exit_code == exit_codes.INTERRUPTED
    newest = world.store.newest()
    assert newest is not None
    assert newest.step == 5


def test_a_stop_never_saves_a_bad_state() -> None:
    """The other member has continued from the bad state, and has a snapshot of it."""
    world = cued(1, 5, "nan", snapshot_every=1).at(700, ask("graceful")).run()
    assert world.ended is not None
    newest = world.store.newest()
    assert newest is not None
    assert newest.step <= 5


@pytest.mark.parametrize(
    ("how", "first"), [("interrupt", "interrupt"), ("graceful", "handled"), ("terminate", ""), ("now", "")]
)
def test_a_script_that_does_not_join_is_stopped_by_the_signal_of_a_terminal(
    how: StopRequest, first: str
) -> None:
    world = World(TWO, STEPS, keeps_itself=True).at(700, ask(how)).run()
    assert world.ended is not None
    if how != "now":
        assert world.ended.why == "stopped as requested; the script keeps its own state"
    stopped = order_for(world.memory, "m0", Policy(grace_s=7.0), None)
    assert (stopped.do, stopped.first, stopped.grace_s) == ("stop", first, 0.0 if how == "now" else 7.0)
    joined = World(TWO, STEPS).at(700, ask(how)).run()
    assert order_for(joined.memory, "m0", Policy(), None).first == ""


def test_members_that_are_first_asked_to_stop_have_twice_the_grace() -> None:
    for first, grace_s in (("", 30.0), ("interrupt", 60.0)):
        given: dict[str, Any] = {"phase": "stopping", "since_ns": 99 * S, "exit_code": 130}
        found = decide(view(member("m0", None), first=first, **given), Policy())
        assert isinstance(found, Wait)
        assert found.until_ns == int((99.0 + grace_s + 10.0) * S), first


def test_ranks_that_finish_while_they_are_asked_to_stop_have_finished() -> None:
    world = World(TWO, STEPS).at(895, ask("graceful")).run()
    assert world.ended is not None
    assert world.ended.exit_code in (0, exit_codes.INTERRUPTED)
    assert world.memory.phase == "ended"


def ask(how: StopRequest) -> Callable[[World], None]:
    def asked(world: World) -> None:
        world.stop = how
        world.look()

    return asked


@pytest.mark.parametrize("at_ms", range(500, 1300, 75))
def test_a_stop_at_any_time_of_a_restart_reaches_such_a_script_by_the_same_signal(at_ms: int) -> None:
    world = cued(1, 5, "kill", keeps_itself=True).at(at_ms, ask("interrupt")).run()
    assert world.ended is not None
    assert (world.ended.exit_code, world.memory.first) == (exit_codes.INTERRUPTED, "interrupt")
