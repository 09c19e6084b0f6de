"""The records of a run in a directory: its newest decision, the right to write, and its checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.controller.records import JobRecords, RunDirectoryRecords
from supervisor.store import run_lead
from supervisor.store.run_lead import Deposed
from supervisor.view.model import UNREAD, Policy, Wait
from tests.unit.supervisor.job_views import view


def test_a_new_directory_has_no_decision() -> None:
    records: JobRecords = RunDirectoryRecords(Path("/nonexistent"))
    assert records.held is None
    assert records.lead.epoch == 0


def test_the_next_supervisor_finds_the_newest_decision(tmp_path: Path) -> None:
    log = RunDirectoryRecords(tmp_path).open_log()
    for generation in (1, 2):
        seen = view(generation=generation)
        log.write(seen, Policy(), Wait(1), seen.memory, {"format": 1})
    log.close()
    held = RunDirectoryRecords(tmp_path).held
    assert held is not None
    assert (held.memory.generation, held.ledger) == (2, {"format": 1})


def test_a_replaced_supervisor_cannot_write(tmp_path: Path) -> None:
    first = RunDirectoryRecords(tmp_path, run_lead.take_over(tmp_path / run_lead.FILE))
    log = first.open_log()
    second = RunDirectoryRecords(tmp_path, run_lead.take_over(tmp_path / run_lead.FILE))
    assert second.lead.epoch > first.lead.epoch
    seen = view()
    with pytest.raises(Deposed):
        log.write(seen, Policy(), Wait(1), seen.memory, None)
    log.close()
    assert RunDirectoryRecords(tmp_path).held is None


def test_checkpoints_are_in_the_directory_and_count_as_unread(tmp_path: Path) -> None:
    index = RunDirectoryRecords(tmp_path).checkpoints(lambda: None)
    assert index.stored.error == UNREAD
