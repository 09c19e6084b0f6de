"""Refuse wrong arguments of the methods that a script calls, with a message that says what is expected."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from holdfast.errors import BadInput


def step_count(value: Any) -> int:
    """Return the number of steps that `steps(value)` requests.

    Raises BadInput unless `value` is an integer that is not negative.
    """
    wrong = f"steps({value!r}): expected the number of steps of the whole training, such as steps(1000)"
    try:
        count = operator.index(value)
    except TypeError:
        raise BadInput(wrong) from None
    if count < 0:
        raise BadInput(wrong)
    return count


def require_names(call: str, given: tuple[Any, ...]) -> None:
    """Raise BadInput if `given`, the positional arguments of a `call` that accepts none, is not empty."""
    if given:
        kinds = ", ".join(type(each).__name__ for each in given)
        raise BadInput(f"{call.partition('(')[0]}() was given {kinds} without a name: write {call}")


def require_known(call: str, unknown: Iterable[str]) -> None:
    """Raise BadInput if `unknown`, the names of arguments that `call` does not accept, is not empty."""
    names = ", ".join(unknown)
    if names:
        raise BadInput(f"{call.partition('(')[0]}() has no argument {names}: write {call}")


def require_scalar(name: str, value: Any) -> None:
    """Raise BadInput unless `value` is None, a number or a one-element tensor. Does not read the tensor."""
    if value is None or isinstance(value, (int, float)):
        return
    if hasattr(value, "numel"):
        if (count := value.numel()) != 1:
            right = f"pass one number, such as {name}.mean()"
            raise BadInput(f"commit({name}=...): got a tensor with {count} elements; {right}")
    elif not hasattr(value, "item") and not hasattr(value, "__float__"):
        raise BadInput(f"commit({name}={value!r}): expected a number or a tensor with one element")


def require_counts(**values: Any) -> None:
    """Raise BadInput unless each value is a whole number; `flops` may be any number."""
    for name, value in values.items():
        fractional = name == "flops" and hasattr(value, "__float__")
        if not fractional and not hasattr(value, "__index__"):
            expected = "a number" if name == "flops" else "a whole number"
            raise BadInput(f"commit({name}={value!r}): expected {expected}")


def check_pause(label: Any, limit_s: Any) -> None:
    """Raise BadInput unless `label` is a string and `limit_s` is a number of seconds, at least 0."""
    if not isinstance(label, str):
        raise BadInput(f'pause({label!r}): expected a label first, as in state.pause("eval", limit_s=600)')
    if isinstance(limit_s, bool) or not isinstance(limit_s, (int, float)) or not limit_s >= 0:
        raise BadInput(f"pause(limit_s={limit_s!r}): expected seconds, or 0 for the run's --pause-timeout")
