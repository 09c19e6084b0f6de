"""The interface to the records of a job: its decisions and the index of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from holdfast.protocol.member_messages import CheckpointReport
from supervisor.controller.checkpoint_index import CheckpointIndex
from supervisor.controller.journal_writer import DecisionLog
from supervisor.store import journal
from supervisor.store.journal import LastEntry
from supervisor.store.run_directory import RunDir
from supervisor.store.run_lead import Lead
from supervisor.view.model import Checkpoint, StorageContents


class CheckpointSource(Protocol):
    """Provides what is known about the checkpoints on storage. `CheckpointIndex` is an example."""

    stored: StorageContents

    async def run(self) -> None:
        """Keep `stored` up to date. Never returns."""

    def request_rescan(self) -> None:
        """Have storage listed as soon as possible."""

    def on_report(self, durable: CheckpointReport) -> None:
        """Use what a member reports about its checkpoints. Called for each member in each round."""

    def doubt(self) -> None:
        """Mark all checkpoints as unverified."""

    def verify(self, doubted: Checkpoint | None) -> None:
        """Have the checkpoint `doubted` read in full. If it is None, cancel an earlier request."""


class JobRecords(Protocol):
    """The store of a job's decisions, including those of earlier supervisors."""

    @property
    def held(self) -> LastEntry | None:
        """The newest decision of a predecessor; None if there is none."""

    @property
    def lead(self) -> Lead:
        """This supervisor's right to act."""

    def open_log(self) -> DecisionLog:
        """Return the log for this supervisor's decisions."""

    def checkpoints(self, changed: Callable[[], object]) -> CheckpointSource:
        """Return the index of the job's checkpoints, which calls `changed` after every update."""


class RunDirectoryRecords:
    """The records of a run in a directory of this machine."""

    def __init__(self, run_dir: Path, lead: Lead | None = None) -> None:
        self._run_dir = RunDir(run_dir)
        self.lead = lead or Lead()
        self.held = journal.last(self._run_dir.journal)

    def open_log(self) -> journal.Journal:
        return journal.Journal(self._run_dir.journal, self.lead)

    def checkpoints(self, changed: Callable[[], object]) -> CheckpointIndex:
        return CheckpointIndex(self._run_dir.checkpoints, changed)
