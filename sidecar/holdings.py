"""What this member holds of the group's state: snapshots in the arena, private states of ranks."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from holdfast.arena import Arena, Gone, Record
from holdfast.messages import PrivateHeld, Slot
from holdfast.private import Blob, PrivateReader

_STORE = re.compile(r"(?:private|kept)-(\d{5})\.bin")
NEWEST = 12  # private states listed for each rank: a resume point is one of the last few


class Holdings:
    """A reader's view of the arena directory."""

    def __init__(self, directory: Path, restored: Path) -> None:
        """`restored` has the private states that this member's ranks were started from."""
        self.directory = directory
        self._restored = restored
        self.arena = Arena(directory)
        self._readers: dict[Path, PrivateReader] = {}

    def slots(self) -> tuple[Slot, ...]:
        return tuple(Slot(r.generation, r.step, r.total_bytes) for r in self.arena.records())

    def record(self, generation: int, step: int) -> Record | None:
        for each in self.arena.records():
            if (each.generation, each.step) == (generation, step):
                return each
        return None

    def privates(self) -> tuple[PrivateHeld, ...]:
        """List the private states held, the newest of each store and those of the snapshots."""
        wanted = {slot.step for slot in self.slots()}
        found: dict[tuple[int, int, int], PrivateHeld] = {}
        for rank, reader in self._stores():
            for place, held in enumerate(reader.held()):
                if place >= NEWEST and held.step not in wanted:
                    continue
                key = (rank, held.generation, held.step)
                if key not in found or held.final:
                    found[key] = PrivateHeld(rank, held.generation, held.step, held.final)
        return tuple(found.values())

    def private(self, rank: int, generation: int, step: int) -> Blob | None:
        """Return a private state whose bytes are what was put; a final one if there is a choice."""
        best: Blob | None = None
        for owner, reader in self._stores():
            if owner != rank:
                continue
            found = reader.get(step, generation)
            if found is not None and (best is None or found.final):
                best = found
        if best is None:
            path = self.restored_path(rank, generation, step)
            with contextlib.suppress(OSError):
                return Blob(generation, step, True, path.read_bytes())
        return best

    def restored_path(self, rank: int, generation: int, step: int) -> Path:
        """Where the private state that a rank is started from lies until the start after the next."""
        return self._restored / f"{rank:05d}-{generation:08d}-{step:012d}.bin"

    def good(self, record: Record) -> bool:
        """False when the snapshot is not what was sealed. One that has no seal yet is believed."""
        try:
            return not self.arena.sealed(record) or self.arena.verify(record)
        except Gone:
            return False

    def _stores(self) -> list[tuple[int, PrivateReader]]:
        found = []
        for path in sorted(self.directory.iterdir()):
            match = _STORE.fullmatch(path.name)
            if match:
                reader = self._readers.setdefault(path, PrivateReader(path))
                found.append((int(match[1]), reader))
        return found
