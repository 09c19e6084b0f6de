"""A member that is stopped at any line removes no checkpoint that another one publishes meanwhile."""

from __future__ import annotations

import errno
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
from tests.samples.checkpoints import PRIVATE, STATE, assert_whole, broken, names, newest_whole, save, scan
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


def foreign(root: Path) -> dict[str, tuple[bool, bytes]]:
    """Put what a script may save beside checkpoints into `root`; return the expected state of all of it."""
    save(root / "elsewhere", 6)
    (root / "step-00000003").mkdir()
    (root / "step-00000004").mkdir()
    (root / "step-00000004" / "lit_model.pth").write_bytes(b"weights")
    (root / "step-00000005").write_text("text")
    (root / "step-00000006").symlink_to(root / "elsewhere" / "step-00000006")
    (root / "step-00000007" / "inner").mkdir(parents=True)
    (root / "step-00000007" / "inner" / "file").write_text("text")
    (root / "step-00000008").mkdir()
    (root / "step-00000008" / "manifest.json").write_text('{"name": "another program"}')
    return everything(root)


def everything(root: Path) -> dict[str, tuple[bool, bytes]]:
    found = sorted(path for path in root.rglob("*") if path.name != catalog.LATEST)
    return {
        str(path.relative_to(root)): (path.is_symlink(), path.read_bytes() if path.is_file() else b"")
        for path in found
    }


def test_nothing_that_holdfast_has_not_written_is_deleted(memory: Path) -> None:
    before = foreign(memory)
    for step in (1, 2, 11, 12):
        save(memory, step)
        retain(memory, Retention(1))
    assert names(memory / "step-00000012") == {STATE, PRIVATE, "manifest.json"}
    shutil.rmtree(memory / "step-00000012")
    assert everything(memory) == before


@pytest.mark.parametrize("step", [4, 5, 7, 8])
def test_a_writer_replaces_nothing_that_holdfast_has_not_written(memory: Path, step: int) -> None:
    before = foreign(memory)
    path = memory / f"step-{step:08d}"
    with pytest.raises(FileExistsError, match=f"{path} exists.* directory for its checkpoints that"):
        save(memory, step, 2)
    assert everything(memory) == before
    save(memory, 9, 2)
    assert [found.step for found in scan(memory)] == [9, 6]


def test_a_name_without_a_manifest_is_reported_as_not_written_by_holdfast(memory: Path) -> None:
    foreign(memory)
    why = {path.name[-1]: reason for path, reason in broken(memory)}
    assert why == {
        "4": "not written by Holdfast, or damaged: manifest.json is missing",
        "5": "not written by Holdfast, or damaged: it is not a directory",
        "7": "not written by Holdfast, or damaged: manifest.json is missing",
        "8": "not written by Holdfast, or damaged: manifest.json is truncated or damaged: it does not end"
        " with its checksum",
    }


def test_what_a_script_saves_into_a_checkpoint_outlives_it(memory: Path) -> None:
    for step in (5, 7):
        path = save(memory, step)
        (path / "lit_model.pth").write_bytes(b"weights")
        (path / "rank-00009.bin").mkdir()
    with pytest.raises(FileExistsError, match="Holdfast has not written all of it"):
        save(memory, 7, 2)
    assert_whole(scan(memory)[0])
    retain(memory, Retention(1))
    assert names(memory) == {"latest", "step-00000005", "step-00000007"}
    assert names(memory / "step-00000005") == {"lit_model.pth", "rank-00009.bin"}
    assert [found.step for found in scan(memory)] == [7]


def test_what_a_script_saves_at_any_line_of_a_removal_stays(memory: Path) -> None:
    template = memory / "template"
    save(template, 7)

    def act(work: Path) -> None:
        [(path, what)] = catalog.each_checkpoint(work)
        removal.remove(path, what)

    def meanwhile(work: Path) -> None:
        path = work / "step-00000007"
        path.mkdir(exist_ok=True)
        (path / "lit_model.pth").write_bytes(b"weights")

    def check(work: Path) -> None:
        removal.finish(work)
        assert names(work) == {"latest", "step-00000007"}
        assert names(work / "step-00000007") == {"lit_model.pth"}

    assert interleaved(template, (removal,), act, meanwhile, check) > 15


def test_a_later_checkpoint_that_cannot_be_read_for_a_while_is_not_replaced(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(memory, 7, 5)
    opened = catalog._open_regular
    failures = 0

    def fails(path: Path) -> int:
        nonlocal failures
        if path.name == "manifest.json" and failures > 0:
            failures -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opened(path)

    monkeypatch.setattr(catalog, "_open_regular", fails)
    for count in range(1, 8):
        failures = count
        with suppress(OSError):
            save(memory, 7, 4)
        failures = 0
        assert generations(memory) == {7: 5}
        assert_whole(scan(memory)[0])
        assert names(memory) == {"latest", "step-00000007"}
