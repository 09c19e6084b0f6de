"""The training state on durable storage: whole once its name is there, or not there at all.

A checkpoint is written under a temporary name, made durable, renamed. `latest` is for people
and scripts; nothing here believes it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

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
from holdfast.protocol import lineage
from holdfast.protocol.lineage import Lineage

_Looked: TypeAlias = tuple[Path, StoredCheckpoint | InvalidCheckpoint]

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
    """Write a checkpoint and return its directory, durable and named by `latest`.

    A whole one of this step and of this or a newer generation is left as it is. Safe to call
    again after any error.

    Args:
        root: The directory of checkpoints; created if missing.
        generation: Fencing token of the state.
        step: Steps that the state has behind it.
        world_size: Ranks of the group.
        files: Content by file name; a path is copied, and must not change meanwhile.
        meta: JSON that describes the state.
        created_at: Seconds since the epoch.
        known: The lineage of the group, which the checkpoint carries.
        epoch: Fencing token of the supervisor whose order this is.
        moved: Called, by any thread, whenever storage has taken a piece of it.

    Raises:
        ValueError: A bad file name, meta that is not JSON, or a supervisor of a later epoch has had a
            checkpoint written here.
        OSError: Storage failed or is full; what was there still is, and readers see it.
    """
    root = Path(root)
    _check_names(files)
    _check_epoch(root, epoch)
    final = root / f"step-{step:08d}"
    _make_root(root)
    if _stands(final, generation):
        durable.sync_directory(root)
        durable.replace_file(root / LATEST, _hint(final))
        return final
    _check_room(root, files)

    def described(entries: tuple[FileEntry, ...]) -> Manifest:
        return Manifest(generation, step, world_size, created_at, entries, meta, known, epoch)

    _write(final, files, described, moved)
    return final


def retain(
    root: Path | str,
    count: int,
    whole: frozenset[Path] = frozenset(),
    known: tuple[Lineage, ...] = (),
    proven: int = -1,
    epoch: int = 0,
) -> tuple[Path, ...]:
    """Delete the oldest checkpoints beyond `count`, void ones, and what dead writers left; return them.

    The newest whole one that is not void stays, however many newer ones are damaged; until there is
    one, nothing is deleted. The newest one at or below the step `proven` stays, too, and while there is
    none, the oldest: if the replicas come to differ, it is what may still be from before. Void ones do
    not count. Those of a newer format stay. Safe to call again.

    Args:
        root: The directory of checkpoints.
        count: How many to keep, at least 1.
        whole: Directories that the caller knows to be whole, which saves reading them.
        known: The lineage of the group; what the checkpoints themselves tell of it is added.
        proven: The last step at which the replicas are known to have been equal; 0 where they are not
            yet, -1 where they are not compared.
        epoch: Fencing token of the supervisor whose order this is: where a later one has had a checkpoint
            written, nothing is deleted.

    Raises:
        OSError: Something could not be read or deleted.
    """
    if count < 1:
        raise ValueError(f"{count} checkpoints to keep, expected 1 or more")
    root = Path(root)
    if not root.is_dir():
        return ()
    durable.remove_debris(root)
    found = tuple((path, what) for path, what in each_checkpoint(root) if not isinstance(what, NewerFormat))
    if any(isinstance(what, StoredCheckpoint) and what.epoch > epoch for _, what in found):
        return ()
    told = [what.lineage for _, what in found if isinstance(what, StoredCheckpoint)]
    void = _void(found, lineage.merged(known, *told))
    beyond = _beyond(tuple(each for each in found if each[0] not in void), count, whole, proven)
    if beyond is None:
        return ()
    removed = (*void, *beyond)
    for path in reversed(removed):
        durable.remove_directory(path)
    return removed


def _void(found: tuple[_Looked, ...], known: tuple[Lineage, ...]) -> tuple[Path, ...]:
    return tuple(
        path
        for path, what in found
        if isinstance(what, StoredCheckpoint) and not lineage.valid(what.generation, what.step, known)
    )


def _beyond(
    found: tuple[_Looked, ...], count: int, whole: frozenset[Path], proven: int
) -> tuple[Path, ...] | None:
    """Return what of `found`, newest first, is not to be kept; None when nothing of it is whole."""
    kept: list[int] = []  # steps
    safe = False
    older: list[_Looked] = []
    for path, what in found:
        if safe and (len(kept) >= count or path.name.endswith(ASIDE)):
            older.append((path, what))
        elif isinstance(what, StoredCheckpoint):
            kept.append(what.step)
            safe = safe or path in whole or verify(what) is None
    if not safe:
        return None
    stays = _before_differing([what for _, what in older if isinstance(what, StoredCheckpoint)], proven)
    if proven < 0 or any(step <= proven for step in kept):
        stays = None
    return tuple(path for path, _ in older if path != stays)


def _before_differing(older: list[StoredCheckpoint], proven: int) -> Path | None:
    """Return the newest, of these that are newest first, that is proven; the oldest where none is."""
    equal = (found.path for found in older if found.step <= proven)
    return next(equal, older[-1].path if older else None)


def _write(
    final: Path,
    files: Mapping[str, Path | bytes],
    described: Callable[[tuple[FileEntry, ...]], Manifest],
    moved: Callable[[], object],
) -> None:
    """Write a checkpoint that is not there, durable and named by `latest` on return."""
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
        batch.settle()
        _check_epoch(root, manifest.epoch)
        _publish(temporary, final, manifest.generation)
        os.replace(hint, root / LATEST)
    durable.sync_directory(root)


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if not is_file_name(name):
            raise ValueError(f"file name {name!r} in a checkpoint, expected {NAME_RULE}")


def _check_epoch(root: Path, epoch: int) -> None:
    """Raise `ValueError` where a supervisor of a later epoch has had a checkpoint written."""
    newest = max(
        (what.epoch for _, what in each_checkpoint(root) if isinstance(what, StoredCheckpoint)), default=0
    )
    if newest > epoch:
        raise ValueError(
            f"a supervisor of epoch {newest} has had checkpoints written to {str(root)!r}, and this member"
            f" obeys epoch {epoch}: it is cut off from the run, or has not heard of the new one yet"
        )


def _hint(final: Path) -> bytes:
    return f"{final.name}\n".encode()


def _stands(path: Path, generation: int) -> bool:
    """Say whether a whole checkpoint of this or a newer generation is at `path`.

    Where that one is void, so is what its writer would put in its place.
    """
    try:
        found = load(path)
    except NewerFormat:
        return True
    except InvalidCheckpoint:
        return False
    return found.generation >= generation and verify(found) is None


def _publish(temporary: Path, final: Path, generation: int) -> None:
    """Give a finished checkpoint its name. What it replaces is gone when this returns."""
    try:
        temporary.rename(final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
    else:
        return
    if _stands(final, generation):
        return  # another writer was faster
    try:
        durable.exchange(temporary, final)
        durable.sync_directory(final.parent)  # before what it replaced is deleted
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
