"""Publish the status of a run, and write its summary into the Supervision of its job."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

from supervisor.cluster.missed.notes import MissedNotes
from supervisor.cluster.supervision import status_fields
from supervisor.cluster.supervision.fenced_records import SupervisionRecords
from supervisor.controller.supervised_run import SupervisedRun
from supervisor.kubernetes.errors import ApiError, InvalidObject
from supervisor.store.run_lead import Deposed

log = logging.getLogger(__name__)

RETRY_S = 2.0  # the time before a failed request to the API server is retried
SUMMARY_S = 5.0  # the time between two writes of the summary while the phase does not change
# the limit for all jobs together; with more than 80 jobs, the time between two writes grows
SUMMARIES_PER_S = 16.0
RARELY_S = 15.0  # the longest time between two writes: half the age at which commands call a status outdated
LARGE = 64  # the number of members above which a summary is encoded in a thread
SPREAD = 0.2  # the time between two writes varies randomly by this fraction
SPACING_S = 0.5  # the time between two statuses while members connect one after another
SPACING_OF_MEMBER_S = 0.002  # the same, per member of a large job, whose status takes 50 us per member


class RunSummary:
    """The summary of one run for users. Call `note_published` after each status that the run publishes."""

    def __init__(
        self,
        run: SupervisedRun,
        records: SupervisionRecords,
        jobs: Callable[[], int],
        standbys: Callable[[], Mapping[str, Any]] = dict,
        missed: MissedNotes | None = None,
    ) -> None:
        """`jobs` returns the number of all jobs that this process supervises.

        `standbys` returns what users see of the standby pods; {} if there is nothing to show. `missed`
        contains what they see of pods that the webhook missed.
        """
        self._run, self._records, self._jobs, self._standbys = run, records, jobs, standbys
        self._missed = missed or MissedNotes()
        self._shown: tuple[str, bool] | None = None  # the last status's phase, and whether it was settled
        self._due = asyncio.Event()  # set when the phase has changed since the last summary

    async def announce(self) -> None:
        """Replace the previous run's end with this run's start in the resource. Raises `Deposed`."""
        try:
            await self._records.write(status_fields.announcement(self._run.memory))
        except (ApiError, OSError) as error:
            log.info("new run not announced", extra={"error": str(error)})

    async def publish_changes(self) -> None:
        """Publish the status whenever a sidecar connects or disconnects. Each decision also publishes it."""
        run = self._run
        while True:
            await run.members_changed.wait()
            run.members_changed.clear()
            run.publish()
            await asyncio.sleep(max(SPACING_S, SPACING_OF_MEMBER_S * len(run.existed)))

    def note_published(self) -> bool:
        """Request an immediate write of the summary if the phase has changed. Return True if it has."""
        shown = (self._run.memory.phase, self._run.memory.settled)
        if shown == self._shown:
            return False
        self._shown = shown
        self._due.set()
        return True

    async def write_regularly(self) -> None:
        """Write the summary when it is due. Random intervals keep jobs from writing simultaneously."""
        while True:
            interval_s = max(SUMMARY_S, min(self._jobs() / SUMMARIES_PER_S, RARELY_S))
            due_s = interval_s * random.uniform(1 - SPREAD, 1 + SPREAD)
            try:
                await asyncio.wait_for(self._due.wait(), due_s)
            except asyncio.TimeoutError:
                self._run.publish()
            self._due.clear()
            await self._write()

    async def _write(self) -> None:
        """Write the summary for users into the resource. Failures are only logged. Raises `Deposed`."""
        try:
            if len(self._run.existed) < LARGE:
                shown = self._fields()
            else:  # the status of thousands of ranks takes a tenth of a second to encode
                shown = await asyncio.to_thread(self._fields)
            await self._records.write(shown)
        except Deposed:
            self._records.lead.depose()
            raise
        except (ApiError, OSError) as error:
            log.info("summary not written", extra={"error": str(error)})

    def _fields(self) -> dict[str, Any]:
        publisher = self._run.publisher
        incidents = [self._missed.incident(each) for each in publisher.run.incidents()]
        return status_fields.summary(self._missed.status(publisher.published), incidents, self._standbys())

    async def record_end(self) -> None:
        """Write the last state and the summary, and retry until they are stored. Raises `Deposed`.

        Without the last state, the next supervisor would wait for the members of a run that has ended, and
        would then treat them as lost. The summary is only for users, so it is omitted if the API server
        refuses it.
        """
        run = self._run
        state = status_fields.end(run.memory, run.bookkeeping.ledger.snapshot())
        shown = self._fields()
        while True:
            try:
                await self._records.write({**shown, **state})
                return
            except Deposed:
                self._records.lead.depose()
                raise
            except InvalidObject as error:  # a retry would be refused as well
                log.error("end of the run refused", extra={"error": str(error)})
                if not shown:
                    return
                shown = {}
            except (ApiError, OSError) as error:
                log.warning("end of the run not recorded yet", extra={"error": str(error)})
                await asyncio.sleep(RETRY_S)
