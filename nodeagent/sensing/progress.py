"""The driver call that a sensor is in: lets the watchdog tell a slow sweep from a hanging call.

A sensor that makes many calls in one `read` marks each of them. While the marks change, the driver answers,
even if the whole `read` takes long; a mark that does not change shows the call that does not return.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol, runtime_checkable


class CallProgress:
    """The newest mark. The sensor's thread writes it, and any thread may read it."""

    __slots__ = ("marked",)

    def __init__(self) -> None:
        # The call, or its name; the device that it is about ("" for none); when it began (monotonic). A
        # sensor with hundreds of calls in a sweep assigns to this instead of calling `mark`.
        self.marked: tuple[Callable[..., Any] | str, str, float] = ("", "", 0.0)

    def mark(self, call: str, about: str = "") -> None:
        """Record that a call begins, about one device unless `about` is empty."""
        self.marked = (call, about, monotonic())

    def newest(self) -> tuple[str, float]:
        """Return the newest call in words, and when it began (monotonic); "" and 0 before the first."""
        call, about, began = self.marked
        name = call if isinstance(call, str) else call.__name__
        return f"{name} of {about}" if about else name, began


@runtime_checkable
class MarksProgress(Protocol):
    """A sensor that marks its calls."""

    progress: CallProgress
