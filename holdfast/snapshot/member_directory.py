"""Remove the memory of a local run whose keeper was killed: there is nobody else to do it.

Every part of a member calls `leave` on its way out. When its keeper is gone it clears the member's folder;
the last one to leave finds nothing but its own and takes the run's folder along.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from pathlib import Path

from holdfast.process import linux

OWNER = "owner"  # locked by the keeper while it lives
IMPORT = "import"  # beside the members' folders
RESTORED = "restore"  # in a member's folder: what its ranks were started from, removed when it is not needed

DYING_S = 5.0  # a thread of the keeper's that the kernel holds longer than this keeps the keeper
LOOK_S = 0.002


def leave(member: Path, keeper: int) -> None:
    """Remove what `clear` does if `keeper`, our parent as we started, is gone; do nothing while it lives.

    The kernel tells a child of its parent's death when the thread that made the child has ended. The others
    may end later: until then the keeper is still our parent, and its lock is still held.
    """
    deadline = time.monotonic() + DYING_S
    while os.getppid() == keeper:
        if linux.state_of(keeper)[0] not in "ZX" or time.monotonic() > deadline:
            return
        time.sleep(LOOK_S)
    remove_if_abandoned(member)


def remove_if_abandoned(member: Path) -> None:
    """Remove a member's folder, and the run's when it was the last. Never raises; safe to repeat."""
    run = member.parent
    if not is_abandoned(run):
        return
    shutil.rmtree(member, ignore_errors=True)
    try:
        others = [each for each in run.iterdir() if each.name not in (OWNER, IMPORT)]
    except OSError:  # somebody was faster
        return
    if not others:
        shutil.rmtree(run, ignore_errors=True)


def is_abandoned(run: Path, *, without_owner: bool = False) -> bool:
    """Return True for the folder of a run whose `holdfast run` has ended: nobody holds the owner's lock.

    `without_owner` is the verdict on a folder that has no owner's file. A member does not remove such a
    folder, which may belong to something else; a search that goes by a run folder's name does.
    """
    try:
        descriptor = os.open(run / OWNER, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return without_owner
    except OSError:  # another user's
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # others may look at the same moment
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
