"""Copy the ranks' output to the launcher's own output, where a pod's log collector reads it.

The ranks write to files in the pod's memory volume, because a file never blocks them and its last lines can
explain a failure. Copied output is freed, so the files take bounded memory no matter how much the script
prints.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path

from holdfast.process.clock import seconds_to_next_tick
from holdfast.process.log_tail import LogTails

POLL_S = 0.2
# the part at the end of each file that is never freed, for messages and for human readers
KEPT_BYTES = 256 << 10
FREE_BYTES = 1 << 20  # memory is freed in steps of at least this size
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # linux/falloc.h


class OutputForwarder:
    """Copies new lines of the log files under `logs` to the descriptor `target`, in a thread.

    With `several` ranks, each line begins with the number of its rank. Content that exists at the start is
    skipped, because an earlier launcher has already copied it.
    """

    def __init__(self, logs: Path, *, several: bool, target: int = 1) -> None:
        self._tails = LogTails(logs, skip=True)
        self._several, self._target = several, target
        self._freed: dict[Path, int] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)

    def start(self) -> None:
        """Start copying."""
        self._thread.start()

    def close(self, limit_s: float) -> None:
        """Copy the remaining lines. Give up after `limit_s`, because the output may have no reader."""
        self._ending.set()
        self._thread.join(limit_s)

    def _run(self) -> None:
        while not self._ending.wait(seconds_to_next_tick(POLL_S)):
            if not self._write(self._tails.poll()):
                return
            self._free()
        self._write(self._tails.close())

    def _write(self, lines: list[tuple[int, str]]) -> bool:
        """Write `lines`; return False if the output is closed."""
        texts = [f"[rank {rank}] {line}\n" if self._several else f"{line}\n" for rank, line in lines]
        data = "".join(texts).encode(errors="replace")
        try:
            while data:
                data = data[os.write(self._target, data) :]
        except OSError:
            return False
        return True

    def _free(self) -> None:
        """Free the memory of the copied part of each file, except for its last `KEPT_BYTES`."""
        for path, offset in self._tails.positions():
            begin = self._freed.get(path, 0)
            end = (offset - KEPT_BYTES) // FREE_BYTES * FREE_BYTES
            if end > begin and punch_hole(path, begin, end - begin):
                self._freed[path] = end


def punch_hole(path: Path, offset: int, length: int) -> bool:
    """Free a range of a file, which then reads as zeros. Return False if that is not possible."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    try:
        with path.open("r+b") as file:
            return bool(libc.fallocate(file.fileno(), _KEEP_SIZE | _PUNCH_HOLE, offset, length) == 0)
    except OSError:
        return False


def forwarder_of(logs: Path, nproc: int, parent: int) -> OutputForwarder | None:
    """Start and return a forwarder; return None in a local run, where the keeper shows the logs."""
    if parent:
        return None
    sys.stdout.flush()
    made = OutputForwarder(logs, several=nproc > 1)
    made.start()
    return made
