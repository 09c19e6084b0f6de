"""Handle Ctrl-C and SIGTERM in the demo.

A signal ends the demo only at points where the demo checks for signals, so the demo always knows what it has
created and must remove.
"""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """The user has requested that the demo end."""


class Interruption:
    """A context manager that records Ctrl-C and SIGTERM. A second signal does not stop the removal."""

    def __init__(self) -> None:
        self._is_asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interruption:
        for each in _SIGNALS:
            if signal.getsignal(each) != signal.SIG_IGN:  # respect nohup
                self._before[each] = signal.signal(each, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)

    def _ask(self, _signum: int, _frame: FrameType | None) -> None:
        self._is_asked = True

    def check(self) -> None:
        """Raise `Interrupted` if a signal has arrived."""
        if self._is_asked:
            raise Interrupted

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`, which should be less than one, and check for signals before and after."""
        self.check()
        time.sleep(seconds)
        self.check()
