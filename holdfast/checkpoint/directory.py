"""Store checkpoints in a directory, where each appears under its name only once it is complete.

A checkpoint is written under a temporary name, made durable, and then renamed. The file `latest` names the
newest checkpoint for people and scripts; Holdfast never reads it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from holdfast.checkpoint import catalog
from holdfast.checkpoint.catalog import ASIDE, LATEST, MANIFEST, StoredCheckpoint
from holdfast.checkpoint.manifest import InvalidCheckpoint
from holdfast.fileio import durable
from holdfast.fileio.bulk_copy import FileBatch
from holdfast.fileio.checksum import FileEntry

_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


class DirectoryStorage:
    """The checkpoints in the directory `root`. Writing the first checkpoint creates the directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    def each_checkpoint(self) -> Iterator[tuple[Path, StoredCheckpoint | InvalidCheckpoint]]:
        return catalog.each_checkpoint(self._root)

    def load(self, name: str) -> StoredCheckpoint:
        return catalog.load(self._root / name)

    def content_fault(self, found: StoredCheckpoint) -> str | None:
        return catalog.content_fault(found)

    def local_copy(
        self, found: StoredCheckpoint, names: Iterable[str], moved: Callable[[], object]
    ) -> tuple[Path, str | None]:
        return found.path, catalog.verify(found)

    def forget_copies(self, but: str = "") -> None:
        """Do nothing: there are no copies, because the ranks read the checkpoint itself."""

    def prepare(self) -> None:
        if not self._root.is_dir():
            self._root.mkdir(parents=True, exist_ok=True)
            durable.sync_directory(self._root.parent)

    def check_room(self, files: Mapping[str, Path | bytes]) -> None:
        needed = sum(
            len(source) if isinstance(source, bytes) else source.stat().st_size for source in files.values()
        )
        status = os.statvfs(self._root)
        if needed > status.f_bavail * status.f_frsize:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {needed} bytes", str(self._root))

    def acknowledge(self, name: str) -> Path:
        durable.sync_directory(self._root)
        durable.replace_file(self._root / LATEST, _hint(name))
        return self._root / name

    @contextmanager
    def staged(
        self,
        name: str,
        files: Mapping[str, Path | bytes],
        epoch: int,
        generation: int,
        moved: Callable[[], object],
    ) -> Iterator[StagedDirectory]:
        root = self._root
        with (
            durable.temporary_directory(root, name) as temporary,
            durable.replacement(root / LATEST) as hint,
            FileBatch(moved) as batch,
        ):
            entries = tuple(batch.copy(files[each], temporary / each) for each in files)
            yield StagedDirectory(batch, temporary, root / name, hint, entries)
            os.replace(hint, root / LATEST)
        durable.sync_directory(root)

    def remove(self, path: Path, what: StoredCheckpoint | InvalidCheckpoint) -> None:
        durable.remove_directory(path)

    def remove_leftovers(self, epoch: int) -> None:
        if self._root.is_dir():
            durable.remove_debris(self._root)


class StagedDirectory:
    """A checkpoint that still has a temporary name. The file that will replace `latest` is beside it."""

    objects = None

    def __init__(
        self,
        batch: FileBatch,
        temporary: Path,
        final: Path,
        hint: Path,
        entries: tuple[FileEntry, ...],
    ) -> None:
        self._batch, self._temporary, self.path, self._hint = batch, temporary, final, hint
        self.entries = entries

    def seal(self, manifest: bytes) -> None:
        self._batch.write(self._temporary / MANIFEST, manifest)
        self._batch.write(self._hint, _hint(self.path.name))
        self._batch.add_directory(self._temporary)
        self._batch.sync()

    def publish(self) -> bool:
        try:
            self._temporary.rename(self.path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            return False
        return True

    def replace(self) -> bool:
        """Move the checkpoint to its final name. On return, the checkpoint that it replaced is deleted."""
        try:
            durable.exchange(self._temporary, self.path)
            durable.sync_directory(self.path.parent)  # before the caller deletes the replaced checkpoint
        except OSError as error:
            if error.errno not in _NO_EXCHANGE:
                raise
            aside = self.path.with_name(self.path.name + ASIDE)
            durable.replace_in_two(self._temporary, self.path, aside)
        return True


def _hint(name: str) -> bytes:
    return f"{name}\n".encode()
