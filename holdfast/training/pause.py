"""Define `Pause`, which `State.pause` returns: declared work that is not a step."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar

from holdfast.errors import BadInput

_R = TypeVar("_R")


class Pause:
    """The result of `state.pause`. It can be used as a context manager or as a decorator of functions.

    A pause that is used in neither way has no effect. When it is garbage-collected, it calls `unused` with a
    warning that names the line of the `state.pause` call. Decorating an `async def` or a generator function
    raises `BadInput`, because the body of such a function runs only after the call has returned, and by then
    the pause would have ended.
    """

    def __init__(
        self, label: Any, begin: Callable[[], AbstractContextManager[None]], unused: Callable[[str], None]
    ) -> None:
        caller = sys._getframe(2)  # the frame that called `state.pause`
        self._place = caller.f_code.co_filename.rpartition("/")[2], caller.f_lineno
        self._label, self._begin, self._unused = label, begin, unused
        self._open: list[AbstractContextManager[None]] = []
        self._used = False

    def __enter__(self) -> None:
        self._used = True
        pause = self._begin()
        pause.__enter__()
        self._open.append(pause)

    def __exit__(self, *raised: Any) -> bool | None:
        return self._open.pop().__exit__(*raised)

    def __call__(self, function: Callable[..., _R]) -> Callable[..., _R]:
        self._used = True
        if kind := _deferred_kind(function):
            call, name = f"state.pause({self._label!r})", getattr(function, "__name__", repr(function))
            raise BadInput(
                f"{call} decorates {name}, which is {kind}: its body runs after the call has returned, when"
                f" the pause is already over. Write `with {call}:` around the work instead"
            )

        @wraps(function)
        def paused(*args: Any, **kwargs: Any) -> _R:
            with self._begin():
                return function(*args, **kwargs)

        return paused

    def __del__(self) -> None:
        if not self._used and not sys.is_finalizing():
            name, line = self._place
            call = f"state.pause({self._label!r})"
            self._unused(f"{call} has no effect without `with` ({name}, line {line}): write `with {call}:`")


def _deferred_kind(function: Callable[..., object]) -> str:
    """Return the kind of `function` if its body runs after its call has returned; otherwise "".

    The kind is a phrase for a message.
    """
    if inspect.iscoroutinefunction(function):
        return "an async function"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return "a generator function"
    return ""
