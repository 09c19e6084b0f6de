from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.lineage import Lineage
from holdfast.messages import Slot, Source
from supervisor import faults, resume
from supervisor.view import Checkpoint, MemberView, Past, View
from tests.unit.supervisor.views import holding, member, memory, view

BOTH = ((0, 1, 10), (1, 1, 10))


def point(*members: MemberView, at_most: int | None = None, **given: Any) -> tuple[str, int, int]:
    found = resume.point(view(*members, **given), at_most)
    return found.source, found.generation, found.step


def test_without_any_state_the_group_begins_anew() -> None:
    assert point(member("m0"), member("m1")) == ("none", 0, 0)


def test_the_newest_step_with_all_private_states_is_taken() -> None:
    one = holding("m0", ((1, 10), (1, 12)), (*BOTH, (0, 1, 12)))
    assert point(one) == ("slot", 1, 10)
    other = holding("m1", (), ((1, 1, 12),))
    assert point(one, other) == ("slot", 1, 12)


def test_holders_and_sources_are_named() -> None:
    found = resume.point(view(holding("m0", ((1, 10),), BOTH[:1]), holding("m1", ((1, 10),), BOTH[1:])), None)
    assert found.holders == ("m0", "m1")
    assert found.sources == (
        Source("http://m0:1", -1, 1, 10),
        Source("http://m1:1", -1, 1, 10),
        Source("http://m0:1", 0, 1, 10),
        Source("http://m1:1", 1, 1, 10),
    )


def test_a_bound_leaves_out_newer_states() -> None:
    both = holding("m0", ((1, 10), (1, 8)), (*BOTH, (0, 1, 8), (1, 1, 8)))
    assert point(both, at_most=9) == ("slot", 1, 8)
    assert point(both, at_most=8) == ("slot", 1, 8)
    assert point(both, at_most=7) == ("none", 0, 0)


@pytest.mark.parametrize("given", [{"connected": False}, {"exists": False}, {"silent_s": 2.0}])
def test_who_does_not_speak_holds_nothing(given: dict[str, Any]) -> None:
    gone = holding("m0", ((1, 10),), BOTH)
    assert point(replace(gone, **given)) == ("none", 0, 0)


def test_a_damaged_snapshot_is_not_used_where_it_is_damaged() -> None:
    damaged = holding("m0", ((1, 10),), BOTH, unusable=(Slot(1, 10, 8),))
    assert point(damaged) == ("none", 0, 0)
    found = resume.point(view(damaged, holding("m1", ((1, 10),), ())), None)
    assert (found.step, found.holders) == (10, ("m1",))


def test_private_state_that_changed_after_it_was_written_is_not_used() -> None:
    told = holding("m0", ((1, 10),), BOTH)
    assert told.report is not None
    late = tuple(replace(each, final=False) for each in told.report.privates)
    assert point(replace(told, report=replace(told.report, privates=late))) == ("none", 0, 0)


def test_what_a_later_generation_went_on_from_before_is_void() -> None:
    lineage = (Lineage(2, 9),)
    assert point(holding("m0", ((1, 10),), BOTH), generation=2, lineage=lineage) == ("none", 0, 0)
    assert point(holding("m0", ((1, 9),), ((0, 1, 9), (1, 2, 9))), lineage=lineage) == ("slot", 1, 9)


def test_private_states_of_generations_that_went_on_from_there_serve_as_well() -> None:
    found = resume.point(
        view(holding("m0", ((1, 10),), (*BOTH, (0, 2, 10))), lineage=(Lineage(2, 10),)), None
    )
    assert [(s.rank, s.generation) for s in found.sources] == [(-1, 1), (0, 2), (1, 1)]


def test_memory_goes_before_storage_of_the_same_step_and_not_before_a_newer_one() -> None:
    held = holding("m0", ((1, 10),), BOTH)
    for step, source in ((9, "slot"), (10, "slot"), (11, "checkpoint")):
        seen = view(held)
        stored = Checkpoint(step, 1, 2, "p", ("note",))
        found = resume.point(View(seen.now_ns, 0.0, seen.memory, seen.members, stored), None)
        assert found.source == source
        assert found.notes == (("note",) if source == "checkpoint" else ())


@pytest.mark.parametrize(("at_most", "lineage"), [(8, ()), (None, (Lineage(2, 8),))])
def test_a_checkpoint_is_bound_by_the_same_rules(at_most: int | None, lineage: tuple[Lineage, ...]) -> None:
    seen = View(0, 0.0, memory(lineage=lineage), (), Checkpoint(9, 1, 2, "p"))
    assert resume.point(seen, at_most).source == "none"


def test_what_could_not_be_restored_again_and_again_is_passed_over() -> None:
    held = holding("m0", ((1, 10), (1, 8)), (*BOTH, (0, 1, 8), (1, 1, 8)))
    past = Past("restore", -1, "m0", 10, faults.restore_signature("slot", 1, 10), 0, 1)
    assert point(held, history=(past,) * (resume.TRIES - 1)) == ("slot", 1, 10)
    assert point(held, history=(past,) * resume.TRIES) == ("slot", 1, 8)
