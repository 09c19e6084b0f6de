"""What a checkpoint needs of its storage, whether that is a directory or an object storage.

The implementations only move data. What may be published is decided in `writer`, and what may be deleted in
`retention`, for every kind of storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from holdfast.checkpoint.catalog import StoredCheckpoint
from holdfast.checkpoint.manifest import InvalidCheckpoint, ObjectLayout
from holdfast.checkpoint.sharing import CheckedRead, SharedPiece, ShareHelpers, StagingPlace
from holdfast.fileio.checksum import FileEntry


class StagedCheckpoint(Protocol):
    """The files of a checkpoint on storage, which nobody takes for a checkpoint yet."""

    @property
    def entries(self) -> tuple[FileEntry, ...]: ...

    @property
    def path(self) -> Path:
        """The path that the published checkpoint has."""

    @property
    def objects(self) -> ObjectLayout | None: ...

    def seal(self, manifest: bytes) -> None:
        """Make everything durable, so that only publishing it is left."""

    def publish(self) -> bool:
        """Make it the checkpoint of its step; return False, without a change, if there already is one."""

    def replace(self) -> bool:
        """Put it in the place of the checkpoint because of which `publish` returned False.

        Return False, without a change, if that one has been replaced or removed meanwhile.
        """


class CheckpointStorage(Protocol):
    """A place for the checkpoints of one job. All methods block; all raise `OSError` if storage fails."""

    def each_checkpoint(self) -> Iterator[tuple[Path, StoredCheckpoint | InvalidCheckpoint]]:
        """Yield each checkpoint, newest first, or its defect. The name of the path is the checkpoint's."""

    def load(self, name: str) -> StoredCheckpoint:
        """Return one checkpoint, or raise what `catalog.load` raises."""

    def content_fault(self, found: StoredCheckpoint) -> str | None:
        """Read the whole checkpoint; return its defect, or None. Raises `catalog.Unreadable` as well."""

    def local_copy(
        self, found: StoredCheckpoint, names: Iterable[str], moved: Callable[[], object]
    ) -> tuple[Path, str | None]:
        """Return a directory in which the files `names` are whole, or else their defect.

        A directory verifies all files of the checkpoint. Safe to repeat: what is there is not read again.
        """

    def forget_copies(self, but: str = "") -> None:
        """Remove all local copies but that of one checkpoint."""

    def prepare(self) -> None:
        """Make the place usable; raise `OSError` if it lacks what a writer relies on."""

    def check_room(self, files: Mapping[str, Path | bytes]) -> None:
        """Raise ENOSPC if it is certain that the files cannot fit."""

    def acknowledge(self, name: str) -> Path:
        """Make the checkpoint that is there durable and the latest one; return its path."""

    def staged(
        self,
        name: str,
        files: Mapping[str, Path | bytes],
        epoch: int,
        generation: int,
        moved: Callable[[], object],
        helpers: ShareHelpers | None = None,
    ) -> AbstractContextManager[StagedCheckpoint]:
        """Write the files of a new checkpoint. At the end, remove them unless they were published.

        The `helpers` write pieces of the file with the state that all ranks share.
        """

    def write_piece(
        self, name: str, place: StagingPlace, size: int, piece: SharedPiece, read: CheckedRead
    ) -> None:
        """Write a piece of the checkpoint `name` that another member stages at `place`; it is then durable.

        Only the pieces of a file of `size` bytes that the writer has created are written, never anything
        beside it. Raises `ShareRefused` if this storage does not have that place, and what `read` raises.
        """

    def remove(self, path: Path, what: StoredCheckpoint | InvalidCheckpoint) -> None:
        """Remove what `each_checkpoint` has yielded; nobody ever sees a part of it.

        Where one step may have several writers, what another one has put in its place meanwhile stays.
        """

    def remove_leftovers(self, epoch: int) -> None:
        """Remove what writers that are certainly dead, or of an older epoch, have left unpublished."""
