"""List the checkpoints on storage for the supervisor. Only the manifests are read."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from holdfast.checkpoint import catalog
from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.checkpoint.manifest import MAX_NUMBER, InvalidCheckpoint
from holdfast.checkpoint.storage import CheckpointStorage
from holdfast.protocol.lineage import Lineage, merged
from holdfast.protocol.member_messages import (
    MAX_SKIPPED,
    ListedCheckpoint,
    RefusedCheckpoint,
    StorageListing,
)

PATIENCE = 5  # after this many failed reads, over all listings, a checkpoint is treated as damaged


class ListingReader:
    """Reads the newest `most` checkpoints in `storage`. Its calls block for as long as storage blocks."""

    def __init__(self, storage: Path | CheckpointStorage, most: int) -> None:
        self._storage = DirectoryStorage(storage) if isinstance(storage, Path) else storage
        self._most = most
        self._unread: Counter[str] = Counter()  # the number of failed reads of each checkpoint, by name

    def read(self) -> StorageListing:
        """Return a listing of the checkpoints on storage. The caller sets its number.

        Raises `OSError` if the folder or a manifest cannot be read. After `PATIENCE` failed reads of a
        manifest, its checkpoint is listed as damaged instead.
        """
        checkpoints: list[ListedCheckpoint] = []
        refused: list[RefusedCheckpoint] = []
        lineages: list[tuple[Lineage, ...]] = []
        generation = epoch = 0
        left = self._most
        for path, found in self._storage.each_checkpoint():
            if not isinstance(found, catalog.Foreign):  # a script may save more often than Holdfast
                left -= 1
            if left < 0:
                break
            if isinstance(found, catalog.Unreadable):
                self.count_failed_read(path.name, found)
            if isinstance(found, InvalidCheckpoint):
                if len(refused) < self._most:
                    refused.append(RefusedCheckpoint(path.name, step_of(path.name), str(found)))
                continue
            lineages.append(found.lineage)
            generation = max(generation, found.generation, *(each.generation for each in found.lineage))
            epoch = max(epoch, found.epoch)
            checkpoints.append(_listed(found))
        return StorageListing(
            checkpoints=tuple(checkpoints),
            refused=tuple(refused),
            lineage=merged(*lineages),
            generation=generation,
            epoch=epoch,
        )

    def count_failed_read(self, name: str, error: catalog.Unreadable) -> None:
        """Count a failed read of the checkpoint `name`.

        Raises `OSError` until `PATIENCE` reads have failed. After that, the checkpoint is treated as damaged.
        """
        self._unread[name] += 1
        if self._unread[name] < PATIENCE:
            raise OSError(f"checkpoint {name}: {error}")


def step_of(name: str) -> int:
    """Return the step in the name of a checkpoint's directory; -1 if the name has no step."""
    number = re.search(r"\d+", name)
    return int(number[0]) if number else -1


def _listed(found: catalog.StoredCheckpoint) -> ListedCheckpoint:
    skip = found.meta.get("skip")
    numbers = skip if isinstance(skip, list) else []
    steps = sorted(each for each in numbers if type(each) is int and 0 <= each <= MAX_NUMBER)[-MAX_SKIPPED:]
    return ListedCheckpoint(
        found.path.name, found.step, found.generation, found.world_size, found.created, tuple(steps)
    )
