from __future__ import annotations

import fcntl
import gc
import mmap
import os
import select
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.fileio.safetensors import plan
from holdfast.snapshot.arena import Arena
from holdfast.snapshot.member_directory import OWNER, RESTORED, is_abandoned, restored_name
from holdfast.snapshot.private_store import PrivateReader, PrivateStore
from supervisor.local.volume import memory_volume
from supervisor.local.volume.removal_watcher import RemovalWatcher
from supervisor.local.volume.volume_repair import FAILURES, LOG_GAP_S, VolumeRepair
from tests.sandbox import memory_directory

LAYOUT = plan([("w", "F32", (1024,))], {})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with memory_directory() as root:
        monkeypatch.setattr(memory_volume, "_ROOTS", (root,))
        folder, owner = memory_volume.create()
        yield folder
        os.close(owner)


@pytest.fixture
def upkeep(run: Path) -> Iterator[VolumeRepair]:
    (run / "m0" / "arena").mkdir(parents=True, mode=0o700)
    found = VolumeRepair(run)
    found.begin()
    found.add("m0")
    yield found
    found.close()


def snapshot(arena: Arena, step: int) -> None:
    draft = arena.begin(LAYOUT, 1, step, 2)
    assert draft is not None
    with draft:
        draft.data[:4096] = bytes([step]) * 4096
        draft.commit()


def test_a_removed_folder_of_a_run_is_restored_with_all_files_that_its_processes_still_write(
    run: Path, upkeep: VolumeRepair
) -> None:
    folder = run / "m0" / "arena"
    arena, store = Arena(folder), PrivateStore(folder / "private-00000.bin", 0)
    snapshot(arena, 1)
    snapshot(arena, 2)
    store.put(1, 2, b"two")
    (run / "m0" / "obeyed.json").write_text("{}")
    assert upkeep.repair(0.0) == []
    shutil.rmtree(run)
    assert arena.records() == ()
    [said] = upkeep.repair(1.0)
    assert said.startswith(f"{run}: ")
    assert "enable-linger" in said
    assert not is_abandoned(run), "another run could take it for abandoned"
    assert (run / "m0" / "obeyed.json").read_text() == "{}"
    newcomer = Arena(folder)
    assert [record.step for record in newcomer.records()] == [2, 1]
    assert all(newcomer.verify(record) for record in newcomer.records())
    mapping = arena.whole(LAYOUT.total_bytes)
    snapshot(arena, 3)
    assert arena.whole(LAYOUT.total_bytes) == mapping, (
        "the file must be rewritten in place, without a new mapping"
    )
    store.put(1, 3, b"three")
    assert [record.step for record in newcomer.records()] == [3, 2]
    blob = PrivateReader(folder / "private-00000.bin").get(3)
    assert blob is not None
    assert blob.data == b"three"
    assert upkeep.repair(2.0) == []


def test_the_folder_is_restored_each_time_and_reported_once_in_a_while(
    run: Path, upkeep: VolumeRepair
) -> None:
    page = run / "m0" / "page-0.bin"
    page.write_bytes(b"here")
    upkeep.repair(0.0)
    said = []
    for round in range(3):
        page.unlink()
        said += upkeep.repair(1.0 + round)
        assert page.read_bytes() == b"here"
    assert len(said) == 1
    page.unlink()
    assert upkeep.repair(1.0 + LOG_GAP_S)


def test_files_that_the_runs_own_processes_replaced_or_created_are_not_touched(
    run: Path, upkeep: VolumeRepair
) -> None:
    told, restored = run / "m0" / "told.json", run / "m0" / RESTORED
    restored.mkdir()
    told.write_text("1")
    first, second = (restored_name(0, 1, 1, checksum) for checksum in (1, 2))
    for name in (first, second):
        (restored / name).write_text(name)
    upkeep.repair(0.0)
    spare = run / "m0" / ".spare"
    spare.write_text("2")
    spare.replace(told)
    (restored / first).unlink()
    assert upkeep.repair(1.0) == []
    assert told.read_text() == "2"
    assert [path.name for path in restored.iterdir()] == [second]
    shutil.rmtree(run)
    told_before_it_is_back = run / "m0" / "told.json"
    upkeep.repair(2.0)
    assert told_before_it_is_back.read_text() == "2"
    assert [path.read_text() for path in restored.iterdir()] == [second]
    assert not spare.exists()


