"""Which checkpoint is the newest whole one, without reading all of storage at every decision."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from holdfast import catalogue
from holdfast.lineage import Lineage, valid
from holdfast.manifest import Invalid
from holdfast.messages import Durable
from supervisor.view import Checkpoint

log = logging.getLogger(__name__)


class Storage:
    """`found` is what `decide` sees. It is read whole at the start, and followed by what members write."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._passed_over: set[tuple[int, int]] = set()
        self.found: Checkpoint | None = None
        self.notes: tuple[str, ...] = ()  # of each that was passed over, why

    async def look(self, lineage: tuple[Lineage, ...]) -> None:
        """Read the newest checkpoint that is not void whole, and the ones before while it is damaged."""
        loop = asyncio.get_running_loop()
        try:
            self.found = await loop.run_in_executor(None, self._newest, lineage)
        except OSError as error:
            log.warning("storage cannot be read", extra={"error": str(error)})

    def _newest(self, lineage: tuple[Lineage, ...]) -> Checkpoint | None:
        notes: list[str] = []
        for path, found in catalogue.look(self._root):
            if isinstance(found, Invalid):
                why: str | None = str(found)
            elif not valid(found.generation, found.step, lineage):
                continue
            else:
                why = catalogue.verify(found)
                if why is None:
                    self.notes = tuple(notes)
                    return _checkpoint(found, self.notes)
                self._passed_over.add((found.generation, found.step))
            notes.append(f"checkpoint {path.name} is not used: {why}")
            log.warning("checkpoint passed over", extra={"note": notes[-1]})
        self.notes = tuple(notes)
        return None

    def heard(self, durable: Durable) -> None:
        """A member has written a checkpoint, and checked it while it wrote."""
        told = (durable.generation, durable.step)
        if durable.step < 0 or not durable.path or told in self._passed_over:
            return
        if self.found is not None and told <= (self.found.generation, self.found.step):
            return
        try:
            self.found = _checkpoint(catalogue.load(durable.path), ())
        except (OSError, ValueError) as error:
            log.warning("checkpoint cannot be read", extra={"error": str(error)})


def _checkpoint(found: catalogue.Found, notes: tuple[str, ...]) -> Checkpoint:
    skip = found.meta.get("skip")
    steps = tuple(s for s in skip if isinstance(s, int)) if isinstance(skip, list) else ()
    return Checkpoint(found.step, found.generation, found.world_size, str(found.path), notes, steps)
