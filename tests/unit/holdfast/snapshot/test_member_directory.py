"""A member's folder has fixed names, and its members remove the memory of a run whose keeper was killed."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.snapshot import member_directory
from holdfast.snapshot.member_directory import (
    ARENA,
    DRILLED,
    IMPORT,
    LAUNCHER_SOCKET,
    OBEYED,
    OWNER,
    RECORDS,
    RESTORED,
    TOLD,
)
from tests.unit.literals import string_literals

# A keeper with a thread: it locks the folder, has a child, and its first thread ends long before the other.
KEEPER = """
import ctypes, fcntl, os, subprocess, sys, threading, time
folder = sys.argv[1]
locked = os.open(f"{folder}/owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
fcntl.flock(locked, fcntl.LOCK_EX)
command = [sys.executable, "-c", sys.argv[2], folder, str(os.getpid())]
child = subprocess.Popen(command, stdout=subprocess.PIPE)
child.stdout.readline()
threading.Thread(target=lambda: (time.sleep(1.0), os._exit(0))).start()
ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit: of this thread alone
"""
CHILD = """
import asyncio, os, signal, sys
from pathlib import Path
from holdfast.process import linux
from holdfast.snapshot.member_directory import leave_member

async def main():
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    linux.end_with_parent(int(sys.argv[2]), signal.SIGTERM)
    print("there", flush=True)
    await told.wait()
    linux.outlive_parent()

asyncio.run(main())
leave_member(Path(sys.argv[1], "m0"), int(sys.argv[2]))
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for member in ("m0", "m1"):
        (tmp_path / "run" / member / "arena").mkdir(parents=True)
    (tmp_path / "run" / member_directory.OWNER).touch()
    return tmp_path / "run"


def test_the_last_member_to_end_removes_the_runs_folder(run: Path) -> None:
    member_directory.remove_if_abandoned(run / "m0")
    assert sorted(each.name for each in run.iterdir()) == ["m1", "owner"]
    member_directory.remove_if_abandoned(run / "m1")
    assert not run.exists()


def test_simultaneous_checks_do_not_mistake_one_another_for_the_keeper(run: Path) -> None:
    with (run / member_directory.OWNER).open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert member_directory.is_abandoned(run)


def test_nothing_is_removed_while_the_keeper_lives(run: Path) -> None:
    with (run / member_directory.OWNER).open() as keeper:
        fcntl.flock(keeper, fcntl.LOCK_EX)
        member_directory.leave_member(run / "m0", os.getppid())
        member_directory.remove_if_abandoned(run / "m0")
    # by order of a keeper that removes the memory itself
    member_directory.leave_member(run / "m0", os.getppid())
    assert (run / "m0" / "arena").is_dir()


def test_a_keeper_whose_first_thread_ends_before_its_others_is_waited_for(tmp_path: Path) -> None:
    """The kernel reports the end of the first thread, and later of the last one, which releases the lock."""
    run = tmp_path / "run"
    (run / "m0").mkdir(parents=True)
    command = [sys.executable, "-c", KEEPER, str(run), CHILD]
    # Returns once the child, which also holds the pipe, has ended.
    subprocess.run(command, check=False, capture_output=True, timeout=60)
    assert not run.exists()


def test_the_names_of_a_members_files_are_pinned() -> None:
    """Members of one run may be of different versions, and readers find files by these names."""
    assert [member_directory.page_name(3), member_directory.below_name(3)] == ["page-3.bin", "below-3"]
    assert [member_directory.private_name(12), member_directory.kept_name(12)] == [
        "private-00012.bin",
        "kept-00012.bin",
    ]
    assert member_directory.slot_name(1) == "slot-1.safetensors"
    assert member_directory.restored_name(3, 2, 70, 0xAB) == "00003-00000002-000000000070-000000ab.bin"
    assert {OWNER, IMPORT, ARENA, RESTORED, RECORDS} == {"owner", "import", "arena", "restore", "records"}
    assert {LAUNCHER_SOCKET, OBEYED, TOLD, DRILLED} == {
        "launcher.sock",
        "obeyed.json",
        "told.json",
        "drilled",
    }


@pytest.mark.parametrize("rank", [0, 99_999, 100_000])
def test_generated_names_are_recognized(rank: int) -> None:
    stores = (member_directory.private_name(rank), member_directory.kept_name(rank))
    for name in stores:
        match = member_directory.PRIVATE_STORE.fullmatch(name)
        assert match is not None
        assert int(match[1]) == rank
    restored = member_directory.restored_name(rank, 2, 70, 0xAB)
    match = member_directory.RESTORED_STATE.fullmatch(restored)
    assert match is not None
    assert [int(group) for group in match.groups()] == [rank, 2, 70]
    assert member_directory.is_slot(member_directory.slot_name(rank))
    held = [f"{ARENA}/{name}" for name in (*stores, RECORDS, member_directory.slot_name(1))]
    for path in (*held, f"{RESTORED}/{restored}", f"{IMPORT}/holdfast", member_directory.page_name(rank)):
        assert member_directory.MEMBER_FILE.fullmatch(path), path


def test_no_other_module_spells_the_name_of_a_members_file() -> None:
    """Words with other meanings are searched for only where a path is joined."""
    distinct = re.compile(
        r"(?<![\w-])(page|private|kept|slot|below)-(%|\\d|\d|$)|launcher\.sock|obeyed\.json|told\.json|\b(arena|restore)/"
    )
    words = {OWNER, IMPORT, ARENA, RESTORED, RECORDS, DRILLED}
    spelled = string_literals(
        *("holdfast", "supervisor", "sidecar", "nodeagent", "trainer", "bench"),
        but="holdfast/snapshot/member_directory.py",
    )
    assert [
        each for each in spelled if distinct.search(each.text) or (each.joined and each.text in words)
    ] == []
