from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from supervisor.store import run_lead
from supervisor.store.run_lead import Blocked, Deposed, Lead, take_over


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / run_lead.FILE


def test_each_takeover_has_a_higher_epoch_and_its_predecessors_may_do_nothing(path: Path) -> None:
    first = take_over(path)
    with first.acting():
        pass
    second = take_over(path)
    assert (first.epoch, second.epoch) == (1, 2)
    with (
        pytest.raises(Deposed, match="epoch 2 has taken over the run; this one has epoch 1"),
        first.acting(),
    ):
        pytest.fail("it acts")
    with pytest.raises(Deposed):
        first.raise_above(7)
    with second.acting():
        assert first.epoch == 1


def test_no_takeover_happens_in_the_middle_of_a_write(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lead, "LOCK_S", 0.02)
    first = take_over(path)
    with first.acting(), first.acting():  # two threads of one supervisor
        with pytest.raises(Blocked):
            take_over(path)
        with pytest.raises(Blocked):
            first.raise_above(9)
        assert first.epoch == 1
    assert take_over(path).epoch == 2


def test_a_writer_waits_for_a_successor_to_raise_the_epoch(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lead, "LOCK_S", 0.02)
    lead = take_over(path)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(Blocked), lead.acting():
            pytest.fail("it acts")


def test_an_epoch_reported_by_others_is_exceeded_once(path: Path) -> None:
    lead = take_over(path)
    lead.raise_above(-1)
    lead.raise_above(0)
    assert lead.epoch == 1
    lead.raise_above(6)
    lead.raise_above(6)
    assert (lead.epoch, take_over(path).epoch) == (7, 8)


@pytest.mark.parametrize("content", ["", "x", "-3", "9" * 40, "\0" * 30])
def test_a_damaged_file_is_replaced_and_epochs_known_elsewhere_count(content: str, path: Path) -> None:
    path.write_text(content)
    lead = take_over(path)
    lead.raise_above(3)  # according to the journal, members and checkpoints
    assert lead.epoch == 4
    with lead.acting():
        assert int(path.read_text().split()[0]) == 4


def test_a_deleted_or_read_only_file_does_not_prevent_supervision(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead = take_over(path)
    path.unlink()
    with lead.acting():
        pass
    path.mkdir()
    lead = take_over(path)
    lead.raise_above(4)
    assert lead.epoch == 5


def test_a_supervisor_without_a_file_is_never_deposed() -> None:
    lead = Lead()
    with lead.acting():
        lead.raise_above(0)
    assert lead.epoch == 0
    lead.raise_above(2)
    assert lead.epoch == 3
