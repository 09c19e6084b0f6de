from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.lineage import Lineage
from holdfast.messages import Durable
from supervisor import closing
from supervisor.view import Checkpoint, Done, End, Policy, Save, Stored, Wait
from tests.unit.supervisor.views import S, fault, holding, launcher, member, report, view

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


def on_storage(*checkpoints: Checkpoint, error: str = "", looked_s: float = 100.0, heard: int = 9) -> Stored:
    return Stored(checkpoints, error=error, looked_ns=int(looked_s * S), heard=heard)


def asked(stored: Stored, now_s: float = 100.0) -> Any:
    """Return what is done when a stop was asked for at 99 s, and no member holds anything."""
    return closing.save_and_end(
        replace(view(now_s=now_s, phase="securing", since_ns=99 * S), stored=stored), ()
    )


def test_what_is_on_storage_is_not_saved_again() -> None:
    action = asked(on_storage(Checkpoint(9, 1, 2, "p")))
    assert action == End(closing.EXIT_INTERRUPTED, "stopped, as asked; the newest checkpoint has step 9")


def test_a_checkpoint_is_named_only_when_storage_was_seen_to_have_it_after_the_stop() -> None:
    old = on_storage(Checkpoint(9, 1, 2, "p"), looked_s=98.0)
    assert isinstance(asked(old), Wait)
    away = on_storage(Checkpoint(9, 1, 2, "p"), error="Stale file handle")
    assert isinstance(asked(away), Wait)
    late = asked(away, now_s=110.0)
    assert late == End(
        closing.EXIT_INTERRUPTED, "stopped, as asked, without a new checkpoint; storage: Stale file handle"
    )
    silent = asked(old, now_s=110.0)
    assert isinstance(silent, End)
    assert silent.why.endswith("storage: it does not answer")


def saving(durable: Durable, now_s: float = 40.0, stored: Stored | None = None, **given: Any) -> Any:
    told = member("m0", report("m0", launcher(), durable=durable), **given)
    seen = view(told, now_s=now_s, phase="saving", save=2, save_member="m0", lineage=(Lineage(3, 20),))
    stored = stored if stored is not None else on_storage(Checkpoint(9, 1, 2, "p"))
    return closing.saving(replace(seen, stored=stored), POLICY)


@pytest.mark.parametrize(
    ("durable", "why"),
    [
        (Durable(9, 1, "p", 0.1, "", 2), "stopped, as asked, with a checkpoint of step 9"),
        (Durable(7, 1, "p", 0.0, "disk full", 2), "stopped; the last checkpoint failed: disk full"),
    ],
)
def test_the_answer_to_the_save_ends_the_run(durable: Durable, why: str) -> None:
    assert saving(durable) == End(closing.EXIT_INTERRUPTED, why)


WRITTEN = Durable(9, 1, "p", 0.1, "", 2)


@pytest.mark.parametrize(
    "there",
    [(), (Checkpoint(9, 2, 2, "p"),), (Checkpoint(8, 1, 2, "p"),)],
    ids=["nothing", "another generation's", "an older one"],
)
def test_a_checkpoint_that_is_not_there_is_not_named_as_if_it_were(there: tuple[Checkpoint, ...]) -> None:
    assert isinstance(saving(WRITTEN, stored=on_storage(*there, heard=1)), Wait), "looked before it was told"
    found = saving(WRITTEN, stored=on_storage(*there))
    gone = "stopped; the checkpoint of step 9 was written, and is not on storage any more"
    assert found == End(closing.EXIT_INTERRUPTED, gone)


def test_a_void_checkpoint_is_not_named_as_if_it_counted() -> None:
    void = Durable(25, 1, "p", 0.1, "", 2)
    found = saving(void, stored=on_storage(Checkpoint(25, 1, 2, "p")))
    assert isinstance(found, End)
    assert found.why.endswith("is not on storage any more")


def test_storage_that_fails_after_the_save_is_named_in_the_end() -> None:
    away = on_storage(Checkpoint(9, 1, 2, "p"), error="Input/output error")
    assert isinstance(saving(WRITTEN, stored=away), Wait)
    why = "stopped; the checkpoint of step 9 was written, but storage could not be read: Input/output error"
    assert saving(WRITTEN, 50.0, away) == End(closing.EXIT_INTERRUPTED, why)


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
