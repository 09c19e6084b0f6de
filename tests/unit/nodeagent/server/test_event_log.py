from __future__ import annotations

import errno
import json
import os
import threading
from typing import Any

from nodeagent.server import event_log
from nodeagent.server.event_log import EventLog

SOON_S = 10.0


class Reader:
    """A reader of the lines that may be slow or disappear."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.began = threading.Event()
        self.goes_on = threading.Event()
        self.gone = self.full = False

    def write(self, line: str) -> None:
        self.began.set()
        assert self.goes_on.wait(SOON_S)
        if self.gone:
            raise BrokenPipeError
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.lines.append(json.loads(line))


def stalled() -> tuple[EventLog, Reader]:
    """Return a log that is in the middle of its first line."""
    reader = Reader()
    log = EventLog(reader.write)
    log.write({"n": 0})
    assert reader.began.wait(SOON_S)
    return log, reader


def test_lines_are_written_in_order() -> None:
    log, reader = stalled()
    for n in range(1, 10):
        log.write({"n": n})
    reader.goes_on.set()
    assert log.drain(SOON_S)
    assert reader.lines == [{"n": n} for n in range(10)]


def test_a_stalled_reader_delays_no_writer_and_is_sent_the_number_of_dropped_lines() -> None:
    log, reader = stalled()
    for n in range(1, event_log.MAX_WAITING + 6):
        log.write({"n": n})
    assert not log.drain(0.0)
    reader.goes_on.set()
    assert log.drain(SOON_S)
    first, missed, after, *_, last = reader.lines
    assert (first, missed, after) == ({"n": 0}, {"event": "lines_left_out", "count": 5}, {"n": 6})
    assert last == {"n": event_log.MAX_WAITING + 5}


def test_a_reader_that_is_gone_receives_nothing_more() -> None:
    log, reader = stalled()
    log.write({"n": 1})
    reader.gone = True
    reader.goes_on.set()
    assert log.drain(SOON_S)
    log.write({"n": 2})
    assert log.drain(0.0)
    assert reader.lines == []


def test_a_disk_that_was_full_receives_the_later_lines_and_the_number_of_those_left_out() -> None:
    log, reader = stalled()
    reader.full = True
    reader.goes_on.set()
    for n in range(1, 4):
        log.write({"n": n})
    assert log.drain(SOON_S)
    reader.full = False
    log.write({"n": 4})
    log.write({"n": 5})
    assert log.drain(SOON_S)
    assert reader.lines == [{"event": "lines_left_out", "count": 4}, {"n": 4}, {"n": 5}]
