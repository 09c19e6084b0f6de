"""Write a job's decisions to its log before they are carried out, without stalling the job.

Full or unresponsive storage must not keep the group from training, so a decision waits at most `JOURNAL_S`
for its line to be written. Losing a line does no lasting harm, because each line contains the whole state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from holdfast.fileio.storage_thread import StorageThread, Unresponsive
from holdfast.process import event_loop
from supervisor.decision import resume_point
from supervisor.store import journal
from supervisor.view.model import JobState, Policy, RunAction, View, Wait

log = logging.getLogger(__name__)

JOURNAL_S = 2.0  # how long a decision waits for its line before it is carried out anyway


class DecisionLog(Protocol):
    """Stores decisions for the next supervisor, which reads the newest one. For example, `journal.Journal`.

    Its methods may block, so `JournalWriter` calls them in a thread.
    """

    def write(self, view: View, policy: Policy, action: RunAction, after: JobState, ledger: Any) -> None:
        """Store one decision. Raises `OSError` if it is not stored, `Deposed` if another supervisor leads."""

    def close(self) -> None:
        """Release the resources of the log."""


class JournalWriter:
    """Writes one job's decisions in a thread, in order."""

    def __init__(self, decisions: DecisionLog, held: JobState, failed: Callable[[str], None]) -> None:
        """Write to `decisions`, whose newest line holds the state `held`.

        `failed` is called on the event loop with the reason why the newest line is not stored, or with "" if
        it is stored.
        """
        self.thread = StorageThread("journal")
        self.decisions = decisions
        self._written = held  # the newest state that was submitted
        self._submitted_s = 0.0  # when it was submitted
        self._line: Future[None] | None = None  # completes when the newest line has been written
        self._failed = failed
        self.error = ""  # why the newest line is not stored, as far as known

    async def write(
        self, view: View, policy: Policy, action: RunAction, after: JobState, ledger: Any
    ) -> None:
        """Write a decision. Return within `JOURNAL_S`, even if it is not written by then.

        During the wait, the event loop continues to serve the members and the keeper. Raises `Deposed` if
        another supervisor has taken over.
        """
        try:
            work = self._submit(view, policy, action, after, ledger)
        except OSError as error:  # no thread can be started
            self._report(str(error))
            log.error("journal not written", extra={"error": str(error)})
            return
        try:
            if self.thread.busy_s > JOURNAL_S:
                raise Unresponsive(JOURNAL_S)
            await event_loop.result_of(work, JOURNAL_S)
            self._report("")
        except OSError as error:
            self._report(str(error))
            log.error("journal not written", extra={"error": str(error)})
            work.add_done_callback(partial(_call_in_loop, asyncio.get_running_loop(), self._written_late))

    def write_without_decision(
        self, view: View, policy: Policy, action: Wait, memory: JobState, ledger: Callable[[], Any]
    ) -> None:
        """Submit a line if the log needs one although no decision is due. Does not block the event loop.

        There are two such cases. When a member holds a state for the first time, the log must record this.
        Without the record, a successor would start from scratch if the supervisor and the members were lost.
        In addition, a failed write is retried every `journal.RETRY_S`, because the next decision may be hours
        away.
        """
        first_held = resume_point.has_saved_state(memory) and not resume_point.has_saved_state(self._written)
        retry = self.error and time.monotonic() - self._submitted_s >= journal.RETRY_S
        if not (first_held or retry) or self.thread.busy_s > JOURNAL_S:
            return
        with suppress(OSError):
            work = self._submit(view, policy, action, memory, ledger())
            work.add_done_callback(partial(_call_in_loop, asyncio.get_running_loop(), self._written_late))

    def close(self) -> None:
        """Close the log after all submitted lines are written."""
        with suppress(OSError):  # no thread can be started, so there is nothing to wait for
            self.thread.submit(self.decisions.close)

    def _submit(
        self, view: View, policy: Policy, action: RunAction, after: JobState, ledger: Any
    ) -> Future[None]:
        work = self.thread.submit(lambda: self.decisions.write(view, policy, action, after, ledger), "line")
        self._line, self._written, self._submitted_s = work, after, time.monotonic()
        return work

    def _written_late(self, work: Future[None]) -> None:
        if work is not self._line:
            return
        error = work.exception()
        if error is None:
            self._report("")
        elif isinstance(error, OSError):
            self._report(str(error))

    def _report(self, error: str) -> None:
        self.error = error
        self._failed(error)


def _call_in_loop(
    loop: asyncio.AbstractEventLoop, call: Callable[[Future[None]], None], work: Future[None]
) -> None:
    """Call `call(work)` in `loop` from another thread. Does nothing if the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, work)
