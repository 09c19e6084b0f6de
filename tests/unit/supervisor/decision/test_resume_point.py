from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import HeldPrivateState, HeldSnapshot, StateSource
from supervisor.decision import resume_point, unreachable_members
from supervisor.decision.state_sources import SNAPSHOT_HOLDERS
from supervisor.view import faults
from supervisor.view.model import (
    Checkpoint,
    GroupSize,
    MemberView,
    OpenIncident,
    PastFault,
    ResumePoint,
    StorageContents,
    UnusableCheckpoint,
    View,
)
from tests.unit.supervisor.job_views import S, fault, holding, launcher, member, memory, report, view

BOTH = ((0, 1, 10), (1, 1, 10))


def point(*members: MemberView, at_most: int | None = None, **given: Any) -> tuple[str, int, int]:
    found = resume_point.newest(view(*members, **given), at_most)
    return found.source, found.generation, found.step


def test_without_any_state_the_group_starts_from_the_beginning() -> None:
    assert point(member("m0"), member("m1")) == ("none", 0, 0)


def test_the_newest_step_with_all_private_states_is_used() -> None:
    one = holding("m0", ((1, 10), (1, 12)), (*BOTH, (0, 1, 12)))
    assert point(one) == ("slot", 1, 10)
    other = holding("m1", (), ((1, 1, 12),))
    assert point(one, other) == ("slot", 1, 12)


def test_holders_and_sources_are_named() -> None:
    found = resume_point.newest(
        view(holding("m0", ((1, 10),), BOTH[:1]), holding("m1", ((1, 10),), BOTH[1:])), None
    )
    assert found.holders == ("m0", "m1")
    assert found.sources == (
        StateSource("http://m0:1", -1, 1, 10),
        StateSource("http://m1:1", -1, 1, 10),
        StateSource("http://m0:1", 0, 1, 10),
        StateSource("http://m1:1", 1, 1, 10),
    )


def test_a_limit_excludes_newer_states() -> None:
    both = holding("m0", ((1, 10), (1, 8)), (*BOTH, (0, 1, 8), (1, 1, 8)))
    assert point(both, at_most=9) == ("slot", 1, 8)
    assert point(both, at_most=8) == ("slot", 1, 8)
    assert point(both, at_most=7) == ("none", 0, 0)


@pytest.mark.parametrize("given", [{"connected": False}, {"exists": False}, {"silent_s": 2.0}])
def test_a_member_that_does_not_report_holds_nothing(given: dict[str, Any]) -> None:
    gone = holding("m0", ((1, 10),), BOTH)
    assert point(replace(gone, **given)) == ("none", 0, 0)


def test_a_damaged_snapshot_is_not_used_where_it_is_damaged() -> None:
    damaged = holding("m0", ((1, 10),), BOTH, unusable=(HeldSnapshot(1, 10, 8),))
    assert point(damaged) == ("none", 0, 0)
    found = resume_point.newest(view(damaged, holding("m1", ((1, 10),), ())), None)
    assert (found.step, found.holders) == (10, ("m1",))


def test_private_state_that_changed_after_it_was_written_is_not_used() -> None:
    told = holding("m0", ((1, 10),), BOTH)
    assert told.report is not None
    late = tuple(replace(each, final=False) for each in told.report.privates)
    assert point(replace(told, report=replace(told.report, privates=late))) == ("none", 0, 0)


def test_a_state_from_before_which_a_later_generation_resumed_is_void() -> None:
    lineage = (Lineage(2, 9),)
    assert point(holding("m0", ((1, 10),), BOTH), generation=2, lineage=lineage) == ("none", 0, 0)
    assert point(holding("m0", ((1, 9),), ((0, 1, 9), (1, 2, 9))), lineage=lineage) == ("slot", 1, 9)


def test_private_states_of_generations_that_resumed_there_also_serve() -> None:
    found = resume_point.newest(
        view(holding("m0", ((1, 10),), (*BOTH, (0, 2, 10))), lineage=(Lineage(2, 10),)), None
    )
    assert [(s.rank, s.generation) for s in found.sources] == [(-1, 1), (0, 2), (1, 1)]


