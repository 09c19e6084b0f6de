"""Remove the memory of a local run whose keeper was killed: there is nobody else to do it.

Every part of a member calls `clear` on its way out when it finds its keeper gone; the last one to leave
finds nothing but its own and takes the run's folder along.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

OWNER = "owner"  # locked by the keeper while it lives
IMPORT = "import"  # beside the members' folders
RESTORED = "restore"  # in a member's folder: what its ranks were started from, removed when it is not needed


def clear(member: Path) -> None:
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


def is_abandoned(run: Path) -> bool:
    """True for the folder of a run whose keeper is gone; False for anything else."""
    try:
        descriptor = os.open(run / OWNER, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # not a run's folder, or not ours to judge
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
