"""Who removes the memory of a run whose keeper was killed."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.snapshot import member_directory

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
from holdfast.snapshot import member_directory as leftovers; from holdfast.process import linux as osproc

async def main():
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    osproc.end_with_parent(int(sys.argv[2]), signal.SIGTERM)
    print("there", flush=True)
    await told.wait()
    osproc.outlive_parent()

asyncio.run(main())
leftovers.leave(Path(sys.argv[1], "m0"), int(sys.argv[2]))
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for member in ("m0", "m1"):
        (tmp_path / "run" / member / "arena").mkdir(parents=True)
    (tmp_path / "run" / member_directory.OWNER).touch()
    return tmp_path / "run"


def test_the_last_member_takes_the_run_s_folder_along(run: Path) -> None:
    member_directory.remove_if_abandoned(run / "m0")
    assert sorted(each.name for each in run.iterdir()) == ["m1", "owner"]
    member_directory.remove_if_abandoned(run / "m1")
    assert not run.exists()


def test_those_who_look_at_the_same_moment_do_not_take_one_another_for_the_keeper(run: Path) -> None:
    with (run / member_directory.OWNER).open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert member_directory.is_abandoned(run)


def test_nothing_is_removed_while_the_keeper_lives(run: Path) -> None:
    with (run / member_directory.OWNER).open() as keeper:
        fcntl.flock(keeper, fcntl.LOCK_EX)
        member_directory.leave(run / "m0", os.getppid())
        member_directory.remove_if_abandoned(run / "m0")
    member_directory.leave(run / "m0", os.getppid())  # as told by a keeper that removes the memory itself
    assert (run / "m0" / "arena").is_dir()


def test_a_keeper_whose_first_thread_ends_before_its_others_is_waited_for(tmp_path: Path) -> None:
    """The kernel tells of the first thread's end, and again of the last one's; the lock goes with that."""
    run = tmp_path / "run"
    (run / "m0").mkdir(parents=True)
    command = [sys.executable, "-c", KEEPER, str(run), CHILD]
    # Returns when the child, which has the pipe too, has ended.
    subprocess.run(command, check=False, capture_output=True, timeout=60)
    assert not run.exists()
