from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from holdfast.protocol.launcher_messages import StartTimes
from supervisor.controller.drills import Drills, obstacle
from tests.unit.supervisor.job_views import S, launcher, member, rank, report, view


async def test_a_drill_is_sent_with_the_orders_until_a_sidecar_has_carried_it_out() -> None:
    made = Drills()
    asked = made.ask("m0", 3, "kill", 1)
    assert (asked.drill.what, asked.drill.rank) == ("kill", 1)
    for carried_out in ({}, {"m0": 0}, {"m1": asked.drill.number}):
        made.update(carried_out, 3)
        assert made.due("m0", 3) == asked.drill
    assert made.due("m1", 3) is None
    assert made.due("m0", 4) is None, "the drill is for other ranks"
    made.update({"m0": asked.drill.number}, 4)
    assert made.due("m0", 3) is None
    assert await made.refusal(asked) == ""


async def test_two_drills_of_one_member_are_carried_out_one_after_the_other() -> None:
    made = Drills()
    first, second = made.ask("m0", 1, "nan", 0), made.ask("m0", 1, "kill", 0)
    assert made.due("m0", 1) == first.drill
    made.update({"m0": first.drill.number}, 1)
    assert made.due("m0", 1) == second.drill
    assert not second.over.is_set()


async def test_a_drill_that_is_not_carried_out_is_withdrawn() -> None:
    made = Drills()
    asked = made.ask("m0", 1, "kill", 0)
    assert "m0 has not carried it out within 0.01 s" in await made.refusal(asked, 0.01)
    assert made.due("m0", 1) is None


async def test_a_waiting_request_is_answered_as_soon_as_the_drill_is_carried_out() -> None:
    made = Drills()
    asked = made.ask("m0", 1, "kill", 0)
    waits = asyncio.ensure_future(made.refusal(asked, 60.0))
    await asyncio.sleep(0)
    made.update({"m0": asked.drill.number}, 1)
    assert await waits == ""


async def test_a_drill_for_ranks_that_are_gone_is_withdrawn_at_once() -> None:
    made = Drills()
    asked = made.ask("m0", 1, "kill", 0)
    made.update({"m0": 0}, 2)
    assert made.due("m0", 1) is None
    assert "generation 2" in await made.refusal(asked, 60.0)


async def test_setting_back_the_wall_clock_does_not_make_a_drill_an_old_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Drills()
    made.update({"m0": 7_000}, 1)
    monkeypatch.setattr(time, "time_ns", lambda: 1_000_000)
    assert made.ask("m0", 1, "kill", 0).drill.number == 7_001
    made.update({"m0": 1 << 90}, 1)
    assert made.ask("m0", 1, "kill", 0).drill.number == 7_002, (
        "a number that no drill can have must be ignored"
    )


@pytest.mark.parametrize(
    ("what", "is_stopped", "still_s", "said"),
    [
        ("hang", False, None, ""),
        ("nan", False, 1.0, ""),
        ("nan", False, 12.0, "rank 1 has completed no step for 12 s: the drill takes effect only if it c"),
        ("hang", True, 12.0, "rank 1 is stopped, and carries out no drill unless it is continued"),
        ("exit", True, None, "rank 1 is stopped, and carries out no drill unless it is continued"),
        ("exit", False, 12.0, ""),
        ("stop", True, None, "rank 1 was already stopped"),
        ("kill", True, 12.0, ""),
        ("sidecar", True, 12.0, ""),
    ],
)
def test_a_drill_that_a_hung_rank_cannot_carry_out_is_not_called_sent(
    what: str, is_stopped: bool, still_s: float | None, said: str
) -> None:
    ranks = (rank(0), rank(1, stopped=is_stopped))
    there = (member(f"m{each.rank}", report(f"m{each.rank}", launcher(each))) for each in ranks)
    now = view(*there, settled=True)
    found = obstacle(now, {"no_step_s": still_s}, what, 1)
    assert found.startswith(said)
    assert bool(found) == bool(said)


@pytest.mark.parametrize("what", ["hang", "spin", "nan"])
def test_a_drill_of_the_next_step_is_pending_while_the_first_step_takes_long(what: str) -> None:
    """The status shows no time without a step until the rank is late."""
    done = rank(1, marks=StartTimes(first_step_ns=1))
    for at, started_s, said in ((rank(1), 92, "for 8.0 s"), (rank(1), 99, ""), (done, 92, "")):
        there = (member(f"m{each.rank}", report(f"m{each.rank}", launcher(each))) for each in (rank(0), at))
        now = view(*there, started_ns=started_s * S, since_ns=started_s * S)
        found = obstacle(now, {"no_step_s": None}, what, 1)
        assert bool(found) == bool(said)
        assert said in found
        assert obstacle(replace(now, memory=replace(now.memory, settled=True)), {}, what, 1) == ""
