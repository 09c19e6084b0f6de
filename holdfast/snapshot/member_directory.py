"""Name the files of a member's folder in the memory volume, and remove the folder when its run has ended.

```text
RUN/                         the run's folder: one for each local run, one for each pod
  owner                      locked by the keeper (`holdfast run`) while it lives
  import/holdfast            a link to this package, the only entry of the folder on the scripts' path
  device-NAME                the process that uses that GPU (`holdfast.process.gpu_assignment`)
  MEMBER/
    launcher.sock            the launcher listens here for its sidecar
    page-LOCAL.bin           the progress page of a rank
    below-LOCAL              exists if `join` refused a process that the rank has started
    obeyed.json              the newest order that the sidecar has accepted
    told.json                the run's history, as received with the orders
    alive                    touched by the sidecar of a pod while its event loop turns
    drilled                  the newest drill that the sidecar has carried out
    import/holdfast          as above
    arena/
      records                which slot has which snapshot
      slot-N.safetensors     a snapshot
      private-RANK.bin       the private states of a rank of this member
      kept-RANK.bin          the private states of a rank of the previous member in the ring
    restore/                 the private states that the ranks were started from
      RANK-GENERATION-STEP-CHECKSUM.bin
```

If the keeper of a local run was killed, the members remove the run's folder: each process of a member calls
`leave_member` when it ends, which removes the member's folder if the keeper has ended. The last member finds
no other member's folder and removes the run's folder too.
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
"""Names of private and kept states, in `ARENA`; the group is the rank."""
RESTORED_STATE = re.compile(r"(\d{5,})-(\d{8,})-(\d{12,})-[0-9a-f]{8}\.bin")
"""Names of the files in `RESTORED`; the groups are rank, generation and step."""
MEMBER_FILE = re.compile(
    rf"{ARENA}(/({RECORDS}|{_SLOT_PREFIX}\d+\.safetensors|{PRIVATE_STORE.pattern}))?|{IMPORT}(/{_PACKAGE})?"
    rf"|{RESTORED}(/{RESTORED_STATE.pattern})?|page-\d+\.bin"
    rf"|{re.escape(OBEYED)}|{re.escape(TOLD)}|{DRILLED}"
)
"""Paths below a member's folder that are restored if they are removed while the member lives.

`LAUNCHER_SOCKET` is excluded, because it is useful only while a launcher listens on it. So are the files of
`below_name`.
"""
RUN_FILE = re.compile(rf"{IMPORT}(/{_PACKAGE})?|{TURN_PREFIX}[^/]+")
"""Paths below the run's folder that are restored as well, except the members' folders and `OWNER`."""

KEEPER_EXIT_S = 5.0  # the limit of the wait for a dead keeper's last thread
POLL_S = 0.002


def page_name(local_rank: int) -> str:
    """Return the name of a rank's progress page."""
    return f"page-{local_rank}.bin"


def below_name(local_rank: int) -> str:
    """Return the name of the file that exists if `join` refused a process that a rank has started."""
    return f"below-{local_rank}"


def slot_name(slot: int) -> str:
    """Return the name of a slot's file in `ARENA`."""
    return f"{_SLOT_PREFIX}{slot}.safetensors"


def is_slot(name: str) -> bool:
    """Return True if a file of `ARENA` belongs to a slot."""
    return name.startswith(_SLOT_PREFIX)


def private_name(rank: int) -> str:
    """Return the name in `ARENA` of the private states of a rank of this member."""
    return f"private-{rank:05d}.bin"


def kept_name(rank: int) -> str:
    """Return the name in `ARENA` of the private states that this member keeps for another member's rank."""
    return f"kept-{rank:05d}.bin"


def restored_stem(rank: int, generation: int, step: int) -> str:
    """Return how the name, in `RESTORED`, of the private state from which a rank was started begins."""
    return f"{rank:05d}-{generation:08d}-{step:012d}"


def restored_name(rank: int, generation: int, step: int, checksum: int) -> str:
    """Return the name, in `RESTORED`, of the private state from which a rank was started.

    `checksum` is the CRC-32 of the content.
    """
    return f"{restored_stem(rank, generation, step)}-{checksum:08x}.bin"


def leave_member(member: Path, keeper: int) -> None:
    """Call `remove_if_abandoned` if `keeper`, the parent of this process at its start, has ended.

    The kernel signals the parent's death to a child as soon as the thread that started the child ends. Until
    its other threads have ended too, the keeper remains the parent and holds its lock. So this waits up to
    `KEEPER_EXIT_S` for them.
    """
    deadline = time.monotonic() + KEEPER_EXIT_S
    while os.getppid() == keeper:
        if linux.state_of(keeper)[0] not in "ZX" or time.monotonic() > deadline:
            return
        time.sleep(POLL_S)
    remove_if_abandoned(member)


def remove_if_abandoned(member: Path) -> None:
    """If the run is abandoned, remove a member's folder and, after the last of these, the run's folder.

    Never raises. A retry is safe.
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
    """Return whether the run's keeper has ended, so that no process holds its lock.

    `without_owner` is the result for a folder without the file `OWNER`. A member does not remove such a
    folder, because it may not belong to a run; code that finds folders by the name pattern of runs does.
    """
    try:
        descriptor = os.open(run / OWNER, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return without_owner
    except OSError:  # another user owns the folder
        return False
    try:
        # Shared, because several processes may check at once.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
