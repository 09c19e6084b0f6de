from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest

from supervisor.display import screen
from supervisor.display.screen import Screen


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 4096)
    stream = open(theirs, "w", encoding="ascii")
    yield ours, stream
    stream.close()
    os.close(ours)


def read_all(descriptor: int, into: list[bytes]) -> threading.Thread:
    def work() -> None:
        while chunk := os.read(descriptor, 65536):
            into.append(chunk)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_written_text_arrives_in_order_and_is_complete_at_the_end(pipe: tuple[int, TextIO]) -> None:
    ours, stream = pipe
    screen_ = Screen(stream, {})
    got: list[bytes] = []
    reader = read_all(ours, got)
    for number in range(2000):
        screen_.write(f"line {number}\n")
    screen_.close()
    stream.close()
    reader.join()
    assert b"".join(got).decode().splitlines() == [f"line {number}" for number in range(2000)]


def test_a_stalled_reader_blocks_nothing(pipe: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "CLOSE_S", 0.01)
    monkeypatch.setattr(screen, "FULL_BYTES", 1 << 20)
    ours, stream = pipe
    screen_ = Screen(stream, {})
    for _ in range(20):
        screen_.write("x" * (1 << 17))
    assert screen_.busy
    screen_.close()
    got: list[bytes] = []
    reader = read_all(ours, got)  # lets the thread end
    screen_._thread.join()
    stream.close()
    reader.join()
    assert len(b"".join(got)) <= screen.FULL_BYTES


@pytest.mark.parametrize("reads_first", [0, 3, 5000, 100_000])
def test_a_pipe_whose_reader_is_behind_at_the_end_gets_a_note_and_the_last_lines(
    pipe: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch, reads_first: int
) -> None:
    monkeypatch.setattr(screen, "CLOSE_S", 0.01)
    monkeypatch.setattr(screen, "LAST_S", 60.0)
    ours, stream = pipe
    screen_ = Screen(stream, {})
    lines = [f"line {number}" for number in range(100_000)]
    for line in lines:
        screen_.write(f"{line}\n")
    got = b""
    while len(got) < reads_first:
        got += os.read(ours, reads_first - len(got))
    screen_.close()
    assert not screen_._thread.is_alive(), "no output may be left in a thread that ends with the process"
    stream.close()
    while chunk := os.read(ours, 65536):
        got += chunk
    shown = got.decode().splitlines()
    [at] = [n for n, line in enumerate(shown) if line.startswith("[")]
    left_out = len(lines) - len(shown) + 1
    assert shown[at] == f"[{left_out:,} lines not shown: the run's logs contain them]"
    assert shown[:at] == lines[:at]
    assert shown[at + 1 :] == lines[at + left_out :]
    assert len("\n".join(shown[at + 1 :])) > screen.LAST_BYTES - 100


@pytest.mark.parametrize(
    ("rest", "at_start", "left"),  # N: the note
    [
        (b"one\ntwo\n", True, b"one\ntwo\n"),
        (b"ne\ntwo\n", False, b"ne\ntwo\n"),
        (b"one\ntwo\nfour\nfive\n", True, b"[2 lines N]\nfour\nfive\n"),
        (b"e\none\ntwo\nfour\nfive\n", False, b"e\n[2 lines N]\nfour\nfive\n"),
        (b"x" * 40 + b"\nfive\n", False, b"\n[1 line N]\nfive\n"),
        (b"x" * 40, False, b"x" * 40),
    ],
)  # fmt: skip
def test_only_whole_lines_are_omitted(
    monkeypatch: pytest.MonkeyPatch, rest: bytes, at_start: bool, left: bytes
) -> None:
    monkeypatch.setattr(screen, "LAST_BYTES", 12)
    monkeypatch.setattr(screen, "ROOM_BYTES", 48)
    assert screen._last_of(rest, at_start) == left.replace(b"N", b"not shown: the run's logs contain them")


def test_a_reader_that_has_left_is_not_an_error(pipe: tuple[int, TextIO]) -> None:
    ours, stream = pipe
    spare = os.dup(ours)
    screen_ = Screen(stream, {})
    os.close(ours)
    os.close(spare)
    screen_.write("into the void")
    screen_._thread.join()
    screen_.write("and again")
    assert not screen_.busy
    screen_.close()
    os.dup2(os.open(os.devnull, os.O_RDONLY), ours)  # for the fixture to close


def test_characters_that_the_encoding_lacks_are_replaced(pipe: tuple[int, TextIO]) -> None:
    ours, stream = pipe
    screen_ = Screen(stream, {})
    screen_.write("caf\u00e9 \u25cf\n")
    screen_.close()
    assert os.read(ours, 100) == b"caf? ?\n"
    assert not screen_.style.unicode


def test_a_non_blocking_output_is_waited_for(pipe: tuple[int, TextIO]) -> None:
    ours, stream = pipe
    os.set_blocking(stream.fileno(), False)
    screen_ = Screen(stream, {})
    screen_.write("y" * 100_000)
    got: list[bytes] = []
    reader = read_all(ours, got)
    screen_.close()
    stream.close()
    reader.join()
    assert len(b"".join(got)) == 100_000


def test_a_terminal_is_detected_with_its_size() -> None:
    leader, follower = os.openpty()
    with open(follower, "w", encoding="utf-8") as stream:
        at_terminal = Screen(stream, {"TERM": "xterm"})
        dumb = Screen(stream, {"TERM": "dumb"})
        assert (at_terminal.is_terminal, at_terminal.style.colour) == (True, True)
        assert (dumb.is_terminal, dumb.style.colour) == (False, False)
        assert all(number > 0 for number in at_terminal.size())
        at_terminal.close()
        dumb.close()
    os.close(leader)


def test_a_full_disk_is_reported_and_one_with_space_again_is_not(pipe: tuple[int, TextIO]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        screen_ = Screen(full, {})
        screen_.write("lost\n")
        screen_.flush()
        assert screen_.write_error == "No space left on device"
        os.dup2(pipe[1].fileno(), full.fileno())
        screen_.write("whole\n")
        screen_.close()
    assert os.read(pipe[0], 100) == b"whole\n"
    assert screen_.write_error == ""
