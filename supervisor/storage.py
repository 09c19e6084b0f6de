"""Which checkpoint is the newest whole one, without reading all of storage at every decision."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from holdfast import catalogue
from holdfast.messages import Durable
from supervisor.view import Checkpoint

log = logging.getLogger(__name__)


class Storage:
    """`found` is what `decide` sees. It is read whole at the start, and followed by what members write."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.found: Checkpoint | None = None

    async def look(self) -> None:
        """Read the newest checkpoint whole, and the ones before while it is damaged."""
        loop = asyncio.get_running_loop()
        try:
            newest, notes = await loop.run_in_executor(None, catalogue.newest_whole, self._root)
        except OSError as error:
            log.warning("storage cannot be read", extra={"error": str(error)})
            return
        for note in notes:
            log.warning("checkpoint passed over", extra={"note": note})
        self.found = None if newest is None else _checkpoint(newest, notes)

    def heard(self, durable: Durable) -> None:
        """A member has written a checkpoint, and checked it while it wrote."""
        if durable.step < 0 or not durable.path:
            return
        known = self.found
        if known is not None and (durable.generation, durable.step) <= (known.generation, known.step):
            return
        try:
            self.found = _checkpoint(catalogue.load(durable.path), ())
        except (OSError, ValueError) as error:
            log.warning("checkpoint cannot be read", extra={"error": str(error)})


def _checkpoint(found: catalogue.Found, notes: tuple[str, ...]) -> Checkpoint:
    skip = found.meta.get("skip")
    steps = tuple(s for s in skip if isinstance(s, int)) if isinstance(skip, list) else ()
    return Checkpoint(found.step, found.generation, found.world_size, str(found.path), tuple(notes), steps)
