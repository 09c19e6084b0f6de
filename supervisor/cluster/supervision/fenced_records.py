"""One job's records under one supervisor, which may write them until another supervisor takes over."""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from supervisor.cluster.supervision.resource import SupervisionResource, Takeover
from supervisor.cluster.supervision.status_fields import decided
from supervisor.controller.records import CheckpointSource
from supervisor.kubernetes.errors import ApiError
from supervisor.store.journal import LastEntry
from supervisor.store.run_lead import MAX_EPOCH, Deposed, Lead
from supervisor.view.model import JobState, Policy, RunAction, View

SAVE_S = 5.0  # the limit for writing a decision; the job does not wait for a slow write to end
RAISE_S = 1.5  # the limit for taking a higher epoch, because a decision waits for it
RAISE_AGAIN_S = 2.0  # the time before a failed attempt is repeated; decisions in between do not wait
TERM_S = 0.05  # the time between two checks of the term, while it is unknown whether this process leads
MAX_UNSURE = 16  # how many claims of a new epoch to remember after their responses were lost


class SupervisionRecords:
    """The records of a job on a cluster: the state in its Supervision, and the checkpoints in storage."""

    def __init__(
        self,
        resource: SupervisionResource,
        found: Takeover,
        make_index: Callable[[Callable[[], object]], CheckpointSource],
        may_order: Callable[[], bool] = lambda: True,
    ) -> None:
        """Nothing is written while `may_order` returns False: see `Leadership.may_order`."""
        loop = asyncio.get_running_loop()
        self.lead = SupervisionLead(found.epoch, resource, loop, may_order)
        self.held = None
        if found.state is not None:
            self.held = LastEntry(found.state.memory, found.state.ledger, None, found.epoch - 1)
        self._make_index = make_index
        self._log = SupervisionLog(self.lead, loop)

    async def write(self, values: Mapping[str, Any]) -> None:
        """Set fields of the status other than decisions. Raises the exceptions of `SupervisionLead.store`."""
        await self.lead.store(values)

    def open_log(self) -> SupervisionLog:
        return self._log

    def checkpoints(self, changed: Callable[[], object]) -> CheckpointSource:
        return self._make_index(changed)


class SupervisionLead(Lead):
    """This supervisor's right to act on one job, until another supervisor takes over.

    `epoch` is always an epoch that this supervisor has written into the resource with a conditional write.
    """

    def __init__(
        self,
        epoch: int,
        resource: SupervisionResource,
        loop: asyncio.AbstractEventLoop,
        may_order: Callable[[], bool] = lambda: True,
    ) -> None:
        """`epoch` is the epoch of the takeover. `loop` runs the requests of `raise_above`."""
        super().__init__(epoch=epoch)
        self._may_order = may_order
        self.deposed: Deposed | None = None
        self._resource, self._loop = resource, loop
        self._unsure: tuple[tuple[int, str], ...] = ()  # epochs that may have been taken, with their claims
        self._failed_s = -RAISE_AGAIN_S  # when the last attempt to take an epoch failed, by CLOCK_MONOTONIC

    def depose(self) -> Deposed:
        """Record that another supervisor has taken over the job, and return the exception to raise."""
        self.deposed = Deposed(self.epoch, self.epoch + 1)
        return self.deposed

    @contextmanager
    def acting(self) -> Iterator[None]:
        if self.deposed is not None:
            raise self.deposed
        yield

    def raise_above(self, known: int) -> None:
        """Take an epoch above `known`, which was found in a member's report or a checkpoint.

        The epoch `known` may belong to a successor, and only the resource shows whether it does. This
        supervisor's epoch therefore remains unchanged until the API server has accepted the higher epoch.
        Call this in a thread other than the event loop's. Safe to repeat; for `RAISE_AGAIN_S` after a
        failure, calls do nothing.

        Raises:
            Deposed: Another supervisor has taken over the job.
            OSError: The API server has not accepted the epoch.
        """
        if known < self.epoch or known > MAX_EPOCH:
            return
        with self.acting():
            if time.monotonic() < self._failed_s + RAISE_AGAIN_S:
                return
            try:
                in_loop(lambda: self._claim(known + 1), self._loop, RAISE_S)
            except Deposed:
                self.depose()
                raise
            except OSError:
                self._failed_s = time.monotonic()
                raise

    async def store(self, values: Mapping[str, Any]) -> None:
        """Set fields of the status. Raises `Deposed` if another process has taken a newer epoch.

        After this process was suspended, this waits until it knows whether it still leads.
        """
        while not self._may_order():  # noqa: ASYNC110  it depends on a clock
            await asyncio.sleep(TERM_S)
        expected = self.epoch
        try:
            await self._resource.write(expected, values)
        except Deposed:
            if expected == self.epoch and not await self._adopt_landed_claim():
                raise
            await self._resource.write(self.epoch, values)

    async def _claim(self, epoch: int) -> None:
        """Write a higher epoch, with a claim that distinguishes it from a successor's epoch."""
        claim = secrets.token_hex(8)
        self._unsure = (*self._unsure, (epoch, claim))[-MAX_UNSURE:]
        await self.store({"epoch": epoch, "claim": claim})
        self.epoch, self._unsure = epoch, ()

    async def _adopt_landed_claim(self) -> bool:
        """Adopt a claim of this process whose response was lost. Return True if the resource contains one."""
        found = await self._resource.stored()
        if found not in self._unsure:
            return False
        self.epoch = found[0]
        self._unsure = tuple(each for each in self._unsure if each[0] > self.epoch)
        return True


