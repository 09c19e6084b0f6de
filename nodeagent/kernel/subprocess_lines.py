"""Runs a child process and reads its output lines in bounded memory, without blocking."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Sequence

MAX_LINE_BYTES = 1 << 16
READ_BYTES = 1 << 16
MAX_BUFFER_BYTES = 1 << 18  # the most that is read before it is processed, even in a flood
MAX_ERROR_TEXT = 300  # characters kept of its stderr
END_S = 2.0  # after SIGTERM; the program has no state that would take longer to save


class LineProcess:
    """A running program, read line by line.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
            env={**os.environ, "LC_ALL": "C", "SYSTEMD_COLORS": "0"},
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._out, self._err = self._process.stdout.fileno(), self._process.stderr.fileno()
        os.set_blocking(self._out, False)
        os.set_blocking(self._err, False)
        self._buffer = bytearray()
        self._skipping = False  # inside an overlong line
        self._words = b""
        self._too_long = 0
        self.ended = False  # no more lines will arrive

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        """Return True if the program has not ended, even if it was killed."""
        return self._process.poll() is None

    def lines(self, wait_s: float, limit: int) -> list[bytes]:
        """Return up to `limit` lines, or none if the program has ended or completes no line in `wait_s`."""
        found = self._whole(limit)
        if found or self.ended:
            return found
        deadline_s = time.monotonic() + wait_s
        while not found and not self.ended:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._wait(left_s):
                break
            self._fill()
            found = self._whole(limit)
        return found

    def take_too_long(self) -> int:
        """Return the number of overlong lines skipped since the last call."""
        count, self._too_long = self._too_long, 0
        return count

    def why(self) -> str:
        """Return the last stderr output and the exit status of a program that has ended."""
        self._listen()
        text = " ".join(self._words.decode("utf-8", "replace").split())
        code = self.code()
        if code is None:
            return text or "it has closed its output"
        return f"{text or 'no error message'} (exit status {code})"

    def code(self) -> int | None:
        """Return the exit status of a program that has ended; None if it has only closed its output."""
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """End the program and wait until it has ended; never raises."""
        for stop in (self._process.terminate, self._process.kill):
            stop()
            try:
                self._process.wait(END_S)
                break
            except subprocess.TimeoutExpired:
                continue
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        self.ended = True

    def _wait(self, wait_s: float) -> bool:
        poller = select.poll()
        poller.register(self._out, select.POLLIN)
        poller.register(self._err, select.POLLIN)
        ready = dict(poller.poll(max(1.0, wait_s * 1000)))
        if self._err in ready and not self._listen() and self._out not in ready:
            time.sleep(min(wait_s, 0.05))  # stderr is closed and stdout is not: do not spin
        return bool(ready)

    def _listen(self) -> bool:
        """Read stderr to keep the program from blocking on it; return False at end of file."""
        try:
            words = os.read(self._err, READ_BYTES)
        except OSError:
            return True
        self._words = (self._words + words)[-MAX_ERROR_TEXT:]
        return bool(words)

    def _fill(self) -> None:
        while len(self._buffer) < MAX_BUFFER_BYTES:
            try:
                data = os.read(self._out, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self.ended = True
                return
            self._buffer += data

    def _whole(self, limit: int) -> list[bytes]:
        found: list[bytes] = []
        start = 0
        while len(found) < limit and (end := self._buffer.find(b"\n", start)) >= 0:
            if self._skipping:
                self._skipping = False  # the line was counted at its first part
            elif end - start > MAX_LINE_BYTES:
                self._too_long += 1
            else:
                found.append(bytes(self._buffer[start:end]))
            start = end + 1
        del self._buffer[:start]
        if len(self._buffer) > MAX_LINE_BYTES and b"\n" not in self._buffer:
            self._too_long += not self._skipping
            self._skipping = True
            self._buffer.clear()
        return found
