"""Cache results that were computed from large immutable values, by the identity of those values.

A job on a cluster can have thousands of members. Several parts of a decision need the same index of them, and
comparing or hashing the members would take longer than rebuilding it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import is_
from typing import ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def by_identity(most: int) -> Callable[[Callable[_Given, _Result]], Callable[_Given, _Result]]:
    """Decorate a pure function of immutable arguments to reuse its last `most` results.

    A result is reused only for the same objects, which are kept alive until the result is dropped. Safe
    to call from several threads. The function must be called with positional arguments.
    """

    def decorate(compute: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
        kept: tuple[tuple[tuple[object, ...], _Result], ...] = ()

        @wraps(compute)
        def call(*given: _Given.args, **named: _Given.kwargs) -> _Result:
            nonlocal kept
            assert not named
            for known, result in kept:
                if all(map(is_, known, given)):
                    return result
            found = compute(*given, **named)
            kept = ((given, found), *kept[: most - 1])  # one assignment, so no thread sees a partial update
            return found

        return call

    return decorate
