from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from supervisor import journal
from supervisor.apply import apply
from supervisor.decide import decide
from supervisor.journal import Journal
from supervisor.view import Done, Policy, Wait
from tests.unit.supervisor.views import fault, holding, view
from tests.world import World

POLICY = Policy(members=2, standby=1, checkpoint_every_s=0.2, skip_bad_batches=True)


def eventful() -> World:
    """Return a run in which everything happens that is ever decided."""
    cues = {
        (0, 2): ("kill", 1),
        (1, 4): ("hang", 1),
        (1, 6): ("lose", 1),
        (0, 9): ("nan", 2),
        (1, 12): ("raise", 1),
    }
    world = World(POLICY, steps=30, cues=cues)
    return world.at(4200, lambda w: setattr(w, "stop", "graceful")).run()


def test_every_decision_of_a_run_is_decided_and_applied_the_same_from_its_line(tmp_path: Path) -> None:
    world, path = eventful(), tmp_path / "journal.jsonl"
    kept = Journal(path)
    for seen, action, after in world.journal:
        kept.write(seen, POLICY, action, after, {"at": seen.now_ns})
    kept.close()
    kinds = set()
    for found, (seen, action, after) in zip(journal.decisions(path), world.journal, strict=True):
        assert (found.view, found.policy, found.action, found.after) == (seen, POLICY, action, after)
        assert decide(found.view, found.policy) == found.action
        assert apply(found.view, found.action, found.policy) == found.after
        kinds.add(type(action).__name__)
    assert kinds == {"Look", "Secure", "Start", "Settle", "Save", "Replace", "End", "Done"}
    last = journal.last(path)
    assert last == (world.journal[-1][2], {"at": world.now_ns}, world.now_ns / 1e9)


def write(kept: Journal, number: int) -> None:
    seen = view(now_s=float(number), incidents=number)
    kept.write(seen, POLICY, Wait(number), seen.memory, None)


def newest(path: Path) -> int | None:
    found = journal.last(path)
    return None if found is None else found[0].incidents


def test_a_write_that_is_cut_off_at_any_byte_leaves_the_one_before(tmp_path: Path) -> None:
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
def test_after_a_torn_write_the_next_stands_alone(tmp_path: Path, torn: bytes) -> None:
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
    assert journal.last_decision(tmp_path / "journal.jsonl") is None
    empty = tmp_path / "empty"
    Journal(empty).close()
    assert journal.last(empty) is None


def test_lines_that_are_no_decisions_are_passed_over(tmp_path: Path) -> None:
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
    found = journal.last_decision(path)
    assert found is not None
    assert found.action == Done(long.message)


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


def test_a_write_that_finds_no_room_is_not_there_and_the_next_one_is(tmp_path: Path) -> None:
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
