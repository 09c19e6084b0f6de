from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.messages import Durable
from supervisor import closing
from supervisor.view import Checkpoint, Done, End, Policy, Save, View, Wait
from tests.unit.supervisor.views import fault, holding, launcher, member, report, view

POLICY = Policy(members=2, save_s=50.0, grace_s=5.0)
HELD = (
    holding("m0", ((1, 9), (1, 7)), ((0, 1, 9), (0, 1, 7))),
    holding("m1", ((1, 9), (1, 7)), ((1, 1, 9), (1, 1, 7))),
)


def test_what_is_secured_is_saved_by_one_who_holds_it() -> None:
    action = closing.save_and_end(view(*HELD), ())
    assert isinstance(action, Save)
    assert (action.member, action.resume.step) == ("m0", 9)


def test_a_bad_state_is_not_saved() -> None:
    action = closing.save_and_end(view(*HELD), (fault("nan", step=8),))
    assert isinstance(action, Save)
    assert action.resume.step == 7


def test_what_is_on_storage_is_not_saved_again() -> None:
    seen = view()
    stored = View(seen.now_ns, 0.0, seen.memory, (), Checkpoint(9, 1, 2, "p"))
    action = closing.save_and_end(stored, ())
    assert action == End(closing.EXIT_INTERRUPTED, "stopped, as asked; the newest checkpoint has step 9")


def saving(durable: Durable, now_s: float = 40.0, **given: Any) -> Any:
    told = member("m0", report("m0", launcher(), durable=durable), **given)
    return closing.saving(view(told, now_s=now_s, phase="saving", save=2, save_member="m0"), POLICY)


@pytest.mark.parametrize(
    ("durable", "why"),
    [
        (Durable(9, 1, "p", 0.1, "", 2), "stopped, as asked, with a checkpoint of step 9"),
        (Durable(7, 1, "p", 0.0, "disk full", 2), "stopped; the last checkpoint failed: disk full"),
    ],
)
def test_the_answer_to_the_save_ends_the_run(durable: Durable, why: str) -> None:
    assert saving(durable) == End(closing.EXIT_INTERRUPTED, why)


def test_the_answer_to_an_older_save_is_waited_beyond_for_a_bounded_time() -> None:
    old = Durable(7, 1, "p", 0.1, "", 1)
    assert isinstance(saving(old), Wait)
    assert isinstance(saving(old, connected=False), Wait)
    assert saving(old, 50.0) == End(closing.EXIT_INTERRUPTED, "stopped without its last checkpoint")
    assert isinstance(saving(old, exists=False), End)


def test_members_are_waited_for_until_they_are_gone_or_their_time_is_up() -> None:
    stopping = view(*HELD, now_s=14.9, phase="stopping")
    assert isinstance(closing.stopping(stopping, POLICY), Wait)
    assert isinstance(closing.stopping(view(*HELD, now_s=15.0), POLICY), Done)
    gone = [replace(each, exists=False) for each in HELD]
    assert closing.stopping(view(*gone), POLICY) == Done("no member is left")
