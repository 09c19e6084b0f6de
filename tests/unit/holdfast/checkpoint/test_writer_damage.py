"""How damaged checkpoints are detected and reported."""

from __future__ import annotations

import os
import random
import shutil
import zlib
from pathlib import Path

import pytest

from holdfast.checkpoint import catalog
from holdfast.checkpoint.catalog import verify
from holdfast.checkpoint.manifest import NewerFormat
from holdfast.checkpoint.retention import Retention, retain
from tests.samples.checkpoints import PRIVATE, STATE, broken, names, newest_whole, save, scan, steps
from tests.sandbox import flip


def test_a_flipped_bit_in_any_file_is_reported_and_the_previous_checkpoint_is_used(
    memory: Path,
) -> None:
    save(memory, 1)
    path = save(memory, 2)
    chance = random.Random(6)
    for name in (STATE, PRIVATE, "manifest.json") * 12:
        bit = chance.randrange(((path / name).stat().st_size - 1) * 8)
        flip(path / name, bit)
        found, (note,) = newest_whole(memory)
        assert found is not None
        assert found.step == 1
        assert note.startswith(f"checkpoint step-00000002 is not used: {name} is ")
        flip(path / name, bit)
    assert newest_whole(memory)[1] == ()


def test_without_a_whole_checkpoint_none_is_found_and_each_has_a_note(memory: Path) -> None:
    for step in (1, 2):
        flip(save(memory, step) / STATE, 9)
    found, notes = newest_whole(memory)
    assert found is None
    assert [note.split()[1] for note in notes] == ["step-00000002", "step-00000001"]


def damage_missing(path: Path) -> None:
    (path / STATE).unlink()


def damage_short(path: Path) -> None:
    os.truncate(path / STATE, 2999)


def damage_link(path: Path) -> None:
    (path / STATE).unlink()
    (path / STATE).symlink_to("/dev/zero")


def damage_pipe(path: Path) -> None:
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")


def damage_no_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def damage_linked_manifest(path: Path) -> None:
    (path / "manifest.json").rename(path / "other")
    (path / "manifest.json").symlink_to(path / "other")


def damage_empty(path: Path) -> None:
    os.truncate(path / "manifest.json", 0)


def damage_step(path: Path) -> None:
    shutil.copy(path.with_name("step-00000001") / "manifest.json", path)


def damage_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("")


DAMAGE = {
    f"{STATE} is missing": damage_missing,
    f"{STATE} has 2999 bytes, but 3000 were written": damage_short,
    f"{STATE} is not a plain file": damage_link,
    "manifest.json cannot be read: not a plain file": damage_pipe,
    "not written by Holdfast, or damaged: manifest.json is missing": damage_no_manifest,
    "manifest.json cannot be read: Too many levels of symbolic links": damage_linked_manifest,
    "manifest.json is truncated or damaged: it does not end with its checksum": damage_empty,
    "manifest.json has step 1": damage_step,
    "not written by Holdfast, or damaged: it is not a directory": damage_file,
}


@pytest.mark.parametrize("why", DAMAGE)
def test_a_directory_that_is_not_a_checkpoint_is_ignored_with_a_reason(memory: Path, why: str) -> None:
    save(memory, 1)
    path = save(memory, 2)
    (found,) = (found for found in scan(memory) if found.step == 2)
    DAMAGE[why](path)

    assert steps(memory) == [1]
    assert broken(memory) == ((path, why),)
    assert verify(found) is not None or "manifest" in why
    newest, notes = newest_whole(memory)
    assert newest is not None
    assert newest.step == 1
    assert notes == (f"checkpoint step-00000002 is not used: {why}",)


def test_a_checkpoint_of_a_newer_format_is_reported_and_never_touched(memory: Path) -> None:
    for step in (1, 2, 3):
        save(memory, step)
    for step in (1, 3):
        path = memory / f"step-{step:08d}"
        raw = (path / "manifest.json").read_bytes().replace(b'"format":1', b'"format":2')
        head = raw[: raw.rindex(b',"crc32"')]
        (path / "manifest.json").write_bytes(head + b',"crc32":%d}\n' % zlib.crc32(head))

    with pytest.raises(NewerFormat, match=r"manifest\.json has format 2, but this holdfast"):
        catalog.load(memory / "step-00000003")
    newest, (note,) = newest_whole(memory)
    assert newest is not None
    assert newest.step == 2
    assert "update it" in note
    retain(memory, Retention(1))
    save(memory, 3)
    assert names(memory) == {"latest", "step-00000001", "step-00000002", "step-00000003"}
