"""What can go wrong in a training script because of holdfast, by name."""

from __future__ import annotations


class HoldfastError(Exception):
    """Root of the errors that holdfast raises in a training script."""


class BadInput(HoldfastError, ValueError):
    """The user gave something that cannot be obeyed. The run ends with exit code 2 and this one line."""


class Uncommitted(BadInput):
    """A step was begun again without a commit. The script may have caught what a lost peer raised in it."""


class NumericFault(HoldfastError, FloatingPointError):
    """A loss or gradient norm that is not finite or jumped, in a script that nobody supervises."""


class Fenced(HoldfastError):
    """This process belongs to an older generation and must not go on."""


class PeerLost(HoldfastError, ConnectionError):
    """Another rank is gone in the middle of an exchange: this one is its victim."""


def type_with_article(value: object) -> str:
    """Return the type of `value` with its article, for a message: "a Linear", "an int64", "an SGD"."""
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    spelt = name.isupper() and name[:1] in "FHLMNRSX"  # letter by letter: an ess
    return f"an {name}" if spelt or name[:1].lower() in ("a", "e", "i", "o") else f"a {name}"


def members_of_group(error: BaseException) -> tuple[BaseException, ...]:
    """Return what an exception group holds, nothing for other exceptions.

    It is known by what it has: before Python 3.11 the class is that of a package.
    """
    try:
        parts = getattr(error, "exceptions", ())
    except Exception:  # of a type of the script's
        return ()
    is_group = isinstance(parts, tuple) and all(isinstance(each, BaseException) for each in parts)
    return parts if is_group else ()
