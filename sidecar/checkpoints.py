"""When a snapshot becomes a checkpoint: at an interval while the group trains, and when one is asked for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from holdfast.arena import Gone, Record
from holdfast.messages import MemberOrder
from sidecar.holdings import Holdings
from sidecar.pages import Pages
from sidecar.saver import Saver

RETRY_S = 5.0  # after storage failed, or the supervisor did not answer; training goes on meanwhile
ANSWER_S = 5.0  # for the supervisor to say whether a snapshot is good: it hears of all ranks each second


class Checkpoints:
    """Decides what `saver` writes. What came of it is in `saver.durable`."""

    def __init__(
        self,
        member: str,
        holdings: Holdings,
        pages: Pages,
        saver: Saver,
        ask: Callable[[], None] = lambda: None,
    ) -> None:
        """`ask` is called when `publishing` has changed, which the supervisor answers: see `answered`."""
        self.publishing = -1
        self._ask = ask
        self._order = MemberOrder("idle", 0)  # the newest
        self._answer = asyncio.Event()
        self._member = member
        self._holdings = holdings
        self._pages = pages
        self._saver = saver
        self._next_at_s = 0.0  # 0: the interval has not begun

    async def when_due(self, order: MemberOrder, now_s: float) -> bool:
        """Save the newest good snapshot if the interval is over. False when there was nothing to do yet.

        The first interval begins with the first call. After a failure the next one is shorter.
        """
        if order.do != "run" or order.checkpoint_every_s <= 0:
            return False
        if self._next_at_s == 0.0:
            self._next_at_s = now_s + order.checkpoint_every_s
        if now_s < self._next_at_s:
            return False
        answered = await self._save_newest(order)
        failed = bool(self._saver.durable.error) or not answered
        pause_s = min(RETRY_S, order.checkpoint_every_s) if failed else order.checkpoint_every_s
        self._next_at_s = now_s + pause_s
        return True

    def answered(self, order: MemberOrder) -> None:
        """Take note of the newest order: it tells of ranks that this member does not have."""
        self._order = order
        self._answer.set()

    async def _save_newest(self, order: MemberOrder) -> bool:
        """Save the newest snapshot that the whole group has gone beyond: then all found it good.

        None whose state was changed after its commit. False when it is not known whether that is so, and
        while another checkpoint is written: with a slot pinned for each nothing could be copied or fetched.
        """
        if self._saver.busy:
            return False
        ranks = self._pages.progress(order.generation)
        steps = [each.step for each in ranks]
        late = {step for each in ranks for step in each.late} | self._void(order)
        for record in self._holdings.arena.records():
            if record.generation != order.generation or not steps or record.step >= max(steps):
                continue
            if record.step in late:
                continue
            durable = self._saver.durable
            if (record.step, record.generation) == (durable.step, durable.generation):
                return True
            try:
                async with self._holdings.pinned(record):
                    good = await self._is_good(record, len(ranks))
                    if good and self._saver.busy:
                        return False
                    if good:
                        await self._saver.save(record, order.sources, self._meta(order), asked=0)
            except (Gone, OSError):
                continue
            if good is None:
                return False
            if good and not self._saver.durable.error:
                return True
        return True

    async def _is_good(self, record: Record, ranks: int) -> bool | None:
        """Say whether no rank has changed or may yet change the state of that step; None: nobody knows.

        This member knows it of its own `ranks`, and the supervisor of those of the other members.
        """
        if ranks >= record.world_size:
            found = self._pages.progress(record.generation)
            if any(record.step in each.late for each in found):
                return False
            return all(each.step > record.step for each in found) or None
        give_up_at = time.monotonic() + ANSWER_S
        self.publishing = record.step
        self._ask()
        try:
            while (left_s := give_up_at - time.monotonic()) > 0:
                self._answer.clear()
                order = self._order
                if order.do not in ("run", "secure") or order.generation != record.generation:
                    return None
                if record.step in self._void(order):
                    return False
                if order.good == record.step:
                    return True
                try:
                    await asyncio.wait_for(self._answer.wait(), left_s)
                except asyncio.TimeoutError:
                    break
        finally:
            self.publishing = -1
            self._ask()
        return None

    def _void(self, order: MemberOrder) -> set[int]:
        newest = self._order if self._order.generation == order.generation else order
        return {*order.void, *newest.void}

    async def asked(self, order: MemberOrder) -> None:
        """Answer the request with the number `order.save`; the answer carries it."""
        record = self._holdings.record(order.save_generation, order.save_step)
        if record is None and order.do == "run":  # a newer one has taken its place: that is as good
            self._saver.durable = replace(self._saver.durable, asked=order.save)
            return
        if record is None:
            why = f"the snapshot of step {order.save_step} is not here"
            self._saver.durable = replace(self._saver.durable, error=why, asked=order.save)
            return
        await self._saver.save(record, order.sources, self._meta(order), asked=order.save)

    def _meta(self, order: MemberOrder) -> dict[str, object]:
        skip = list(order.launch.skip) if order.launch else []
        return {"skip": skip, "member": self._member}