def stored(*checkpoints: Checkpoint, **given: Any) -> View:
    seen = view(**given)
    return replace(seen, stored=StorageContents(checkpoints=checkpoints))


def test_memory_takes_precedence_over_storage_at_the_same_step_but_not_over_a_newer_step() -> None:
    held = holding("m0", ((1, 10),), BOTH)
    for step, source in ((9, "slot"), (10, "slot"), (11, "checkpoint")):
        seen = replace(view(held), stored=StorageContents((Checkpoint(step, 1, 2, "p"),)))
        assert resume_point.newest(seen, None).source == source


def test_a_checkpoint_is_used_with_the_skipped_newer_ones_named() -> None:
    damaged = tuple(UnusableCheckpoint(f"step-{step}", step, "is cut short") for step in (12, 9))
    seen = replace(view(), stored=StorageContents((Checkpoint(10, 1, 2, "p"),), damaged))
    assert resume_point.newest(seen, None).notes == ("checkpoint step-12 is not used: is cut short",)


@pytest.mark.parametrize(("at_most", "lineage"), [(8, ()), (None, (Lineage(2, 8),))])
def test_a_checkpoint_obeys_the_same_limits_and_the_next_older_one_is_used(
    at_most: int | None, lineage: tuple[Lineage, ...]
) -> None:
    """Differing replicas limit the step, and every checkpoint beyond it is as bad as the newest."""
    kept = [Checkpoint(step, 1, 2, f"step-{step}") for step in (9, 8, 5)]
    found = resume_point.newest(stored(*kept, lineage=lineage), at_most)
    assert (found.source, found.step, found.path) == ("checkpoint", 8, "step-8")
    assert resume_point.newest(stored(kept[0], lineage=lineage), at_most) == resume_point.FROM_THE_BEGINNING


def test_of_one_step_the_newer_generation_is_used() -> None:
    found = resume_point.newest(stored(Checkpoint(9, 1, 2, "old"), Checkpoint(9, 3, 2, "new")), None)
    assert (found.generation, found.path) == (3, "new")


def test_a_checkpoint_that_could_not_be_restored_is_skipped_for_the_previous_one() -> None:
    failed = PastFault("restore", -1, "m0", 9, faults.restore_signature("checkpoint", 1, 9), 0, 1)
    seen = stored(Checkpoint(9, 1, 2, "a"), Checkpoint(8, 1, 2, "b"), history=(failed,) * resume_point.TRIES)
    assert resume_point.newest(seen, None).path == "b"


def test_a_void_or_missing_checkpoint_is_not_named() -> None:
    seen = stored(Checkpoint(9, 1, 2, "a"), Checkpoint(8, 1, 2, "b"), lineage=(Lineage(2, 8),))
    assert not resume_point.has_checkpoint(seen, 1, 9)
    assert resume_point.has_checkpoint(seen, 1, 8)
    assert not resume_point.has_checkpoint(seen, 2, 8)
    assert resume_point.newest_checkpoint(seen) == seen.stored.checkpoints[1]


def test_a_state_that_repeatedly_failed_to_restore_is_skipped() -> None:
    held = holding("m0", ((1, 10), (1, 8)), (*BOTH, (0, 1, 8), (1, 1, 8)))
    past = PastFault("restore", -1, "m0", 10, faults.restore_signature("slot", 1, 10), 0, 1)
    assert point(held, history=(past,) * (resume_point.TRIES - 1)) == ("slot", 1, 10)
    assert point(held, history=(past,) * resume_point.TRIES) == ("slot", 1, 8)


