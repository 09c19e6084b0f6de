from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import HeldPrivateState, HeldSnapshot
from supervisor.decision import refusal, resume_point
from supervisor.view import faults
from supervisor.view.model import Checkpoint, End, Fault, PastFault, StorageContents, UnusableCheckpoint
from tests.unit.supervisor.job_views import fault, holding, launcher, member, report, view

CRASH = fault("crash")


def test_a_run_that_saved_nothing_may_start_over() -> None:
    assert refusal.no_state_left(view(), None, None) is None
    assert refusal.no_state_left(view(), CRASH, None) is None


def test_a_start_beside_checkpoints_that_cannot_be_used_names_each_and_the_way_out() -> None:
    unusable = UnusableCheckpoint("step-00000009", 9, "manifest.json is cut short")
    seen = replace(
        view(lineage=(Lineage(2, 5),)),
        stored=StorageContents((Checkpoint(7, 1, 2, "/r/step-00000007"),), (unusable,)),
    )
    ended = refusal.no_state_left(seen, None, None)
    assert ended is not None
    assert ended.exit_code == 2
    assert ended.why == (
        "the run directory has checkpoints, and none can be used: checkpoint step-00000009: manifest.json is "
        "cut short; checkpoint step-00000007: the run later went back to step 5; --from-scratch starts over "
        "from step 0"
    )


def test_a_start_whose_checkpoints_have_vanished_is_not_a_start_from_the_beginning() -> None:
    ended = refusal.no_state_left(view(saved=70), None, None)
    assert ended is not None
    assert (ended.exit_code, "although step 70 had one" in ended.why) == (2, True)


def test_a_long_list_is_shortened() -> None:
    seen = replace(
        view(), stored=StorageContents((), tuple(UnusableCheckpoint(f"s{n}", n, "is bad") for n in range(9)))
    )
    ended = refusal.no_state_left(seen, None, None)
    assert ended is not None
    assert ended.why.count("is bad") == refusal.LISTED
    assert "and 5 more" in ended.why


def test_a_fault_without_a_usable_state_ends_the_run_with_the_existing_states_and_reasons() -> None:
    held = holding("m0", ((1, 600), (1, 590)), ((0, 1, 600),))
    failed = PastFault("restore", -1, "m0", 80, faults.restore_signature("checkpoint", 1, 80), 0, 1)
    stored = StorageContents((Checkpoint(500, 1, 2, "step-500"), Checkpoint(80, 1, 2, "step-80")))
    seen = replace(view(held, held=600, saved=500, history=(failed,) * resume_point.TRIES), stored=stored)
    ended = refusal.no_state_left(seen, CRASH, 256)
    assert ended is not None
    assert (ended.exit_code, ended.cause) == (1, CRASH)
    assert ended.why == (
        "rank 1 failed; no state is left to resume from: "
        "checkpoint step-500: it is beyond step 256; checkpoint step-80: its restore failed 4 times; "
        "the snapshot of step 600 on m0: it is beyond step 256; "
        "the snapshot of step 590 on m0: it is beyond step 256"
    )


WHOLE = (HeldPrivateState(0, 1, 6, True), HeldPrivateState(1, 1, 6, True))


