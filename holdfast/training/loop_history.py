"""The loops over `steps` that follow each other in a process: refuse those that can only be a mistake.

`steps(n)` counts from the beginning of the whole training, so that after a restart the same line continues
where the group left off. A script that means n steps from here (of an epoch) would train the first n, pass
over all others, and end well. A process that has trained nothing yet passes over what was done before it,
as it should.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from holdfast.errors import BadInput

_HOLDFAST = str(Path(__file__).parents[1]) + os.sep
_STDLIB = str(Path(os.__file__).parent) + os.sep

SourceLine = tuple[str, int]


class LoopHistory:
    """What the loops of this process have asked for and done."""

    def __init__(self, resumed: int, say: Callable[[str], None]) -> None:
        self._resumed = resumed  # steps that were done before this process
        self._say = say
        self._passed: int | None = None  # steps of the last loop, if all were done before this process
        self._asked: dict[SourceLine, set[int]] = {}
        self._trained: dict[SourceLine, int] = {}  # how many loops at a line have done steps
        self._warned = False

    def begin(self, count: int, step: int, line: SourceLine) -> None:
        """Judge a loop over `steps(count)` that begins at `line`, with the state of `step`.

        Raises:
            BadInput: all its steps were trained by this line before, and it never asked for fewer.
        """
        asked = self._asked.setdefault(line, set())
        if count <= step and self._trained and min(asked, default=count) >= count:
            self._nothing_left(count, step, line)
        asked.add(count)
        self._warn_of_passed(count, step)

    def ended(self, did: int, line: SourceLine) -> None:
        """A loop that was begun at `line` is over, or was left, after `did` steps."""
        if did > 0:
            self._trained[line] = self._trained.get(line, 0) + 1

    def _nothing_left(self, count: int, step: int, line: SourceLine) -> None:
        """Refuse what can only be a mistake; else warn, once.

        One line that trains several times with the same count (`zip` with a loader that ends first, `break`)
        may well know what it counts, and a process that was resumed cannot tell whether it did so before.
        """
        name, number = line[0].rpartition("/")[2], line[1]
        counts = "n in steps(n) counts from the beginning of the whole training, not of an epoch or a phase"
        if self._trained.get(line) == 1 and self._resumed == 0:
            raise BadInput(
                f"steps({count}) is the whole training, not one epoch, and its steps are done: {counts}. For "
                f"3 epochs write one loop, `for step in state.steps(3 * {count}):`, or batches.steps(3 * "
                "len(batches)), with what follows an epoch in `if batches.ends_epoch(step):`. Before a loop "
                f"that may have nothing left to do, write `if state.step < {count}:`"
            )
        if not self._warned:
            self._warned = True
            self._say(
                f"steps({count}) ({name}, line {number}) does nothing, as {step} steps are done: {counts}. "
                f"For as many more write steps({step} + {count}); if nothing is left to do there, `if "
                f"state.step < {count}:` before the loop says so"
            )

    def _warn_of_passed(self, count: int, step: int) -> None:
        """Warn when what stands between an earlier loop and this one has run again, with a later state."""
        if count < self._resumed:
            self._passed = count
        elif self._passed is not None and step < count:
            passed, self._passed = self._passed, None
            self._say(
                f"the loop over steps({passed}) was done before the restart, so what follows it has run "
                f"again, with the state of step {step}. If it must happen once: write `if state.step < "
                f"{passed}:` around that loop, and do it as the next one begins, in `if step == {passed}:` "
                '(see "Two loops" in the user guide)'
            )


def line_of_script() -> SourceLine:
    """Return the script's present line: the innermost frame that is neither Holdfast's nor a library's."""
    frame: FrameType | None = sys._getframe(1)
    first: SourceLine = ("", 0)
    while frame is not None:
        name = frame.f_code.co_filename
        line = (name, frame.f_lineno)
        if not name.startswith((_HOLDFAST, "<frozen ")):
            if "site-packages" not in name and not name.startswith(_STDLIB):
                return line
            first = first if first[0] else line
        frame = frame.f_back
    return first
