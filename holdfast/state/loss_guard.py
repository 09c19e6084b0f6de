"""Distinguish a loss that has diverged from a loss that is only noisy. Pure.

A false alarm costs a rollback, and maybe the whole run, because the same batch would produce the same loss
again. So a loss counts as a jump only if its rise above the median of recent losses exceeds all four of these
limits:

* a multiple of the usual spread, which is measured as the MAD because outliers do not affect the MAD;
* a multiple of 2% of the median;
* a multiple of the distance from the median to the highest loss in the window, because the losses of batches
  have a heavy-tailed distribution;
* the loss of the untrained model, because a converged model has tiny losses, and the loss of a single hard
  sample can be a hundred times as large.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from holdfast.protocol import defaults
from holdfast.protocol.launcher_messages import INF, JUMP, NAN, BadNumberKind

NumberVerdict: TypeAlias = Literal["ok", BadNumberKind]
OK: Final = "ok"
MAD_TO_SIGMA = 1.4826  # converts the MAD of a normal distribution to its standard deviation
RELATIVE_SPREAD = 0.02
# A multiple of the distance from the median to the highest loss. If the tail of the distribution falls as
# e^-x, one step in 10^7 exceeds this limit.
ABOVE_HIGHEST = 4.0
MIN_RISE = 0.5  # in units of the loss


def finiteness(*values: float | None) -> NumberVerdict:
    """Return "nan" or "inf" for the first value that is not finite; "ok" if all are finite."""
    for value in values:
        if value is not None and not math.isfinite(value):
            return NAN if math.isnan(value) else INF
    return OK


class LossGuard:
    """Compares each step's loss and gradient norm with the values of recent steps.

    Only values that pass the check are added to the window, so a series of bad values never comes to look
    normal. If `factor_grad` is 0, gradient norms are checked only for NaN and Inf.
    """

    def __init__(
        self,
        window: int = 64,
        min_count: int = 16,
        factor: float = defaults.LOSS_JUMP,
        factor_grad: float = 0.0,
        min_rise: float = MIN_RISE,
    ) -> None:
        if not 1 <= min_count <= window:
            raise ValueError(f"min_count: {min_count} is not between 1 and the window, {window}")
        self._min_count = min_count
        self._factor, self._factor_grad, self._min_rise = factor, factor_grad, min_rise
        self._losses = _Window(window)
        self._norms = _Window(window)
        self._first: list[float] = []  # the first losses of the run, when the model was untrained
        self._set_least_rise()

    def check(self, loss: float, grad_norm: float | None) -> NumberVerdict:
        """Return the verdict on a step, without learning from it."""
        verdict = finiteness(loss, grad_norm)
        if verdict != OK:
            return verdict
        if self._jumped(self._losses, loss, self._factor, self._least_rise):
            return JUMP
        if grad_norm is None or self._factor_grad == 0:
            return OK
        has_jumped = self._jumped(self._norms, grad_norm, self._factor_grad, self._min_rise)
        return JUMP if has_jumped else OK

    def learn(self, loss: float, grad_norm: float | None) -> None:
        """Add the values of a step to the window. Call this only if the verdict on the step is "ok"."""
        if grad_norm is not None and self._factor_grad != 0:
            self._norms.learn(grad_norm)
        self._losses.learn(loss)
        if len(self._first) < self._min_count:
            self._first.append(loss)
            self._set_least_rise()

    def accept(self, loss: float) -> None:
        """Add to the window a loss that has jumped, because the run continues with it."""
        self._losses.learn(loss)

    def usual(self) -> str:
        """Describe the losses in the window, and the limit above which a loss is considered a jump."""
        ordered = self._losses.ordered
        if not ordered:
            return "no losses yet"
        median = self._losses.median()
        rise = _rise_limit(self._losses, median, self._factor, self._least_rise)
        return (
            f"last {len(ordered)}: median {median:.4g}, highest {ordered[-1]:.4g}; limit {median + rise:.4g}"
        )

    def learned(self) -> dict[str, Collection[float]]:
        """Return the recorded values. These are live collections: copy them before the next `learn`."""
        return {"losses": self._losses.recent, "grad_norms": self._norms.recent, "first": self._first}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `learned` whose collections were converted to lists.

        Raises `ValueError`, and changes nothing, if a list is missing or contains an invalid number.
        """
        losses, norms = _numbers(state, "losses"), _numbers(state, "grad_norms")
        first = _numbers(state, "first")
        self._losses.replace(losses)
        self._norms.replace(norms)
        self._first = first
        self._set_least_rise()

    def _jumped(self, seen: _Window, value: float, factor: float, least: float) -> bool:
        if len(seen.ordered) < self._min_count:
            return False
        median = seen.median()
        rise = value - median
        if rise <= _lower_limit(median, factor, least):
            return False  # the usual case; the spread need not be computed
        return rise > _rise_limit(seen, median, factor, least)

    def _set_least_rise(self) -> None:
        """Compute the rise up to which a loss is never a jump. It depends on the untrained model's loss."""
        untrained = abs(_middle(sorted(self._first))) if self._first else 0.0
        self._least_rise = max(self._min_rise, untrained)


class _Window:
    """The most recent values, in order of arrival and in sorted order."""

    def __init__(self, size: int) -> None:
        self._size = size
        # Each step stores these values. In an array they are in one place, and need not be collected.
        self.recent = array("d")
        self.ordered: list[float] = []

    def learn(self, value: float) -> None:
        if len(self.recent) == self._size:
            del self.ordered[bisect_left(self.ordered, self.recent[0])]
            del self.recent[0]
        self.recent.append(value)
        insort(self.ordered, value)

    def replace(self, values: Sequence[float]) -> None:
        self.recent = array("d", values[-self._size :])
        self.ordered = sorted(self.recent)

    def median(self) -> float:
        return _middle(self.ordered)

    def mad(self, median: float) -> float:
        return _middle(sorted([abs(value - median) for value in self.ordered]))


def _rise_limit(seen: _Window, median: float, factor: float, least: float) -> float:
    """Return by how much a value must exceed the median of `seen` to count as a jump."""
    return max(
        _lower_limit(median, factor, least),
        ABOVE_HIGHEST * (seen.ordered[-1] - median),
        factor * MAD_TO_SIGMA * seen.mad(median),
    )


def _lower_limit(median: float, factor: float, least: float) -> float:
    """Return the part of `_rise_limit` that needs no pass over the window."""
    return max(least, factor * RELATIVE_SPREAD * abs(median))


def _middle(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return ordered[half - 1] / 2 + ordered[half] / 2  # divide first, because the sum may overflow


def _numbers(state: Mapping[str, Any], key: str) -> list[float]:
    values = state.get(key)
    if not isinstance(values, list) or not all(
        isinstance(value, (int, float)) and math.isfinite(value) for value in values
    ):
        raise ValueError(f"loss guard: {key} is not a list of finite numbers")
    return [float(value) for value in values]
