from __future__ import annotations

import errno
import json
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from holdfast.protocol.member_messages import StateSource
from supervisor.decision import transition
from supervisor.decision.decide import decide
from supervisor.store import journal
from supervisor.store.journal import Journal
from supervisor.store.run_lead import FILE, Deposed, take_over
from supervisor.view.model import (
    Checkpoint,
    Completion,
    Dismiss,
    Done,
    End,
    JobState,
    Learn,
    LearnedStall,
    Look,
    OpenIncident,
    PastFault,
    Policy,
    Preserve,
    Replace,
    ResumePoint,
    RunAction,
    Save,
    Secure,
    Settle,
    Start,
    StorageContents,
    View,
    Wait,
    Warn,
)
from tests.simulation.cluster.world import World
from tests.unit.supervisor.job_views import fault, holding, member, view

POLICY = Policy(members=2, standby=1, checkpoint_every_s=0.2, skip_bad_batches=True)


def eventful() -> World:
    """Return a run with every kind of decision."""
    cues = {
        (0, 2): ("kill", 1),
        (1, 4): ("hang", 1),
        (1, 6): ("lose", 1),
        (0, 9): ("nan", 2),
        (1, 12): ("raise", 1),
    }
    world = World(POLICY, steps=30, cues=cues)
    return world.at(4200, lambda w: setattr(w, "stop", "graceful")).run()


def test_every_decision_of_a_run_can_be_repeated_from_its_line(tmp_path: Path) -> None:
    world, path = eventful(), tmp_path / "journal.jsonl"
    kept = Journal(path)
    for seen, action, after in world.journal:
        kept.write(seen, POLICY, action, after, {"at": seen.now_ns})
    kept.close()
    for found, (seen, action, after) in zip(journal.decisions(path), world.journal, strict=True):
        assert (found.view, found.policy, found.action, found.after) == (seen, POLICY, action, after)
        assert decide(found.view, found.policy) == found.action
        assert transition.after(found.view, found.action, found.policy) == found.after
    assert journal.last(path) == journal.LastEntry(
        world.journal[-1][2], {"at": world.now_ns}, journal.Decision(*found_last(world))
    )


def found_last(world: World) -> tuple[View, Policy, RunAction, JobState]:
    seen, action, after = world.journal[-1]
    return seen, POLICY, action, after


FAULT = fault("hang")
RESUME = ResumePoint(5, 1, "slot", "", (StateSource("http://m0:1", 0, 1, 5),), ("m0",))
EACH: dict[type[object], RunAction] = {
    Wait: Wait(7, "because"),
    Look: Look((FAULT,), "because"),
    Dismiss: Dismiss("because"),
    Warn: Warn("evaluate (train.py:42)", "because"),
    Learn: Learn((LearnedStall("sleep", 12.5),), "because"),
    Secure: Secure((FAULT,), True, "because"),
    Start: Start(("m0", "m1"), RESUME, (3,), "127.0.0.1", 4000, FAULT, "restart", ("line",), "because"),
    Settle: Settle(7, "because"),
    Save: Save("m0", RESUME, "because"),
    Preserve: Preserve("m0", RESUME, "because"),
    Replace: Replace("m0", "because"),
    End: End(1, "because", "traceback", FAULT),
    Done: Done("because"),
}


@pytest.mark.parametrize("kind", get_args(RunAction), ids=lambda kind: kind.__name__)
def test_a_line_with_any_action_is_read_back(kind: type[object], tmp_path: Path) -> None:
    path, seen = tmp_path / "journal.jsonl", view(member("m0"))
    kept = Journal(path)
    kept.write(seen, POLICY, EACH[kind], seen.memory, {"at": 1})
    kept.close()
    expected = journal.Decision(seen, POLICY, EACH[kind], seen.memory)
    assert journal.last(path) == journal.LastEntry(seen.memory, {"at": 1}, expected)
    assert list(journal.decisions(path)) == [expected]


def test_the_parts_of_sentences_are_not_in_a_line(tmp_path: Path) -> None:
    """Only displays use the parts. A line contains the sentence."""
    hung = replace(fault("hang"), hung="it is stopped")
    end = End(3, "finished; and more", completion=Completion(notes=("and more",)))
    seen = view(incident=OpenIncident(1, 1, 0, 0, 0.0, (hung,), measure="restart"), completion=end.completion)
    kept = Journal(tmp_path / "journal.jsonl")
    kept.write(seen, POLICY, end, seen.memory, None)
    kept.close()
    line = json.loads((tmp_path / "journal.jsonl").read_bytes())
    assert "completion" not in line["what"]
    assert not {"completion"} & {*line["after"], *line["view"]["memory"]}
    incident = line["after"]["incident"]
    assert "measure" not in incident
    assert "hung" not in incident["faults"][0]
    [found] = journal.decisions(tmp_path / "journal.jsonl")
    assert (found.action, found.after) == (end, seen.memory), "the parts are not compared"
    assert isinstance(found.action, End)
    assert found.action.completion is None


