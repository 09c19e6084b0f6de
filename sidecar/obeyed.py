"""Whose orders a member obeys: those of the highest epoch and generation that it has ever seen."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast import durable, wire

log = logging.getLogger(__name__)

FILE = "obeyed.json"
_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True, order=True)
class Standing:
    """The epoch of a supervisor, and a generation of its."""

    epoch: int = 0
    generation: int = 0


class Obeyed:
    """`newest` is what an order is compared with. It lies in the member's own folder, in memory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self.newest = _read(self._path)

    def refusal(self, asked: Standing) -> str:
        """Return why an order of `asked` must not be obeyed, "" when it may."""
        newest = self.newest
        if asked >= newest:
            return ""
        if asked.epoch < newest.epoch:
            return (
                f"order of epoch {asked.epoch} refused: a supervisor of epoch {newest.epoch} has taken the"
                " run over, and the one that sent it is to end"
            )
        return (
            f"order of generation {asked.generation} refused: generation {newest.generation} is here already"
        )

    def take(self, asked: Standing) -> None:
        """Obey nothing older than `asked` from now on, also after a restart."""
        if asked <= self.newest:
            return
        self.newest = asked
        temporary = durable.temporary_path(self._path.parent, self._path.name)
        try:
            try:
                temporary.write_text(json.dumps(asdict(asked)))
                os.replace(temporary, self._path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:  # the launcher knows the epoch too, and tells it to the next sidecar
            log.warning("the newest order is not kept", extra={"error": str(error)})


def _read(path: Path) -> Standing:
    try:
        with open(path, "rb") as file:
            return wire.from_json(Standing, json.loads(file.read(_MAX_BYTES)))
    except FileNotFoundError:
        return Standing()
    except (OSError, ValueError, RecursionError) as error:
        log.warning("the newest order is not known", extra={"error": str(error)})
        return Standing()
