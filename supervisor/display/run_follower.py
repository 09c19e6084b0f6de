"""Follow the directory of a run in progress: its status, its ranks' output and its incidents.

A separate thread reads the files. The process that displays a run also restarts dead parts and handles
Ctrl-C, and storage that hangs must not delay either of these tasks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from holdfast.fileio.storage_thread import StorageThread
from holdfast.process.log_tail import LogTails
from supervisor.store.json_file import JsonFileReader
from supervisor.store.run_directory import RunDir

SOON_S = 0.05  # how long `poll` waits for a read, which usually takes one or two milliseconds
HANGS_S = 5.0  # a longer read is reported
READ_S = 1.0  # the time limit for one small file
END_S = 3.0  # the time limit for the last read
OLD_S = 10.0  # `poll` probes with a write if the status is older; it is renewed every second

RankLine = tuple[int, str]  # rank, text
_WARNS = re.compile(r"holdfast: (?:(?P<of>warning: )(?:rank \d+: )?|rank \d+: )(?P<text>.*)")
_NUMBER = re.compile(r"\d+")


class WarningFilter:
    """Filters out repeated warnings. Each rank prints a warning, and prints it again after a restart.

    Two warnings about the script are the same even if their numbers, such as the step, differ. Two warnings
    about a training value, such as a loss jump, are not.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()

    def admit(self, text: str) -> bool:
        """True if a line must be shown, because it is not a warning or is the first of its kind."""
        found = _WARNS.match(text)
        if found is None:
            return True
        kind = found["text"] if found["of"] else _NUMBER.sub("#", found["text"])
        if kind in self._known:
            return False
        self._known.add(kind)
        return True


@dataclass(frozen=True, slots=True)
class _Reading:
    lines: list[RankLine]
    status: Mapping[str, Any]
    gone: bool
    refused: str = ""  # why nothing can be written


class RunFollower:
    """Reads new content of the directory. No method raises or blocks for longer than its limit."""

    def __init__(self, run: RunDir) -> None:
        self.status: Mapping[str, Any] = {}  # the newest
        self._run = run
        self._files = StorageThread("run directory")
        self._follower = JsonFileReader(run.status_file)
        self._tails = LogTails(run.logs, skip=True)
        self._warned = WarningFilter()
        self._pending: Future[_Reading] | None = None
        self._since_s = 0.0
        self._gone = False
        self._refused = ""
        self._reported = ""
        # The newest status, with the time at which it was first read or, if later, the time of the last
        # probe.
        self._renewed: tuple[object, float] = (None, 0.0)
        self._probed = ""

    def poll(self, now_s: float) -> list[RankLine]:
        """Return the lines that ranks have printed since the last call. Update `status`.

        Warnings that another rank or an earlier generation has already printed are left out.
        """
        if self._pending is None:
            self._pending, self._since_s = self._files.submit(self._read_all), now_s
            with suppress(futures.TimeoutError, OSError):
                self._pending.exception(SOON_S)  # `wait` takes several times as long
        if not self._pending.done():
            return []
        reading, self._pending = self._pending.result(), None
        return self._adopt(reading)

    def news(self, now_s: float) -> str:
        """Return a message about the directory itself if its state has changed; "" otherwise."""
        hangs = self._pending is not None and now_s - self._since_s > HANGS_S
        state = "hangs" if hangs else "gone" if self._gone else "refuses" if self._refused else ""
        if state == self._reported:
            return ""
        before, self._reported = self._reported, state
        name = self._run.path
        over = "can be written to again" if before == "refuses" else "is available again"
        return {
            "hangs": f"the storage of the run directory {name} does not respond: training continues, but"
            " nothing in it can be read or written",
            "gone": f"WARNING: the run directory {name} was removed: training continues, and faults are still"
            " recovered from memory, but the records and checkpoints in it are lost, the ranks' output is no"
            " longer shown, `holdfast status` and the other commands do not find the run, and it can be"
            " resumed only from checkpoints that it writes from now on, if any",
            "refuses": f"nothing can be written to the run directory {name}: {self._refused}. Training"
            " continues, and faults are recovered from memory, but no checkpoint, incident or journal line is"
            " written, and this display is not updated. Holdfast keeps retrying",
            "": f"the run directory {name} {over}" if before else "",
        }[state]

    def incident(self, number: int) -> Mapping[str, Any] | None:
        """Return one incident; None if it does not exist or cannot currently be read."""
        with suppress(OSError):
            return self._files.do(lambda: self._run.incident(number), READ_S)
        return None

    def close(self) -> list[RankLine]:
        """Return the last lines, and update `status`. A later `poll` does not return them again."""
        lines: list[RankLine] = []
        last: _Reading | None = None
        with suppress(OSError):
            if self._pending is not None:
                wait([self._pending], END_S)
            last = self._files.do(self._read_last, END_S)
        if self._pending is not None and self._pending.done():  # an earlier read, whose lines come first
            earlier, self._pending = self._pending, None
            with suppress(OSError):
                lines = self._adopt(earlier.result())
        if last is not None:
            lines += self._adopt(last)
        return lines

    def _adopt(self, reading: _Reading) -> list[RankLine]:
        self.status, self._gone, self._refused = reading.status, reading.gone, reading.refused
        return [line for line in reading.lines if self._warned.admit(line[1])]

    def _read_all(self) -> _Reading:
        lines, status, gone = self._tails.poll(), self._follower.read(), self._run.is_gone()
        return _Reading(lines, status or {}, gone, "" if gone else self._refusal(status, time.monotonic()))

    def _refusal(self, status: object, now_s: float) -> str:
        """Return why nothing can be written; "" if the status is newer than `OLD_S` or a probe succeeds."""
        known, at_s = self._renewed
        if status is not known:
            self._renewed, self._probed = (status, now_s), ""
        elif status is not None and now_s - at_s > OLD_S:
            self._renewed = known, now_s
            try:
                self._run.probe()
                self._probed = ""
            except OSError as error:
                self._probed = error.strerror or str(error)
        return self._probed

    def _read_last(self) -> _Reading:
        return _Reading(self._tails.close(), self._follower.read() or {}, self._run.is_gone())
