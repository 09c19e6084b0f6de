"""Know which step's state is whole at this instant, and stop the writes while it is copied.

An optimizer's writes are between two marks in the device's queue. While the device has not reached the
first, the state before them is whole; once it has reached the second, the state after them is; between the
two no state is. It does not matter where the host is: in `optimizer.step()`, waiting for a loss, or a step
ahead.

On a CPU the device is always where the host is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.state.device import Device, QueueMark

POLL_S = 0.001  # between two looks while nothing is whole


@dataclass(slots=True)
class _QueuedWrites:
    """The writes that make `step + 1` out of `step`."""

    step: int
    before: list[QueueMark]  # each optimizer's first: they may be in streams of their own
    part: Any  # what the host has of `step`, None if it did not keep it
    after: list[QueueMark] = field(default_factory=list)
    queued: bool = False  # all of them are


@dataclass(frozen=True, slots=True)
class WholeState:
    """A state that is whole on the device.

    `part` is what the host kept of that step; None while the host's own objects are still of it.
    """

    step: int
    part: Any
    _writes: _QueuedWrites | None  # the writes that will end it, if any are queued
    _count: int


class WriteGate:
    """The thread of the script writes, others look. `device` says which marks it has reached."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._step = 0
        self._queued: deque[_QueuedWrites] = deque()
        self._count = 0  # writes ever begun
        self._looking = threading.Lock()
        self._may_write = threading.Lock()
        self._freezing = threading.Lock()
        self._is_frozen = False
        self.writing = False  # the host is between the first and the last write of a step

    # -- for the thread that writes

    def start(self, step: int) -> None:
        """The objects are those of `step`, and nothing is queued that writes them."""
        with self._looking:
            self._queued.clear()
            self._step = step

    def close(self, step: int, keep: Callable[[], Any] | None = None) -> None:
        """What is queued from now on makes `step + 1` out of `step`. Never returns once the gate is frozen.

        `keep` returns what the host has of `step`, to be copied later if the device is still before the
        writes then; None if that cannot be.
        """
        with self._may_write:
            part = keep() if keep is not None else None
            mark = self._device.mark()
            with self._looking:
                self._count += 1
                self._queued.append(_QueuedWrites(step, [mark], part))
                self.writing = True

    def before_more(self) -> None:
        """Mark that another optimizer's writes of this step follow, perhaps in another stream."""
        mark = self._device.mark()
        with self._looking:
            self._queued[-1].before.append(mark)

    def after_some(self) -> None:
        """Mark that an optimizer's writes have been queued, in the present stream."""
        mark = self._device.mark()
        with self._looking:
            if self.writing:
                self._queued[-1].after.append(mark)

    def open(self) -> None:
        """All writes of the step are queued, and the host's own objects are those of the next one."""
        mark = self._device.mark()
        with self._looking:
            last = self._queued[-1]
            last.after.append(mark)
            last.queued = True
            self.writing = False
            if not self._device.queues:
                self._advance()

    def keep_pace(self) -> None:
        """Wait until the device has done the step before the one that is being queued.

        So the host is a step ahead at most, which keeps the device busy, and what it holds of that step
        (numbers that are not judged, private state) is bounded.
        """
        with self._looking:
            before = [mark for each in self._queued if each.queued for mark in each.after]
        for mark in before:
            self._device.wait(mark)
        with self._looking:
            self._advance()

    # -- for threads that copy

    @property
    def frozen(self) -> bool:
        """True while no step may write."""
        return self._is_frozen

    def freeze(self, limit_s: float) -> bool:
        """Let no further step write; queued work is still done. A second call changes nothing.

        False when the script is within `close` for longer than the limit: a call into a device whose queue
        is full.
        """
        with self._freezing:
            if not self._is_frozen:
                self._is_frozen = self._may_write.acquire(timeout=limit_s)
            return self._is_frozen

    def thaw(self) -> None:
        """Let the script write again."""
        self._is_frozen = False
        self._may_write.release()

    def look(self) -> WholeState | None:
        """Return the state that is whole at this instant, None if none is."""
        with self._looking:
            self._advance()
            if not self._queued:
                return WholeState(self._step, None, None, self._count)
            first = self._queued[0]
            # On the host the objects are being written already; without a part they are not known.
            known = self._device.queues and first.part is not None
            if known and not self._begun(first):
                return WholeState(first.step, first.part, first, self._count)
            return None

    def whole(self, limit_s: float) -> WholeState | None:
        """Return the state that is whole, waiting for one up to `limit_s`."""
        give_up_at = time.monotonic() + limit_s
        while (found := self.look()) is None and time.monotonic() < give_up_at:
            time.sleep(POLL_S)
        return found

    def still(self, found: WholeState) -> bool:
        """Say whether a state that was whole has been whole all the time until now.

        Call it when a copy has ended: if the first write had begun before that, its mark was reached
        before the copy's mark, and a thread that sees the latter reached sees the former reached.
        """
        with self._looking:
            if found._writes is not None:
                return not self._begun(found._writes)
            return found._count == self._count

    def _begun(self, writes: _QueuedWrites) -> bool:
        """Say whether the device may have begun with some of them."""
        return any(map(self._device.reached, writes.before))

    def _advance(self) -> None:
        """Forget the writes that the device has done."""
        while self._queued:
            first = self._queued[0]
            if not first.queued or not all(map(self._device.reached, first.after)):
                return
            self._step = first.step + 1
            self._queued.popleft()
