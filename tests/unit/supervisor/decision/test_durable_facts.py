from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import (
    CheckpointReport,
    HeldChecksum,
    HeldPrivateState,
    HeldSnapshot,
    KnownHistory,
)
from supervisor.decision.durable_facts import VOIDS, with_durable_facts, with_last_status
from supervisor.view.model import Checkpoint, JobState, MemberView, OpenIncident, StorageContents, VoidStep
from tests.unit.supervisor.job_views import S, launcher, member, memory, progress, report, view


def taught(*members: MemberView, stored: StorageContents | None = None, **given: Any) -> JobState:
    return with_durable_facts(replace(view(*members, **given), stored=stored or StorageContents()))


def training(*at: tuple[int, int], **given: Any) -> tuple[MemberView, ...]:
    """Return a member for each pair of its rank's step and its snapshot's step."""
    return tuple(
        member(f"m{n}", report(f"m{n}", launcher(), progress=(progress(n, step, snapshot),), **given))
        for n, (step, snapshot) in enumerate(at)
    )


def test_uninformative_reports_change_nothing() -> None:
    seen = view(*training((3, -1), (3, -1)), reached=3)
    assert with_durable_facts(seen) is seen.memory


def test_a_newer_generation_is_remembered_wherever_it_is_seen() -> None:
    assert taught(stored=StorageContents(generation=7)).seen == 7
    assert taught(*training((3, -1), (3, -1), slots=(HeldSnapshot(5, 3, 8),))).seen == 5
    assert taught(*training((3, -1), (3, -1), durable=CheckpointReport(3, 4, "p"))).seen == 4
    assert taught(member("m0", report("m0", launcher(generation=6)))).seen == 6
    assert taught(stored=StorageContents(generation=7), seen=9).seen == 9
    assert taught(stored=StorageContents(generation=7), generation=8).seen == 0


def test_a_valid_checkpoint_is_remembered_and_a_void_one_is_not() -> None:
    stored = StorageContents(
        (Checkpoint(30, 1, 2, "a"), Checkpoint(20, 1, 2, "b")), lineage=(Lineage(2, 25),)
    )
    found = taught(stored=stored)
    assert (found.saved, found.lineage) == (20, (Lineage(2, 25),))
    assert taught(stored=StorageContents(), saved=20).saved == 20
    assert taught(stored=stored, lineage=(Lineage(3, 0),)).saved == -1


@pytest.mark.parametrize(
    ("at", "given", "held"),
    [
        (((9, 8), (9, 8)), {}, 8),
        (((9, 8), (8, 8)), {}, -1),
        (((9, 8), (9, 8)), {"settled": False}, -1),
        (((9, 8), (9, 8)), {"phase": "securing"}, -1),
        (((9, -1), (9, -1)), {}, -1),
        (((9, 8),), {}, -1),
    ],
    ids=["beyond it", "not all beyond it", "not settled", "securing", "none", "a rank is missing"],
)
def test_a_snapshot_counts_as_held_once_all_ranks_have_gone_beyond_it(
    at: tuple[tuple[int, int], ...], given: dict[str, Any], held: int
) -> None:
    assert taught(*training(*at), **{"settled": True, **given}).held == held


def sealed(name: str, *crcs: int) -> MemberView:
    seals = tuple(HeldChecksum(1, 16 * at, 4096, crc) for at, crc in enumerate(crcs, 1))
    return member(name, report(name, launcher(), seals=seals))


def test_the_last_steps_at_which_all_were_equal_are_remembered() -> None:
    assert taught(sealed("m0", 1, 2, 3), sealed("m1", 1, 2, 3)).equal == (32, 48)
    assert taught(sealed("m0", 1, 2, 3), sealed("m1", 1, 2, 9)).equal == (16, 32)
    assert taught(sealed("m0", 1, 2, 3)).equal == (), "only one of two members reported it"
    assert taught(equal=(8, 12)).equal == (8, 12)
    assert taught(sealed("m0", 1), sealed("m1", 1), equal=(8, 12)).equal == (12, 16)
    alone: dict[str, Any] = {"world_size": 1, "placement": ("m0",)}
    assert taught(sealed("m0", 1, 2, 3), **alone).equal == (), "a single member has no other to match"


def changed(number: int, late: tuple[int, ...] = (), amended: tuple[int, ...] = ()) -> MemberView:
    told = replace(progress(number, 90), late=late, amended=amended)
    return member(f"m{number}", report(f"m{number}", launcher(), progress=(told,)))


def test_a_void_step_is_remembered_until_its_rank_has_committed_it_again() -> None:
    void = taught(changed(0, late=(32,)), changed(1)).void
    assert void == (VoidStep(1, 32, 0),)
    assert taught(changed(0, amended=(40, 41)), changed(1), void=void).void == void
    assert taught(changed(1), void=void).void == void, "its member is gone"
    assert taught(changed(0), changed(1, amended=(32,)), void=void).void == void
    assert taught(changed(0, amended=(32,)), changed(1), void=void).void == ()


def test_the_newest_void_steps_and_those_with_a_held_state_are_remembered() -> None:
    many = tuple(VoidStep(1, step, 0) for step in range(VOIDS))
    stored = StorageContents((Checkpoint(0, 1, 2, "a"),))
    holding = member(
        "m1", report("m1", launcher(), progress=(progress(1, 200),), slots=(HeldSnapshot(1, 2, 8),))
    )
    found = taught(changed(0, late=(200, 201, 202)), holding, stored=stored, void=many).void
    assert [each.step for each in found] == [0, 2, *range(3, VOIDS), 200, 201, 202]


