from __future__ import annotations

import os
import random
import resource
import shutil
from pathlib import Path

import pytest

from holdfast.checkpoint import catalog
from holdfast.checkpoint.catalog import verify
from holdfast.checkpoint.retention import Retention, retain
from holdfast.checkpoint.writer import write
from holdfast.fileio import durable
from holdfast.fileio.checksum import CHUNK_BYTES, checksum
from tests.samples.checkpoints import (
    PRIVATE,
    STATE,
    assert_whole,
    broken,
    latest,
    names,
    newest_whole,
    save,
    scan,
    steps,
)
from tests.sandbox import flip, in_child


def test_a_written_checkpoint_is_found_with_all_its_data(tmp_path: Path) -> None:
    path = save(tmp_path / "deep" / "root", 1200, generation=3)

    (found,) = scan(tmp_path / "deep" / "root")
    assert path == found.path
    assert path.name == "step-00001200"
    assert (found.step, found.generation, found.world_size, found.created) == (1200, 3, 2, 2200.0)
    assert found.meta == {"model": "test", "generation": 3}
    assert found.bytes == 3007
    assert [entry.name for entry in found.files] == [STATE, PRIVATE]
    assert_whole(found)
    assert latest(path.parent) == path.name
    assert names(path.parent) == {"latest", path.name}
    assert newest_whole(path.parent) == (found, ())
    assert catalog.load(path) == found


def test_a_file_of_many_chunks_is_copied_from_a_path_with_its_checksums(tmp_path: Path) -> None:
    source = tmp_path / "source"
    content = random.Random(4).randbytes(1001) * (2 * CHUNK_BYTES // 1001 + 1)
    source.write_bytes(content)
    expected = checksum(memoryview(content))
    path = write(
        tmp_path / "root",
        generation=1,
        step=1,
        world_size=1,
        files={"state": source, "empty": b""},
        meta={},
        created_at=0,
    )

    assert (path / "state").read_bytes() == content
    (found,) = scan(tmp_path / "root")
    assert verify(found) is None
    assert len(found.files[0].crc32) == 3
    assert found.files[0].checksum == expected
    flip(path / "state", (CHUNK_BYTES + 5) * 8)
    assert verify(found) == (
        f"state is damaged: checksum differs in bytes {CHUNK_BYTES} to {2 * CHUNK_BYTES - 1}"
    )


@pytest.mark.parametrize("name", ["../x", "/etc/x", ".x", "a/b", "", "manifest.json"])
def test_a_file_name_that_is_a_path_is_refused(memory: Path, name: str) -> None:
    with pytest.raises(ValueError, match="expected letters"):
        save(memory, 1, more={name: b""})
    assert names(memory) == set()


def test_the_newest_step_is_listed_first_and_latest_names_the_last_one_written(memory: Path) -> None:
    for step in (5, 20, 3):
        save(memory, step)
    assert steps(memory) == [20, 5, 3]
    assert latest(memory) == "step-00000003"


def test_a_missing_root_contains_no_checkpoints(memory: Path) -> None:
    assert scan(memory / "none") == ()
    assert broken(memory / "none") == ()
    assert newest_whole(memory / "none") == (None, ())
    assert latest(memory / "none") is None
    assert retain(memory / "none", Retention(1)) == ()


def test_a_whole_checkpoint_of_the_same_or_a_newer_generation_is_kept(memory: Path) -> None:
    path = save(memory, 7, generation=2)
    before = path.stat().st_ino

    assert save(memory, 7, generation=2) == path
    assert save(memory, 7, generation=1) == path
    assert path.stat().st_ino == before
    assert scan(memory)[0].generation == 2


def test_a_newer_generation_or_a_damaged_checkpoint_is_replaced(memory: Path) -> None:
    path = save(memory, 7, generation=1)
    save(memory, 7, generation=2)
    assert scan(memory)[0].generation == 2

    flip(path / STATE, 100)
    save(memory, 7, generation=1)
    assert scan(memory)[0].generation == 1
    assert_whole(scan(memory)[0])
    shutil.rmtree(path)
    path.mkdir()
    save(memory, 7)
    shutil.rmtree(path)
    path.write_text("in the way")
    with pytest.raises(FileExistsError, match="so it is not replaced"):
        save(memory, 7)
    assert path.read_text() == "in the way"
    assert names(memory) == {"latest", path.name}


@pytest.mark.parametrize("lie", [b"", b"step-00000009\n", b"../../etc\n", b"\xff\xfe", b"x" * 10_000])
def test_a_wrong_latest_link_is_ignored(memory: Path, lie: bytes) -> None:
    save(memory, 1)
    save(memory, 2)
    (memory / "latest").write_bytes(lie)

    found, notes = newest_whole(memory)
    assert found is not None
    assert (found.step, notes) == (2, ())
    save(memory, 3)
    assert latest(memory) == "step-00000003"


def test_the_oldest_checkpoints_beyond_the_limit_are_deleted(memory: Path) -> None:
    for step in range(5):
        save(memory, step)
    removed = retain(memory, Retention(2))
    assert [path.name for path in removed] == ["step-00000002", "step-00000001", "step-00000000"]
    assert steps(memory) == [4, 3]
    assert retain(memory, Retention(2)) == ()
    with pytest.raises(ValueError, match="expected 1 or more"):
        retain(memory, Retention(0))


def test_the_newest_whole_checkpoint_is_kept_however_many_newer_ones_are_damaged(memory: Path) -> None:
    for step in range(6):
        path = save(memory, step)
        if step > 2:
            flip(path / STATE, 77)
    retain(memory, Retention(2))
    assert steps(memory) == [5, 4, 3, 2]
    known = frozenset({memory / "step-00000005"})
    retain(memory, Retention(2), whole=known)
    assert steps(memory) == [5, 4]


def test_files_of_dead_writers_are_removed_and_those_of_live_writers_are_kept(memory: Path) -> None:
    save(memory, 1)

    def dies() -> None:
        with durable.temporary_directory(memory, "step-00000002") as path:
            (path / STATE).write_bytes(b"half")
            os._exit(0)

    assert in_child(dies) == 0
    (memory / ".tmp-of somebody else").mkdir()
    old = memory / ".tmp-elsewhere-1-0-step-00000009"
    new = memory / ".tmp-elsewhere-1-1-step-00000009"
    for path in (old, new):
        path.mkdir()
    os.utime(old, (1.0, 1.0))
    with durable.temporary_directory(memory, "step-00000003") as mine:
        retain(memory, Retention(1))
        left = {"latest", "step-00000001", ".tmp-of somebody else", new.name}
        assert names(memory) == {*left, mine.name}
    assert names(memory) == left


def test_an_unreadable_checkpoint_is_reported_and_the_previous_one_is_used(memory: Path) -> None:
    save(memory, 1)
    save(memory, 2)

    def child() -> None:  # the remaining descriptors suffice to list, but not to open
        found = scan(memory)[0]
        soft = len(list(Path("/proc/self/fd").iterdir())) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
        occupied = []
        try:
            while True:
                occupied.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            assert verify(found) == f"{STATE} cannot be read: Too many open files"

    assert in_child(child) == 0
