"""Determine which step's state is complete at this instant, and block further writes while it is copied.

An optimizer's writes are between two marks in the device's queue. (In CUDA's terms, a mark is an event, and a
queue is a stream.) Until the device reaches the first mark, the state before the writes is complete. Once it
has reached the second mark, the state after the writes is complete. Between the two marks, neither state is
complete. The host may be anywhere: in `optimizer.step()`, waiting for a loss, or a step ahead.

On a CPU, the device is always where the host is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from holdfast.state.device import Device, QueueMark

POLL_S = 0.001  # the interval between two checks while no state is whole


@dataclass(slots=True)
class _QueuedWrites:
    """The writes that turn the state of `step` into the state of `step + 1`."""

    step: int
    before: list[QueueMark]  # a mark before the writes of each optimizer, because streams may differ
    part: Any  # the host's part of the state of `step`; None if it was not kept
    after: list[QueueMark] = field(default_factory=list)
    queued: bool = False  # whether all the writes are in the queue


@dataclass(frozen=True, slots=True)
class WholeState:
    """A state that is whole on the device.

    `part` is the host's copy of its own part of that state. It is None while the host's objects still have
    that part.
    """

    step: int
    part: Any
    _writes: _QueuedWrites | None  # the queued writes that will overwrite it, if any
    _count: int


class WriteGate:
    """Tracks one rank's writes. The script's thread reports them; other threads ask which state is whole."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._step = 0
        self._queued: deque[_QueuedWrites] = deque()
        self._count = 0  # the number of steps whose writes have begun
        self._queue_lock = threading.Lock()
        self._may_write = threading.Lock()
        self._freezing = threading.Lock()
        self._is_frozen = False
        self.writing = False  # True while the host is between the first and the last write of a step

    # -- for the thread that writes

    def start(self, step: int) -> None:
        """Start with the state of `step` in the objects and without writes in the queue."""
        with self._queue_lock:
            self._queued.clear()
            self._step = step

    def begin_writes(self, step: int, keep: Callable[[], Any] | None = None) -> None:
        """Mark the start of the writes that turn `step` into `step + 1`. Never returns if the gate is frozen.

        `keep` returns a copy of the host's part of the state of `step`, or None if it cannot be kept. With
        this copy, the state of `step` remains whole until the device reaches the writes.
        """
        with self._may_write:
            part = keep() if keep is not None else None
            mark = self._device.mark()
            with self._queue_lock:
                self._count += 1
                self._queued.append(_QueuedWrites(step, [mark], part))
                self.writing = True

    def begin_more_writes(self) -> None:
        """Mark the start of another optimizer's writes in this step, possibly in another stream."""
        mark = self._device.mark()
        with self._queue_lock:
            self._queued[-1].before.append(mark)

    def end_some_writes(self) -> None:
        """Mark that an optimizer's writes have been queued in the current stream."""
        mark = self._device.mark()
        with self._queue_lock:
            if self.writing:
                self._queued[-1].after.append(mark)

    def end_writes(self) -> None:
        """Mark the end of the step's writes.

        At this point, all writes are queued, and the host's objects belong to the next step.
        """
        mark = self._device.mark()
        with self._queue_lock:
            last = self._queued[-1]
            last.after.append(mark)
            last.queued = True
            self.writing = False
            if not self._device.queues:
                self._forget_completed()

    def keep_pace(self) -> None:
        """Wait until the device has completed the step before the one that is being queued.

        This keeps the host at most one step ahead, which is enough to keep the device busy and limits what
        the host must keep for queued steps (unchecked numbers, private state).
        """
        with self._queue_lock:
            before = [mark for each in self._queued if each.queued for mark in each.after]
        for mark in before:
            self._device.wait(mark)
        with self._queue_lock:
            self._forget_completed()

    # -- for threads that copy

    @property
    def frozen(self) -> bool:
        """True if the script cannot begin the writes of another step."""
        return self._is_frozen

    def freeze(self, limit_s: float) -> bool:
        """Block the writes of further steps. The device still completes the queued work. Idempotent.

        Returns False if the script remains inside `begin_writes` for longer than the limit, for example
        because the device's queue is full.
        """
        with self._freezing:
            if not self._is_frozen:
                self._is_frozen = self._may_write.acquire(timeout=limit_s)
            return self._is_frozen

    def whole_state(self) -> WholeState | None:
        """Return the state that is whole at this instant; None if no state is whole."""
        with self._queue_lock:
            step, first = self._step, None
            for writes in self._queued:
                if not self._completed(writes):
                    first = writes
                    break
                step = writes.step + 1
            if first is None:
                return WholeState(step, None, None, self._count)
            # On a host, the optimizer may already be writing the objects. On a device, the state is usable
            # only with a copy of the host's part.
            known = self._device.queues and first.part is not None
            if known and not self._begun(first):
                return WholeState(first.step, first.part, first, self._count)
            return None

    def wait_for_whole_state(self, limit_s: float) -> WholeState | None:
        """Return the state that is whole, after waiting up to `limit_s` for one; None if there is none."""
        give_up_at = time.monotonic() + limit_s
        while (found := self.whole_state()) is None and time.monotonic() < give_up_at:
            time.sleep(POLL_S)
        return found

    def is_still_whole(self, found: WholeState) -> bool:
        """Return True if this state has remained whole until now.

        Call this after a copy of the state has ended. If the first write began before the copy ended, the
        device reached the mark of the write before the mark of the copy. So a thread that finds the copy's
        mark reached also finds the write's mark reached.
        """
        with self._queue_lock:
            if found._writes is not None:
                return not self._begun(found._writes)
            return found._count == self._count

    def _begun(self, writes: _QueuedWrites) -> bool:
        """Return True if the device may have begun any of the writes."""
        return any(map(self._device.reached, writes.before))

    def _completed(self, writes: _QueuedWrites) -> bool:
        """Return True if all of the step's writes are in the queue, and the device has completed them."""
        return writes.queued and all(map(self._device.reached, writes.after))

    def _forget_completed(self) -> None:
        """Remove from the queue the steps whose writes the device has completed."""
        while self._queued and self._completed(self._queued[0]):
            self._step = self._queued.popleft().step + 1
