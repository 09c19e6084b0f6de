"""A member that is stopped at any line removes no checkpoint that another one publishes meanwhile."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.checkpoint import catalog, directory, removal, retention, writer
from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.checkpoint.retention import Retention, retain
from holdfast.fileio import durable
from holdfast.protocol.lineage import Lineage
from tests.interleaving import interleaved
from tests.samples.checkpoints import STATE, assert_whole, broken, names, newest_whole, save, scan
from tests.sandbox import flip

KNOWN = (Lineage(2, 5),)  # generation 2 has resumed from step 5, so step 7 of generation 1 is void


def taken_over(work: Path) -> None:
    """A later supervisor's member publishes its first checkpoint. The old one has saved that step too."""
    save(work, 7, 2, known=KNOWN, epoch=9)


def generations(root: Path) -> dict[int, int]:
    return {found.step: found.generation for found in scan(root)}


@pytest.mark.parametrize(("keep", "lineage"), [(2, ()), (1, KNOWN)])
def test_a_member_stopped_anywhere_in_its_retention_keeps_what_its_successor_publishes(
    memory: Path, keep: int, lineage: tuple[Lineage, ...]
) -> None:
    template = memory / "template"
    for step in (5, 7, 9, 11) if not lineage else (5, 7):
        save(template, step, epoch=1)
    left: set[tuple[int, int]] = set()

    def act(work: Path) -> None:
        retain(work, Retention(keep, lineage, epoch=1), frozenset({work / "step-00000011"}))

    def meanwhile(work: Path) -> None:
        taken_over(work)
        left.clear()
        left.update(generations(work).items())

    def check(work: Path) -> None:
        assert generations(work)[7] == 2
        for found in scan(work):
            assert_whole(found)
        assert broken(work) == ()
        assert len(left - set(generations(work).items())) <= 1, "only the deletion in progress completes"
        retain(work, Retention(1, epoch=9))
        assert names(work) == {"latest", "step-00000007"}

    assert interleaved(template, (retention, removal, directory), act, meanwhile, check) > 40


@pytest.mark.parametrize("damaged", [False, True])
def test_a_checkpoint_published_at_any_line_of_a_removal_stays_whole(memory: Path, damaged: bool) -> None:
    template = memory / "template"
    path = save(template, 7)
    if damaged:
        (path / STATE).unlink()

    def act(work: Path) -> None:
        [(path, what)] = catalog.each_checkpoint(work)
        DirectoryStorage(work).remove(path, what)

    def check(work: Path) -> None:
        (found,) = scan(work)
        assert found.generation == 2
        assert_whole(found)
        assert names(work) == {"latest", "step-00000007"}

    assert interleaved(template, (removal,), act, taken_over, check) > 15


def test_a_removal_at_any_line_of_a_replacement_leaves_the_new_checkpoint_whole(memory: Path) -> None:
    template = memory / "template"
    save(template, 7)

    def meanwhile(work: Path) -> None:
        path = work / "step-00000007"
        removal.remove(path, catalog.load(path, template / path.name))

    def check(work: Path) -> None:
        (found,) = scan(work)
        assert found.generation == 2
        assert_whole(found)
        retain(work, Retention(1, epoch=9))
        assert names(work) == {"latest", "step-00000007"}

    assert interleaved(template, (writer, directory, durable), taken_over, meanwhile, check) > 40


def test_a_writer_stopped_anywhere_replaces_no_checkpoint_that_it_has_not_examined(memory: Path) -> None:
    template = memory / "template"
    save(template, 5)
    flip(save(template, 7) / STATE, 50)

    def act(work: Path) -> None:
        with suppress(ValueError, OSError):
            save(work, 7, epoch=1)

    def check(work: Path) -> None:
        found, notes = newest_whole(work)
        assert found is not None
        assert (found.step, found.generation, notes) == (7, 2, ())
        assert_whole(found)
        newest = frozenset({found.path})
        retain(work, Retention(2, epoch=9), newest)
        assert names(work) == {"latest", "step-00000005", "step-00000007"}

    assert interleaved(template, (writer, directory, durable), act, taken_over, check) > 60


def test_a_writer_that_counts_as_dead_publishes_all_of_its_files_or_nothing(memory: Path) -> None:
    """It was stopped for so long that its files are being removed, and then publishes them."""
    template = memory / "template"
    old = save(template, 7).rename(template / ".tmp-elsewhere-1-0-step-00000007")
    for path in (*old.iterdir(), old):
        os.utime(path, (1.0, 1.0))
    published: list[bool] = []

    def meanwhile(work: Path) -> None:
        with suppress(FileNotFoundError):
            (work / old.name).rename(work / "step-00000007")
            published.append(True)

    def check(work: Path) -> None:
        for found in scan(work):
            assert_whole(found)
        assert broken(work) == ()
        assert names(work) == {"latest", *(["step-00000007"] if published else [])}
        published.clear()

    assert interleaved(template, (durable, shutil), durable.remove_debris, meanwhile, check) > 20


def test_a_removal_that_was_interrupted_is_completed_whoever_has_the_name_by_then(memory: Path) -> None:
    for step in (5, 7):
        path = save(memory, step)
        (path / "manifest.json").rename(path / catalog.REMOVED)
    assert tuple(catalog.each_checkpoint(memory)) == ()
    save(memory, 7, 2)
    assert generations(memory) == {7: 2}
    retain(memory, Retention(1))
    assert names(memory) == {"latest", "step-00000007"}


def test_a_checkpoint_that_cannot_be_compared_is_kept(memory: Path) -> None:
    path = save(memory, 7)
    found = catalog.load(path)
    (path / "manifest.json").rename(path / "other")
    (path / "manifest.json").symlink_to("other")
    assert not removal.remove(path, found)
    assert not removal.remove(path, catalog.load_or_defect(path))
    assert len(names(path)) == 4


def test_anything_else_with_the_name_of_a_checkpoint_is_removed_with_its_content(memory: Path) -> None:
    save(memory, 9)
    file, link, folder = (memory / f"step-0000000{step}" for step in (5, 6, 7))
    file.write_text("text")
    shutil.copytree(memory / "step-00000009", memory / "mine")
    link.symlink_to(memory / "mine")
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("text")
    retain(memory, Retention(1))
    assert names(memory) == {"latest", "step-00000009", "mine"}
    assert len(names(memory / "mine")) == 3
