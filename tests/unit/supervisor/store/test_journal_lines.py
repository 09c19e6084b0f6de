"""The exact content of a line, the log records about unreadable lines, and the lines of other versions."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.store import journal
from supervisor.store.journal import Decision, Journal, LastEntry
from supervisor.store.recorded import recorded
from supervisor.store.run_lead import FILE, take_over
from supervisor.view.model import Checkpoint, Dismiss, PastFault, Policy, StorageContents, Wait
from tests.unit.supervisor.job_views import member, view
from tests.unit.supervisor.store.test_journal import room_for

POLICY = Policy(members=2, standby=1)
SEEN = view(member("m0"), history=(PastFault("crash", 1, "m1", 4, "signature", 0, 4),))


def write(kept: Journal, number: int) -> None:
    seen = view(now_s=float(number), incidents=number)
    kept.write(seen, POLICY, Wait(number), seen.memory, None)


def numbers(path: Path) -> list[int]:
    return [each.view.memory.incidents for each in journal.decisions(path)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a journal with one line, about `SEEN`."""
    found = tmp_path / "journal.jsonl"
    kept = Journal(found)
    kept.write(SEEN, POLICY, Wait(7, "because"), SEEN.memory, {"at": 1})
    kept.close()
    return found


def changed(path: Path, **fields: object) -> None:
    """Replace `fields` of the only line."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields) + "\n")


Logged = list[tuple[str, str, dict[str, object]]]  # level, event, fields


@pytest.fixture
def logged() -> Iterator[Logged]:
    """Yield the list of all records that the journal logs."""
    usual = vars(logging.makeLogRecord({})).keys()
    found: Logged = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            fields = {name: value for name, value in vars(record).items() if name not in usual}
            found.append((record.levelname, record.getMessage(), fields))

    handler = Handler()
    journal.log.addHandler(handler)
    yield found
    journal.log.removeHandler(handler)


def test_a_line_has_all_that_a_decision_is_based_on_and_each_part_once(tmp_path: Path) -> None:
    kept = Journal(tmp_path / "journal.jsonl", take_over(tmp_path / FILE))
    kept.write(SEEN, POLICY, Wait(7, "because"), SEEN.memory, {"at": 1})
    kept.close()
    raw = (tmp_path / "journal.jsonl").read_bytes()
    seen = recorded(SEEN)
    del seen["memory"]["history"]
    line = {
        "format": 1,
        "epoch": 1,
        "wall_s": SEEN.wall_s,
        "action": "Wait",
        "what": recorded(Wait(7, "because")),
        "view": seen,
        "policy": recorded(POLICY),
        "after": recorded(SEEN.memory),
        "ledger": {"at": 1},
    }
    assert json.loads(raw) == line
    assert raw == json.dumps(line, separators=(",", ":")).encode() + b"\n"
    assert journal.last(tmp_path / "journal.jsonl") == LastEntry(
        SEEN.memory, {"at": 1}, Decision(SEEN, POLICY, Wait(7, "because"), SEEN.memory), 1
    )


def test_the_journal_is_readable_by_its_user_only_even_after_it_was_restored(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    kept = Journal(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.unlink()
    write(kept, 1)
    assert path.stat().st_mode & 0o777 == 0o600
    kept.close()
    kept.close()
    write(kept, 2)
    assert numbers(path) == [1, 2], "a closed journal must be reopened"


def test_a_journal_that_cannot_be_opened_is_logged_with_its_reason(tmp_path: Path, logged: Logged) -> None:
    Journal(tmp_path)
    reason = f"[Errno {errno.EISDIR}] {os.strerror(errno.EISDIR)}: '{tmp_path}'"
    assert logged == [("ERROR", "journal not opened", {"error": reason})]


def test_unreadable_lines_are_counted_in_one_record_with_the_newest_reason(
    path: Path, logged: Logged
) -> None:
    good = path.read_text()
    after = json.loads(good)["after"]
    for wrong in ({"phase": 3}, {"incidents": "x"}):
        line = json.dumps(json.loads(good) | {"after": after | wrong})
        path.write_text(path.read_text() + line + "\n")
    path.write_text(path.read_text() + '{"format":2}\n')
    found = journal.last(path)
    assert found is not None
    assert found.memory == SEEN.memory
    fields = {"lines": 2, "newest": "JobState.incidents: 'x' is not int"}
    assert logged == [("WARNING", "unreadable journal lines skipped", fields)]


def test_a_journal_that_storage_cannot_read_is_logged_and_no_state_is_known(
    tmp_path: Path, logged: Logged
) -> None:
    assert journal.last(tmp_path) is None
    [(level, event, fields)] = logged
    assert (level, event, fields["lines"]) == ("WARNING", "unreadable journal lines skipped", 1)
    assert fields["newest"] == f"[Errno {errno.EISDIR}] {os.strerror(errno.EISDIR)}: '{tmp_path}'"


def test_nothing_is_logged_about_a_journal_that_can_be_read(
    path: Path, tmp_path: Path, logged: Logged
) -> None:
    assert journal.last(path) is not None
    assert journal.last(tmp_path / "none") is None
    assert logged == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"action": "Ponder"}, "unknown action 'Ponder'"),
        ({"action": None}, "unknown action None"),
        ({"what": {"later": 7}}, "Wait.until_ns: missing"),
        ({"view": None}, "View: None is not an object"),
        ({"view": [1]}, "View: [1] is not an object"),
        ({"policy": None}, "Policy: None is not an object"),
    ],
)
def test_a_decision_that_cannot_be_read_is_logged_with_the_reason_and_the_state_is_kept(
    path: Path, logged: Logged, fields: dict[str, object], reason: str
) -> None:
    changed(path, **fields)
    assert list(journal.decisions(path)) == []
    assert journal.last(path) == LastEntry(SEEN.memory, {"at": 1}, None, 0)
    assert logged == [("WARNING", "decision in the journal not read", {"error": reason})]


@pytest.mark.parametrize("memory", [None, [1], "x"])
def test_a_view_without_a_readable_memory_costs_only_the_decision(
    path: Path, logged: Logged, memory: object
) -> None:
    line = json.loads(path.read_text())
    changed(path, view={**line["view"], "memory": memory})
    assert journal.last(path) == LastEntry(SEEN.memory, {"at": 1}, None, 0)
    reason = f"View.memory: {memory!r} is not an object"
    assert logged == [("WARNING", "decision in the journal not read", {"error": reason})]


@pytest.mark.parametrize(("epoch", "expected"), [(3, 3), ("3", 0), (True, 0), (None, 0)])
def test_an_epoch_that_is_not_a_whole_number_counts_as_0(path: Path, epoch: object, expected: int) -> None:
    changed(path, epoch=epoch)
    found = journal.last(path)
    assert found is not None
    assert (found.memory, found.ledger, found.epoch) == (SEEN.memory, {"at": 1}, expected)


def test_a_line_without_a_ledger_has_none(path: Path) -> None:
    line = json.loads(path.read_text())
    del line["ledger"]
    path.write_text(json.dumps(line) + "\n")
    found = journal.last(path)
    assert found is not None
    assert found.ledger is None


def test_the_checkpoints_of_a_view_precede_the_one_that_an_older_version_wrote(path: Path) -> None:
    line = json.loads(path.read_text())
    old = {"step": 9, "generation": 1, "world_size": 2, "path": "p"}
    new = {"step": 12, "generation": 1, "world_size": 2, "path": "q"}
    changed(path, view={**line["view"], "checkpoint": old, "stored": {"checkpoints": [new]}})
    [found] = journal.decisions(path)
    assert found.view.stored == StorageContents((Checkpoint(12, 1, 2, "q"),))


def test_a_last_line_without_its_newline_is_ignored_even_if_it_is_complete(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)
    assert len(list(journal.decisions(path))) == 2
    path.write_bytes(path.read_bytes()[:-1])
    assert len(list(journal.decisions(path))) == 1
    assert journal.size(path) * 2 == path.stat().st_size + 1


def test_a_decision_that_cannot_be_read_does_not_hide_those_after_it(path: Path) -> None:
    good = path.read_text()
    changed(path, action="Ponder")
    path.write_text(good + path.read_text() + "nonsense\n" + good)
    assert [each.action for each in journal.decisions(path)] == [Wait(7, "because")] * 2


@pytest.mark.parametrize(
    ("line", "valid"),
    [
        ('{"format":1,"after":{}}', True),
        ('{"format":1,"after":null}', True),
        ('{"format":2,"after":{}}', False),
        ('{"format":1}', False),
        ('{"after":{}}', False),
        ("[1]", False),
        ("", False),
    ],
)
def test_a_valid_line_is_an_object_of_this_format_with_a_state(
    tmp_path: Path, line: str, valid: bool
) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(line + "\n")
    assert journal.has_lines_since(path, 0) is valid
    assert journal.has_lines_since(path, len(line) + 1) is False
    assert journal.has_lines_since(tmp_path / "none", 0) is False


def test_a_line_that_does_not_fit_into_a_restored_journal_leaves_no_gap_before_the_next(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal.jsonl"
    kept = Journal(path)
    write(kept, 1)
    path.unlink()
    write(kept, 2)
    whole = path.stat().st_size
    with room_for(whole + 100), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        write(kept, 3)
    assert path.stat().st_size == whole
    write(kept, 4)
    kept.close()
    assert b"\0" not in path.read_bytes()
    assert numbers(path) == [1, 2, 4]


def test_foreign_bytes_at_the_end_are_cut_off_by_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    kept = Journal(path)
    write(kept, 1)
    with path.open("ab") as file:
        file.write(b'{"torn')
    write(kept, 2)
    kept.close()
    assert numbers(path) == [1, 2]
    assert len(path.read_bytes().splitlines()) == 2


def test_the_history_of_a_view_is_left_out_only_if_the_state_has_the_same(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    kept = Journal(path)
    other = view().memory
    kept.write(SEEN, POLICY, Dismiss("because"), other, None)
    kept.close()
    line = json.loads(path.read_text())
    assert line["view"]["memory"]["history"] == recorded(SEEN.memory)["history"]
    assert list(journal.decisions(path)) == [Decision(SEEN, POLICY, Dismiss("because"), other)]


def test_a_state_with_fields_of_a_later_version_is_read_without_them(path: Path, logged: Logged) -> None:
    after = json.loads(path.read_text())["after"]
    changed(path, after={**after, "later": [1]})
    decision = Decision(SEEN, POLICY, Wait(7, "because"), SEEN.memory)
    assert journal.last(path) == LastEntry(SEEN.memory, {"at": 1}, decision, 0)
    assert logged == []


def test_an_empty_line_counts_as_complete(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"\ntorn")
    assert journal.size(path) == 1
    assert journal.last(path) is None


def test_a_removed_journal_of_more_than_one_block_is_restored_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    kept = Journal(path)
    kept.write(SEEN, POLICY, Wait(1), SEEN.memory, "z" * 3_000_000)
    before = path.read_bytes()
    path.unlink()
    kept.write(SEEN, POLICY, Wait(2), SEEN.memory, None)
    kept.close()
    assert path.read_bytes().startswith(before)
    assert [each.action for each in journal.decisions(path)] == [Wait(1), Wait(2)]