def test_a_private_state_that_a_later_generation_made_void_counts_as_missing() -> None:
    early = HeldPrivateState(1, 1, 10, final=False)
    lone = holding("m0", ((1, 10),), BOTH[:1])
    assert lone.report is not None
    report = replace(lone.report, privates=(*lone.report.privates, early))
    seen = view(replace(lone, report=report))
    held_early = "the private state of rank 1 is available only from before the commit"
    assert resume_point.missing_private_state(seen, 10) == held_early
    back = replace(seen, memory=replace(seen.memory, lineage=(Lineage(2, 9),)))
    assert resume_point.missing_private_state(back, 10) == "the private state of rank 0, 1 is missing"


def test_a_state_of_step_0_counts_as_saved() -> None:
    assert not resume_point.has_saved_state(memory())
    assert resume_point.has_saved_state(memory(saved=0))
    assert resume_point.has_saved_state(memory(held=0))


def test_each_resume_point_has_exactly_the_expected_fields() -> None:
    first = holding("m0", ((1, 12), (1, 10)), ((0, 1, 10), (1, 1, 10)))
    second = holding("m1", ((1, 10),), ((0, 2, 10), (1, 1, 10), (1, 1, 12)))
    checkpoint = Checkpoint(10, 1, 2, "/s/a")
    stored = StorageContents(
        (checkpoint,), (UnusableCheckpoint("b", 10, "is bad"), UnusableCheckpoint("c", 9, ""))
    )
    now = replace(view(first, second), stored=stored)
    sources = (
        StateSource("http://m0:1", -1, 1, 10),
        StateSource("http://m1:1", -1, 1, 10),
        StateSource("http://m1:1", 0, 2, 10),
        StateSource("http://m0:1", 1, 1, 10),
        StateSource("http://m1:1", 1, 1, 10),
    )
    assert resume_point.newest(now, None) == ResumePoint(10, 1, "slot", "", sources, ("m0", "m1"))
    notes = ("checkpoint b is not used: is bad",)
    durable = ResumePoint(10, 1, "checkpoint", "/s/a", notes=notes)
    alone = replace(now, members=())
    assert resume_point.newest(alone, None) == durable
    assert resume_point.newest(alone, 10) == durable
    assert resume_point.newest(alone, 9) == resume_point.FROM_THE_BEGINNING
    assert resume_point.newest(alone, None, frozenset({(1, 10)})) == resume_point.FROM_THE_BEGINNING
    assert resume_point.newest(now, None, frozenset({(2, 10), (1, 9)})).source == "slot"
    assert resume_point.newest(now, None, frozenset({(1, 10)})) == resume_point.FROM_THE_BEGINNING
    assert resume_point.checkpoint_of(now, durable) == checkpoint
    assert resume_point.checkpoint_of(now, replace(durable, path="/s/b")) is None
    assert resume_point.checkpoint_of(now, replace(durable, source="slot")) is None
    newer = replace(now, stored=replace(stored, checkpoints=(replace(checkpoint, step=11),)))
    assert resume_point.newest(newer, None) == ResumePoint(11, 1, "checkpoint", "/s/a")


@pytest.mark.parametrize(
    ("privates", "why"),
    [
        ((HeldPrivateState(0, 1, 6, True), HeldPrivateState(1, 1, 6, True)), ""),
        ((HeldPrivateState(1, 1, 6, True),), "the private state of rank 0 is missing"),
        (
            (HeldPrivateState(0, 1, 7, True), HeldPrivateState(1, 1, 5, True)),
            "the private state of rank 0, 1 is missing",
        ),
        (
            (HeldPrivateState(0, 1, 6, False), HeldPrivateState(1, 1, 6, False)),
            "the private state of rank 0, 1 is available only from before the commit",
        ),
        ((HeldPrivateState(0, 1, 6, False),), "the private state of rank 1 is missing"),
        (
            (HeldPrivateState(0, 0, 6, False), HeldPrivateState(1, 1, 6, True)),
            "the private state of rank 0 is missing",
        ),
    ],
)
def test_the_reason_names_the_rank_whose_private_state_is_missing(
    privates: tuple[HeldPrivateState, ...], why: str
) -> None:
    there = member("m0", report("m0", None, privates=privates))
    assert resume_point.missing_private_state(view(there, lineage=(Lineage(1, 5),)), 6) == why


