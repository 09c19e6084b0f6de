"""The journal's sensor with a real child process, which prints entries as journald writes them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.process.clock import LEAST
from nodeagent.kernel.journal import JournalSensor
from nodeagent.kernel.subprocess_lines import LineProcess
from nodeagent.model import Observation
from nodeagent.sensing.clock import Clock, begin
from nodeagent.sensing.sensor import WAIT_S, Unavailable
from tests.unit.nodeagent.kernel.world import LINES, XID_79, events, lost

pytestmark = [pytest.mark.local, pytest.mark.timeout(30)]

BOUND_S = 10.0
CLOCK: Clock = begin(None, 0.0)
BOOT = CLOCK.anchor.boot_id.replace("-", "")


class Folder:
    """The folder that the replacement for journalctl reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.program = path / "journalctl"
        self.program.write_text(
            f"#!{sys.executable} -I\n{(Path(__file__).parent / 'journalctl.py').read_text()}"
        )
        self.program.chmod(0o755)
        os.mkfifo(path / "lines")
        # Opened for reading and writing, so that neither side waits for the other.
        self._pipe = os.open(path / "lines", os.O_RDWR)
        self._count = 0

    def write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._pipe, data[: 1 << 15]) :]

    def say(self, text: str, **changed: Any) -> None:
        self.write(self.entry(text, **changed))

    def entry(self, text: str, **changed: Any) -> bytes:
        """Return the next entry of the journal, which then becomes the journal's newest entry."""
        self._count += 1
        entry = {
            "__CURSOR": f"s=1;i={self._count}", "__MONOTONIC_TIMESTAMP": str(self._count * 1_000_000),
            "__REALTIME_TIMESTAMP": "1", "_BOOT_ID": BOOT, "_TRANSPORT": "kernel", "SYSLOG_FACILITY": "0",
            "PRIORITY": "3", "MESSAGE": text, **changed,
        }  # fmt: skip
        line = json.dumps(entry)
        (self.path / "newest").write_text(line)
        return line.encode() + b"\n"

    def calls(self) -> list[list[str]]:
        return [line.split() for line in (self.path / "calls").read_text().splitlines()]

    def end(self) -> None:
        os.close(self._pipe)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    made = Folder(tmp_path)
    monkeypatch.setenv("JOURNAL", str(tmp_path))
    yield made
    made.end()


@pytest.fixture
def journal(folder: Folder) -> Iterator[Callable[..., JournalSensor]]:
    made: list[JournalSensor] = []

    def start(cursor: str = "", **options: Any) -> JournalSensor:
        sensor = JournalSensor(CLOCK, LINES, cursor, journalctl=str(folder.program), **options)
        made.append(sensor)
        sensor.open()
        return sensor

    yield start
    for each in made:
        each.close()


def until(sensor: JournalSensor, count: int) -> list[Observation]:
    """Read until there are `count` events, for at most `BOUND_S`."""
    found: list[Observation] = []
    deadline_s = time.monotonic() + BOUND_S
    while len(events(found)) < count and time.monotonic() < deadline_s:
        found += sensor.read()
    return found


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_kernel_lines_are_reported_as_they_arrive_and_the_cursor_advances(
    folder: Folder, journal: Callable[..., JournalSensor]
) -> None:
    sensor = journal(directory=Path("/host/var/log/journal"))
    folder.say("eth0: renamed from veth0")
    folder.say(XID_79)
    [found] = events(until(sensor, 1))
    assert (found.check, found.entity, found.value, found.source) == (
        "xid",
        "gpu/0000:3b:00.0",
        79,
        "journal",
    )
    assert found.at_s == pytest.approx(CLOCK.from_monotonic(2.0), abs=0.01)
    assert sensor.cursor == "s=1;i=2"
    folder.say(XID_79.replace("3b", "5e"), MESSAGE=list(XID_79.replace("3b", "5e").encode()))
    assert [each.entity for each in events(until(sensor, 1))] == ["gpu/0000:5e:00.0"]
    [[_, *called]] = folder.calls()
    assert {"-k", "--boot", "-f", "--no-tail", "--no-pager", "--directory=/host/var/log/journal"} <= {*called}


