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
    """Which checkpoints to keep: the newest `keep` that are not void, and the newest up to step `proven`.

    Attributes:
        keep: How many of the newest checkpoints to keep, at least 1.
        lineage: The group's lineage. The lineages stored in the checkpoints are added to it.
        proven: The last step at which the replicas are known to have been equal; 0 if no such step is known
            yet, -1 if the replicas are not compared.
        epoch: Fencing token of the supervisor that ordered the deletion. If a supervisor of a later epoch
            ordered any of the checkpoints, nothing is deleted.
    """

    keep: int = defaults.KEEP_CHECKPOINTS
    lineage: tuple[Lineage, ...] = ()
    proven: int = -1
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Leftover:
    """Data in object storage that no checkpoint names: of a writer that is at work, or of one that died.

    `epoch` is that of its writer, and `written_s` when storage accepted the last of it, on storage's clock.
    """

    epoch: int
    written_s: float


def is_abandoned(left: Leftover, epoch: int, newest_epoch: int, newest_s: float) -> bool:
    """Return whether a member that obeys `epoch` may delete `left`, which must be older than all checkpoints.

    `newest_epoch` is the latest epoch of the checkpoints, and `newest_s` when the newest one was published. A
    writer of an older epoch than that is not allowed to publish any more. Any other is dead if it has written
    nothing for an hour, because a live one writes continuously.
    """
    if newest_epoch > epoch or left.epoch > epoch or left.written_s >= newest_s:
        return False
    return left.epoch < newest_epoch or newest_s - left.written_s > DEBRIS_AGE_S


def retain(
    root: Path | str | CheckpointStorage, wanted: Retention, whole: frozenset[Path] = frozenset()
) -> tuple[Path, ...]:
    """Delete void checkpoints, the oldest beyond `wanted.keep`, and files of dead writers.

    Return the deleted checkpoints. The newest intact checkpoint that is not void is kept, however many newer
    checkpoints are damaged. If no intact checkpoint exists, none is deleted. The newest checkpoint at or
    below the step `wanted.proven` is kept too, or the oldest if none is that old: if the replicas differ
    later, that checkpoint may date from before they began to differ. Void checkpoints do not count, and
    checkpoints of a newer format are kept. Safe to call again.

    Args:
        root: The directory of checkpoints, or another storage.
        wanted: Which checkpoints are kept.
        whole: Directories that the caller knows to be intact, so that they need not be read.

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
    told = [what.lineage for _, what in found if isinstance(what, StoredCheckpoint)]
    void = _void(found, lineage.merged(wanted.lineage, *told))
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
    """Return the checkpoints of `found`, newest first, that may be deleted; None if none is intact."""
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
    """Return the newest checkpoint up to step `proven`, else the oldest. `older` is sorted newest first."""
    equal = (found.path for found in older if found.step <= proven)
    return next(equal, older[-1].path if older else None)