def test_a_members_folder_whose_permissions_were_removed_gets_them_back(
    run: Path, upkeep: VolumeRepair
) -> None:
    page = run / "m0" / "page-0.bin"
    page.write_bytes(b"here")
    page.chmod(0)
    (run / "m0").chmod(0)
    run.chmod(0)
    upkeep.repair(0.0)
    for path, mode in ((run, 0o700), (run / "m0", 0o700), (page, 0o600)):
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_files_that_cannot_be_restored_are_reported_once_and_retried(run: Path, upkeep: VolumeRepair) -> None:
    page = run / "m0" / "page-0.bin"
    page.write_bytes(b"here")
    upkeep.repair(0.0)
    shutil.rmtree(run)
    run.write_text("in the way")
    said = [line for look in range(FAILURES + 2) for line in upkeep.repair(float(look))]
    assert len(said) == 1
    assert "something else is in its place" in said[0]
    assert "the run cannot recover from faults" in said[0]
    assert upkeep.error == said[0]
    run.unlink()
    assert upkeep.repair(100.0)
    assert upkeep.error == ""
    assert page.read_bytes() == b"here"


def test_a_file_in_place_of_a_folder_does_not_prevent_restoring_the_rest(
    run: Path, upkeep: VolumeRepair
) -> None:
    page, restored = run / "m0" / "page-0.bin", run / "m0" / RESTORED
    page.write_bytes(b"here")
    restored.mkdir()
    (restored / restored_name(0, 1, 1, 1)).write_text("one")
    upkeep.repair(0.0)
    shutil.rmtree(restored)
    restored.write_text("in the way")
    page.unlink()
    upkeep.repair(1.0)
    assert page.read_bytes() == b"here"
    assert restored.read_text() == "in the way"
    restored.unlink()
    assert upkeep.repair(2.0) == []
    assert not restored.exists(), "the file belonged to no one"


def test_the_memory_of_a_lost_member_is_released(run: Path, upkeep: VolumeRepair) -> None:
    with (run / "m0" / "page-0.bin").open("w+b") as file:
        file.write(bytes(mmap.PAGESIZE))
    upkeep.repair(0.0)
    shutil.rmtree(run / "m0")
    upkeep.repair(1.0)
    held = _open_without_a_name(run)
    assert held
    upkeep.free("m0").join()
    assert _open_without_a_name(run) == held - 1
    assert not (run / "m0").exists()
    assert upkeep.repair(2.0) == []


def test_the_cleanup_of_old_folders_finds_the_folder_locked(run: Path, upkeep: VolumeRepair) -> None:
    shutil.rmtree(run)
    upkeep.repair(0.0)
    descriptor = os.open(run, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
    assert (run / OWNER).exists()


def _open_without_a_name(run: Path) -> int:
    """Return the number of open files of the run in this process that have no name any more."""
    links = []
    for each in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(each.readlink()))
        except FileNotFoundError:
            continue
    return sum(link.startswith(f"{run}/m0") and link.endswith("(deleted)") for link in links)


def test_the_keeper_reserves_descriptors_for_other_uses(
    run: Path, upkeep: VolumeRepair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        (run / "m0" / f"page-{number}.bin").write_bytes(b"here")
    gc.collect()  # otherwise, files that earlier tests left open could be closed in between
    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr("supervisor.local.volume.volume_repair._most_descriptors", lambda: 0)
    upkeep.repair(0.0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    (run / "m0" / "page-0.bin").unlink()
    assert upkeep.repair(1.0) == [], "files that are not held open cannot be restored"


def a_tick_later() -> None:
    """Wait until the kernel gives changes another time."""
    coarse = 5  # CLOCK_REALTIME_COARSE: include/uapi/linux/time.h
    began = time.clock_gettime(coarse)
    while time.clock_gettime(coarse) == began:
        pass


@pytest.mark.parametrize("what", ["page-0.bin", "arena/records", "arena", "."])
def test_only_a_change_makes_a_search_necessary(
    run: Path, upkeep: VolumeRepair, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("supervisor.local.volume.volume_repair.SETTLED_S", -1.0)
    for name in ("page-0.bin", "arena/records"):
        (run / "m0" / name).write_bytes(b"here")
    assert not upkeep.is_unchanged()
    upkeep.repair(0.0)
    assert upkeep.is_unchanged()
    a_tick_later()
    gone = run / "m0" / what
    if gone.is_dir():
        shutil.rmtree(gone)
    else:
        gone.unlink()
    assert not upkeep.is_unchanged()
    upkeep.repair(0.0)
    assert gone.exists()


def test_a_folder_that_has_just_changed_is_searched_again(run: Path, upkeep: VolumeRepair) -> None:
    """Two changes within a tick of the kernel's clock have the same time."""
    (run / "m0" / "page-0.bin").write_bytes(b"here")
    upkeep.repair(0.0)
    assert not upkeep.is_unchanged()


def test_changed_permissions_are_reported_immediately(run: Path, upkeep: VolumeRepair) -> None:
    page = run / "m0" / "page-0.bin"
    page.write_bytes(b"here")
    watcher = RemovalWatcher()
    watcher.open()
    watcher.watch([run / "m0"])
    assert not select.select([watcher.descriptor], [], [], 0)[0]
    page.chmod(0)
    assert select.select([watcher.descriptor], [], [], 10.0)[0]
    watcher.close()