@pytest.mark.parametrize(
    ("state", "at_most", "why"),
    [
        (HeldSnapshot(1, 6, 8), None, ""),
        (HeldSnapshot(1, 6, 8), 6, ""),
        (HeldSnapshot(1, 6, 8), 5, "it is beyond step 5"),
        (HeldSnapshot(1, 3, 8), None, "its restore failed 4 times"),
        (Checkpoint(3, 1, 2, "p"), None, ""),
        (HeldSnapshot(2, 3, 8), None, ""),
        (HeldSnapshot(1, 8, 8), None, "the run later went back to step 7"),
        (HeldSnapshot(2, 9, 8), None, "the run later went back to step 8"),
        (HeldSnapshot(3, 9, 8), None, ""),
    ],
)
def test_the_reason_why_a_state_must_not_be_used_is_given(
    state: HeldSnapshot | Checkpoint, at_most: int | None, why: str
) -> None:
    failed = PastFault("restore", -1, "m0", 3, "restore of slot 1/3", 0, 1)
    others = (replace(failed, kind="crash"), replace(failed, signature="restore of checkpoint 1/3"))
    opened = OpenIncident(1, 1, 0, 0, 0.0, (fault("restore", signature=failed.signature),) * 2)
    now = view(history=(failed,) * 3 + others, incident=opened, lineage=(Lineage(2, 7), Lineage(3, 8)))
    assert resume_point.reason_unusable(now, state, at_most) == why


def test_void_checkpoints_on_storage_do_not_count() -> None:
    void, good, older = Checkpoint(9, 1, 2, "a"), Checkpoint(7, 2, 2, "b"), Checkpoint(5, 1, 2, "c")
    now = replace(view(lineage=(Lineage(2, 5),)), stored=StorageContents((void, good, older)))
    assert resume_point.newest_checkpoint(now) == good
    assert [resume_point.has_checkpoint(now, *each) for each in ((1, 9), (2, 7), (1, 5), (2, 5), (1, 7))] == [
        *(False, True, True, False, False)
    ]
    assert resume_point.newest_checkpoint(view()) is None
    assert [
        resume_point.has_saved_state(memory(saved=s, held=h)) for s, h in ((-1, -1), (0, -1), (-1, 0))
    ] == [*(False, True, True)]


SMALLER = (GroupSize(2, 1, (1,), 0),)  # generation 2 went on with the second of two members


def test_private_states_of_another_group_size_are_not_mixed_because_ranks_have_other_numbers() -> None:
    given: dict[str, Any] = {"sizes": SMALLER, "world_size": 1, "reduced_by": 1, "placement": ("m1",)}
    both = holding("m1", ((1, 10), (2, 10)), BOTH)
    assert point(both, **given) == ("slot", 1, 10), "generation 2 has no private state yet"
    assert resume_point.newest(view(both, **given), None).world_size == 2
    later = holding("m1", ((1, 10), (2, 10)), (*BOTH, (0, 2, 10)))
    assert point(later, **given) == ("slot", 2, 10)
    found = resume_point.newest(view(later, **given), None)
    assert found.world_size == 0
    assert [each.generation for each in found.sources if each.rank == 0] == [2]


def test_a_lost_rank_of_a_smaller_group_is_not_replaced_by_one_of_the_larger_group() -> None:
    larger = holding("m1", ((1, 10),), BOTH[1:])
    given: dict[str, Any] = {"sizes": SMALLER, "world_size": 1, "reduced_by": 1, "placement": ("m1",)}
    assert point(larger, **given) == ("none", 0, 0)


# -- members that are cut off from their peers


def cut_off(name: str = "m1") -> PastFault:
    return PastFault("member_lost", 1, name, 10, unreachable_members.SIGNATURE, 80 * S, 1)


def unread(generation: int, step: int) -> PastFault:
    """Return a start that failed because a member could not read a state."""
    signature = faults.restore_signature("slot", generation, step)
    return PastFault("restore", -1, "m9", step, signature, 90 * S, 2)


