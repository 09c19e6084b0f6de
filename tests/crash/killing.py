"""Kill a writer, a forked child, between any two changes that it makes to files."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from holdfast.checkpoint import directory, removal, retention, sharing, writer
from holdfast.fileio import bulk_copy, durable, range_writer
from holdfast.snapshot import arena, commit_records, private_store, slot_file
from tests.sandbox import in_child

T = TypeVar("T")

# The modules that change anything outside the process. A kill elsewhere has the same effect as one in these.
_MODULES = (
    *(arena, bulk_copy, commit_records, directory, durable, private_store, range_writer, removal, retention),
    *(sharing, shutil, slot_file, writer),
)
TRACED = {module.__file__ for module in _MODULES}


def killed_at_every_line(
    template: Path,
    prepare: Callable[[Path], T],
    act: Callable[[T], object],
    check: Callable[[Path, bool], None],
) -> int:
    """Run `act` on copies of `template`, and kill it at each line before which the files have changed.

    A kill at any other line has the same effect as a kill at the line before. A first run without a kill
    finds those lines. `act` receives what `prepare` returns for the copy, in the same process. After each
    kill, and after a run that finished, `check` receives the copy and whether `act` finished. Returns the
    number of kills.
    """
    work = template.with_name("work")
    gc.freeze()  # a garbage collection in the child would copy this process's memory
    shutil.copytree(template, work)
    lines = _changing_lines(work, prepare, act)
    check(work, True)
    for line in lines:
        shutil.rmtree(work)
        shutil.copytree(template, work)
        status = in_child(partial(_killed, line, work, prepare, act))
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
        try:
            check(work, False)
        except BaseException as error:
            error.args = (*error.args, f"after a kill at line {line}")
            raise
    return len(lines)


def _killed(line: int, work: Path, prepare: Callable[[Path], T], act: Callable[[T], object]) -> None:
    _traced(_Killer(line), prepare(work), act)


class _Killer:
    """Traces a process and kills it at the given line."""

    def __init__(self, line: int) -> None:
        self._left = line

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class _Observer:
    """Records the first line, and each line before which the files have changed."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._line = 0
        self._state: object = None
        self.lines: list[int] = []

    def __call__(self) -> None:
        self._line += 1
        state = _state(self._work)
        if state != self._state:
            self._state = state
            self.lines.append(self._line)


def _changing_lines(work: Path, prepare: Callable[[Path], T], act: Callable[[T], object]) -> tuple[int, ...]:
    report = work.with_name("lines")

    def observe() -> None:
        observer = _Observer(work)
        _traced(observer, prepare(work), act)
        report.write_text(" ".join(map(str, observer.lines)))

    assert in_child(observe) == 0
    return tuple(map(int, report.read_text().split()))


def _state(work: Path) -> tuple[tuple[str, bytes], ...]:
    """Return all names and contents; a file that vanishes during the walk is left out."""
    found: list[tuple[str, bytes]] = []
    for folder, _, names in os.walk(work):
        found.append((folder, b""))
        for name in names:
            with suppress(FileNotFoundError):
                found.append((name, Path(folder, name).read_bytes()))
    return tuple(found)


def _traced(visit: Callable[[], None], prepared: T, act: Callable[[T], object]) -> None:
    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            visit()
        return trace

    gc.disable()
    sys.settrace(trace)
    act(prepared)
    sys.settrace(None)
