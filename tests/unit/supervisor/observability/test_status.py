from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.protocol.launcher_messages import Ending, StartTimes
from holdfast.protocol.member_messages import CheckpointReport
from supervisor.observability.bookkeeping import Bookkeeping
from supervisor.observability.ledger import Bucket
from supervisor.observability.publisher import StatusPublisher
from supervisor.store.run_directory import RunDir
from supervisor.view.model import (
    UNREAD,
    Checkpoint,
    Completion,
    Departure,
    OpenIncident,
    PastWarning,
    Policy,
    StorageContents,
    View,
)
from tests.unit.supervisor.hangs.test_detection import SLEEPS, WAITS, there
from tests.unit.supervisor.hangs.test_detection import seen as standing
from tests.unit.supervisor.job_views import S, fault, launcher, member, memory, progress, rank, report, view


def seen(*owns_s: float) -> View:
    """Return a view of members whose ranks have these own times; 0 means unknown."""
    members = []
    for number, own_s in enumerate(owns_s):
        said = replace(
            progress(number, 200), own_s=own_s, own_least_s=own_s, own_data_s=own_s / 4, own_steps=50
        )
        members.append(member(f"m{number}", report(f"m{number}", launcher(rank(number)), progress=(said,))))
    return view(*members)


def test_the_status_lists_slow_ranks_until_they_no_longer_are(tmp_path: Path) -> None:
    records = StatusPublisher(RunDir(tmp_path))

    def told(*owns_s: float) -> list[tuple[Any, ...]]:
        now = seen(*owns_s)
        found = told_by(records, now)["ranks"]
        return [
            tuple(each[k] for k in ("own_s", "own_data_s", "slow", "slow_since", "peers_s")) for each in found
        ]

    usual = (0.03, 0.0075, None, None, None)
    assert told(0.0, 0.09) == [(None, None, None, None, None), (0.09, 0.0225, None, None, None)]
    assert told(0.03, 0.09) == [usual, (0.09, 0.0225, 3.0, 150, 0.03)]
    assert told(0.03, 0.042) == [usual, (0.042, 0.0105, 1.4, 150, 0.03)]
    assert told(0.03, 0.0) == [usual, (None, None, 1.4, 150, 0.03)]
    assert told(0.03, 0.03) == [usual, usual]


def told_by(records: StatusPublisher, now: View) -> dict[str, Any]:
    records.publish(now, Bookkeeping(now.now_ns, None))
    records.files.do(lambda: None, 30.0)  # a thread writes it
    return dict(records.published)


def doing(*ranks: int, step: int = 9, **changed: Any) -> View:
    """Return a view where these ranks report their steps, each with its number as its loss."""
    members = [
        member(
            f"m{number}",
            report(
                f"m{number}",
                launcher(rank(number)),
                progress=(replace(progress(number, step), loss=f"{number}.5"),) if number in ranks else (),
            ),
        )
        for number in (0, 1)
    ]
    return replace(view(*members), memory=memory(**changed))


def test_the_loss_is_that_of_rank_0_even_if_it_ends_first(tmp_path: Path) -> None:
    records = StatusPublisher(RunDir(tmp_path))
    assert told_by(records, doing(0, 1))["loss"] == 0.5
    assert told_by(records, doing(1))["loss"] == 0.5, "rank 1's own loss was reported as the group's"
    assert told_by(records, doing())["loss"] == 0.5


def test_a_member_that_has_lost_its_ranks_does_not_hold_back_the_step(tmp_path: Path) -> None:
    """The pod of a lost member stays until its node is back, with its last report."""
    records = StatusPublisher(RunDir(tmp_path))
    now = doing(0, 1, step=3719)
    last = replace(progress(0, 207), snapshot_step=9999, step_s=60.0)
    away = member("away", report("away", launcher(rank(0), generation=0), progress=(last,)), connected=False)
    told, alone = (told_by(records, replace(now, members=(*now.members, *more))) for more in ((away,), ()))
    shown = ("step", "secured_step", "snapshot_step", "step_s", "rate", "loss")
    assert told["step"] == 3719
    assert {name: told[name] for name in shown} == {name: alone[name] for name in shown}


