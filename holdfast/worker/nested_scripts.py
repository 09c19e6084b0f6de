"""Refuse `join` in a process that a rank's script has started, for example as another copy of the script.

Otherwise each of these processes (one per rank) would train alone, and yet the run would appear to succeed.
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
    "it was started by torchrun, by accelerate launch, or by a script that starts other processes or itself"
    " again (os.exec, subprocess). Pass the script itself: holdfast run --nproc-per-node N -- python train.py"
    ". If it starts itself again to set variables, set them for holdfast: OMP_NUM_THREADS=4 holdfast run ..."
)

REFUSED_BELOW = f"a process below the rank was refused by join(): {LAUNCHED_INDIRECTLY}\n"


def rank_variables(directory: Path, local_rank: int) -> dict[str, str]:
    """Return the variables that a rank has but its launcher does not. `directory` is the member's folder."""
    return {environment.BELOW: str(_file(directory, local_rank))}


def refuse_below_rank(given: Mapping[str, str]) -> None:
    """Record a `join` in a process that a rank has started, and raise BadInput; otherwise do nothing.

    A variable that is left over in a shell refers to the folder of a run that has ended, and is ignored.
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
    """Forget refusals below earlier processes of `local_rank`. Call this before a new process is created."""
    with suppress(OSError):
        _file(directory, local_rank).unlink(missing_ok=True)


def was_refused(directory: Path, local_rank: int) -> bool:
    """Return True if a process that `local_rank` started, directly or indirectly, was refused."""
    return _file(directory, local_rank).exists()


def _file(directory: Path, local_rank: int) -> Path:
    return directory / member_directory.below_name(local_rank)
