"""Name the files in a member's folder in the memory volume, and remove the folder after its run has ended.

```text
RUN/                         the run's folder: one for each local run, one for each pod
  owner                      locked by the keeper (`holdfast run`) for as long as it lives
  import/holdfast            a link to this package; scripts have the folder `import` on their path
  device-NAME                the process that uses this GPU (`holdfast.process.gpu_assignment`)
  MEMBER/
    launcher.sock            the socket where the launcher listens for its sidecar
    page-LOCAL.bin           the progress page of a rank
    below-LOCAL              exists if `join` has refused a process that the rank started
    obeyed.json              the newest order that the sidecar has accepted
    told.json                the run's history, as received with the orders
    alive                    touched by a pod's sidecar while its event loop runs
    drilled                  the newest drill that the sidecar has carried out
    import/holdfast          the same link as above
    arena/
      records                which slot holds which snapshot
      slot-N.safetensors     a snapshot
      private-RANK.bin       the private states of a rank of this member
      kept-RANK.bin          the private states of a rank of the previous member in the ring
    restore/                 the private states that the ranks started from
      RANK-GENERATION-STEP-CHECKSUM.bin
```

If the keeper of a local run is killed, the members remove the run's folder. Each process of a member calls
`leave_member` when it exits. If the keeper has exited, this call removes the member's folder. The last
member, which finds no other member's folder, removes the run's folder as well.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from pathlib import Path

from holdfast.process import linux
from holdfast.process.gpu_assignment import TURN_PREFIX

OWNER = "owner"
IMPORT = "import"

LAUNCHER_SOCKET = "launcher.sock"
OBEYED = "obeyed.json"
TOLD = "told.json"
DRILLED = "drilled"
ALIVE = "alive"

ARENA = "arena"
RECORDS = "records"  # in `ARENA`

RESTORED = "restore"

FOLDERS = (ARENA, IMPORT, RESTORED)  # below a member's folder
_PACKAGE = "holdfast"  # the link in `IMPORT`, which `holdfast.parts.import_root` makes
_SLOT_PREFIX = "slot-"

PRIVATE_STORE = re.compile(r"(?:private|kept)-(\d{5,})\.bin")
"""Matches the names of the private and kept states in `ARENA`. The group is the rank."""
RESTORED_STATE = re.compile(r"(\d{5,})-(\d{8,})-(\d{12,})-[0-9a-f]{8}\.bin")
"""Matches the names of the files in `RESTORED`. The groups are rank, generation and step."""
MEMBER_FILE = re.compile(
    rf"{ARENA}(/({RECORDS}|{_SLOT_PREFIX}\d+\.safetensors|{PRIVATE_STORE.pattern}))?|{IMPORT}(/{_PACKAGE})?"
    rf"|{RESTORED}(/{RESTORED_STATE.pattern})?|page-\d+\.bin"
    rf"|{re.escape(OBEYED)}|{re.escape(TOLD)}|{DRILLED}"
)
"""Matches the paths in a member's folder that the keeper restores if they are removed while the member lives.

It does not match `LAUNCHER_SOCKET`, which is useful only while a launcher listens on it, or the files named
by `below_name`.
"""
RUN_FILE = re.compile(rf"{IMPORT}(/{_PACKAGE})?|{TURN_PREFIX}[^/]+")
"""Matches the other paths in the run's folder that are restored: all except `OWNER` and members' folders."""

KEEPER_EXIT_S = 5.0  # how long to wait for the last thread of a dead keeper
POLL_S = 0.002


def page_name(local_rank: int) -> str:
    """Return the name of a rank's progress page."""
    return f"page-{local_rank}.bin"


def below_name(local_rank: int) -> str:
    """Return the name of the file that exists if `join` has refused a process that this rank started."""
    return f"below-{local_rank}"


def slot_name(slot: int) -> str:
    """Return the name of a slot's file in `ARENA`."""
    return f"{_SLOT_PREFIX}{slot}.safetensors"


def is_slot(name: str) -> bool:
    """Return True if a file of `ARENA` belongs to a slot."""
    return name.startswith(_SLOT_PREFIX)


def private_name(rank: int) -> str:
    """Return the name, in `ARENA`, of the file with the private states of one of this member's ranks."""
    return f"private-{rank:05d}.bin"


def kept_name(rank: int) -> str:
    """Return the name, in `ARENA`, of the file with the private states of another member's rank."""
    return f"kept-{rank:05d}.bin"


def restored_stem(rank: int, generation: int, step: int) -> str:
    """Return the beginning of the name that `restored_name` returns: everything before the checksum."""
    return f"{rank:05d}-{generation:08d}-{step:012d}"


def restored_name(rank: int, generation: int, step: int, checksum: int) -> str:
    """Return the name, in `RESTORED`, of the file with the private state that a rank started from.

    `checksum` is the CRC-32 of the content.
    """
    return f"{restored_stem(rank, generation, step)}-{checksum:08x}.bin"


def leave_member(member: Path, keeper: int) -> None:
    """Remove the folders of an abandoned run if `keeper`, the original parent of this process, has exited.

    The kernel signals a parent's death to a child as soon as the thread that started the child exits. But the
    keeper remains the parent and holds its lock until its other threads have ended. So this waits up to
    `KEEPER_EXIT_S` for them, and then calls `remove_if_abandoned`.
    """
    deadline = time.monotonic() + KEEPER_EXIT_S
    while os.getppid() == keeper:
        if linux.state_of(keeper)[0] not in "ZX" or time.monotonic() > deadline:
            return
        time.sleep(POLL_S)
    remove_if_abandoned(member)


def remove_if_abandoned(member: Path) -> None:
    """Remove a member's folder if its run is abandoned, and the run's folder if no other member is left.

    This never raises an exception. A retry is safe.
    """
    run = member.parent
    if not is_abandoned(run):
        return
    shutil.rmtree(member, ignore_errors=True)
    try:
        others = [each for each in run.iterdir() if each.name not in (OWNER, IMPORT)]
    except OSError:  # another member has just removed the run's folder
        return
    if not others:
        shutil.rmtree(run, ignore_errors=True)


def is_abandoned(run: Path, *, without_owner: bool = False) -> bool:
    """Return whether the run's keeper has exited, and no process holds the lock on `OWNER`.

    `without_owner` is the result for a folder that does not contain `OWNER`. Members use False, because a
    folder without `OWNER` may not belong to a run. Code that finds folders by the name pattern of runs uses
    True.
    """
    try:
        descriptor = os.open(run / OWNER, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return without_owner
    except OSError:  # another user owns the folder
        return False
    try:
        # A shared lock, because several processes may check at the same time.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