def test_on_a_cluster_a_step_is_secured_once_it_survives_the_loss_of_any_node(tmp_path: Path) -> None:
    def secured(*nodes: str, saved: int = 0) -> int | None:
        now = doing(0, 1, step=9)
        members = tuple(
            replace(each, report=replace(each.report, node=node, durable=CheckpointReport(saved)))
            for each, node in zip(now.members, nodes, strict=True)
            if each.report is not None
        )
        policy = Policy(members_created_externally=True)
        found = told_by(StatusPublisher(RunDir(tmp_path), policy=policy), replace(now, members=members))
        step = found["secured_step"]
        assert step is None or isinstance(step, int)
        return step

    assert secured("a", "b") == 9
    assert secured("a", "a", saved=4) == 4
    assert secured("a", "a", saved=-1) == 0
    assert told_by(StatusPublisher(RunDir(tmp_path)), doing(0, 1, step=9))["secured_step"] == 9


def test_a_run_that_was_stopped_has_the_step_that_was_saved(tmp_path: Path) -> None:
    records = StatusPublisher(RunDir(tmp_path))
    assert told_by(records, doing(0, 1, step=9))["step"] == 9
    saving = doing(phase="saving", save_step=10)
    assert (told_by(records, saving)["step"], told_by(records, saving)["secured_step"]) == (10, 10)
    assert told_by(StatusPublisher(RunDir(tmp_path)), doing(phase="ended"))["step"] is None


def test_the_number_of_steps_is_the_one_that_the_ranks_of_this_generation_report(tmp_path: Path) -> None:
    def aiming(generation: int, *goals: int) -> View:
        ranks = [rank(n, generation=generation, marks=StartTimes(goal=goal)) for n, goal in enumerate(goals)]
        return view(member("m0", report("m0", launcher(*ranks))))

    records = StatusPublisher(RunDir(tmp_path))
    assert told_by(records, aiming(1, 0, 0))["total_steps"] is None
    assert told_by(records, aiming(1, 0, 500))["total_steps"] == 500
    assert told_by(StatusPublisher(RunDir(tmp_path)), aiming(7, 500))["total_steps"] is None


def test_before_the_first_group_there_is_no_standby(tmp_path: Path) -> None:
    forming = replace(doing(), memory=memory(phase="forming", placement=()))
    assert [each["role"] for each in told_by(StatusPublisher(RunDir(tmp_path)), forming)["members"]] == [
        "new",
        "new",
    ]


def test_members_that_end_with_the_run_have_left(tmp_path: Path) -> None:
    def roles(*, gone: tuple[str, ...] = ("m0", "m1"), **changed: Any) -> list[str]:
        members = [
            member(name, None if name in gone else report(name, None), exists=name not in gone)
            for name in ("m0", "m1")
        ]
        seen = view(*members, **changed)
        return [each["role"] for each in told_by(StatusPublisher(RunDir(tmp_path)), seen)["members"]]

    assert roles(phase="ended") == roles(phase="stopping") == ["left", "left"]
    assert roles(phase="stopping", gone=("m1",)) == ["active", "left"]
    assert roles(phase="running", gone=("m1",)) == ["active", "lost"]
    assert roles(phase="ended", lost=("m1",)) == ["left", "lost"]
    opened = OpenIncident(1, 1, 0, 0, 0.0, (fault("member_lost", 1, 9, member="m1"),))
    assert roles(phase="ended", incident=opened) == ["left", "lost"]


def test_a_status_says_that_the_script_has_finished_only_once_it_has(tmp_path: Path) -> None:
    def ended(**changed: Any) -> dict[str, Any]:
        return told_by(StatusPublisher(RunDir(tmp_path)), view(phase="ended", **changed))

    assert ended(why="all ranks have finished")["finished"] is True
    assert (
        ended(why="all ranks have finished; work", completion=Completion(notes=("work",)))["finished"] is True
    )
    assert "finished" not in ended(why="all ranks have finished; work")
    assert "finished" not in ended(why="stopped as requested")


