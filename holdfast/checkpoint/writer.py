"""Write checkpoints, and decide which one to keep if several writers write the same step.

The rules are the same for every kind of storage:

- A checkpoint appears only once it is complete.
- An intact checkpoint of the same or a newer generation is kept, not replaced.
- A member that obeys an older supervisor publishes nothing.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from holdfast.checkpoint.catalog import Foreign, StoredCheckpoint, Unreadable, name_of, occupied
from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.checkpoint.manifest import (
    NAME_RULE,
    InvalidCheckpoint,
    Manifest,
    NewerFormat,
    is_file_name,
    pack,
)
from holdfast.checkpoint.sharing import ShareHelpers
from holdfast.checkpoint.storage import CheckpointStorage, StagedCheckpoint
from holdfast.protocol.lineage import Lineage

PUBLISH_TRIES = 5  # an attempt fails only if another writer publishes the same step at the same moment


def write(
    root: Path | str | CheckpointStorage,
    *,
    generation: int,
    step: int,
    world_size: int,
    files: Mapping[str, Path | bytes],
    meta: Mapping[str, object],
    created_at: float,
    known: tuple[Lineage, ...] = (),
    epoch: int = 0,
    moved: Callable[[], object] = lambda: None,
    helpers: ShareHelpers | None = None,
) -> Path:
    """Write a checkpoint and return its path.

    On return, the checkpoint is durable and, in a directory, `latest` names it. If storage already has an
    intact checkpoint of this step and of this or a newer generation, that checkpoint is kept instead. A retry
    is safe after any error.

    Args:
        root: The directory of the checkpoints, created if missing, or another storage.
        generation: Fencing token of the state.
        step: The number of steps that the state contains.
        world_size: The number of ranks in the group.
        files: The content of each file, by name. If the content is a path, that file is copied and must not
            change during the call.
        meta: JSON that describes the state.
        created_at: Seconds since the epoch.
        known: The group's lineage, which is stored in the checkpoint.
        epoch: Fencing token of the supervisor that ordered the checkpoint.
        moved: Called by any thread each time storage has accepted a piece of data.
        helpers: Peers that may write pieces of the state that all ranks share.

    Raises:
        ValueError: A file name is not allowed, `meta` is not JSON, or a supervisor of a later epoch has
            ordered one of the checkpoints in `root`.
        FileExistsError: Something that Holdfast did not write has the name of the checkpoint.
        OSError: Storage failed or is full, or an existing checkpoint of this step cannot be read. Existing
            checkpoints are unchanged.
    """
    storage = DirectoryStorage(Path(root)) if isinstance(root, str | Path) else root
    _check_names(files)
    _check_epoch(storage, epoch)
    name = name_of(step)
    storage.prepare()
    if _has_intact(storage, name, generation):
        return storage.acknowledge(name)
    storage.check_room(files)
    with storage.staged(name, files, epoch, generation, moved, helpers) as staged:
        manifest = Manifest(
            generation,
            step,
            world_size,
            created_at,
            staged.entries,
            meta,
            known,
            epoch,
            staged.objects,
        )
        staged.seal(pack(manifest))
        _check_epoch(storage, epoch)
        _publish(storage, staged, name, generation)
    return staged.path


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if not is_file_name(name):
            raise ValueError(f"file name {name!r} in a checkpoint, expected {NAME_RULE}")


def _check_epoch(storage: CheckpointStorage, epoch: int) -> None:
    """Raise `ValueError` if a supervisor of a later epoch ordered one of the checkpoints."""
    newest = max(
        (what.epoch for _, what in storage.each_checkpoint() if isinstance(what, StoredCheckpoint)), default=0
    )
    if newest > epoch:
        raise ValueError(
            f"{str(storage)!r} has checkpoints ordered by a supervisor of epoch {newest}, but this member"
            f" obeys epoch {epoch}: it is cut off from the run, or the new supervisor has not contacted it"
            " yet"
        )


def _has_intact(storage: CheckpointStorage, name: str, generation: int) -> bool:
    """Return whether `name` is an intact checkpoint of this or a newer generation.

    If the existing checkpoint is void, so is the caller's, whose generation is not newer. Raises `OSError` if
    the existing checkpoint cannot be read, because it may be intact, or if Holdfast did not write it.
    """
    try:
        found = storage.load(name)
        return found.generation >= generation and storage.content_fault(found) is None
    except NewerFormat:
        return True
    except Unreadable as error:
        raise OSError(
            errno.EIO, f"{name} already exists but cannot be read, so it will not be replaced: {error}"
        ) from error
    except Foreign:
        raise occupied(f"{storage}/{name}") from None
    except InvalidCheckpoint:
        return False


def _publish(storage: CheckpointStorage, staged: StagedCheckpoint, name: str, generation: int) -> None:
    """Publish a complete checkpoint, unless another writer has published one that must be kept."""
    for _ in range(PUBLISH_TRIES):
        if staged.publish() or _has_intact(storage, name, generation) or staged.replace():
            return
    raise OSError(errno.EBUSY, f"other writers kept publishing {name}")
