"""Hooks on a script's objects that stay with them: no copy, no file and no compiled form of them has any.

A script saves its whole model (`torch.save(model)`), copies it, or compiles it (`torch.jit.script`), and
what it gets has to be what it would be without us, also where there is no holdfast to load it. Hooks that
all modules share would do that too, and would cost every module of a model time in every pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class Hook:
    """What calls `tell` with what a hook of torch's is given. A copy of it calls nothing, and is not ours."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell

    def __call__(self, *given: Any) -> None:
        self._tell(*given)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Be, in a copy, something of the standard library that takes anything and returns None."""
        return getattr, (nullcontext(), "__exit__")


def hide(hooks: dict[int, Any]) -> None:
    """See that copies of `hooks`, which torch keeps in the object itself, leave out those of ours.

    The dict remains the one that it is: handles that remove a hook refer to it.
    """
    if type(hooks) is not OrderedDict:  # it takes no attributes; a copy of a hook does nothing either
        return
    given: Any = hooks  # pickle and copy ask the object for these, before its class
    given.__reduce_ex__ = lambda _: (OrderedDict, (), None, None, iter(_others(hooks)))


def hide_from_script(hooks: dict[int, Any]) -> None:
    """See that `torch.jit.script` does not compile those of ours in `hooks`, a module's.

    It, and what moves hooks from one module to another, asks for the values, where a call of the module asks
    for the items.
    """
    if type(hooks) is OrderedDict:
        given: Any = hooks
        given.values = lambda: [hook for _, hook in _others(hooks)]


def _others(hooks: dict[int, Any]) -> list[tuple[int, Any]]:
    return [(number, hook) for number, hook in hooks.items() if not isinstance(hook, Hook)]