def test_a_line_contains_the_history_once_and_one_with_two_copies_is_read(tmp_path: Path) -> None:
    """After a hundred incidents, one copy was half of a line of 50 KB."""
    path = tmp_path / "journal.jsonl"
    past = tuple(PastFault("crash", 1, "m1", step, f"signature {step}", 0, step) for step in range(100))
    seen = view(member("m0"), history=past)
    kept = Journal(path)
    kept.write(seen, POLICY, Settle(7, "because"), seen.memory, None)
    kept.write(seen, POLICY, Settle(7, "because"), replace(seen.memory, history=past[1:]), None)
    kept.close()
    once, twice = path.read_text().splitlines()
    assert (once.count("signature 50"), twice.count("signature 50")) == (1, 2)
    first, second = journal.decisions(path)
    assert first.view == second.view == seen
    line = json.loads(once)
    line["view"]["memory"]["history"] = line["after"]["history"]  # as earlier versions wrote it
    path.write_text(json.dumps(line) + "\n")
    assert list(journal.decisions(path)) == [first]


def changed(path: Path, *names: str, **fields: object) -> None:
    """Append the newest line once more, with other `fields` in the object that `names` lead to."""
    line = json.loads(path.read_text().splitlines()[-1])
    part = line
    for name in names:
        part = part[name]
    part |= fields
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_fields_added_by_a_later_version_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    kept = Journal(path)
    write(kept, 1)
    kept.close()
    known = journal.last(path)
    for names in ((), ("after",), ("view",), ("view", "memory"), ("policy",), ("what",)):
        changed(path, *names, later={"more": [1]})
    assert known is not None
    assert journal.last(path) == known
    assert list(journal.decisions(path)) == [known.decision] * 7


