"""Publish a run's status and its incidents to files in the run's directory, to the API and to the metrics.

A status is built and published once per tick, after every decision, and whenever a sidecar connects or
disconnects. Clients of the API and readers of status.json get the last published status. Reading it changes
nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from holdfast.fileio.storage_thread import StorageThread
from supervisor.observability import status
from supervisor.observability.bookkeeping import Bookkeeping
from supervisor.observability.metrics import Metrics
from supervisor.store.run_lead import Deposed, Lead
from supervisor.view.model import Policy, View
from supervisor.view.slow_ranks import SlowRank, find_slow_ranks

log = logging.getLogger(__name__)

MAX_UNWRITTEN = 64  # unwritten incidents to keep for another attempt

# The fields to take over from a predecessor's status, with their types in JSON.
_CARRIED = {"step": int, "secured_step": int, "total_steps": int, "own_state": bool, "loss": float}


class StatusStore(Protocol):
    """Stores statuses and incidents, which a successor reads. A `RunDir` is an example."""

    @property
    def path(self) -> Path:
        """Names the run."""

    def status(self) -> dict[str, Any] | None:
        """Return the last status; None if there is none or it cannot be read."""

    def write_status(self, status: Mapping[str, Any]) -> None:
        """Store a status. Raises `OSError`."""

    def write_incident(self, incident: Mapping[str, Any]) -> None:
        """Store an incident, replacing its earlier record. Raises `OSError`."""

    def incidents(self) -> list[dict[str, Any]]:
        """Return the incidents in ascending order."""


class StatusPublisher:
    """Publishes statuses and incidents. A thread writes the files, so a full disk cannot stop the run."""

    def __init__(
        self,
        run: StatusStore,
        lag: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
        policy: Policy | None = None,
        lead: Lead | None = None,
        *,
        files: StorageThread | None = None,
        published: Callable[[], None] = lambda: None,
    ) -> None:
        """Publish for `run`.

        Args:
            run: The store for the status and incidents, usually the run's directory.
            lag: Returns the maximum and p99 lag of the supervisor's event loop, in seconds.
            policy: The limits for a group that completes no step.
            lead: The leadership of the run. After another supervisor takes over, no more files are written,
                and `deposed` contains the reason.
            files: The thread that writes the files. By default, the publisher starts its own.
            published: Called after each status is published.
        """
        self.run = run
        self._metrics = Metrics()
        self._measured: Mapping[str, Any] = {}  # the status that the metrics show
        self.published: Mapping[str, Any] = {}  # the last status; empty before the first
        self.journal_error = ""  # why the last decision is not on disk
        self.files = files or StorageThread("records")
        self.deposed: Deposed | None = None
        self._lag = lag
        self._policy = policy or Policy()
        self._lead = lead or Lead()
        self._known: Mapping[str, Any] = {}  # the previous status, for values that are no longer reported
        self._last_incident: dict[str, Any] | None = None
        self._published = published
        self._slow_ranks: tuple[SlowRank, ...] = ()
        self._unwritten: dict[str, dict[str, Any]] = {}  # incidents that could not be written
        self._status_error = ""  # why the last status could not be written

    def take_over(self) -> dict[str, Any] | None:
        """Return the predecessor's last status and continue from its values; return None if there is none.

        Any program may have written the file, so only fields with the right types are taken over.
        """
        found = self.run.status()
        if found is not None:
            carried = _CARRIED.items()
            self._known = {name: found[name] for name, kind in carried if type(found.get(name)) is kind}
        return found

    def publish(self, view: View, accounts: Bookkeeping, volume_error: str = "") -> None:
        """Build and publish a status. The API and the metrics show it immediately, the file soon afterwards.

        `volume_error` says why the members' memory volume cannot be used; "" if it can.
        """
        self._slow_ranks = find_slow_ranks(self._slow_ranks, view)
        context = status.StatusContext(
            run=self.run.path.name,
            updated_s=time.time(),
            supervisor_pid=os.getpid(),
            policy=self._policy,
            last_incident=self._last_incident,
            slow_ranks=self._slow_ranks,
            lag=self._lag(),
            journal_error=self.journal_error,
            volume_error=volume_error,
            known=self._known,
        )
        newest = status.build(view, accounts, context)
        self.published = self._known = newest
        if self._last_incident is not None and not self._last_incident["open"]:
            self._metrics.incident(self._last_incident)
        self._write_soon(lambda: self._write_status(newest), "status")
        self._published()

    def measured(self) -> Metrics:
        """Return the metrics with the values of the last status.

        They are set here and not in `publish`, because setting them takes as long as building the status, and
        statuses are published more often than metrics are read.
        """
        if self._measured is not self.published:
            self._measured = self.published
            self._metrics.update(self._measured)
        return self._metrics

    def incident(self, found: dict[str, Any]) -> None:
        """Write an incident's file. The next status shows it as the last incident."""
        self._last_incident = found
        self._write_soon(lambda: self._write_incident(found), str(found["id"]))

    def _write_soon(self, write: Callable[[], object], kind: str) -> None:
        try:
            self.files.submit(write, f"{kind} of {self.run.path}")
        except OSError as error:  # no thread can be started
            log.warning("not written", extra={"what": kind, "error": str(error)})

    def _write_incident(self, found: dict[str, Any]) -> bool:
        """Write an incident. If that fails, keep it for a later `_write_status` and return False."""
        name = str(found["id"])
        self._unwritten.pop(name, None)
        try:
            with self._lead.acting():
                self.run.write_incident(found)
        except Deposed as error:
            self.deposed = error
        except OSError as error:
            log.warning("incident not written", extra={"id": name, "error": str(error)})
            self._unwritten[name] = found
            for oldest in list(self._unwritten)[:-MAX_UNWRITTEN]:
                del self._unwritten[oldest]
            return False
        return True

    def _write_status(self, newest: Mapping[str, Any]) -> None:
        try:
            with self._lead.acting():
                self.run.write_status(newest)
        except Deposed as error:
            self.deposed = error
            return
        except OSError as error:
            if str(error.strerror) != self._status_error:  # log each reason once, not every second
                self._status_error = str(error.strerror)
                log.warning("status not written", extra={"error": str(error)})
            return
        self._status_error = ""
        for found in tuple(self._unwritten.values()):
            if not self._write_incident(found):
                return
