"""Write checkpoints to durable storage. A checkpoint appears under its name only when it is complete.

A checkpoint is written under a temporary name, made durable, and renamed. `latest` is written for people and
scripts; Holdfast never reads it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from holdfast.checkpoint.catalog import (
    ASIDE,
    LATEST,
    MANIFEST,
    StoredCheckpoint,
    each_checkpoint,
    load,
    verify,
)
from holdfast.checkpoint.manifest import (
    NAME_RULE,
    InvalidCheckpoint,
    Manifest,
    NewerFormat,
    is_file_name,
    pack,
)
from holdfast.fileio import durable
from holdfast.fileio.bulk_copy import FileBatch
from holdfast.fileio.checksum import FileEntry
from holdfast.protocol.lineage import Lineage

_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


def write(
    root: Path | str,
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
) -> Path:
    """Write a checkpoint and return its directory, which is durable and recorded in `latest`.

    If an intact checkpoint of this step exists, of this or a newer generation, it is kept instead. Safe to
    call again after any error.

    Args:
        root: The directory of checkpoints; created if missing.
        generation: Fencing token of the state.
        step: The number of steps that the state includes.
        world_size: Ranks of the group.
        files: Content by file name. A path's file is copied, and must not change during the call.
        meta: JSON that describes the state.
        created_at: Seconds since the epoch.
        known: The lineage of the group, which is stored in the checkpoint.
        epoch: Fencing token of the supervisor that ordered the checkpoint.
        moved: Called, on any thread, whenever storage has accepted a piece of data.

    Raises:
        ValueError: A file name is not allowed, `meta` is not JSON, or `root` has a checkpoint that a
            supervisor of a later epoch ordered.
        OSError: Storage failed or is full. Existing checkpoints are unchanged.
    """
    root = Path(root)
    _check_names(files)
    _check_epoch(root, epoch)
    final = root / f"step-{step:08d}"
    _make_root(root)
    if _has_intact(final, generation):
        durable.sync_directory(root)
        durable.replace_file(root / LATEST, _hint(final))
        return final
    _check_room(root, files)

    def described(entries: tuple[FileEntry, ...]) -> Manifest:
        return Manifest(generation, step, world_size, created_at, entries, meta, known, epoch)

    _write(final, files, described, moved)
    return final


def _write(
    final: Path,
    files: Mapping[str, Path | bytes],
    described: Callable[[tuple[FileEntry, ...]], Manifest],
    moved: Callable[[], object],
) -> None:
    """Write a new checkpoint; on return it is durable and recorded in `latest`."""
    root = final.parent
    with (
        durable.temporary_directory(root, final.name) as temporary,
        durable.replacement(root / LATEST) as hint,
        FileBatch(moved) as batch,
    ):
        manifest = described(tuple(batch.copy(files[name], temporary / name) for name in files))
        batch.write(temporary / MANIFEST, pack(manifest))
        batch.write(hint, _hint(final))
        batch.add_directory(temporary)
        batch.sync()
        _check_epoch(root, manifest.epoch)
        _publish(temporary, final, manifest.generation)
        os.replace(hint, root / LATEST)
    durable.sync_directory(root)


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if not is_file_name(name):
            raise ValueError(f"file name {name!r} in a checkpoint, expected {NAME_RULE}")


def _check_epoch(root: Path, epoch: int) -> None:
    """Raise `ValueError` if a supervisor of a later epoch ordered one of the checkpoints."""
    newest = max(
        (what.epoch for _, what in each_checkpoint(root) if isinstance(what, StoredCheckpoint)), default=0
    )
    if newest > epoch:
        raise ValueError(
            f"{str(root)!r} has checkpoints ordered by a supervisor of epoch {newest}, but this member obeys"
            f" epoch {epoch}: it is cut off from the run, or the new supervisor has not contacted it yet"
        )


def _hint(final: Path) -> bytes:
    return f"{final.name}\n".encode()


def _has_intact(path: Path, generation: int) -> bool:
    """Return whether `path` is an intact checkpoint of this or a newer generation.

    It may be void, but then the caller's checkpoint, whose generation is not newer, is void too.
    """
    try:
        found = load(path)
    except NewerFormat:
        return True
    except InvalidCheckpoint:
        return False
    return found.generation >= generation and verify(found) is None


def _publish(temporary: Path, final: Path, generation: int) -> None:
    """Rename a finished checkpoint to its final name. The caller deletes a directory left at `temporary`."""
    try:
        temporary.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
    else:
        return
    if _has_intact(final, generation):
        return  # another writer was faster
    try:
        durable.exchange(temporary, final)
        durable.sync_directory(final.parent)  # made durable before the caller deletes the replaced checkpoint
    except OSError as error:
        if error.errno not in _NO_EXCHANGE:
            raise
        durable.replace_in_two(temporary, final, final.with_name(final.name + ASIDE))


def _make_root(root: Path) -> None:
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        durable.sync_directory(root.parent)


def _check_room(root: Path, files: Mapping[str, Path | bytes]) -> None:
    """Raise ENOSPC before the first byte is written if the files cannot fit."""
    needed = sum(
        len(source) if isinstance(source, bytes) else source.stat().st_size for source in files.values()
    )
    status = os.statvfs(root)
    if needed > status.f_bavail * status.f_frsize:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {needed} bytes", str(root))
