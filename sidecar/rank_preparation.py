"""Restore the states of a generation's ranks, then start the ranks; remember why this was not possible."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from holdfast.protocol.launcher_messages import LauncherOrder
from holdfast.protocol.member_messages import MAX_UNUSABLE, HeldSnapshot, MemberOrder
from sidecar.state.restore import NoFreeSlot, Restorer, StateUnavailable, StorageFailed, VolumeRefused

REPORTED_S = 0.05  # the time in which the launcher reports that it has received the order to start ranks


@dataclass(frozen=True, slots=True)
class PrepareFailure:
    """Why this member could not prepare the ranks of a generation. `error` is "" if it succeeded."""

    error: str = ""
    generation: int = 0
    is_occupied: bool = False  # no slot, memory or storage was available; the state itself may be good
    is_refused_by_volume: bool = False


class RankPreparation:
    """Prepares the ranks of one generation after another.

    The attributes describe failures: `failure` is the last one, and `unusable` contains the newest snapshots
    that could not be restored.
    """

    def __init__(
        self,
        restorer: Restorer,
        current_order: Callable[[], MemberOrder],
        end_ranks_before: Callable[[int], None],
        start: Callable[[LauncherOrder], None],
    ) -> None:
        """`end_ranks_before` ends the ranks of older generations, whose slots are then free.

        `start` sends the order to start ranks to the launcher.
        """
        self._restorer = restorer
        self._current_order = current_order
        self._end_ranks_before = end_ranks_before
        self._start = start
        self.failure = PrepareFailure()
        self.unusable: tuple[HeldSnapshot, ...] = ()
        self._restored = 0  # the newest generation whose local copies were removed after all ranks restored
        self._room_bytes = 0  # the size of the snapshot for which memory was last allocated in advance

    async def start_ranks(self, order: MemberOrder) -> None:
        """Restore the states that `order` names and start its ranks, unless a newer order has replaced it."""
        try:
            free_a_slot = partial(self._end_ranks_before, order.generation)
            launch, ranks = await self._restorer.prepare(order, free_a_slot)
        except StateUnavailable as error:
            if error.slot is not None:
                self.unusable = (*self.unusable, error.slot)[-MAX_UNUSABLE:]
            if self._current_order().generation == order.generation:
                is_refused = isinstance(error, VolumeRefused)
                is_occupied = is_refused or isinstance(error, NoFreeSlot | StorageFailed)
                self.failure = PrepareFailure(str(error), order.generation, is_occupied, is_refused)
            return
        current = self._current_order()
        if current.generation == order.generation and current.do == "run":
            self._start(LauncherOrder("run", order.generation, launch, ranks))
            # Give the launcher time to report its new state. Otherwise the order would be sent twice.
            await asyncio.sleep(REPORTED_S)

    def refuse(self, generation: int, error: str) -> None:
        """Record that the ranks of `generation` cannot be started, although their state may be good."""
        self.failure = PrepareFailure(error, generation, is_occupied=True)

    def forget_error(self) -> None:
        """Forget why an older generation could not be prepared."""
        self.failure = replace(self.failure, error="")

    def holds_copies(self, generation: int) -> bool:
        """Return True unless the local copies for this generation's ranks have been removed."""
        return self._restored < generation

    async def forget_copies(self, generation: int) -> None:
        """Remove the local copies of the states from which all ranks of `generation` have started."""
        await self._restorer.forget_copies()
        self._restored = generation

    def lacks_room(self, total_bytes: int) -> bool:
        """Return True if memory for a snapshot of this size should be preallocated."""
        return bool(total_bytes) and total_bytes != self._room_bytes

    async def preallocate(self, total_bytes: int) -> None:
        """Preallocate memory for a snapshot that may have to be fetched, which halves the time of a fetch."""
        self._room_bytes = total_bytes
        await self._restorer.preallocate(total_bytes, lambda: self._current_order().do == "idle")