class SupervisionLog:
    """Writes decisions into the resource from a thread other than the event loop's."""

    def __init__(self, lead: SupervisionLead, loop: asyncio.AbstractEventLoop) -> None:
        self._lead, self._loop = lead, loop

    def write(self, view: View, policy: Policy, action: RunAction, after: JobState, ledger: Any) -> None:
        """Store the job's state after a decision.

        Raises `OSError` if the state may not have been stored, and `Deposed` if another supervisor leads.
        """
        with self._lead.acting():
            values = decided(after, ledger, type(action).__name__, str(getattr(action, "why", "")))
            try:
                in_loop(lambda: self._lead.store(values), self._loop, SAVE_S)
            except Deposed:
                self._lead.depose()
                raise

    def close(self) -> None:
        """Do nothing, because each write is a separate request."""


def in_loop(
    work: Callable[[], Coroutine[Any, Any, None]], loop: asyncio.AbstractEventLoop, limit_s: float
) -> None:
    """Run `work` in `loop`, and wait for it in another thread.

    The coroutine is created in the loop. If it were created here, and the loop ended before the coroutine
    started, Python would warn that it was never awaited.

    Raises the exceptions of `work`, but an `ApiError` becomes an `OSError`. Also raises `OSError` if `work`
    takes longer than `limit_s`, or if the loop has ended.
    """
    outcome: concurrent.futures.Future[None] = concurrent.futures.Future()
    started: list[asyncio.Task[None]] = []

    def finish(task: asyncio.Task[None]) -> None:
        error = OSError("the request was cancelled") if task.cancelled() else task.exception()
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    def start() -> None:
        task = loop.create_task(work())
        task.add_done_callback(finish)
        started.append(task)

    def cancel() -> None:
        for task in started:
            task.cancel()

    try:
        loop.call_soon_threadsafe(start)
        outcome.result(limit_s)
    except concurrent.futures.TimeoutError:  # before Python 3.11, this differs from the built-in TimeoutError
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(cancel)
        raise OSError(f"the API server has not responded for {limit_s:g} s") from None
    except ApiError as error:
        raise OSError(str(error)) from None
    except RuntimeError:
        if loop.is_closed():
            raise OSError("this supervisor is ending") from None
        raise
