"""Store checkpoints in a directory, where each one appears under its name only once it is complete.

A checkpoint is written under a temporary name, made durable, and then renamed. The file `latest` names the
newest checkpoint for people and scripts; Holdfast never reads it.
"""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from holdfast.checkpoint import catalog, removal
from holdfast.checkpoint.catalog import LATEST, MANIFEST, Foreign, StoredCheckpoint, Unreadable
from holdfast.checkpoint.manifest import REPLICATED, InvalidCheckpoint
from holdfast.checkpoint.sharing import (
    PIECE_BYTES,
    TOKEN,
    TOKEN_BYTES,
    CheckedRead,
    SharedFile,
    SharedPiece,
    ShareHelpers,
    ShareRefused,
    StagingPlace,
    is_token,
    new_token,
)
from holdfast.fileio import durable
from holdfast.fileio.bulk_copy import FileBatch
from holdfast.fileio.checksum import CHUNK_BYTES, FileEntry
from holdfast.fileio.range_writer import RangeWriter

THREADS = 2  # for a writer that shares a file: one computes checksums while the other writes
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DirectoryStorage:
    """The checkpoints in the directory `root`. Writing the first checkpoint creates the directory."""

    def __init__(self, root: Path, open_range: Callable[[str, int], RangeWriter] = RangeWriter) -> None:
        self._root, self._open_range = root, open_range

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
        """Do nothing, because the ranks read the checkpoint itself and there are no copies."""

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
        helpers: ShareHelpers | None = None,
    ) -> Iterator[StagedDirectory]:
        root = self._root
        with (
            durable.temporary_directory(root, name) as temporary,
            durable.replacement(root / LATEST) as hint,
            FileBatch(moved) as batch,
        ):
            entries = tuple(
                self._shared(batch, source, temporary / each, moved, helpers)
                if helpers is not None and each == REPLICATED and isinstance(source, Path)
                else batch.copy(source, temporary / each)
                for each, source in files.items()
            )
            yield StagedDirectory(batch, temporary, root / name, hint, entries)
            os.replace(hint, root / LATEST)
        durable.sync_directory(root)

    def _shared(
        self,
        batch: FileBatch,
        source: Path,
        target: Path,
        moved: Callable[[], object],
        helpers: ShareHelpers,
    ) -> FileEntry:
        """Copy `source` as `FileBatch.copy` does, but with the peers' help. Raises OSError.

        Once this returns, requests from helpers are refused. A helper may still be writing because of an
        earlier request, but it writes only bytes that are already in the file.
        """
        work = SharedFile(source, PIECE_BYTES, moved)
        batch.allocate(target, work.size)
        token = new_token()
        folder = os.open(target.parent, _FOLDER)
        try:
            with self._open_range(target.name, folder) as out, open(source, "rb", buffering=0) as file:

                def write(piece: SharedPiece) -> tuple[int, ...]:
                    crcs = work.checksums(piece)
                    _write_mapped(file.fileno(), piece, out, moved)
                    return crcs

                with open(target.parent / TOKEN, "x") as shown:
                    shown.write(token)
                try:
                    with helpers.helping(StagingPlace(target.parent.name, token), work):
                        work.write_rest(write, THREADS)
                finally:
                    (target.parent / TOKEN).unlink()
                missing = _missing(work, target)
                for piece in missing:
                    write(piece)
                if missing:
                    helpers.distrust(f"{self}: {len(missing)} pieces that peers have written are not there")
        finally:
            os.close(folder)
        return work.entry(target.name)

    def write_piece(
        self, name: str, place: StagingPlace, size: int, piece: SharedPiece, read: CheckedRead
    ) -> None:
        if not durable.is_temporary_name(place.folder, name):
            raise ShareRefused("the folder does not have the name of a writer's folder")
        try:
            folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                inner = os.open(place.folder, _FOLDER, dir_fd=folder)
            finally:
                os.close(folder)
            try:
                _check_token(inner, place.token)
                out = self._open_range(REPLICATED, inner)
            finally:
                os.close(inner)
        except FileNotFoundError:
            raise ShareRefused("this member does not see the writer's folder") from None
        with out:
            if out.size != size:
                raise ShareRefused(f"the writer's file has {out.size} bytes, expected {size}")
            for at in piece.chunks:
                out.write(read(at, min(at + CHUNK_BYTES, piece.end)), at)
            out.sync()

    def remove(self, path: Path, what: StoredCheckpoint | InvalidCheckpoint) -> bool:
        return removal.remove(path, what)

    def remove_leftovers(self, epoch: int) -> None:
        if self._root.is_dir():
            durable.remove_debris(self._root)
            removal.finish(self._root)


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
        self._occupant: StoredCheckpoint | InvalidCheckpoint | None = None  # what `publish` found

    def seal(self, manifest: bytes) -> None:
        self._batch.write(self._temporary / MANIFEST, manifest)
        self._batch.write(self._hint, _hint(self.path.name))
        self._batch.add_directory(self._temporary)
        self._batch.sync()

    def publish(self) -> bool:
        if removal.rename_if_free(self._temporary, self.path):
            return True
        self._occupant = catalog.load_or_defect(self.path)
        return False

    def replace(self) -> bool:
        """Move the checkpoint to its final name. On return, the checkpoint that it replaced is deleted.

        The old checkpoint first gets another name that readers recognise. It is then compared with the
        checkpoint that `publish` found, because another writer may have replaced that one at any moment. If
        they differ, the old checkpoint gets its name back. If the process is killed in between, the old
        checkpoint is still listed under its other name.

        Raises `FileExistsError` if a script has saved something into the old checkpoint's directory.
        """
        if self._occupant is None or isinstance(self._occupant, Foreign | Unreadable):
            return False
        try:
            if removal.has_strangers(self.path):
                raise catalog.occupied(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        aside = self.path.with_name(catalog.name_aside(self.path.name))
        try:
            self.path.rename(aside)
        except FileNotFoundError:
            return False
        replaced = catalog.load_or_defect(self.path, aside)
        if not catalog.is_same(replaced, self._occupant):
            removal.rename_if_free(aside, self.path)  # if the name is taken, retention deletes one of the two
            return False
        if not removal.rename_if_free(self._temporary, self.path):
            return False
        durable.sync_directory(self.path.parent)  # before the replaced checkpoint is deleted
        if isinstance(replaced, StoredCheckpoint):
            replaced = dataclasses.replace(replaced, path=aside)
        removal.remove(aside, replaced)
        return True


def _write_mapped(source: int, piece: SharedPiece, out: RangeWriter, moved: Callable[[], object]) -> None:
    """Write a piece from the pages of the source, which must not be truncated during the call."""
    size = piece.end - piece.begin
    with mmap.mmap(source, size, access=mmap.ACCESS_READ, offset=piece.begin) as pages:
        for at in piece.chunks:
            with memoryview(pages)[at - piece.begin : at - piece.begin + CHUNK_BYTES] as chunk:
                out.write(chunk, at)
            moved()
    if not out.is_direct:
        out.sync()  # otherwise the page cache would fill up


def _missing(work: SharedFile, target: Path) -> tuple[SharedPiece, ...]:
    descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # keeps a file server from reading ahead
        return work.missing(descriptor)
    finally:
        os.close(descriptor)


def _check_token(folder: int, token: str) -> None:
    """Raise `ShareRefused` unless this is the same folder that the writer sees."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(TOKEN, flags, dir_fd=folder)
    try:
        found = os.read(descriptor, TOKEN_BYTES + 1)
    finally:
        os.close(descriptor)
    if not is_token(found, token):
        raise ShareRefused("the folder of that name is another writer's folder")


def _hint(name: str) -> bytes:
    return f"{name}\n".encode()
