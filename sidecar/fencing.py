"""Refuse orders that are older than one that this member has obeyed, also after the sidecar was restarted.

The member keeps what the orders said of the run's history, too: the journal lacks it if nothing could be
written. And it keeps the number of the newest drill, so that a restarted sidecar carries out none again.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from holdfast.fileio import durable
from holdfast.protocol import codec
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import KnownHistory, MemberOrder
from holdfast.snapshot import member_directory

log = logging.getLogger(__name__)

_MAX_BYTES = 4096
_MAX_HISTORY_BYTES = 1 << 20
_MAX_DRILLS_BYTES = 32

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, order=True)
class OrderVersion:
    """The epoch of a supervisor, and the generation of its order."""

    epoch: int = 0
    generation: int = 0


class OrderFence:
    """Compares orders with `newest`, and keeps in `history` what they said of the run's history.

    Both are files in the member's own folder, in memory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.newest = _read(directory / member_directory.OBEYED, OrderVersion, _MAX_BYTES)
        self.history = _read(directory / member_directory.TOLD, KnownHistory, _MAX_HISTORY_BYTES)

    def refusal(self, asked: OrderVersion) -> str:
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

    def take(self, asked: OrderVersion) -> None:
        """Obey nothing older than `asked` from now on, also after a restart."""
        if asked <= self.newest:
            return
        self.newest = asked
        # The launcher knows the epoch too, and reports it to the next sidecar.
        self._keep(member_directory.OBEYED, asked)

    def learn(self, order: MemberOrder) -> tuple[Lineage, ...]:
        """Keep what `order` says of the run's history, and return the lineage that counts.

        A supervisor that lost track has an older generation and knows less: its lineage does not count.
        """
        known = self.history
        if order.generation < known.generation:
            return known.lineage
        skip = order.launch.skip if order.launch is not None else known.skip
        history = KnownHistory(order.generation, order.lineage, skip)
        if history != known:
            self.history = history
            self._keep(member_directory.TOLD, history)
        return order.lineage

    def _keep(self, name: str, what: Any) -> None:
        temporary = durable.temporary_path(self._directory, name)
        try:
            try:
                temporary.write_text(json.dumps(asdict(what)))
                os.replace(temporary, self._directory / name)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            log.warning("the newest order is not kept", extra={"error": str(error)})


def _read(path: Path, kind: type[_T], most_bytes: int) -> _T:
    try:
        with open(path, "rb") as file:
            return codec.from_json(kind, json.loads(file.read(most_bytes)))
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError, RecursionError) as error:
        log.warning("the newest order is not known", extra={"error": str(error)})
        return kind()


class CompletedDrills:
    """Keeps the number of the newest drill, `newest`, in the member's own folder, in memory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / member_directory.DRILLED
        self.newest = _read_drills(self._path)

    def take(self, number: int) -> None:
        """Remember a drill, before it is carried out."""
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


def _read_drills(path: Path) -> int:
    try:
        with open(path, "rb") as file:
            return max(0, int(file.read(_MAX_DRILLS_BYTES)))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        log.warning("the newest drill is not known", extra={"error": str(error)})
        return 0
