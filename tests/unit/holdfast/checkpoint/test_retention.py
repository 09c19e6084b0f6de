"""Which checkpoints are kept when one directory contains several lines of training."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.retention import Leftover, NewestCheckpoint, Retention, is_abandoned, retain
from holdfast.protocol.lineage import Lineage
from tests.samples.checkpoints import STATE, save, scan, steps
from tests.sandbox import flip


def line(root: Path, generation: int, *at: int) -> None:
    for step in at:
        save(root, step, generation)


def test_void_checkpoints_do_not_count_and_are_deleted(memory: Path) -> None:
    line(memory, 1, 60, 80, 90, 100)
    newest = save(memory, 74, generation=2)
    removed = retain(memory, Retention(3, (Lineage(2, 70),)), frozenset({newest}))
    assert [path.name for path in removed] == ["step-00000100", "step-00000090", "step-00000080"]
    assert steps(memory) == [74, 60]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_checkpoint_just_written_is_kept_whatever_a_later_generation_made_void(
    memory: Path, count: int
) -> None:
    line(memory, 1, 80, 90, 100)
    for step in (74, 76, 78):
        written = save(memory, step, generation=2)
        retain(memory, Retention(count, (Lineage(2, 70),)), frozenset({written}))
        assert step in steps(memory)
    assert steps(memory) == [78, 76, 74][:count]


def test_nothing_is_deleted_until_a_whole_checkpoint_counts(memory: Path) -> None:
    line(memory, 1, 80, 90, 100, 110)
    assert retain(memory, Retention(1, (Lineage(2, 70),))) == ()
    flip(save(memory, 74, generation=2) / STATE, 9)
    assert retain(memory, Retention(1, (Lineage(2, 70),))) == ()
    assert len(steps(memory)) == 5


def test_a_member_that_lacks_the_lineage_reads_it_from_the_checkpoints(memory: Path) -> None:
    line(memory, 1, 60, 90, 100)
    save(memory, 74, generation=2, known=(Lineage(2, 70),))
    assert retain(memory, Retention(2)) == (memory / "step-00000100", memory / "step-00000090")
    assert steps(memory) == [74, 60]


def test_the_newest_checkpoint_that_was_proven_equal_is_kept(memory: Path) -> None:
    line(memory, 1, 100, 200, 300, 400, 500, 600)
    assert retain(memory, Retention(2, proven=399)) == (
        memory / "step-00000400",
        memory / "step-00000200",
        memory / "step-00000100",
    )
    assert steps(memory) == [600, 500, 300]
    assert retain(memory, Retention(2, proven=550)) == (memory / "step-00000300",), (
        "step 500 is one of the two that are kept"
    )
    assert retain(memory, Retention(1, proven=700)) == (memory / "step-00000500",)


def test_a_void_checkpoint_proves_nothing(memory: Path) -> None:
    line(memory, 1, 100, 200, 300)
    line(memory, 2, 160, 170)
    known = (Lineage(2, 150),)
    retain(memory, Retention(1, known, proven=200))
    assert steps(memory) == [170]
    line(memory, 1, 100)
    retain(memory, Retention(1, known, proven=150))
    assert steps(memory) == [170, 100]


def test_a_member_cut_off_from_the_run_publishes_and_deletes_nothing(memory: Path) -> None:
    save(memory, 100, epoch=1)
    save(memory, 200, generation=2, epoch=2)
    for cut_off in (0, 1):
        with pytest.raises(ValueError, match="has checkpoints ordered by a supervisor of epoch 2"):
            save(memory, 300, epoch=cut_off)
        assert retain(memory, Retention(1, (), epoch=cut_off)) == ()
    assert steps(memory) == [200, 100]
    newest = save(memory, 300, generation=2, epoch=3)
    assert len(retain(memory, Retention(1, epoch=3), frozenset({newest}))) == 2


def test_checkpoints_written_before_epochs_existed_count(memory: Path) -> None:
    line(memory, 1, 100, 200)
    found = scan(memory)
    assert [each.epoch for each in found] == [0, 0]
    save(memory, 300, epoch=4)
    assert scan(memory)[0].epoch == 4
    assert len(retain(memory, Retention(1, epoch=4))) == 2


def saved(root: Path, step: int, keep: int, proven: int) -> list[int]:
    """Write one checkpoint, and return the steps of all remaining ones, newest first."""
    written = save(root, step)
    retain(root, Retention(keep, proven=proven), frozenset({written}))
    return steps(root)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_an_equal_checkpoint_exists_whenever_replicas_come_to_differ(memory: Path, keep: int) -> None:
    """Proofs come late and rarely, and a supervisor that dies forgets one. Checkpoints are frequent."""
    proofs = {100: 0, 200: 0, 300: 0, 400: 110, 500: 110, 600: 110, 700: 510, 800: 110, 900: 110, 1000: 730}
    known = -1
    for step, proven in proofs.items():
        there = saved(memory, step, keep, proven)
        known = max(known, proven)
        assert there[0] == step
        assert len(there) <= keep + 1
        assert any(each <= max(known, 100) for each in there), "no state is left for the group to go back to"


def test_with_keep_1_the_oldest_is_kept_until_a_newer_one_is_proven_equal(memory: Path) -> None:
    assert [saved(memory, step, 1, 0) for step in (100, 200, 300)] == [[100], [200, 100], [300, 100]]
    assert saved(memory, 400, 1, 350) == [400, 300]
    assert saved(memory, 500, 1, 200) == [500, 300], "a supervisor has forgotten the proof"
    assert saved(memory, 600, 1, 550) == [600, 500]
    assert saved(memory, 700, 1, 700) == [700]


def test_with_one_replica_keep_1_keeps_one(memory: Path) -> None:
    assert [saved(memory, step, 1, -1) for step in (100, 200, 300)] == [[100], [200], [300]]


@given(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.integers(-9000, 9000))
def test_a_leftover_is_deleted_only_if_its_writer_cannot_publish_any_more(
    left: int, ours: int, newest: int, age_s: int
) -> None:
    if is_abandoned(Leftover(left, 10_000.0 - age_s), ours, NewestCheckpoint(newest, 10_000.0)):
        assert age_s > 0, "older than all checkpoints"
        assert newest <= ours, "a later supervisor may know more"
        assert left < newest or (left <= ours and age_s > 3600.0)
    elif age_s > 0 and newest <= ours and left <= ours:
        assert left >= newest
        assert age_s <= 3600.0
