"""Check the successive loops over `steps` in a process, and refuse loops that can only be a mistake.

`steps(n)` counts from the beginning of the whole training, so after a restart the same line continues where
the group left off. Suppose the author of a script meant n more steps, such as those of an epoch. The first
loop would train n steps, all others would do nothing, and the script would end without an error. A process
that has not trained yet, in contrast, rightly skips loops that were completed before it started.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from holdfast.errors import BadInput
from holdfast.worker.script_source import HOLDFAST_FOLDER, STDLIB_FOLDER

SourceLine = tuple[str, int]


class LoopHistory:
    """Records this process's loops at each line: the counts that they requested, and how many trained."""

    def __init__(self, resumed: int, say: Callable[[str], None]) -> None:
        self._resumed = resumed  # the number of steps completed before this process started
        self._say = say
        # The count of the last loop, if it was complete before this process started.
        self._passed: int | None = None
        self._asked: dict[SourceLine, set[int]] = {}
        self._trained: dict[SourceLine, int] = {}  # by line: how many loops have completed at least one step
        self._warned = False

    def begin(self, count: int, step: int, line: SourceLine) -> None:
        """Check a loop over `steps(count)` that begins at `line` with the state of `step`; warn if necessary.

        Raises:
            BadInput: no steps are left to do, exactly one earlier loop at this line has trained, no loop at
                this line has requested fewer steps, and the process did not resume.
        """
        asked = self._asked.setdefault(line, set())
        if count <= step and self._trained and min(asked, default=count) >= count:
            self._nothing_left(count, step, line)
        asked.add(count)
        self._warn_of_passed(count, step)

    def ended(self, did: int, line: SourceLine) -> None:
        """Record that the loop at `line` has ended, or was left, after `did` steps."""
        if did > 0:
            self._trained[line] = self._trained.get(line, 0) + 1

    def _nothing_left(self, count: int, step: int, line: SourceLine) -> None:
        """Refuse a loop that can only be a mistake. Warn once if another loop has nothing left to do.

        If several loops at the same line have trained, the count is probably meant for the whole training.
        Such loops end early because of a `break`, or because they `zip` the steps with a loader that ends
        first. In a resumed process no loop is refused, because the loops before the restart are not known.
        """
        name, number = line[0].rpartition("/")[2], line[1]
        counts = "n in steps(n) counts from the beginning of the whole training, not of an epoch or a phase"
        if self._trained.get(line) == 1 and self._resumed == 0:
            raise BadInput(
                f"steps({count}) is the whole training, not one epoch, and all of its steps are done:"
                f" {counts}. For 3 epochs, write a single loop, `for step in state.steps(3 * {count}):` or"
                " batches.steps(3 * len(batches)), and put the work after an epoch under `if"
                " batches.ends_epoch(step):`. If a loop may have nothing left to do, write `if state.step"
                f" < {count}:` before it"
            )
        if not self._warned:
            self._warned = True
            self._say(
                f"steps({count}) ({name}, line {number}) does nothing, because {step} steps are done:"
                f" {counts}. To train that many more steps, write steps({step} + {count}). If the loop may"
                f" have nothing left to do, write `if state.step < {count}:` before it"
            )

    def _warn_of_passed(self, count: int, step: int) -> None:
        """Warn if the code between an earlier loop and this loop has run again, with a later state."""
        if count < self._resumed:
            self._passed = count
        elif self._passed is not None and step < count:
            passed, self._passed = self._passed, None
            self._say(
                f"the loop over steps({passed}) was complete before the restart, so the code after it has"
                f" run again, with the state of step {step}. If that code must run only once, put the loop"
                f" under `if state.step < {passed}:`, and do that work in the next loop, under `if step =="
                f" {passed}:` "
                '(see "Two loops" in the user guide)'
            )


def line_of_script() -> SourceLine:
    """Return the line of the innermost frame that does not belong to Holdfast or a library."""
    frame: FrameType | None = sys._getframe(1)
    first: SourceLine = ("", 0)
    while frame is not None:
        name = frame.f_code.co_filename
        line = (name, frame.f_lineno)
        if not name.startswith((HOLDFAST_FOLDER, "<frozen ")):
            if "site-packages" not in name and not name.startswith(STDLIB_FOLDER):
                return line
            first = first if first[0] else line
        frame = frame.f_back
    return first