def test_a_member_whose_ranks_wait_for_warm_processes_is_marked(tmp_path: Path) -> None:
    def members(*parked: int) -> dict[str, Any]:
        failed = launcher(
            rank(0, pid=0, state="starting"), parked=parked, warm_ending=Ending(0, 1), warm_failures=1
        )
        found = told_by(StatusPublisher(RunDir(tmp_path)), view(member("m0", report("m0", failed))))
        return dict(found["members"][0])

    assert members()["warm_awaited"] is True
    assert "the ranks wait for them" in members()["warm_error"]
    assert "warm_awaited" not in members(0)


def test_a_start_shows_what_it_waits_for(tmp_path: Path) -> None:
    def starting(*parked: int | None, unreachable: str = "") -> str:
        reports = [
            report(f"m{n}", None if p is None else launcher(parked=tuple(range(p)), generation=0))
            for n, p in enumerate(parked)
        ]
        reports[-1] = replace(reports[-1], launcher_unreachable=unreachable)
        members = [member(f"m{n}", each) for n, each in enumerate(reports)]
        now = replace(view(*members), memory=memory(phase="forming", generation=0, placement=()))
        return str(told_by(StatusPublisher(RunDir(tmp_path)), now)["message"])

    not_started = "to be started by the training command"
    assert starting(None, None) == f"waiting for the launcher of m0 and 1 other member {not_started}"
    assert starting(0, None) == f"waiting for the launcher of m1 {not_started}"
    assert starting(0, None, unreachable="denied") == "member m1 cannot start ranks: denied"
    assert starting(None, None, unreachable="denied") == "member m1 cannot start ranks: denied"
    assert starting(0, 0).startswith("importing modules")
    assert starting(1, 0) == "1 of 2 members ready"
    assert starting(1, 1, 1) == "2 of 2 members ready"


def test_a_member_shows_why_its_launcher_is_out_of_reach(tmp_path: Path) -> None:
    for error in ("", "denied"):
        said = replace(report("m0", None), launcher_unreachable=error)
        found = told_by(StatusPublisher(RunDir(tmp_path)), view(member("m0", said)))
        assert found["members"][0]["launcher_error"] == error


def test_the_status_shows_since_when_there_is_no_progress_and_the_reason(tmp_path: Path) -> None:
    records = StatusPublisher(RunDir(tmp_path), policy=Policy(members=2))
    asleep = there(0, SLEEPS, late_s=30.0), there(1, WAITS, late_s=30.0)
    now = standing(*asleep, warned=(PastWarning("evaluate (train.py)", "look there"),))
    found = told_by(records, now)
    assert (found["no_step_s"], found["hang_limit_s"], found["held_up_by"]) == (30.0, 60.0, 0)
    assert found["waiting_for"].startswith("rank 0 has been in evaluate (train.py:42)")
    assert found["warnings"] == ["look there"]
    assert (found["rate"], found["tokens_per_s"]) == (None, None)
    moving = told_by(records, seen(0.0, 0.0))
    assert (moving["no_step_s"], moving["hang_limit_s"], moving["waiting_for"]) == (None, None, "")


