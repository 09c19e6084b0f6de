"""When a snapshot becomes a checkpoint: at an interval while the group trains, and when one is asked for."""

from __future__ import annotations

from dataclasses import replace

from holdfast.messages import MemberOrder
from sidecar.holdings import Holdings
from sidecar.pages import Pages
from sidecar.saver import Saver

RETRY_S = 5.0  # after storage failed; training goes on meanwhile


class Checkpoints:
    """Decides what `saver` writes. What came of it is in `saver.durable`."""

    def __init__(self, member: str, holdings: Holdings, pages: Pages, saver: Saver) -> None:
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
        await self._save_newest(order)
        failed = bool(self._saver.durable.error)
        pause_s = min(RETRY_S, order.checkpoint_every_s) if failed else order.checkpoint_every_s
        self._next_at_s = now_s + pause_s
        return True

    async def _save_newest(self, order: MemberOrder) -> None:
        """Save the newest snapshot that the whole group has gone beyond: then all found it good.

        None whose state was changed after its commit.
        """
        ranks = self._pages.progress(order.generation)
        steps = [each.step for each in ranks]
        late = {step for each in ranks for step in each.late}
        for record in self._holdings.arena.records():
            if record.generation != order.generation or not steps or record.step >= max(steps):
                continue
            if record.step in late:
                continue
            durable = self._saver.durable
            if (record.step, record.generation) == (durable.step, durable.generation):
                return
            await self._saver.save(record, order.sources, self._meta(order), asked=0)
            if not self._saver.durable.error:
                return

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