def test_the_copies_of_a_member_that_is_cut_off_are_the_last_sources() -> None:
    there = (holding("m1", ((1, 10),), BOTH), holding("m0", ((1, 10),), BOTH[:1]), holding("m9", (), BOTH))
    lost = fault("member_lost", 1, signature=unreachable_members.SIGNATURE)
    before = {"incident": OpenIncident(1, 1, 90 * S, 91 * S, 0.0, (lost,))}
    after = {"history": (cut_off(),), "placement": ("m0", "m9")}
    for given in (before, after):
        found = resume_point.newest(view(*there, **given), None)
        assert found.holders == ("m0", "m1")
        assert [each.url for each in found.sources if each.rank == -1] == ["http://m0:1", "http://m1:1"]
        assert [each.url for each in found.sources if each.rank == 0] == [
            "http://m0:1", "http://m9:1", "http://m1:1",
        ]  # fmt: skip
        assert [each.url for each in found.sources if each.rank == 1] == ["http://m9:1", "http://m1:1"]


def test_if_enough_others_have_the_snapshot_it_is_not_read_from_a_member_that_is_cut_off() -> None:
    others = [holding(f"n{number}", ((1, 10),), BOTH) for number in range(SNAPSHOT_HOLDERS)]
    seen = view(holding("m1", ((1, 10),), ()), *others, history=(cut_off(),), placement=("m0", "m9"))
    assert all("m1" not in each.url for each in resume_point.newest(seen, None).sources)


NEWEST_ONLY_ON_M1 = (
    holding("m0", ((1, 10), (1, 8)), ((0, 1, 10), (0, 1, 8), (1, 1, 8))),
    holding("m1", (), ((1, 1, 10),)),
    member("m9", report("m9", launcher(parked=(1,)))),
)
MOVED: dict[str, Any] = {"placement": ("m0", "m9"), "generation": 2}


def test_a_state_that_only_a_member_that_is_cut_off_completes_is_tried_once() -> None:
    assert point(*NEWEST_ONLY_ON_M1, history=(cut_off(),), **MOVED) == ("slot", 1, 10)
    history = (cut_off(), unread(1, 10))
    assert point(*NEWEST_ONLY_ON_M1, history=history, **MOVED) == ("slot", 1, 8)


def test_a_state_that_others_complete_too_is_tried_as_often_as_any() -> None:
    history = (cut_off(), unread(1, 10))
    other = holding("m2", (), ((1, 1, 10),))
    assert point(*NEWEST_ONLY_ON_M1, other, history=history, **MOVED) == ("slot", 1, 10)
    assert point(*NEWEST_ONLY_ON_M1, history=history[1:], **MOVED) == ("slot", 1, 10), "nobody is cut off"
    assert point(*NEWEST_ONLY_ON_M1, history=history) == ("slot", 1, 10), "it has its own state"


def test_a_state_that_only_a_member_that_is_cut_off_completes_is_not_given_up_if_it_is_the_last() -> None:
    """The network may work again, and without any state the run would end."""
    only = (holding("m0", ((1, 10),), BOTH[:1]), *NEWEST_ONLY_ON_M1[1:])
    for failures in range(resume_point.TRIES):
        history = (cut_off(), *(unread(1, 10) for _ in range(failures)))
        assert point(*only, history=history, **MOVED) == ("slot", 1, 10)
    history = (*history, unread(1, 10))
    assert point(*only, history=history, **MOVED) == ("none", 0, 0)


def test_a_checkpoint_is_used_rather_than_a_newer_state_that_could_not_be_read() -> None:
    only = (holding("m0", ((1, 10),), BOTH[:1]), *NEWEST_ONLY_ON_M1[1:])
    stored = StorageContents((Checkpoint(6, 1, 2, "c"),))
    seen = view(*only, history=(cut_off(), unread(1, 10)), **MOVED)
    assert resume_point.newest(replace(seen, stored=stored), None).step == 6
