"""Refuse orders older than the newest one that this member has obeyed, even after the sidecar restarts.

The member also keeps the run's history from the orders. If the supervisor could not write to its journal, the
journal lacks some of that history. The member also keeps the number of the newest drill, so that the drill is
not repeated after a restart.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from holdfast.fileio import durable
from holdfast.protocol import codec
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import MAX_SKIPPED, KnownHistory, MemberOrder
from holdfast.snapshot import member_directory

log = logging.getLogger(__name__)

_MAX_BYTES = 4096
_MAX_HISTORY_BYTES = 1 << 20
_MAX_DRILLS_BYTES = 32

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, order=True)
class OrderVersion:
    """The age of an order: the epoch of the supervisor that sent it, and its generation."""

    epoch: int = 0
    generation: int = 0


def unreadable_start(text: str) -> OrderVersion | None:
    """Return the version of the unreadable order in `text` if it is an order to run; None otherwise."""
    try:
        found = json.loads(text)
        is_start = isinstance(found, dict) and found["do"] == "run"
        numbers = (found["epoch"], found["generation"]) if is_start else ()
    except (ValueError, RecursionError, KeyError):
        return None
    if not numbers or not all(type(each) is int for each in numbers):
        return None
    return OrderVersion(*numbers)


class OrderFence:
    """Refuses outdated orders, and keeps the run's history.

    `newest` is the version of the newest order that was obeyed, and `history` is the run's history as the
    orders state it. Both are also stored in files in the member's in-memory directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.newest = _read(directory / member_directory.OBEYED, OrderVersion, _MAX_BYTES)
        self.history = _read(directory / member_directory.TOLD, KnownHistory, _MAX_HISTORY_BYTES)

    def refusal(self, asked: OrderVersion) -> str:
        """Return why the member must refuse an order with version `asked`, or "" if it must obey it."""
        newest = self.newest
        if asked >= newest:
            return ""
        if asked.epoch < newest.epoch:
            return (
                f"order of epoch {asked.epoch} refused: a supervisor of epoch {newest.epoch} has taken over"
                " the run, so the sender of this order must end"
            )
        return (
            f"order of generation {asked.generation} refused: this member is already in generation"
            f" {newest.generation}"
        )

    def accept(self, asked: OrderVersion) -> None:
        """Refuse every order older than `asked` from now on, even after a restart."""
        if asked <= self.newest:
            return
        self.newest = asked
        # If this fails, the launcher still knows the epoch and reports it to the next sidecar.
        self._keep(member_directory.OBEYED, asked)

    def learn(self, order: MemberOrder) -> tuple[Lineage, ...]:
        """Keep the run's history from `order`, and return the lineage to use.

        If the supervisor's journal lacks its last lines, the order has an older generation and an incomplete
        lineage. The known lineage is then returned instead.
        """
        known = self.history
        if order.generation < known.generation:
            return known.lineage
        skip = order.launch.skip if order.launch is not None else known.skip
        history = KnownHistory(order.generation, order.lineage, skip[-MAX_SKIPPED:])
        if history != known:
            self.history = history
            self._keep(member_directory.TOLD, history)
        return order.lineage

    def _keep(self, name: str, what: Any) -> None:
        try:
            durable.replace_file(self._directory / name, json.dumps(asdict(what)).encode())
        except OSError as error:
            log.warning("newest order not saved", extra={"error": str(error)})


def _read(path: Path, kind: type[_T], most_bytes: int) -> _T:
    try:
        with open(path, "rb") as file:
            return codec.from_json(kind, json.loads(file.read(most_bytes)))
    except FileNotFoundError:
        return kind()
    except (OSError, ValueError, RecursionError) as error:
        log.warning("newest order not read", extra={"error": str(error)})
        return kind()


class CompletedDrills:
    """Keeps the number of the `newest` drill in a file, so that the drill is not repeated after a restart."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / member_directory.DRILLED
        self.newest = _read_drills(self._path)

    def remember(self, number: int) -> None:
        """Record a drill. Call this before carrying out the drill, because it may kill this process."""
        self.newest = number
        try:
            durable.replace_file(self._path, str(number).encode())
        except OSError as error:
            log.warning("newest drill not saved", extra={"error": str(error)})


def _read_drills(path: Path) -> int:
    try:
        with open(path, "rb") as file:
            return max(0, int(file.read(_MAX_DRILLS_BYTES)))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        log.warning("newest drill not read", extra={"error": str(error)})
        return 0
