"""Messages that are too long, and peers that do not read."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.launcher.workers.warm_pool import MemberSettings
from holdfast.launcher.workers.worker_group import WorkerGroup
from holdfast.launcher.workers.worker_process import Worker, WorkerProcess
from holdfast.protocol import codec, rank_channel
from holdfast.protocol.launcher_messages import BadNumber, Ending, RankStart, SecureAnswer
from holdfast.protocol.rank_channel import WorkerMessage, WorkerOrder


def carried(message: WorkerMessage) -> WorkerMessage:
    ours, theirs = rank_channel.pair()
    with ours, theirs:
        rank_channel.send(ours, message)
        return rank_channel.receive(theirs, WorkerMessage)[0]


@pytest.mark.parametrize("text", ["\U0001f642" * 16_000, "x" * 400_000, "\x1b" * 100_000, '"' * 200_000])
def test_a_message_that_is_too_long_loses_the_end_of_its_longest_text(text: str) -> None:
    ending = Ending(7, 1, None, False, "exception", 5, text)
    found = carried(WorkerMessage("failing", 3, ending=ending, secured=SecureAnswer(0, 4, False, "no room")))
    assert found.ending is not None
    assert found.ending.message.endswith(" [...]")
    kept = found.ending.message.removesuffix(" [...]")
    assert text.startswith(kept)
    assert len(codec.encode(found)) > 0.9 * rank_channel._MAX_PACKET_BYTES, "more was cut than necessary"
    assert (found.what, found.ending.code, found.ending.fail) == ("failing", 1, "exception")
    assert found.secured == SecureAnswer(0, 4, False, "no room")


def test_several_long_texts_are_shortened_one_after_the_other() -> None:
    flag = BadNumber("nan", 3, "9" * 150_000, 0, 1)
    found = carried(WorkerMessage("flag", flag=flag, secured=SecureAnswer(0, 4, False, "w" * 300_000)))
    assert found.flag is not None
    assert found.secured is not None
    assert found.secured.why.endswith(" [...]")


def test_a_message_that_fits_is_sent_unchanged() -> None:
    said = WorkerMessage("failing", 3, ending=Ending(7, message="\U0001f642" * 1000))
    assert carried(said) == said


def test_nothing_is_omitted_from_an_order() -> None:
    ours, theirs = rank_channel.pair()
    with ours, theirs, pytest.raises(codec.InvalidMessage, match="do not fit into a packet"):
        rank_channel.send(ours, WorkerOrder("member", argv=("x" * 200_000,)))


def fill(line: socket.socket) -> None:
    """Send as much as the socket holds without a reader."""
    with suppress(BlockingIOError):
        while True:
            rank_channel.send(line, WorkerOrder("where"), wait=False)


def test_a_non_blocking_send_does_not_wait_for_a_peer_that_does_not_read() -> None:
    """If the launcher blocked there, it would hold up all of its ranks."""
    ours, theirs = rank_channel.pair()
    with ours, theirs:
        fill(ours)
        with pytest.raises(BlockingIOError):
            rank_channel.send(ours, WorkerOrder("where"), wait=False)
        assert rank_channel.receive(theirs, WorkerOrder)[0] == WorkerOrder("where")


@pytest.mark.parametrize(
    "ask", [WorkerGroup.ask_where, lambda group: group.drill(0, "nan")], ids=["where", "drill"]
)
def test_a_rank_that_reads_nothing_does_not_block_its_launcher(
    ask: Callable[[WorkerGroup], None], tmp_path: Path
) -> None:
    ours, theirs = rank_channel.pair()
    with ours, theirs:
        group = WorkerGroup(MemberSettings(tmp_path, tmp_path, "m0", 1, tmp_path, 0))
        fill(ours)
        rank = RankStart(0, 0)
        group.workers = (Worker(0, 0, rank, WorkerProcess(0, ours, tmp_path / "log", pid=os.getpid())),)
        ask(group)
        assert rank_channel.receive(theirs, WorkerOrder)[0] == WorkerOrder("where")
