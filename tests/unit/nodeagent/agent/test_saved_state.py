from __future__ import annotations

import errno
import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.fileio.bulk_copy import FileBatch
from nodeagent.agent import saved_state
from nodeagent.agent.changes import ReportedFinding
from nodeagent.agent.clean_time import CleanTime
from nodeagent.agent.saved_state import BEFORE, MAX_HISTORY, NAME, SavedState
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import Action, Level, Observation
from nodeagent.policy.loading import shipped
from nodeagent.sensing.clock import Anchor


def full() -> SavedState:
    made = SavedState(
        Anchor("boot", 12.5),
        99.0,
        {("gpu/a", "xid", 79): ReportedFinding(Level.UNHEALTHY, Action.REPLACE, 3.0)},
        clean_time=CleanTime(1.0, None, 3.0, (4.0, 5.0), (frozenset({"kmsg"}), frozenset({"kmsg", "host"}))),
        evidence={"series": [], "events": []},
        positions={"kmsg": ["boot", 7]},
    )
    made.add([{"kind": "raised"}, {"kind": "cleared"}])
    return made


def test_a_saved_state_is_loaded(tmp_path: Path) -> None:
    saved_state.save(tmp_path, full())
    assert saved_state.load(tmp_path) == (full(), ())
    assert sorted(each.name for each in tmp_path.iterdir()) == [NAME]


def test_without_a_file_the_state_is_empty(tmp_path: Path) -> None:
    assert saved_state.load(tmp_path / "nowhere") == (SavedState(), ())


def test_what_the_reader_would_refuse_for_its_size_is_saved_without_texts_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator = Evaluator(shipped())
    for number in range(20):
        at_s = 1000.0 * number
        for check, value in (("xid", 95.0), ("gpu_temperature_margin", 40.0)):
            seen = Observation(at_s, check, f"gpu/0000:{number:02x}:00.0", "kmsg", value, text="x" * 500)
            evaluator.add(seen)
    state = replace(full(), evidence=evaluator.dump())
    assert len(saved_state.encode(state)) > 15_000
    monkeypatch.setattr(saved_state, "MAX_BYTES", 15_000)
    saved_state.save(tmp_path, state)
    loaded, problems = saved_state.load(tmp_path)
    again = Evaluator(shipped())
    again.load(loaded.evidence)
    now_s = 30_000.0
    assert problems == ()
    assert len(found := again.findings(now_s)) >= 20
    assert found == tuple(replace(each, evidence=()) for each in evaluator.findings(now_s))
    monkeypatch.setattr(saved_state, "MAX_BYTES", 5_000)
    with pytest.raises(OSError, match="at most 5000 can be read again"):
        saved_state.save(tmp_path, state)
    assert sorted(each.name for each in tmp_path.iterdir()) == [NAME], "the previous file is unchanged"


def test_changes_are_numbered_permanently_and_the_newest_are_kept() -> None:
    made = full()
    made.add([{}] * MAX_HISTORY)
    assert len(made.history) == MAX_HISTORY
    assert (made.history[0]["seq"], made.history[-1]["seq"], made.next_seq) == (
        3,
        MAX_HISTORY + 2,
        MAX_HISTORY + 3,
    )


