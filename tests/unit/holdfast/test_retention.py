"""Which checkpoints stay when there are several lines of training in one directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.checkpoint import retain, scan
from holdfast.lineage import Lineage
from tests.expendable import flip
from tests.samples.checkpoints import STATE, save, steps


def line(root: Path, generation: int, *at: int) -> None:
    for step in at:
        save(root, step, generation)


def test_void_ones_do_not_count_and_are_deleted(memory: Path) -> None:
    line(memory, 1, 60, 80, 90, 100)
    newest = save(memory, 74, generation=2)
    removed = retain(memory, 3, frozenset({newest}), (Lineage(2, 70),))
    assert [path.name for path in removed] == ["step-00000100", "step-00000090", "step-00000080"]
    assert steps(memory) == [74, 60]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_one_just_written_stays_whatever_a_later_generation_made_void(memory: Path, count: int) -> None:
    line(memory, 1, 80, 90, 100)
    for step in (74, 76, 78):
        written = save(memory, step, generation=2)
        retain(memory, count, frozenset({written}), (Lineage(2, 70),))
        assert step in steps(memory)
    assert steps(memory) == [78, 76, 74][:count]


def test_nothing_is_deleted_until_there_is_a_whole_one_that_counts(memory: Path) -> None:
    line(memory, 1, 80, 90, 100, 110)
    assert retain(memory, 1, known=(Lineage(2, 70),)) == ()
    flip(save(memory, 74, generation=2) / STATE, 9)
    assert retain(memory, 1, known=(Lineage(2, 70),)) == ()
    assert len(steps(memory)) == 5


def test_a_member_that_does_not_know_the_lineage_finds_it_in_the_checkpoints(memory: Path) -> None:
    line(memory, 1, 60, 90, 100)
    save(memory, 74, generation=2, known=(Lineage(2, 70),))
    assert retain(memory, 2) == (memory / "step-00000100", memory / "step-00000090")
    assert steps(memory) == [74, 60]


def test_the_newest_of_those_that_were_proven_equal_stays(memory: Path) -> None:
    line(memory, 1, 100, 200, 300, 400, 500, 600)
    assert retain(memory, 2, proven=399) == (
        memory / "step-00000400",
        memory / "step-00000200",
        memory / "step-00000100",
    )
    assert steps(memory) == [600, 500, 300]
    assert retain(memory, 2, proven=550) == (memory / "step-00000300",), "500 is one of those that stay"
    assert retain(memory, 1, proven=700) == (memory / "step-00000500",)


def test_a_void_one_proves_nothing(memory: Path) -> None:
    line(memory, 1, 100, 200, 300)
    line(memory, 2, 160, 170)
    known = (Lineage(2, 150),)
    retain(memory, 1, known=known, proven=200)
    assert steps(memory) == [170]
    line(memory, 1, 100)
    retain(memory, 1, known=known, proven=150)
    assert steps(memory) == [170, 100]


def test_a_member_that_is_cut_off_from_the_run_publishes_and_deletes_nothing(memory: Path) -> None:
    save(memory, 100, epoch=1)
    save(memory, 200, generation=2, epoch=2)
    for cut_off in (0, 1):
        with pytest.raises(ValueError, match="a supervisor of epoch 2 has had checkpoints written"):
            save(memory, 300, epoch=cut_off)
        assert retain(memory, 1, known=(), epoch=cut_off) == ()
    assert steps(memory) == [200, 100]
    newest = save(memory, 300, generation=2, epoch=3)
    assert len(retain(memory, 1, frozenset({newest}), epoch=3)) == 2


def test_checkpoints_of_versions_without_an_epoch_count_as_before(memory: Path) -> None:
    line(memory, 1, 100, 200)
    found = scan(memory)
    assert [each.epoch for each in found] == [0, 0]
    save(memory, 300, epoch=4)
    assert scan(memory)[0].epoch == 4
    assert len(retain(memory, 1, epoch=4)) == 2
