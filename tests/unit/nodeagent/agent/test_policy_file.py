"""Whatever becomes of the operator's file, a good policy is in force, and a mistake is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nodeagent.agent.policy_file import KEPT, MAX_UNSETTLED, START_PAUSE_S, PolicyFile
from nodeagent.model import Level
from nodeagent.policy import loading, overriding
from nodeagent.policy.loading import shipped

GOOD = '[xid.63]\nlevel = "degraded"\n'
OTHER = '[xid.63]\nlevel = "unhealthy"\n'
BAD = '[xid.63]\nlevel = "terrible"\n[checks.heet]\nclear_s = 5\n'


class Room:
    """A policy file, the folder of the state, and how often a change was announced."""

    def __init__(self, tmp_path: Path, *, required: bool = True) -> None:
        self.path, self.folder, self.required = tmp_path / "node.toml", tmp_path / "state", required
        self.folder.mkdir()
        self.notified = 0
        self.pauses: list[float] = []

    def start(self) -> PolicyFile:
        made = PolicyFile(self.path, self.folder, required=self.required, pause=self.pauses.append)
        made.notify = self.notify
        return made

    def read(self, file: PolicyFile) -> None:
        """Read the file as often as it takes to adopt a change."""
        file.read()
        file.read()

    def notify(self) -> None:
        self.notified += 1

    @property
    def kept(self) -> Path:
        return self.folder / KEPT


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path)


def level(file: PolicyFile) -> Level:
    return file.current.policy.xids[63].level


def test_a_changed_file_takes_effect_and_is_announced_once(room: Room) -> None:
    room.path.write_text(GOOD)
    file = room.start()
    assert (level(file), file.current.problem) == (Level.DEGRADED, "")
    before = file.current
    file.read()
    file.ask()
    file.read()
    assert (file.current is before or file.current == before, room.notified) == (True, 0)
    assert file.current.policy is before.policy, "the same content is the same policy"
    room.path.write_text(OTHER)
    file.read()
    file.read()
    assert (level(file), room.notified, room.kept.read_text()) == (Level.UNHEALTHY, 1, OTHER)


@pytest.mark.parametrize(
    "bad", ["wrong", "missing", "folder", "binary", "huge", "dangling", "not toml", "huge number", "empty"]
)
def test_a_bad_file_leaves_the_last_good_policy_in_force_and_is_named(room: Room, bad: str) -> None:
    room.path.write_text(GOOD)
    running = room.start()
    room.path.unlink()
    if bad == "wrong":
        room.path.write_text(BAD)
    elif bad == "folder":
        room.path.mkdir()
    elif bad == "binary":
        room.path.write_bytes(b"\xff\xfe")
    elif bad == "huge":
        room.path.write_bytes(b"#" * (2 << 20))
    elif bad == "dangling":
        room.path.symlink_to("nowhere")
    elif bad == "not toml":
        room.path.write_text("[[[")
    elif bad == "huge number":
        room.path.write_text(f"[xid.63]\nhold_s = 0x{'f' * 5000}\n")
    elif bad == "empty":
        room.path.write_text("\n")
    room.read(running)
    for file in (running, room.start()):
        assert level(file) is Level.DEGRADED
        assert file.current.rejected
        assert str(room.path) in file.current.problem
        assert "remains in force" in file.current.problem
    assert room.kept.read_text() == GOOD
    assert room.notified == 1
    if room.path.is_dir():
        room.path.rmdir()
    room.path.unlink(missing_ok=True)
    room.path.write_text(GOOD)
    room.read(running)
    assert (level(running), running.current.problem, running.current.rejected) == (Level.DEGRADED, "", False)


def test_a_text_that_the_reader_fails_on_is_a_bad_file(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    room.path.write_text(GOOD)
    running = room.start()

    def failing(*_: object) -> None:
        raise ArithmeticError("too\ndeep")

    with monkeypatch.context() as patch:
        patch.setattr(overriding, "overridden", failing)
        room.path.write_text(OTHER)
        room.read(running)
        started = PolicyFile(room.path, None, required=True, pause=room.pauses.append)
    assert (level(running), running.current.rejected, room.notified) == (Level.DEGRADED, True, 1)
    assert "node.toml: cannot be understood: ArithmeticError: too deep" in running.current.problem
    assert started.current.policy is shipped()
    running.ask()
    running.read()
    assert (level(running), running.current.problem) == (Level.UNHEALTHY, "")


def test_all_mistakes_are_counted_and_the_first_are_named(room: Room) -> None:
    room.path.write_text("".join(f'[xid.{n}]\nlevel = "x"\n' for n in range(10)))
    problem = room.start().current.problem
    assert "xid.0.level" in problem
    assert "and 7 more" in problem


def test_a_bad_file_at_the_first_start_leaves_the_shipped_policy_in_force(room: Room) -> None:
    room.path.write_text(BAD)
    file = room.start()
    assert file.current.policy is shipped()
    assert "the shipped policy is in force because no earlier valid policy is known" in file.current.problem
    room.kept.write_text(BAD)
    file = room.start()
    assert file.current.policy is shipped()
    assert "no longer valid" in file.current.problem


def test_a_bad_file_is_not_parsed_again_until_it_changes(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    room.path.write_text(BAD)
    file = room.start()

    def counted(*_: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(loading, "load", counted)
    file.read()


def test_a_file_that_an_operator_removes_from_the_usual_place_restores_the_shipped_policy(
    tmp_path: Path,
) -> None:
    room = Room(tmp_path, required=False)
    room.path.write_text(GOOD)
    file = room.start()
    room.path.unlink()
    file.read()
    assert level(file) is Level.DEGRADED, "it may be about to be exchanged"
    file.read()
    assert (file.current.policy, file.current.problem) == (shipped(), "")
    assert not room.kept.exists()
    room.path.write_text(BAD)
    assert room.start().current.policy is shipped(), "the removed file does not come back"


def test_a_link_that_is_switched_as_for_a_mounted_config_map_is_followed(room: Room) -> None:
    folder = room.path.parent
    for name, text in (("one", GOOD), ("two", OTHER)):
        (folder / name).mkdir()
        (folder / name / "node.toml").write_text(text)
    (folder / "..data").symlink_to("one")
    room.path.symlink_to("..data/node.toml")
    file = room.start()
    assert level(file) is Level.DEGRADED
    (folder / "next").symlink_to("two")
    os.replace(folder / "next", folder / "..data")
    room.read(file)
    assert level(file) is Level.UNHEALTHY


def test_a_policy_that_cannot_be_kept_is_in_force_and_kept_once_there_is_room(room: Room) -> None:
    room.path.write_text(GOOD)
    room.folder.rmdir()
    file = room.start()
    assert (level(file), file.current.rejected) == (Level.DEGRADED, False)
    assert "cannot be written: No such file" in file.current.problem
    room.folder.mkdir()
    file.read()
    assert (file.current.problem, room.kept.read_text()) == ("", GOOD)


# -- a file that is being written

LONG = GOOD + "[checks.disk_used]\nunhealthy = false\n"


def test_the_beginning_of_a_file_that_is_being_written_never_takes_effect(room: Room) -> None:
    room.path.write_text(LONG)
    file = room.start()
    before = file.current
    for length in (0, len(GOOD), len(LONG)):  # as `cp` leaves it: cut off, then partly written
        room.path.write_text(LONG[:length])
        file.read()
        assert (file.current, room.kept.read_text()) == (before, LONG)
    room.path.write_text(GOOD)
    file.read()
    room.path.write_text(GOOD + "#" * len(OTHER))
    file.read()
    assert file.current == before
    room.read(file)
    assert (file.current.policy.rules["disk_used"].unhealthy is None, room.notified) == (False, 1)


def test_the_same_content_written_again_since_the_last_read_is_not_finished(room: Room) -> None:
    room.path.write_text(GOOD)
    file = room.start()
    for at_s in (1, 2):
        room.path.write_text(OTHER)
        os.utime(room.path, (at_s, at_s))
        file.read()
        assert level(file) is Level.DEGRADED
    file.read()
    assert level(file) is Level.UNHEALTHY


def test_a_file_that_is_being_written_at_the_start_leaves_the_last_good_policy_in_force(room: Room) -> None:
    room.path.write_text(LONG)
    room.start()
    assert room.pauses == [START_PAUSE_S]
    room.start()
    assert len(room.pauses) == 1, "the file is that of the copy"
    for length, after in ((0, len(GOOD)), (len(GOOD), len(LONG))):
        room.path.write_text(LONG[:length])

        def write(_: float, length: int = after) -> None:
            room.path.write_text(LONG[:length])

        file = PolicyFile(room.path, room.folder, required=True, pause=write)
        assert (file.current.policy.rules["disk_used"].unhealthy, file.current.problem) == (None, "")
        assert room.kept.read_text() == LONG


def test_a_file_that_keeps_changing_is_a_problem_until_it_settles(room: Room) -> None:
    room.path.write_text(GOOD)
    file = room.start()
    for n in range(MAX_UNSETTLED + 2):
        assert file.current.rejected is (n > MAX_UNSETTLED)
        room.path.write_text(f"{OTHER}# {n}")
        file.read()
    assert "it changes all the time" in file.current.problem
    assert (level(file), room.notified) == (Level.DEGRADED, 1)
    room.path.write_text(GOOD)
    room.read(file)
    assert (level(file), file.current.problem, file.current.rejected) == (Level.DEGRADED, "", False)


def test_an_emptied_file_takes_effect_if_there_was_no_other_or_if_it_says_so(room: Room) -> None:
    room.path.write_text("")
    file = room.start()
    assert (file.current.policy.xids[63], file.current.problem) == (shipped().xids[63], "")
    room.path.write_text(GOOD)
    room.read(file)
    room.path.write_text("# the shipped policy\n")
    room.read(file)
    assert (file.current.policy.xids[63], file.current.problem) == (shipped().xids[63], "")
