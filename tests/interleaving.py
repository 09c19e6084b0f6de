"""Run one action between any two lines of another, as if the other's process were stopped there."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any


def interleaved(
    template: Path,
    modules: tuple[ModuleType, ...],
    act: Callable[[Path], object],
    meanwhile: Callable[[Path], object],
    check: Callable[[Path], object],
) -> int:
    """Run `act` on copies of `template`, and `meanwhile` before one of its lines in `modules`: each in turn.

    Then call `check` with the copy. Returns the number of lines.
    """
    files = {module.__file__ for module in modules}
    work = template.with_name("work")
    line = 0
    while True:
        line += 1
        shutil.copytree(template, work)
        if not _run(files, line, lambda: act(work), lambda: meanwhile(work)):
            shutil.rmtree(work)
            return line - 1
        try:
            check(work)
        except BaseException as error:
            error.args = (*error.args, f"with the other action before line {line}")
            raise
        shutil.rmtree(work)


def _run(
    files: set[str | None], line: int, act: Callable[[], object], meanwhile: Callable[[], object]
) -> bool:
    """Return False if `act` ended before its line number `line`."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                frame.f_trace = None
                meanwhile()
        return trace if left > 0 else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return left <= 0