def test_a_step_that_is_not_late_yet_is_shown_and_not_counted_as_training(tmp_path: Path) -> None:
    """A slow step in the past can make the limit for a late step as long as minutes."""
    records = StatusPublisher(RunDir(tmp_path))
    accounts = Bookkeeping(100 * S, None)

    def told(at_s: float, step: int, phase: str = "forward") -> dict[str, Any]:
        said = [replace(progress(number, step), phase=phase) for number in (0, 1)]
        members = [
            member(f"m{number}", report(f"m{number}", launcher(rank(number)), progress=(each,)))
            for number, each in enumerate(said)
        ]
        now = view(*members, now_s=at_s, settled=True)
        accounts.observe(now)
        records.publish(now, accounts)
        return dict(records.published)

    told(100.0, 8)
    moving = told(110.0, 9)
    assert (moving["no_step_s"], moving["ettr"], moving["rate"]) == (None, 1.0, 20.0)
    assert told(111.0, 9)["no_step_s"] is None, "shorter times are not shown"
    held = told(130.0, 9)
    assert (held["no_step_s"], held["rate"], held["hang_limit_s"]) == (20.0, None, None)
    assert held["ettr"] == held["ettr_hour"] == 0.333333
    assert held["waiting_for"] == "the step takes longer than usual, and no rank is late yet"
    paused = told(140.0, 9, "eval")
    assert (paused["no_step_s"], paused["waiting_for"]) == (None, "")
    assert told(141.0, 10)["no_step_s"] is None


def test_a_group_that_waits_for_storage_shows_that(tmp_path: Path) -> None:
    def waiting(stored: StorageContents, **given: Any) -> str:
        now = replace(view(), memory=memory(**{"phase": "forming", "generation": 3, **given}), stored=stored)
        return str(told_by(StatusPublisher(RunDir(tmp_path)), now)["message"])

    assert waiting(StorageContents(error=UNREAD)) == "0 of 2 members are running"
    away = StorageContents(error="Stale file handle")
    assert waiting(away) == "storage cannot be read, still trying: Stale file handle"
    assert waiting(away, phase="securing").startswith("storage cannot be read")
    assert waiting(away, phase="running") == ""
    unread = StorageContents((Checkpoint(9, 1, 2, "p"),), looked_ns=1)
    assert waiting(unread) == "verifying the checkpoint of step 9 before it is used"


def test_a_job_without_storage_or_members_does_not_wait_for_storage(tmp_path: Path) -> None:
    """On a cluster, only members read storage, so it is unread again once the last pod is gone."""

    def waiting(error: str, **policy: Any) -> str:
        stored = StorageContents(error=error, looked_ns=1)
        now = replace(view(), memory=memory(phase="forming"), stored=stored)
        accounts = Bookkeeping(0, None)
        records = StatusPublisher(RunDir(tmp_path), policy=Policy(members_created_externally=True, **policy))
        records.publish(now, accounts)
        return str(records.published["message"])

    assert waiting(UNREAD) == "0 of 2 members are running"
    assert waiting("no such directory", has_storage=False) == "0 of 2 members are running"
    assert waiting("no such directory") == "storage cannot be read, still trying: no such directory"


def test_for_a_script_that_keeps_its_own_state_nothing_is_secured_and_a_restart_makes_its_ratio_unknown(
    tmp_path: Path,
) -> None:
    def its_own(step: int) -> View:
        told = replace(progress(0, step), snapshot_step=-1)
        return view(member("m0", report("m0", launcher(rank(0), joins=False), progress=(told,))))

    records, accounts = StatusPublisher(RunDir(tmp_path)), Bookkeeping(0, None)
    records.publish(its_own(9), accounts)
    first = records.published
    assert (first["own_state"], first["secured_step"], first["step"]) == (True, None, 9)
    assert first["ettr"] == first["ettr_hour"] == 0.0, "it is known until the first restart"
    accounts.ledger.enter(Bucket.PRODUCTIVE, 1)
    accounts.ledger.begun_again(2)
    records.publish(its_own(3), accounts)
    again = records.published
    assert (again["ettr"], again["ettr_hour"]) == (None, None)
    assert told_by(records, doing(0, 1))["own_state"] is False, "this one has a snapshot"


def test_a_member_that_is_about_to_end_is_shown_with_the_reason(tmp_path: Path) -> None:
    leaving = member("m0", report("m0", None), departure=Departure("node n1 is drained"))
    shown = told_by(StatusPublisher(RunDir(tmp_path)), view(leaving, member("m1", report("m1", None))))
    assert [each.get("leaving") for each in shown["members"]] == ["node n1 is drained", None]