@given(st.data())
def test_a_flipped_bit_or_a_torn_file_is_reported_and_the_previous_file_is_used(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("memory")
    saved_state.save(folder, full())
    newer = full()
    newer.last_s = 100.0
    saved_state.save(folder, newer)
    raw = bytearray((folder / NAME).read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del raw[at:]
    (folder / NAME).write_bytes(raw)
    found, problems = saved_state.load(folder)
    # A flip may hit a blank in the first line without changing its meaning.
    assert found == (full() if problems else newer)
    assert all(str(folder / NAME) in each for each in problems)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_state_or_a_problem(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    folder = tmp_path_factory.mktemp("memory")
    (folder / NAME).write_bytes(raw)
    (folder / BEFORE).write_bytes(raw)
    found, problems = saved_state.load(folder)
    assert found == SavedState()
    assert len(problems) == 2


def rewritten(path: Path, *replacements: tuple[bytes, bytes]) -> None:
    """Replace parts of a file, and correct its first line."""
    _, _, raw = path.read_bytes().partition(b"\n")
    for old, new in replacements:
        assert old in raw
        raw = raw.replace(old, new)
    path.write_bytes(b"%08x %d\n" % (zlib.crc32(raw), len(raw)) + raw)


def test_a_file_that_the_disk_cannot_read_is_replaced_by_the_previous_one_which_is_kept(
    tmp_path: Path,
) -> None:
    saved_state.save(tmp_path, full())
    (tmp_path / NAME).rename(tmp_path / BEFORE)
    (tmp_path / NAME).mkdir()  # reading it fails, as on a bad sector
    found, [problem] = saved_state.load(tmp_path, set_aside=True)
    assert found == full()
    assert "Is a directory; it is kept as memory.damaged.json" in problem
    saved_state.save(tmp_path, found)
    assert saved_state.load(tmp_path) == (full(), ())
    (tmp_path / NAME).unlink()
    assert saved_state.load(tmp_path) == (full(), ()), "the only good version was not replaced by a bad one"


def test_a_damaged_file_never_replaces_the_previous_version(tmp_path: Path) -> None:
    for _ in range(2):
        saved_state.save(tmp_path, full())
    (tmp_path / NAME).write_bytes(b"torn")
    found, problems = saved_state.load(tmp_path, set_aside=True)
    assert (found, len(problems)) == (full(), 1)
    saved_state.save(tmp_path, found)
    (tmp_path / NAME).write_bytes(b"torn again")
    assert saved_state.load(tmp_path)[0] == full()


def test_if_no_file_can_be_read_the_disks_error_is_raised(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(IsADirectoryError):
        saved_state.load(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"last_s":99.0', b'"last_s":Infinity'),
        (b'"last_s":99.0', b'"last_s":1e999'),
        (b"12.5", b"NaN"),
        (b'"xid",79', b'"xid",Infinity'),
        (b'"seq":1', b'"sequence":1'),
        (b'"seq":1', b'"seq":1e400'),
        (b'"events":[]', b'"events":[["node","boot",0,"",[[],[],[]]]]'),
        (b'"events":[]', b'"events":[["gpu/a","xid",1e400,"",[[[5.0,5.0]],[],["kmsg"]]]]'),
        (b'"events":[]', b'"events":[["gpu/a","xid",79,"",[[[' + b"9" * 400 + b',5.0]],[],["kmsg"]]]]'),
    ],
)
def test_a_hostile_file_counts_as_missing_with_its_positions(tmp_path: Path, old: bytes, new: bytes) -> None:
    saved_state.save(tmp_path, full())
    rewritten(tmp_path / NAME, (old, new))
    found, problems = saved_state.load(tmp_path)
    assert (found, len(problems)) == (SavedState(), 1)


def newer(path: Path, version: object = saved_state.VERSION + 1) -> bytes:
    raw = json.dumps({"version": version, "shape": "unknown"}).encode()
    content = b"%08x %d\n" % (zlib.crc32(raw), len(raw)) + raw
    path.write_bytes(content)
    return content


def test_a_state_written_by_a_newer_agent_is_set_aside_and_survives_every_save(tmp_path: Path) -> None:
    content = newer(tmp_path / NAME)
    assert saved_state.load(tmp_path)[0] == SavedState()
    assert (tmp_path / NAME).read_bytes() == content, "a command that only reads changes nothing"
    found, problems = saved_state.load(tmp_path, set_aside=True)
    assert found == SavedState()
    assert len(problems) == 1
    assert "it has version 2; this agent reads versions up to 1" in problems[0]
    assert "it is kept as memory.version-2.json" in problems[0]
    saved_state.save(tmp_path, full())
    saved_state.save(tmp_path, full())
    assert (tmp_path / "memory.version-2.json").read_bytes() == content
    assert saved_state.load(tmp_path, set_aside=True) == (full(), ())


def test_the_files_of_every_generation_are_set_aside_for_a_newer_agent(tmp_path: Path) -> None:
    kept = {
        f"memory{each}.version-7.json": newer(tmp_path / f"memory{each}.json", 7)
        for each in (".2", ".2.before")
    }
    saved_state.save(tmp_path, full())
    found, problems = saved_state.load(tmp_path, set_aside=True)
    assert (found, len(problems)) == (full(), 2)
    for _ in range(2):
        saved_state.save(tmp_path, full(), generation=2)
    saved_state.return_to_first_generation(tmp_path)
    assert saved_state.load(tmp_path, set_aside=True) == (full(), ())
    assert {name: (tmp_path / name).read_bytes() for name in kept} == kept


def test_the_previous_file_is_used_if_a_newer_agent_wrote_only_the_last_one(tmp_path: Path) -> None:
    saved_state.save(tmp_path, full())
    (tmp_path / NAME).rename(tmp_path / BEFORE)
    newer(tmp_path / NAME)
    found, problems = saved_state.load(tmp_path, set_aside=True)
    assert (found, len(problems)) == (full(), 1)


def test_a_newer_state_that_cannot_be_set_aside_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer(tmp_path / NAME)

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(Path, "replace", read_only)
    found, problems = saved_state.load(tmp_path, set_aside=True)
    assert found == SavedState()
    assert "cannot be renamed to memory.version-2.json: read-only" in problems[0]


def test_a_failed_save_leaves_the_previous_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_state.save(tmp_path, full())

    def full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(FileBatch, "write", full_disk)
    with pytest.raises(OSError, match="no space"):
        saved_state.save(tmp_path, SavedState())
    assert saved_state.load(tmp_path) == (full(), ())


def test_the_state_of_an_agent_that_did_not_measure_clean_time_is_used(tmp_path: Path) -> None:
    saved_state.save(tmp_path, full())
    content = (tmp_path / NAME).read_bytes().partition(b"\n")[2].replace(b'"calm":[1.0,null,3.0],', b"")
    (tmp_path / NAME).write_bytes(b"%08x %d\n" % (zlib.crc32(content), len(content)) + content)
    found, problems = saved_state.load(tmp_path)
    assert (found.reported, found.clean_time.watched_s, problems) == (full().reported, None, ())


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP])
def test_the_previous_version_is_kept_on_a_file_system_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, "no hard links")

    monkeypatch.setattr("os.link", refused)
    for last_s in (1.0, 2.0, 3.0):
        saved_state.save(tmp_path, SavedState(last_s=last_s))
    assert saved_state.load(tmp_path)[0].last_s == 3.0
    (tmp_path / NAME).unlink()
    assert saved_state.load(tmp_path)[0].last_s == 2.0


