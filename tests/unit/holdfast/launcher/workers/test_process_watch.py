"""The launcher receives its processes' reports and notices their ends."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from holdfast.launcher.workers.process_watch import ProcessWatch
from holdfast.launcher.workers.worker_process import WorkerProcess
from holdfast.process import selector_loop
from holdfast.protocol import rank_channel
from holdfast.protocol.launcher_messages import Ending
from holdfast.protocol.rank_channel import WorkerMessage

FAILED = Ending(2, 1, message="ValueError: a word")
UNWINDING = Ending(1, 1, unwinding=True)


class Watched:
    """One watched process, and a record of what its watch has reported."""

    def __init__(self, folder: Path) -> None:
        self.events: list[str] = []  # messages and the end, in order
        self.reported: Ending | None = None  # when the end was reported
        self.status: int | None = None  # the status of the reaped process
        self.selector = selectors.DefaultSelector()
        self.watch = ProcessWatch(self.selector, self._on_message, self._on_end)
        ours, self.theirs = rank_channel.pair()
        self.process = WorkerProcess(0, ours, folder / "log")
        self.watch.add(self.process)

    def _on_message(self, process: WorkerProcess, message: WorkerMessage) -> None:
        assert process is self.process
        self.events.append(message.what)

    def _on_end(self, process: WorkerProcess) -> None:
        self.events.append("end")
        self.reported = process.reported
        if process.pid:
            self.status = os.waitpid(process.pid, 0)[1]

    def say(self, message: WorkerMessage) -> None:
        rank_channel.send(self.theirs, message)

    def turn(self) -> None:
        """Wait until something is ready, and handle everything that is."""
        for key in selector_loop.ready(self.selector, 60.0):
            key.data()

    def until_ended(self) -> None:
        while "end" not in self.events:
            self.turn()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.theirs.close()
    made.process.close()
    made.selector.close()


def waiting_child() -> tuple[int, IO[bytes]]:
    """Return the pid of a process in its own group, and a pipe whose closing makes it exit with 3."""
    child = subprocess.Popen(["sh", "-c", "read line; exit 3"], stdin=subprocess.PIPE, start_new_session=True)
    child.returncode = 0  # so that Popen does not reap it
    assert child.stdin is not None
    return child.pid, child.stdin


def test_the_end_of_a_process_is_noticed_although_its_channel_stays_open(watched: Watched) -> None:
    """A data loader worker may hold the channel open."""
    child, line = waiting_child()
    watched.say(WorkerMessage("born", child))
    watched.turn()
    line.close()
    watched.until_ended()
    assert watched.events == ["born", "end"]
    assert watched.status == 3 << 8
    assert watched.process.pidfd == -1
    assert not watched.selector.get_map()


def test_all_messages_are_received_before_the_end_even_if_the_kernel_reports_the_end_first(
    watched: Watched,
) -> None:
    child, line = waiting_child()
    watched.watch.born(watched.process, child)
    line.close()
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    for message in (WorkerMessage("note", child), WorkerMessage("failing", child, ending=FAILED)):
        watched.say(message)
    watched.theirs.sendall(b"{}")  # a process that the script forked may write anything
    watched.say(WorkerMessage("left"))
    watched.watch.ended(watched.process)
    assert watched.events == ["note", "failing", "left", "end"]
    assert watched.reported == FAILED


def test_a_process_whose_channel_closes_before_its_pid_is_known_has_ended(watched: Watched) -> None:
    watched.theirs.close()
    watched.until_ended()
    assert watched.events == ["end"]
    assert not watched.selector.get_map()


def test_a_process_that_closes_its_channel_has_not_ended(watched: Watched) -> None:
    child, line = waiting_child()
    watched.watch.born(watched.process, child)
    watched.theirs.close()
    watched.turn()
    assert watched.events == []
    line.close()
    watched.until_ended()
    assert watched.events == ["end"]


def test_a_signal_sent_before_the_pid_was_known_is_sent_again(watched: Watched) -> None:
    child, line = waiting_child()
    watched.process.kill(signal.SIGKILL)
    watched.say(WorkerMessage("born", child))
    watched.until_ended()
    line.close()
    assert watched.status == signal.SIGKILL


@pytest.mark.parametrize(
    ("messages", "reported"),
    [
        ([WorkerMessage("failing", ending=UNWINDING)], UNWINDING),
        ([WorkerMessage("failing", ending=UNWINDING), WorkerMessage("withdrawn")], None),
        ([WorkerMessage("failing", ending=UNWINDING), WorkerMessage("withdrawn", 1)], UNWINDING),
        ([WorkerMessage("failing", ending=UNWINDING), WorkerMessage("failing", ending=FAILED)], FAILED),
        ([WorkerMessage("failing", ending=FAILED), WorkerMessage("withdrawn")], FAILED),
        ([WorkerMessage("failing", ending=FAILED), WorkerMessage("failing", ending=UNWINDING)], FAILED),
        ([WorkerMessage("failing", 1, ending=FAILED)], None),
        ([WorkerMessage("withdrawn"), WorkerMessage("failing")], None),
    ],
    ids=[
        "unwinding",
        "caught",
        "a fork's withdrawal",
        "unwound",
        "final",
        "later",
        "a fork's failure",
        "no ending",
    ],
)
def test_the_last_message_of_a_process_determines_the_reported_ending(
    watched: Watched, messages: list[WorkerMessage], reported: Ending | None
) -> None:
    watched.process.pid = os.getpid()
    for message in messages:
        watched.say(message)
        watched.turn()
    assert watched.process.reported == reported
    watched.process.pid = 0