def test_only_the_kernels_own_lines_of_this_boot_are_believed(
    folder: Folder, journal: Callable[..., JournalSensor]
) -> None:
    sensor = journal()
    folder.say(XID_79, _TRANSPORT="syslog")
    folder.say(XID_79, SYSLOG_FACILITY="1")
    folder.say(XID_79, _BOOT_ID="f" * 32)
    folder.write(b"\xff not json\n")
    folder.say("nfs: server 10.0.0.9 OK")
    assert [each.check for each in events(until(sensor, 1))] == ["cleared"]


def test_silence_is_no_failure_and_a_read_does_not_wait_long(
    folder: Folder, journal: Callable[..., JournalSensor]
) -> None:
    sensor = journal()
    folder.say(XID_79)
    until(sensor, 1)
    began = time.monotonic()
    assert list(sensor.read()) == []
    assert WAIT_S * LEAST * 0.9 < time.monotonic() - began < 2 * WAIT_S + 1.0


def questions(folder: Folder) -> int:
    return sum("-n" in each for each in folder.calls())


def test_a_journalctl_that_never_writes_is_not_taken_for_a_healthy_kernel(
    folder: Folder, journal: Callable[..., JournalSensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodeagent.kernel.journal.ANSWER_S", 0.5)
    (folder.path / "hangs").touch()
    sensor = journal("s=1;i=1")
    with pytest.raises(Unavailable, match=r"has not written the newest entry for 0.5 s"):
        sensor.read()
    assert sensor.progress.newest()[0] == "journalctl -n 1"
    assert not alive(int(folder.calls()[1][0]))


def test_silence_is_believed_once_another_journalctl_finds_nothing_newer(
    folder: Folder, journal: Callable[..., JournalSensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.entry("eth0: renamed from veth0")  # read before a restart of the agent
    sensor = journal("s=1;i=1")
    assert events([*sensor.read(), *sensor.read()]) == []
    assert questions(folder) == 1, "not asked again at once"
    monkeypatch.setattr("nodeagent.kernel.journal.PROVE_S", 0.0)
    assert events(sensor.read()) == []
    assert questions(folder) == 2


def test_a_journal_without_lines_of_the_kernel_shows_nothing(
    folder: Folder, journal: Callable[..., JournalSensor]
) -> None:
    """The kernel logs at every boot, so nobody records what it says, or the journal is another one."""
    sensor = journal()
    with pytest.raises(Unavailable, match="finds no line of the kernel from this boot"):
        sensor.read()
    assert questions(folder) == 1


def test_a_journalctl_that_cannot_be_killed_is_not_joined_by_others(
    folder: Folder, journal: Callable[..., JournalSensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    sensor = journal()
    folder.say(XID_79)
    until(sensor, 1)
    hangs = True
    monkeypatch.setattr(LineProcess, "is_alive", lambda _: hangs)
    for _ in range(3):
        with pytest.raises(
            Unavailable, match=rf"\(process {folder.calls()[0][0]}\) was killed but has not exited"
        ):
            sensor.open()
    assert len(folder.calls()) == 1
    hangs = False
    sensor.open()
    folder.say(XID_79)
    assert len(events(until(sensor, 1))) == 1


def test_a_journalctl_that_has_stopped_following_is_noticed(
    folder: Folder, journal: Callable[..., JournalSensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nodeagent.kernel.journal.ANSWER_S", 0.5)
    monkeypatch.setattr("nodeagent.kernel.journal.PROVE_S", 0.0)
    sensor = journal()
    folder.say("eth0: renamed from veth0")
    sensor.read()
    follower = int(folder.calls()[0][0])
    os.kill(follower, signal.SIGSTOP)
    folder.say(XID_79)
    with pytest.raises(Unavailable, match="does not write an entry that is in the journal"):
        sensor.read()
    sensor.open()
    assert not alive(follower)
    assert "--after-cursor=s=1;i=1" in sensor.command(), "the new one writes what was missed"


def test_a_line_that_arrives_during_the_question_is_not_missed(
    folder: Folder, journal: Callable[..., JournalSensor]
) -> None:
    late = folder.entry(XID_79)  # in the journal, but not written yet by the journalctl that follows it

    def write_late() -> None:
        while not (folder.path / "calls").exists() or not questions(folder):
            time.sleep(0.01)
        folder.write(late)

    sensor = journal("s=1;i=0")
    writer = threading.Thread(target=write_late)
    writer.start()
    assert [each.value for each in events(until(sensor, 1))] == [79]
    writer.join()


def test_the_end_of_journalctl_is_reported_and_the_next_one_continues_after_the_cursor(
    folder: Folder, journal: Callable[..., JournalSensor]
) -> None:
    sensor = journal()
    folder.say(XID_79)
    until(sensor, 1)
    os.kill(int(folder.calls()[0][0]), 9)
    with pytest.raises(Unavailable, match=r"has ended.*exit status -9"):
        until(sensor, 1)
    sensor.close()
    sensor.open()
    folder.say(XID_79.replace("3b", "5e"))
    assert len(events(until(sensor, 1))) == 1
    assert "--after-cursor=s=1;i=1" in folder.calls()[1]


def test_a_refused_cursor_is_dropped(folder: Folder, journal: Callable[..., JournalSensor]) -> None:
    (folder.path / "fails").write_text("Failed to seek to cursor: Invalid argument")
    sensor = journal("garbage")
    with pytest.raises(Unavailable, match=r"Failed to seek to cursor: Invalid argument \(exit status 1\)"):
        until(sensor, 1)
    assert sensor.cursor == ""
    assert not any(each.startswith("--after-cursor") for each in sensor.command())


def test_closing_leaves_no_process_behind(folder: Folder, journal: Callable[..., JournalSensor]) -> None:
    sensor = journal()
    folder.say(XID_79)
    until(sensor, 1)
    pid = int(folder.calls()[0][0])
    assert alive(pid)
    sensor.close()
    sensor.close()
    assert not alive(pid)
    with pytest.raises(Unavailable, match="not running"):
        sensor.read()


def test_an_overlong_line_is_omitted_and_counted(
    folder: Folder, journal: Callable[..., JournalSensor]
) -> None:
    sensor = journal()
    folder.say(XID_79)
    found = until(sensor, 1)
    flood = threading.Thread(target=folder.write, args=(b"y" * 2_000_000 + b"\n",))  # more than pipes hold
    flood.start()
    while flood.is_alive():
        found += sensor.read()
    folder.say(XID_79.replace("3b", "5e"))
    found += until(sensor, 1)
    assert len(events(found)) == 2
    assert lost(found) == [0.0, 1.0]


def test_a_flood_is_read_piece_by_piece_and_nothing_is_missed(
    folder: Folder, journal: Callable[..., JournalSensor]
) -> None:
    sensor = journal()
    found: list[Observation] = []
    for share in range(20):
        for _ in range(30):
            folder.say("audit: type=1400 " + "x" * 900)
        folder.say(XID_79.replace("3b", f"{share + 1:02x}"))
        found += events(until(sensor, 1))
    assert [each.entity for each in found] == [f"gpu/0000:{n + 1:02x}:00.0" for n in range(20)]


def test_a_missing_journalctl_is_reported() -> None:
    with pytest.raises(Unavailable, match="not installed"):
        JournalSensor(CLOCK, LINES, journalctl="/nonexistent/journalctl").open()


@pytest.mark.skipif(shutil.which("journalctl") is None, reason="there is no journalctl on this machine")
def test_the_real_journalctl_accepts_all_options(tmp_path: Path) -> None:
    sensor = JournalSensor(CLOCK, LINES, "s=0;i=1;b=0;m=0;t=0;x=0", directory=tmp_path)
    sensor.open()
    why = ""
    try:
        assert events(sensor.read()) == []
    except Unavailable as gone:  # an empty folder may be refused, an option must not be
        why = str(gone)
    sensor.close()
    assert "option" not in why
