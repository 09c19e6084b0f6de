"""The errors that holdfast raises in a training script, and helpers for messages about exceptions."""

from __future__ import annotations


class HoldfastError(Exception):
    """The base class of the errors that holdfast raises in a training script."""


class BadInput(HoldfastError, ValueError):
    """An argument is wrong, or a call is out of order. The run prints the message and exits with code 2."""


class Uncommitted(BadInput):
    """The script began a step again without committing it, or ran the optimizer but did not commit the step.

    The script may have caught the exception that the step raised when another rank was lost.
    """


class NumericFault(HoldfastError, FloatingPointError):
    """A loss or gradient norm is not finite or has jumped, and there is no supervisor to roll back."""


class Fenced(HoldfastError):
    """This process belongs to an older generation or has no rank, so it must exit."""


class PeerLost(HoldfastError, ConnectionError):
    """Another rank was lost in the middle of an exchange, so this rank cannot complete its step."""


def type_with_article(value: object) -> str:
    """Return the type of `value` with its article, for a message: "a Linear", "an int64", "an SGD"."""
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    """Return the name of a type with its article."""
    is_spelt = name.isupper() and name[:1] in "FHLMNRSX"  # pronounced letter by letter: "an ess gee dee"
    return f"an {name}" if is_spelt or name[:1].lower() in ("a", "e", "i", "o") else f"a {name}"


def members_of_group(error: BaseException) -> tuple[BaseException, ...]:
    """Return the exceptions in an exception group; () for other exceptions.

    A group is recognised by its attribute `exceptions` and not by its class, because before Python 3.11 the
    class comes from a separate package.
    """
    try:
        parts = getattr(error, "exceptions", ())
    except Exception:  # if the script defines the class, reading the attribute may raise anything
        return ()
    is_group = isinstance(parts, tuple) and all(isinstance(each, BaseException) for each in parts)
    return parts if is_group else ()
