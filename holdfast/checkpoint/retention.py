"""Delete the checkpoints that are no longer needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from holdfast.checkpoint.catalog import ASIDE, StoredCheckpoint, Unreadable
from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.checkpoint.manifest import InvalidCheckpoint, NewerFormat
from holdfast.checkpoint.storage import CheckpointStorage
from holdfast.fileio.durable import DEBRIS_AGE_S
from holdfast.protocol import defaults, lineage
from holdfast.protocol.lineage import Lineage

_Found: TypeAlias = tuple[Path, StoredCheckpoint | InvalidCheckpoint]


@dataclass(frozen=True, slots=True)
class Retention:
    """Specifies which checkpoints to keep: the newest `keep` that are not void, and one up to `proven`.

    Attributes:
        keep: How many of the newest checkpoints to keep, at least 1.
        lineage: The group's lineage. The lineages stored in the checkpoints are added to it.
        proven: The last step where the replicas are known to have matched. The newest checkpoint at or below
            this step is kept too. 0 if no such step is known yet, -1 if the replicas are not compared.
        epoch: Fencing token of the supervisor that ordered the deletion. If a supervisor of a later epoch
            ordered any of the checkpoints, nothing is deleted.
    """

    keep: int = defaults.KEEP_CHECKPOINTS
    lineage: tuple[Lineage, ...] = ()
    proven: int = -1
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Leftover:
    """Data in object storage that belongs to no checkpoint. Its writer may still be at work, or dead.

    `epoch` is the epoch that the writer obeyed. `written_s` is when storage accepted the last of the data, by
    its own clock.
    """

    epoch: int
    written_s: float


def is_abandoned(left: Leftover, epoch: int, newest_epoch: int, newest_s: float) -> bool:
    """Return whether a member that obeys `epoch` may delete `left`.

    `newest_epoch` is the highest epoch of all checkpoints, and `newest_s` is when the newest checkpoint was
    published. Only data that was written before that time may be deleted, and not by a member that obeys a
    lower epoch than the writer or a checkpoint. A writer that obeys an epoch below `newest_epoch` may no
    longer publish. Any other writer counts as dead if it has written nothing for an hour, because a live
    writer writes continuously.
    """
    if newest_epoch > epoch or left.epoch > epoch or left.written_s >= newest_s:
        return False
    return left.epoch < newest_epoch or newest_s - left.written_s > DEBRIS_AGE_S


def retain(
    root: Path | str | CheckpointStorage, wanted: Retention, whole: frozenset[Path] = frozenset()
) -> tuple[Path, ...]:
    """Delete void checkpoints, the oldest ones beyond `wanted.keep`, and what dead writers have left behind.

    Returns the deleted checkpoints. The newest intact checkpoint that is not void is always kept, even if
    many newer checkpoints are damaged. If no checkpoint is intact, none is deleted.

    The newest checkpoint at or below the step `wanted.proven` is kept too, or the oldest checkpoint if none
    is that old. If the replicas turn out to differ, that checkpoint may date from before they diverged.

    Void checkpoints do not count towards `wanted.keep`. Checkpoints of a newer format are never deleted. A
    retry is safe.

    Args:
        root: The directory of the checkpoints, or another storage.
        wanted: Which checkpoints to keep.
        whole: Directories that the caller knows to be intact; these are not read again.

    Raises:
        ValueError: `wanted.keep` is below 1.
        OSError: A file could not be read or deleted.
    """
    if wanted.keep < 1:
        raise ValueError(f"{wanted.keep} checkpoints to keep, expected 1 or more")
    storage = DirectoryStorage(Path(root)) if isinstance(root, str | Path) else root
    storage.remove_leftovers(wanted.epoch)
    found = tuple(each for each in storage.each_checkpoint() if not isinstance(each[1], NewerFormat))
    if any(isinstance(what, StoredCheckpoint) and what.epoch > wanted.epoch for _, what in found):
        return ()
    lineages = [what.lineage for _, what in found if isinstance(what, StoredCheckpoint)]
    void = _void(found, lineage.merged(wanted.lineage, *lineages))
    valid = tuple(each for each in found if each[0] not in void)

    def intact(path: Path, what: StoredCheckpoint) -> bool:
        try:
            return path in whole or storage.content_fault(what) is None
        except Unreadable:
            return False

    deletable = _deletable(valid, wanted.keep, intact, wanted.proven)
    if deletable is None:
        return ()
    removed = (*void, *deletable)
    seen = dict(found)
    for path in reversed(removed):
        storage.remove(path, seen[path])
    return removed


def _void(found: tuple[_Found, ...], known: tuple[Lineage, ...]) -> tuple[Path, ...]:
    return tuple(
        path
        for path, what in found
        if isinstance(what, StoredCheckpoint) and not lineage.valid(what.generation, what.step, known)
    )


def _deletable(
    found: tuple[_Found, ...], count: int, intact: Callable[[Path, StoredCheckpoint], bool], proven: int
) -> tuple[Path, ...] | None:
    """Return the checkpoints that may be deleted; None if no checkpoint is intact.

    `found` and the result are sorted newest first.
    """
    kept: list[int] = []  # steps
    safe = False
    older: list[_Found] = []
    for path, what in found:
        if safe and (len(kept) >= count or path.name.endswith(ASIDE)):
            older.append((path, what))
        elif isinstance(what, StoredCheckpoint):
            kept.append(what.step)
            safe = safe or intact(path, what)
    if not safe:
        return None
    stays = _newest_proven([what for _, what in older if isinstance(what, StoredCheckpoint)], proven)
    if proven < 0 or any(step <= proven for step in kept):
        stays = None
    return tuple(path for path, _ in older if path != stays)


def _newest_proven(older: list[StoredCheckpoint], proven: int) -> Path | None:
    """Return the newest checkpoint at or below step `proven`, or the oldest one if none is that old.

    `older` is sorted newest first. The result is None if it is empty.
    """
    equal = (found.path for found in older if found.step <= proven)
    return next(equal, older[-1].path if older else None)
