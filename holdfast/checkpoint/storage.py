"""Define the interface of checkpoint storage, implemented by directories and by object storage.

The implementations only move data. For all of them, `writer` decides which checkpoints may be published, and
`retention` which may be deleted.
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
    """The files of a checkpoint that are on storage but not published yet, so no reader sees them."""

    @property
    def entries(self) -> tuple[FileEntry, ...]: ...

    @property
    def path(self) -> Path:
        """The path of the checkpoint once it is published."""

    @property
    def objects(self) -> ObjectLayout | None: ...

    def seal(self, manifest: bytes) -> None:
        """Write the manifest and make all files durable. The checkpoint can then be published."""

    def publish(self) -> bool:
        """Publish the files as the checkpoint of their step.

        If that step already has a checkpoint, return False and change nothing.
        """

    def replace(self) -> bool:
        """Publish the files, replacing the checkpoint that made `publish` return False.

        If that checkpoint has been replaced or removed in the meantime, return False and change nothing.
        """


class CheckpointStorage(Protocol):
    """Stores the checkpoints of one job. All methods block, and raise `OSError` if storage fails."""

    def each_checkpoint(self) -> Iterator[tuple[Path, StoredCheckpoint | InvalidCheckpoint]]:
        """Yield the path of each checkpoint, newest first, with the checkpoint or its defect.

        The last part of the path is the checkpoint's name.
        """

    def load(self, name: str) -> StoredCheckpoint:
        """Return the checkpoint `name`. Raises the same errors as `catalog.load`."""

    def content_fault(self, found: StoredCheckpoint) -> str | None:
        """Read the whole checkpoint; describe its defect, or return None if it is intact.

        Raises `catalog.Unreadable` if storage fails, because the content may still be intact.
        """

    def local_copy(
        self, found: StoredCheckpoint, names: Iterable[str], moved: Callable[[], object]
    ) -> tuple[Path, str | None]:
        """Make the files `names` available in a local directory; return its path, and a defect or None.

        Object storage downloads only these files. Directory storage returns the checkpoint itself, after
        verifying all of its files. A retry is safe, and does not download complete files again.
        """

    def forget_copies(self, but: str = "") -> None:
        """Remove the local copies of all checkpoints except the checkpoint `but`."""

    def prepare(self) -> None:
        """Prepare storage for a writer. Raises `OSError` if it lacks a feature that a writer relies on."""

    def check_room(self, files: Mapping[str, Path | bytes]) -> None:
        """Raise `OSError` (ENOSPC) if the files certainly do not fit."""

    def acknowledge(self, name: str) -> Path:
        """Make the existing checkpoint `name` durable, and make it the latest one; return its path."""

    def staged(
        self,
        name: str,
        files: Mapping[str, Path | bytes],
        epoch: int,
        generation: int,
        moved: Callable[[], object],
        helpers: ShareHelpers | None = None,
    ) -> AbstractContextManager[StagedCheckpoint]:
        """Write the files of a new checkpoint. When the context ends, remove them unless they were published.

        The `helpers` may write pieces of the file with the state that all ranks share.
        """

    def write_piece(
        self, name: str, place: StagingPlace, size: int, piece: SharedPiece, read: CheckedRead
    ) -> None:
        """Durably write a piece of the checkpoint `name`, which another member is staging at `place`.

        This writes only to the file of `size` bytes that the writer has created. Raises `ShareRefused` if
        this storage does not have that place, and any exception of `read`.
        """

    def remove(self, path: Path, what: StoredCheckpoint | InvalidCheckpoint) -> bool:
        """Remove a checkpoint that `each_checkpoint` has yielded. No reader sees it half removed.

        If another writer has replaced it, even during this call, the replacement is kept and stays intact.
        Return False if the checkpoint was no longer there or could not be read.
        """

    def remove_leftovers(self, epoch: int) -> None:
        """Remove unpublished data of writers that are certainly dead or obey an older epoch."""
