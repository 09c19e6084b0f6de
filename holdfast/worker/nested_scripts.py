"""Refuse `join` in a process that a rank's script has started, such as the script itself once more.

Otherwise it would train alone: as many copies as there are ranks, and all of them would end with success.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from holdfast.errors import BadInput
from holdfast.protocol import environment
from holdfast.snapshot import member_directory

LAUNCHED_INDIRECTLY = (
    "torchrun, accelerate launch, or a script that starts other processes or itself again (os.exec,"
    " subprocess) stands between; give the script itself: holdfast run --nproc-per-node N -- python train.py."
    " Variables that it starts itself again for are set before that: OMP_NUM_THREADS=4 holdfast run ..."
)

REFUSED_BELOW = f"a process below the rank was refused by join(): {LAUNCHED_INDIRECTLY}\n"


def rank_variables(directory: Path, local_rank: int) -> dict[str, str]:
    """Return the variables that a rank has in addition to the launcher's, in the member's `directory`."""
    return {environment.BELOW: str(_file(directory, local_rank))}


def refuse_below_rank(given: Mapping[str, str]) -> None:
    """Raise BadInput in a process that a rank has started, and record that; else do nothing.

    A variable that is left over in a shell names the folder of a run that has ended: it is ignored.
    """
    below = given.get(environment.BELOW, "")
    if not below or not Path(below).parent.is_dir():
        return
    with suppress(OSError):
        Path(below).touch()
    raise BadInput(refusal())


def refusal() -> str:
    """Return the message for a process that Holdfast did not start."""
    return f"join() in process {os.getpid()}, which Holdfast did not start: {LAUNCHED_INDIRECTLY}"


def clear(directory: Path, local_rank: int) -> None:
    """Forget the refusals below earlier processes of `local_rank`: a new process is being made for it."""
    with suppress(OSError):
        _file(directory, local_rank).unlink(missing_ok=True)


def was_refused(directory: Path, local_rank: int) -> bool:
    """True when a process below that of `local_rank` has been refused."""
    return _file(directory, local_rank).exists()


def _file(directory: Path, local_rank: int) -> Path:
    return directory / member_directory.below_name(local_rank)
