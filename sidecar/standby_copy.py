"""Copy the group's newest snapshot to a standby while the group trains.

A member that takes over ranks fetches their state from a member that has it. If all members with ranks are on
one node, no member has it once the node is lost. So a standby on another node keeps a copy that is some steps
old. The supervisor decides when this is needed and which member to copy from (`MemberOrder.sources` of
"idle").

The copy must not slow down the training: the holder limits its rate (`sidecar.state.peers`), and this member
rests for longer than a copy takes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from holdfast.protocol.lineage import valid
from holdfast.protocol.member_messages import HeldSnapshot, MemberOrder, StateSource
from holdfast.snapshot.arena import ArenaBusy
from sidecar.state.holdings import HeldStates, Holdings
from sidecar.state.peers import PeerClient
from sidecar.state.snapshot_fetch import FetchFailed, FetchManner

log = logging.getLogger(__name__)

MIN_APART_S = 5.0  # the minimum time between two copies
REST = 3.0  # after a copy, this member rests for this many times its duration


class StandbyCopier:
    """Keeps a copy of the group's state on this member while its order asks for one."""

    def __init__(
        self,
        holdings: Holdings,
        peers: PeerClient,
        order: Callable[[], MemberOrder],
        changed: Callable[[], None],
    ) -> None:
        """`order` returns the newest order. `changed` is called when there is a new copy to report."""
        self._holdings, self._peers = holdings, peers
        self._order, self._changed = order, changed
        self._failed = ""  # why the last copy failed

    async def run(self) -> None:
        """Copy until cancelled."""
        while True:
            began_s = time.monotonic()
            await self.copy()
            await asyncio.sleep(max(MIN_APART_S, REST * (time.monotonic() - began_s)))

    async def copy(self) -> None:
        """Copy the newest state that this member does not have yet, if its order asks for it."""
        order = self._order()
        if order.do != "idle" or not order.sources:
            return
        try:
            await self._copy(order)
            self._failed = ""
        except (FetchFailed, ArenaBusy, OSError) as error:  # the next attempt may succeed
            if str(error) != self._failed:
                log.info("state not copied", extra={"error": str(error)})
            self._failed = str(error)

    async def _copy(self, order: MemberOrder) -> None:
        """Copy the private states, then the snapshot. Raises `FetchFailed`, `ArenaBusy` or `OSError`."""
        urls = dict.fromkeys(each.url for each in order.sources)
        held = {url: await self._peers.held(url) for url in urls}
        found = newest_copy(held, order, self._newest(order))
        if found is None:
            return
        source, privates = found
        blobs = {each: await self._peers.private(each) for each in privates}
        manner = FetchManner("spare", 1, lambda: self._is_wanted(order))
        await self._peers.snapshot(source, manner=manner)
        keys = frozenset((each.rank, each.generation, each.step) for each in privates)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._holdings.forget_restored, keys)
        for each, blob in blobs.items():
            key = (each.rank, each.generation, each.step)
            await loop.run_in_executor(None, self._holdings.keep_restored, *key, blob)
        if self._is_wanted(order):  # otherwise ranks may have started here, which change their states
            self._changed()

    def _is_wanted(self, order: MemberOrder) -> bool:
        """Return False once this member may need its slots for something else."""
        now = self._order()
        return (now.do, now.generation, now.epoch) == (order.do, order.generation, order.epoch)

    def _newest(self, order: MemberOrder) -> tuple[int, int]:
        """Return the age of the newest complete copy that this member has; (-1, -1) if it has none."""
        own = {"": self._holdings.states()}
        ranks = (replace(each, url="") for each in order.sources)
        found = newest_copy(own, replace(order, sources=tuple(ranks)), (-1, -1))
        return (-1, -1) if found is None else (found[0].step, found[0].generation)


def newest_copy(
    held: Mapping[str, HeldStates], order: MemberOrder, newer_than: tuple[int, int]
) -> tuple[StateSource, tuple[StateSource, ...]] | None:
    """Return the sources of the group's newest complete state. `held` maps each URL to what it holds.

    The first source has the snapshot, and the others have the ranks' private states. A state is complete if
    the private states of all ranks are final. The result is None if no complete state is newer than
    `newer_than`, which consists of a step and a generation.
    """
    ranks = [
        rank for each in order.sources if each.rank >= 0 for rank in range(each.rank, each.rank + each.count)
    ]
    snapshots = {slot: each.url for each in order.sources if each.rank < 0 for slot in held[each.url].slots}
    for slot in sorted(snapshots, key=lambda each: (each.step, each.generation), reverse=True):
        if (slot.step, slot.generation) <= newer_than:
            return None
        if not valid(slot.generation, slot.step, order.lineage):
            continue
        privates = _privates(held, order, slot)
        if all(rank in privates for rank in ranks):
            source = StateSource(snapshots[slot], -1, slot.generation, slot.step)
            return source, tuple(privates[rank] for rank in ranks)
    return None


def _privates(
    held: Mapping[str, HeldStates], order: MemberOrder, slot: HeldSnapshot
) -> dict[int, StateSource]:
    """Return the source of each rank's newest final private state that belongs to the snapshot."""
    found: dict[int, StateSource] = {}
    for url, states in held.items():
        for each in states.privates:
            if (
                each.step != slot.step
                or not each.final
                or not valid(each.generation, each.step, order.lineage)
            ):
                continue
            known = found.get(each.rank)
            if known is None or known.generation < each.generation:
                found[each.rank] = StateSource(url, each.rank, each.generation, each.step)
    return found