@pytest.mark.parametrize(
    ("privates", "unusable", "why"),
    [
        ((), (), "the private state of rank 0, 1 is missing"),
        ((WHOLE[0], HeldPrivateState(1, 1, 5, True)), (), "the private state of rank 1 is missing"),
        ((WHOLE[0], replace(WHOLE[1], final=False)), (), "rank 1 is available only from before the commit"),
        (WHOLE, (HeldSnapshot(1, 6, 8),), "it is damaged"),
        (WHOLE, (), "a new run resumes only from storage"),
    ],
)
def test_a_snapshot_that_is_not_whole_is_named_with_what_is_wrong_with_it(
    privates: tuple[HeldPrivateState, ...], unusable: tuple[HeldSnapshot, ...], why: str
) -> None:
    told = report("m0", launcher(), slots=(HeldSnapshot(1, 6, 8),), privates=privates, unusable=unusable)
    seen = view(member("m0", told), held=6)
    [said] = refusal.why_states_are_refused(seen, None)
    assert said.startswith("the snapshot of step 6 on m0: ")
    assert said.endswith(why)
    gone = replace(seen, members=(replace(seen.members[0], exists=False),))
    assert refusal.why_states_are_refused(gone, None) == ("the snapshot of step 6 on m0: the member is lost",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"held": 111},
            "storage has no checkpoint yet (--checkpoint-every); the snapshot of step 111",
        ),
        ({"saved": 70, "held": 111}, "storage has no checkpoint left, although step 70 had one"),
    ],
)
def test_lost_state_is_named(given: dict[str, int], said: str) -> None:
    ended = refusal.no_state_left(view(**given), CRASH, None)
    assert ended is not None
    assert (ended.exit_code, said in ended.why) == (1, True)


def test_a_failed_restore_is_never_followed_by_a_start_from_the_beginning() -> None:
    ended = refusal.no_state_left(view(), fault("restore"), None)
    assert ended is not None
    assert ended.exit_code == 1


def test_each_end_without_a_usable_state_has_exactly_its_text() -> None:
    unusable = UnusableCheckpoint("s9", 9, "is bad")
    directory = "the run directory has"
    anew = "--from-scratch starts over from step 0"
    gone = "no checkpoint left, although step 0 had one (is the storage mounted?)"
    assert refusal.no_state_left(view(saved=0), None, None) == End(2, f"{directory} {gone}; {anew}")
    listed = replace(view(saved=0), stored=StorageContents((), (unusable,)))
    none = "checkpoints, and none can be used: checkpoint s9: is bad"
    assert refusal.no_state_left(listed, None, None) == End(2, f"{directory} {none}; {anew}")

    def left(cause: Fault = CRASH, stored: StorageContents | None = None, **given: Any) -> str:
        found = refusal.no_state_left(replace(view(**given), stored=stored or StorageContents()), cause, None)
        assert found is not None
        assert found == End(1, found.why, cause=cause)
        return found.why.removeprefix("rank 1 failed; no state is left to resume from: ")

    lost = "the snapshot of step 0 is lost with its members"
    assert left(held=0) == f"storage has no checkpoint yet (--checkpoint-every); {lost}"
    assert left(saved=0) == f"storage has {gone}"
    assert left(saved=0, held=0) == f"storage has {gone}; {lost}"
    assert left(stored=StorageContents((), (unusable,)), held=0) == "checkpoint s9: is bad"
    assert left(fault("restore")) == "storage has no checkpoint yet (--checkpoint-every)"
    four = tuple(UnusableCheckpoint(f"s{n}", n, "is bad") for n in range(4))
    lines = "; ".join(f"checkpoint s{n}: is bad" for n in (3, 2, 1, 0))
    assert left(stored=StorageContents((), four), saved=0) == lines
    five = (*four, UnusableCheckpoint("s4", 4, "is bad"))
    cut = "; ".join(f"checkpoint s{n}: is bad" for n in (4, 3, 2, 1))
    assert left(stored=StorageContents((), five), saved=0) == f"{cut}; and 1 more"


def test_snapshots_of_one_step_are_listed_with_all_their_holders_newest_first() -> None:
    bad = (HeldSnapshot(1, 6, 8),)
    there = [
        member(
            f"m{n}",
            report(f"m{n}", launcher(), slots=(HeldSnapshot(1, 6, 8), HeldSnapshot(1, 7, 8)), unusable=bad),
        )
        for n in (0, 1)
    ]
    assert refusal.why_states_are_refused(view(*there, member("m2")), 6) == (
        "the snapshot of step 7 on m0, m1: it is beyond step 6",
        "the snapshot of step 6 on m0, m1: it is damaged",
    )
