"""Delete the checkpoints that are no longer needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from holdfast.checkpoint import catalog
from holdfast.checkpoint.catalog import Foreign, StoredCheckpoint, Unreadable
from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.checkpoint.manifest import InvalidCheckpoint, NewerFormat
from holdfast.checkpoint.storage import CheckpointStorage
from holdfast.fileio.durable import DEBRIS_AGE_S
from holdfast.protocol import defaults, lineage
from holdfast.protocol.lineage import Lineage

_Found: TypeAlias = tuple[Path, StoredCheckpoint | InvalidCheckpoint]


@dataclass(frozen=True, slots=True)
class Retention:
    """Specifies which checkpoints to keep: the newest `keep` that are not void, and one at or below `proven`.

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
    """Data in object storage that belongs to no checkpoint. Its writer may be dead, or may still be writing.

    `epoch` is the epoch that the writer obeyed. `written_s` is the time when storage accepted the last of the
    data, on the storage's clock.
    """

    epoch: int
    written_s: float


@dataclass(frozen=True, slots=True)
class NewestCheckpoint:
    """The highest epoch of all checkpoints in object storage, and the time when the newest one was published.

    `written_s` is a time on the storage's clock. Both fields are 0 if there is no checkpoint.
    """

    epoch: int
    written_s: float


def is_abandoned(left: Leftover, epoch: int, newest: NewestCheckpoint) -> bool:
    """Return whether a member that obeys `epoch` may delete `left`.

    Only data that was written before the newest checkpoint may be deleted, and only by a member whose epoch
    is at least that of the writer and of all checkpoints. A writer that obeys an epoch below that of a
    checkpoint may no longer publish. Any other writer is assumed dead if it has written nothing for an hour,
    because a live writer writes continuously.
    """
    if newest.epoch > epoch or left.epoch > epoch or left.written_s >= newest.written_s:
        return False
    return left.epoch < newest.epoch or newest.written_s - left.written_s > DEBRIS_AGE_S


def is_settled(removed_s: float, epoch: int, newest: NewestCheckpoint) -> bool:
    """Return whether a member that obeys `epoch` may delete the empty manifest of a removed checkpoint.

    The checkpoint was removed at `removed_s`, and is older than all others. A group resumes from a checkpoint
    that exists, and saves only later steps. So a group can save the removed checkpoint's step again only if
    it started from scratch, or if it resumed before the removal and has saved nothing since. An hour is long
    enough to rule out the second case.
    """
    return newest.epoch <= epoch and newest.written_s - removed_s > DEBRIS_AGE_S


def retain(
    root: Path | str | CheckpointStorage, wanted: Retention, whole: frozenset[Path] = frozenset()
) -> tuple[Path, ...]:
    """Delete void checkpoints, the oldest ones beyond `wanted.keep`, and what dead writers have left behind.

    Returns the deleted checkpoints. The newest intact checkpoint that is not void is always kept, even if
    many newer checkpoints are damaged. If no checkpoint is intact, none is deleted.

    The newest checkpoint at or below the step `wanted.proven` is kept too, or the oldest checkpoint if none
    is that old. If the replicas turn out to differ, that checkpoint may date from before they diverged.

    Void checkpoints do not count towards `wanted.keep`. Checkpoints of a newer format, and files that
    Holdfast did not write, are never deleted. A retry is safe.

    This process may be stopped at any point, for any length of time, while another member takes over the run
    and publishes checkpoints of the same steps:

    - Only the very checkpoints that were listed are deleted, never others that have since received their
      names. Both kinds of storage ensure this for any order of events.
    - The checkpoints are listed again before each deletion, and nothing more is deleted if any has changed.
      So once a later supervisor or generation has published, at most the deletion in progress completes.
    - That deletion, and any deletion before the later generation's first checkpoint, can remove the
      checkpoint that the generation resumed from. To lose work this way, three things must coincide: the
      supervisor passed over newer intact checkpoints, `wanted.proven` does not keep the checkpoint that it
      used, and all members lose their copies in memory before the next checkpoint, which a group writes as
      soon as it trains again.

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
    found = _listed(storage)
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
    return _removed(storage, found, (*void, *deletable))


def _listed(storage: CheckpointStorage) -> tuple[_Found, ...]:
    return tuple(each for each in storage.each_checkpoint() if not isinstance(each[1], NewerFormat | Foreign))


def _removed(
    storage: CheckpointStorage, found: tuple[_Found, ...], deletable: tuple[Path, ...]
) -> tuple[Path, ...]:
    """Remove `deletable`, the last one first, and stop as soon as any checkpoint differs from `found`.

    Returns the removed checkpoints, in the order of `deletable`.
    """
    seen = dict(found)
    removed: tuple[Path, ...] = ()
    for path in reversed(deletable):
        if not _is_unchanged(seen, dict(_listed(storage))):
            break
        what = seen[path]
        if storage.remove(path, what):
            removed = (path, *removed)
            del seen[path]
    return removed


def _is_unchanged(
    before: Mapping[Path, StoredCheckpoint | InvalidCheckpoint],
    now: Mapping[Path, StoredCheckpoint | InvalidCheckpoint],
) -> bool:
    return before.keys() == now.keys() and all(catalog.is_same(before[path], now[path]) for path in before)


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
        if safe and (len(kept) >= count or catalog.is_aside(path.name)):
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

    `older` is sorted newest first. The result is None if `older` is empty.
    """
    equal = (found.path for found in older if found.step <= proven)
    return next(equal, older[-1].path if older else None)
