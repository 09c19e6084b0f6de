"""What can go wrong in a training script because of holdfast, by name."""

from __future__ import annotations


class HoldfastError(Exception):
    """Root of the errors that holdfast raises in a training script."""


class BadInput(HoldfastError, ValueError):
    """The user gave something that cannot be obeyed. The run ends with exit code 2 and this one line."""


class NumericFault(HoldfastError, FloatingPointError):
    """A loss or gradient norm that is not finite or jumped, in a script that nobody supervises."""


class Fenced(HoldfastError):
    """This process belongs to an older generation and must not go on."""


class PeerLost(HoldfastError, ConnectionError):
    """Another rank is gone in the middle of an exchange: this one is its victim."""