def test_an_action_of_a_later_version_keeps_the_state_that_followed_it(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    kept = Journal(path)
    write(kept, 1)
    kept.close()
    changed(path, action="Ponder")
    changed(path, "after", incidents=2)
    found = journal.last(path)
    assert found is not None
    assert (found.memory.incidents, found.decision) == (2, None)
    assert len(list(journal.decisions(path))) == 1


@pytest.mark.parametrize("wrong", [{"incidents": "two"}, {"phase": None}, {"history": [1]}, {"launch": 3}])
def test_an_unreadable_state_loses_only_its_line(wrong: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    kept = Journal(path)
    write(kept, 1)
    kept.close()
    changed(path, "after", **wrong)
    changed(path, "after", **wrong)
    assert newest(path) == 1
    again = Journal(path)
    write(again, 2)
    again.close()
    assert newest(path) == 2


def test_a_deeply_nested_line_loses_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    kept = Journal(path)
    write(kept, 1)
    kept.close()
    with path.open("ab") as file:
        file.write(b'{"format":1,"after":' + b"[" * 200_000 + b"]" * 200_000 + b"}\n")
    assert newest(path) == 1


def test_the_size_counts_whole_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert journal.size(path) == 0
    kept = Journal(path)
    write(kept, 1)
    kept.close()
    whole = path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"torn')
    assert journal.size(path) == whole
    assert not journal.has_lines_since(path, journal.size(path))
    write(Journal(path), 2)
    assert journal.has_lines_since(path, whole)


def write(kept: Journal, number: int) -> None:
    seen = view(now_s=float(number), incidents=number)
    kept.write(seen, POLICY, Wait(number), seen.memory, None)


def newest(path: Path) -> int | None:
    found = journal.last(path)
    return None if found is None else found.memory.incidents


def test_a_write_cut_off_at_any_byte_keeps_the_previous_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    kept = Journal(path)
    write(kept, 1)
    whole = path.stat().st_size
    write(kept, 2)
    kept.close()
    content = path.read_bytes()
    for size in (*range(0, len(content), 97), whole - 1, whole, whole + 1):
        path.write_bytes(content[:size])
        assert newest(path) == (None if size < whole else 1)
    for size in (len(content) - 1, len(content)):
        path.write_bytes(content[:size])
        assert newest(path) == 1 + (size == len(content))


@pytest.mark.parametrize("torn", [b"", b"{", b'{"format":1,"after":{}}', b"\x00\xff", b"x" * 3_000_000])
def test_the_line_after_a_torn_write_is_separate(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    kept = Journal(path)
    write(kept, 1)
    kept.close()
    with path.open("ab") as file:
        file.write(torn)
    assert newest(path) == 1
    again = Journal(path)
    write(again, 2)
    again.close()
    assert [each.view.memory.incidents for each in journal.decisions(path)] == [1, 2]
    assert newest(path) == 2


def test_without_a_journal_nothing_is_known(tmp_path: Path) -> None:
    assert journal.last(tmp_path / "journal.jsonl") is None
    empty = tmp_path / "empty"
    Journal(empty).close()
    assert journal.last(empty) is None


def test_lines_that_are_not_decisions_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    kept = Journal(path)
    write(kept, 1)
    kept.close()
    with path.open("ab") as file:
        file.write(b'\nnull\n[1]\n{"format":2,"after":{}}\n')
    assert newest(path) == 1
    assert len(list(journal.decisions(path))) == 1


def test_a_line_longer_than_any_block_is_found(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    kept = Journal(path)
    long = fault("exception", message="x" * 900_000)
    slots = tuple((1, n) for n in range(3))
    seen = view(holding("m0", slots, ()), history=(), message="y" * 1_000_000)
    kept.write(seen, POLICY, Done(long.message), seen.memory, "z" * 1_000_000)
    kept.close()
    found = journal.last(path)
    assert found is not None
    assert found.decision is not None
    assert found.decision.action == Done(long.message)


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_write_without_space_leaves_no_trace_and_the_next_one_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    kept = Journal(path)
    write(kept, 1)
    whole = path.stat().st_size
    with room_for(whole + 100), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        write(kept, 2)
    assert path.stat().st_size == whole
    write(kept, 3)
    kept.close()
    assert [each.view.memory.incidents for each in journal.decisions(path)] == [1, 3]


def test_a_journal_that_cannot_be_opened_is_retried_with_each_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.mkdir()
    assert journal.last(path) is None
    assert not journal.has_lines_since(path, 0)
    kept = Journal(path)
    with pytest.raises(IsADirectoryError):
        write(kept, 1)
    path.rmdir()
    write(kept, 2)
    kept.close()
    assert newest(path) == 2


def test_an_old_journal_without_a_list_of_checkpoints_is_read_with_the_one_it_has(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    kept = Journal(path)
    write(kept, 1)
    kept.close()
    line = json.loads(path.read_text())
    del line["view"]["stored"]
    found = {"step": 9, "generation": 1, "world_size": 2, "path": "p", "notes": ["x"], "skip": [4]}
    for checkpoint in (None, found):
        line["view"]["checkpoint"] = checkpoint
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    _, none, one = journal.decisions(path)
    assert none.view.stored == StorageContents()
    assert one.view.stored == StorageContents((Checkpoint(9, 1, 2, "p", (4,)),))


def test_a_replaced_supervisor_writes_nothing_and_truncates_nothing(tmp_path: Path) -> None:
    path, now = tmp_path / "journal.jsonl", view(generation=3)
    first = Journal(path, take_over(tmp_path / FILE))
    first.write(now, POLICY, Wait(1), now.memory, None)
    second = Journal(path, take_over(tmp_path / FILE))
    newer = replace(now.memory, generation=4)
    second.write(now, POLICY, Wait(1), newer, None)
    before = path.read_bytes()
    with pytest.raises(Deposed):  # otherwise it would truncate the file to the lines it wrote itself
        first.write(now, POLICY, Wait(1), now.memory, None)
    assert path.read_bytes() == before
    held = journal.last(path)
    assert held is not None
    assert (held.memory, held.epoch) == (newer, 2)
    first.close()
    second.close()


def test_lines_of_versions_without_an_epoch_are_of_epoch_0(tmp_path: Path) -> None:
    path, now = tmp_path / "journal.jsonl", view(generation=3)
    written = Journal(path)
    written.write(now, POLICY, Wait(1), now.memory, None)
    written.close()
    line = json.loads(path.read_text())
    del line["epoch"]
    path.write_text(json.dumps(line) + "\n")
    held = journal.last(path)
    assert held is not None
    assert (held.memory, held.epoch) == (now.memory, 0)


def test_a_removed_journal_is_restored_with_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    kept = Journal(path)
    write(kept, 1)
    whole = journal.size(path)
    path.unlink()
    write(kept, 2)
    write(kept, 3)
    kept.close()
    assert [each.view.memory.incidents for each in journal.decisions(path)] == [1, 2, 3]
    assert journal.has_lines_since(path, whole)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
