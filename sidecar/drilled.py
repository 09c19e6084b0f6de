"""Which drills a member has carried out: none is carried out again by the sidecar that takes over."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from holdfast import durable

log = logging.getLogger(__name__)

FILE = "drilled"
_MAX_BYTES = 32


class Drilled:
    """`newest` is the number of the newest one. It lies in the member's own folder, in memory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self.newest = _read(self._path)

    def take(self, number: int) -> None:
        """Remember a drill, before anything of it is done."""
        self.newest = number
        temporary = durable.temporary_path(self._path.parent, self._path.name)
        try:
            try:
                temporary.write_text(str(number))
                os.replace(temporary, self._path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            log.warning("a drill is not remembered", extra={"error": str(error)})


def _read(path: Path) -> int:
    try:
        with open(path, "rb") as file:
            return max(0, int(file.read(_MAX_BYTES)))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        log.warning("the newest drill is not known", extra={"error": str(error)})
        return 0