def test_the_groups_progress_outlives_its_members_and_not_its_generation() -> None:
    assert taught(*training((9, 8), (8, 8))).reached == 9
    assert taught(reached=9).reached == 9
    assert taught(*training((3, 2), (3, 2)), reached=9).reached == 9
    newer = launcher(generation=2)
    told = member("m0", report("m0", newer, progress=(progress(0, 4),)))
    assert taught(told, reached=9).reached == -1, "the report is about another generation"


def status(*steps: int | None, **given: object) -> dict[str, object]:
    ranks = [{"rank": number, "step": step} for number, step in enumerate(steps)]
    return {"generation": 1, "ranks": ranks, "snapshot_step": 128, **given}


@pytest.mark.parametrize(
    ("told", "known"),
    [
        (status(147, 146), (147, 128)),
        (status(147, 128), (147, 4)),
        (status(147, None), (147, 4)),
        (status(147), (147, 4)),
        (status(147, 146, snapshot_step=None), (147, 4)),
        (status(147, 146, snapshot_step=2), (147, 4)),
        (status(147, 146, generation=2), (-1, 4)),
        (status(147, 146, generation="1"), (-1, 4)),
        (status(ranks="all"), (-1, 4)),
        (status(ranks=[7, {"step": "9"}, {"step": True}]), (-1, 4)),
        ({}, (-1, 4)),
        (None, (-1, 4)),
    ],
)
def test_the_last_status_tells_a_successor_the_progress_of_the_group(
    told: dict[str, object] | None, known: tuple[int, int]
) -> None:
    before = memory(settled=True, reached=1, held=4)
    after = with_last_status(before, told)
    assert (after.reached, after.held) == known
    assert after == replace(before, reached=known[0], held=known[1])


def test_ranks_without_a_step_have_none_to_lose_and_ranks_being_secured_are_known() -> None:
    for known in (memory(), memory(phase="securing", settled=True, reached=7)):
        assert with_last_status(known, None) is known


def test_a_history_that_was_not_recorded_is_learned_from_the_members() -> None:
    """A run was started from scratch, and its journal could not be written."""
    told = KnownHistory(2, (Lineage(2, 0),), (7,))
    stored = StorageContents((Checkpoint(343, 1, 2, "a"),), lineage=(Lineage(1, 0),), generation=1)
    here = member("m0", report("m0", launcher(), told=told))
    found = taught(here, stored=stored, skip=(3,), lineage=(Lineage(1, 0),))
    assert (found.lineage, found.saved, found.seen, found.skip) == ((Lineage(2, 0),), -1, 2, (3, 7))
    known = taught(here, stored=stored, generation=2, lineage=(Lineage(1, 0), Lineage(2, 350)))
    assert (known.lineage, known.saved) == ((Lineage(1, 0), Lineage(2, 350)), 343), (
        "the supervisor itself knows more"
    )


def test_one_update_records_every_durable_fact() -> None:
    there = tuple(
        replace(each, report=replace(each.report, seals=(HeldChecksum(1, 4, 8, 7), HeldChecksum(1, 5, 8, 7))))
        for each in training((9, 8), (9, 7))
        if each.report is not None
    )
    checkpoints = (Checkpoint(9, 1, 2, "a"), Checkpoint(6, 1, 2, "b"))
    stored = StorageContents(checkpoints, lineage=(Lineage(2, 7),), generation=2)
    found = taught(*there, stored=stored, settled=True, lineage=(Lineage(1, 3),), skip=(2,))
    before = memory(settled=True, lineage=(Lineage(1, 3),), skip=(2,))
    assert found == replace(
        before, lineage=(Lineage(1, 3), Lineage(2, 7)), seen=2, saved=6, held=8, reached=9, equal=(4, 5)
    )


def test_a_generation_is_newer_only_if_it_is_beyond_all_that_is_known() -> None:
    known = [taught(stored=StorageContents(generation=each), generation=4, seen=3).seen for each in (4, 5)]
    assert known == [3, 5]
    assert [
        taught(stored=StorageContents(generation=each), generation=2, seen=6).seen for each in (6, 7)
    ] == [6, 7]
    private = HeldPrivateState(0, 8, 3, True)
    assert taught(member("m0", report("m0", None, privates=(private,)))).seen == 8
    history = KnownHistory(9, (Lineage(11, 4),))
    assert taught(member("m0", report("m0", None, told=history))).seen == 11
    assert taught(member("m0", report("m0", None, told=KnownHistory(9)))).seen == 9


def test_a_status_describes_the_group_only_if_no_later_progress_is_known() -> None:
    lower = with_last_status(memory(settled=True, reached=150, held=200), status(147, 146))
    assert (lower.reached, lower.held) == (150, 200)
    unsettled = with_last_status(memory(held=4), status(147, 146))
    assert (unsettled.reached, unsettled.held) == (147, 4)
    assert with_last_status(memory(settled=True, held=4), status(147, 129)).held == 128


def test_the_time_at_which_all_survivors_have_secured_their_state_is_recorded_once() -> None:
    """The next decision can be much later, because the group may wait for another pod."""
    incident = OpenIncident(1, 1, 90 * S, 91 * S, 0.0)

    def survived_ns(*ready: int, phase: str = "securing", known_ns: int = 0) -> int:
        members = [
            member(f"m{n}", report(f"m{n}", launcher(), secured_for=generation))
            for n, generation in enumerate(ready)
        ]
        gone = replace(member("m2"), exists=False)
        given = {"placement": ("m0", "m1", "m2"), "incident": replace(incident, survived_ns=known_ns)}
        after = with_durable_facts(view(*members, gone, phase=phase, now_s=100.0, **given))
        assert after.incident is not None
        return after.incident.survived_ns

    assert survived_ns(1, 0) == 0
    assert survived_ns(1, 1) == 100 * S
    assert survived_ns(1, 1, known_ns=95 * S) == 95 * S
    assert survived_ns(1, 1, phase="running") == 0
