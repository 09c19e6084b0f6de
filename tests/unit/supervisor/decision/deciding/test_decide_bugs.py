"""Decisions about recurring failures: a bug is not a fault."""

from __future__ import annotations

from dataclasses import replace

from supervisor.observability import incident_record
from supervisor.view.model import Start
from tests.simulation.cluster.member import Content
from tests.simulation.cluster.scripts import STEPS, TWO, cued
from tests.simulation.cluster.world import World


def test_the_same_exception_at_the_same_step_ends_the_run_at_the_third_time() -> None:
    world = cued(1, 5, "raise", times=99).run()
    assert world.ended is not None
    assert (world.ended.exit_code, len(world.starts)) == (1, 3)
    assert world.ended.cause is not None
    assert world.ended.cause.rank == 1
    assert "ValueError" in world.ended.message
    assert "the same failure 3 times at step 5; this is a bug, not a fault" in world.ended.why
    assert world.closed == {1: "overtaken", 2: "overtaken", 3: "ended"}


def test_the_same_signal_at_the_same_step_ends_the_run_at_the_fifth_time() -> None:
    world = cued(1, 5, "crash", times=99, policy=replace(TWO, standby=0)).run()
    assert world.ended is not None
    assert (world.ended.exit_code, len(world.starts)) == (128 + 11, 5)


def test_a_rank_that_always_hangs_at_the_same_step_ends_the_run() -> None:
    """The second time, it gets the limit of possible work, but the hang is certain, so it ends as a bug."""
    world = cued(1, 5, "hang", times=99, policy=replace(TWO, stall_limit_s=1.0)).run()
    assert world.ended is not None
    assert (world.ended.exit_code, len(world.starts)) == (1, 5)


def test_a_script_that_exits_on_purpose_is_not_restarted() -> None:
    world = cued(1, 5, "leave").run()
    assert world.ended is not None
    assert (world.ended.exit_code, len(world.starts)) == (3, 1)


def test_kills_of_a_rank_that_makes_progress_in_between_are_never_a_bug() -> None:
    """A script that protects no state starts over each time, and is killed at the same step each time."""
    world = cued(1, 5, "kill", times=12, keeps_itself=True).run()
    assert world.ended is not None
    assert (world.ended.exit_code, len(world.starts)) == (0, 13)
    assert {start.resume.source for start in world.starts} == {"none"}


def test_the_loss_of_a_script_that_keeps_its_own_state_is_unknown() -> None:
    world = cued(1, 5, "kill", keeps_itself=True).run()
    [decided] = [m.incident for _, a, m in world.journal if isinstance(a, Start) and m.incident]
    assert decided.lost is None


def test_restarts_beyond_the_budget_end_the_run() -> None:
    policy = replace(TWO, max_restarts=2)
    cues = {(1, step): ("kill", 1) for step in range(1, 6)}
    world = World(policy, STEPS, cues=cues).run()
    assert world.ended is not None
    assert (world.ended.exit_code, len(world.starts)) == (137, 3)
    assert "--max-restarts 2 reached: 2 restarts in 1 h" in world.ended.why


def test_a_recurring_bad_number_is_named_with_its_batch_and_ends_the_run() -> None:
    world = cued(1, 5, "nan", times=99).run()
    assert world.ended is not None
    assert (world.ended.exit_code, len(world.starts)) == (1, 2)
    assert "step 5 of rank 1 (batch position 50) produces a bad number again" in world.ended.why
    assert "--skip-bad-batches" in world.ended.why


def test_a_bad_batch_is_skipped_if_the_user_allowed_it() -> None:
    world = cued(1, 5, "nan", times=99, policy=replace(TWO, skip_bad_batches=True)).run()
    assert world.final == Content(STEPS, frozenset({5}))
    assert [start.skip for start in world.starts] == [(), (), (5,)]
    assert "step 5 will be skipped" in world.starts[2].evidence[0]
    incidents = [m.incident for _, a, m in world.journal if isinstance(a, Start) and m.incident is not None]
    assert [each.skipped for each in incidents] == [(), (5,)]
    assert incident_record.record(incidents[1], None)["skipped_steps"] == [5]
    assert "skipped_steps" not in incident_record.record(incidents[0], None)
