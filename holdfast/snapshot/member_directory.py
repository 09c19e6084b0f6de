"""One member's folder in the memory volume: the names of all that lies in it, and who removes it.

```text
RUN/                         the run's folder: one for each local run, one for each pod
  owner                      locked by the keeper (`holdfast run`) while it lives
  import/holdfast            a link to this package, and nothing else: what scripts find on their path
  device-NAME                the process that has that GPU (`holdfast.process.gpu_assignment`)
  MEMBER/
    launcher.sock            the launcher listens here for its sidecar
    page-LOCAL.bin           the progress page of a rank
    below-LOCAL              exists when `join` refused a process below that rank
    obeyed.json              the newest order that the sidecar has taken
    told.json                what orders have said of the run's history
    drilled                  the newest drill that the sidecar has carried out
    import/holdfast          as above
    arena/
      records                which slot holds which snapshot
      slot-N.safetensors     a snapshot
      private-RANK.bin       the private states of a rank of this member
      kept-RANK.bin          those of a rank of the member before it in the ring
    restore/                 what the ranks were started from
      RANK-GENERATION-STEP-CHECKSUM.bin
```

The memory of a local run whose keeper was killed has no owner any more, so the members remove it. Every part
of a member calls `leave` on its way out. When its keeper has ended, `leave` clears the member's folder; the
last member to leave finds no other member's folder and removes the run's folder too.
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

ARENA = "arena"
RECORDS = "records"  # in `ARENA`

RESTORED = "restore"

FOLDERS = (ARENA, IMPORT, RESTORED)  # of a member
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
"""Paths below a member's folder that are put back if they are removed while the member lives.

Not `LAUNCHER_SOCKET`, which is only of use while a launcher listens on it, and no `below_name`.
"""
RUN_FILE = re.compile(rf"{IMPORT}(/{_PACKAGE})?|{TURN_PREFIX}[^/]+")
"""The same below the run's folder, without the members' and `OWNER`."""

KEEPER_EXIT_S = 5.0  # a thread of the keeper's that the kernel holds longer than this keeps the keeper
POLL_S = 0.002


def page_name(local_rank: int) -> str:
    """Return the name of a rank's progress page."""
    return f"page-{local_rank}.bin"


def below_name(local_rank: int) -> str:
    """Return the name of the file that says that a process below a rank was refused."""
    return f"below-{local_rank}"


def slot_name(slot: int) -> str:
    """Return the name of a slot's file in `ARENA`."""
    return f"{_SLOT_PREFIX}{slot}.safetensors"


def is_slot(name: str) -> bool:
    """Return True for a file of `ARENA` that belongs to a slot."""
    return name.startswith(_SLOT_PREFIX)


def private_name(rank: int) -> str:
    """Return the name in `ARENA` of the private states of a rank of this member."""
    return f"private-{rank:05d}.bin"


def kept_name(rank: int) -> str:
    """Return the name in `ARENA` of the private states that this member keeps for another one's rank."""
    return f"kept-{rank:05d}.bin"


def restored_stem(rank: int, generation: int, step: int) -> str:
    """Return what the name in `RESTORED` begins with of the private state that a rank was started from."""
    return f"{rank:05d}-{generation:08d}-{step:012d}"


def restored_name(rank: int, generation: int, step: int, checksum: int) -> str:
    """Return that name. `checksum` is the CRC-32 of the content."""
    return f"{restored_stem(rank, generation, step)}-{checksum:08x}.bin"


def leave_member(member: Path, keeper: int) -> None:
    """Call `remove_if_abandoned` if `keeper`, the parent of this process at its start, has ended.

    The kernel tells a child of its parent's death when the thread that made the child has ended. The others
    may end later: until then the keeper is still our parent, and its lock is still held.
    """
    deadline = time.monotonic() + KEEPER_EXIT_S
    while os.getppid() == keeper:
        if linux.state_of(keeper)[0] not in "ZX" or time.monotonic() > deadline:
            return
        time.sleep(POLL_S)
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
