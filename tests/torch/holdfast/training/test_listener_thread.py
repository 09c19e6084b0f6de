"""The thread that listens to the launcher answers however a copy ends, and handles later orders."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.errors import BadInput
from holdfast.protocol import rank_channel
from holdfast.protocol.launcher_messages import Launch, RankStart
from holdfast.protocol.rank_channel import WorkerMessage, WorkerOrder
from holdfast.training.session import Session
from holdfast.worker.launcher_channel import LauncherChannel

WAIT_S = 20.0


class Failing:
    """A copy that fails in an unexpected way."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def snapshot_just_in_time(self, generation: int, copy: bool) -> None:
        raise self.error


class Unspoilable:
    def _poison(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def line(tmp_path: Path) -> Iterator[tuple[socket.socket, Session]]:
    ours, theirs = rank_channel.pair()
    ours.settimeout(WAIT_S)
    session = Session(
        Launch(3, 1, 1, "", 0, 0, 0.0), RankStart(0, 0), LauncherChannel(theirs, tmp_path, 0, 1)
    )
    stopped = threading.Event()
    thread = threading.Thread(target=listen, args=(session, stopped), daemon=True)
    thread.start()
    with closing(ours), closing(theirs):
        yield ours, session
        rank_channel.send(ours, WorkerOrder("fork"))  # an order that ranks never receive
        assert stopped.wait(WAIT_S), "the listener died"


def listen(session: Session, stopped: threading.Event) -> None:
    """Do what `Session._listen` does until an order ends the thread instead of the process."""
    assert session._rank.channel is not None
    while True:
        order, _ = rank_channel.receive(session._rank.channel.control, WorkerOrder)
        if order.do == "fork":
            stopped.set()
            return
        session._obey(order)


@pytest.mark.parametrize(
    "error", [BadInput("it is a set"), RuntimeError("CUDA error"), ValueError("x" * 9000)]
)
def test_a_copy_that_fails_in_any_way_is_answered(
    line: tuple[socket.socket, Session], error: Exception
) -> None:
    ours, session = line
    session._protection = Failing(error)  # type: ignore[assignment]
    for _ in range(2):
        rank_channel.send(ours, WorkerOrder("secure", generation=3))
        said, _descriptors = rank_channel.receive(ours, WorkerMessage)
        assert said.secured is not None
        assert (said.secured.rank, said.secured.whole) == (0, False)
        assert said.secured.why.startswith(type(error).__name__)
        assert len(said.secured.why) <= 500


def test_a_failed_drill_is_reported(
    line: tuple[socket.socket, Session], capsys: pytest.CaptureFixture[str]
) -> None:
    ours, session = line
    session._state = Unspoilable()  # type: ignore[assignment]
    rank_channel.send(ours, WorkerOrder("drill", drill="nan"))
    said, _ = rank_channel.receive(ours, WorkerMessage)
    assert (said.what, "the drill nan failed: RuntimeError" in said.note) == ("note", True)
    assert "the drill nan failed" in capsys.readouterr().err


def test_a_question_about_the_main_thread_is_answered(line: tuple[socket.socket, Session]) -> None:
    ours, _ = line
    rank_channel.send(ours, WorkerOrder("where"))
    said, _descriptors = rank_channel.receive(ours, WorkerMessage)
    assert (said.what, said.where) == ("where", "work")