def test_a_file_of_a_version_that_did_not_pause_the_clean_time_is_loaded(tmp_path: Path) -> None:
    _, _, raw = saved_state.encode(full()).partition(b"\n")
    found = json.loads(raw)
    del found["calm_released_s"], found["calm_needs"]
    raw = json.dumps(found).encode()
    (tmp_path / NAME).write_bytes(b"%08x %d\n" % (zlib.crc32(raw), len(raw)) + raw)
    unpaused = replace(full(), clean_time=CleanTime(1.0, None, 3.0))
    assert saved_state.load(tmp_path) == (unpaused, ())


def test_a_state_keeps_its_id_until_a_part_of_it_is_lost(tmp_path: Path) -> None:
    for state in (replace(full(), id="first"), replace(full(), last_s=100.0, id="first")):
        saved_state.save(tmp_path, state)
    assert saved_state.load(tmp_path)[0].id == "first"
    (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes()[:-1])
    previous, problems = saved_state.load(tmp_path)
    assert (previous.last_s, previous.id != "first", len(problems)) == (99.0, True, 1)
    raw = json.loads((tmp_path / BEFORE).read_bytes().partition(b"\n")[2])
    assert raw.pop("id") == "first"
    text = json.dumps(raw).encode()
    (tmp_path / NAME).write_bytes(b"%08x %d\n" % (zlib.crc32(text), len(text)) + text)
    assert len(saved_state.load(tmp_path)[0].id) == 16, "an earlier agent wrote none"


@pytest.mark.parametrize("content", [b"torn", b'5a1dc9f0 13\n{"version":2}'])
def test_a_state_that_was_set_aside_is_still_missing_if_nothing_was_saved_since(
    tmp_path: Path, content: bytes
) -> None:
    for name in saved_state.names(1):
        (tmp_path / name).write_bytes(content)
    assert len(saved_state.load(tmp_path, set_aside=True)[1]) == 2
    [problem] = saved_state.load(tmp_path)[1]
    assert "has only files that could not be used: memory.1.before." in problem
    saved_state.save(tmp_path, full())
    assert saved_state.load(tmp_path) == (full(), ())


def test_the_message_about_damaged_content_says_that_it_is_damaged(tmp_path: Path) -> None:
    for damage, why in (
        ({"told": [[1]]}, "its content is damaged (ValueError: not enough values to unpack"),
        ({"version": "x"}, "its content is damaged: it is not an object with a version"),
    ):
        saved_state.save(tmp_path, full())
        _, _, raw = (tmp_path / NAME).read_bytes().partition(b"\n")
        changed = json.dumps({**json.loads(raw), **damage}).encode()
        (tmp_path / NAME).write_bytes(b"%08x %d\n" % (zlib.crc32(changed), len(changed)) + changed)
        (tmp_path / BEFORE).unlink(missing_ok=True)
        [problem] = saved_state.load(tmp_path)[1]
        assert problem.startswith(f"{tmp_path / NAME} is not used: {why}")
        assert problem.endswith("no other file can be used, so the agent starts a new state")


def test_the_message_about_a_damaged_file_names_it_what_was_expected_and_what_is_used(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("torn")
    why = f"{tmp_path / NAME} is not used: its first line is not a checksum and a size, as in every file of"
    [problem] = saved_state.load(tmp_path)[1]
    assert problem.startswith(why)
    assert problem.endswith("no other file can be used, so the agent starts a new state")
    saved_state.save(tmp_path, full())
    (tmp_path / NAME).rename(tmp_path / BEFORE)
    (tmp_path / NAME).write_text("torn")
    [problem] = saved_state.load(tmp_path)[1]
    assert problem.startswith(why)
    assert problem.endswith(f"{BEFORE}, an earlier version, is used instead")
