"""Distinguish a loss that has diverged from one that is merely noisy. Pure.

A false alarm costs a rollback and perhaps the run, because the same batch then produces the same loss again.
So a loss counts as a jump only if its rise above the median exceeds four limits at once:

* a multiple of the usual spread, measured as the MAD, which outliers do not affect;
* a multiple of 2% of the median;
* a multiple of the distance from the median to the highest loss of the window, because batch losses have
  heavy tails;
* the loss of the untrained model, because a converged model has tiny losses, and a single hard sample can
  have a loss a hundred times as large.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from holdfast.protocol import defaults
from holdfast.protocol.launcher_messages import INF, JUMP, NAN, BadNumberKind

NumberVerdict: TypeAlias = Literal["ok", BadNumberKind]
OK: Final = "ok"
MAD_TO_SIGMA = 1.4826  # for a normal distribution
RELATIVE_SPREAD = 0.02
# Times the distance from the median to the highest loss; exceeded once in 10^7 steps with a tail of e^-x.
ABOVE_HIGHEST = 4.0
MIN_RISE = 0.5  # in units of the loss


def finiteness(*values: float | None) -> NumberVerdict:
    """Return "nan" or "inf" for the first of the values that is not finite; "ok" if all are finite."""
    for value in values:
        if value is not None and not math.isfinite(value):
            return NAN if math.isnan(value) else INF
    return OK


class LossGuard:
    """Compares each step's loss and gradient norm with those of the steps before it.

    Only values that pass the check are added to the window, so a series of bad values never becomes normal.
    With a `factor_grad` of 0, gradient norms are only checked for NaN and Inf.
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
        self._first: list[float] = []  # the first losses of the run, from the untrained model

    def check(self, loss: float, grad_norm: float | None) -> NumberVerdict:
        """Return the verdict; add the values to the window if it is "ok"."""
        judged = grad_norm is not None and self._factor_grad > 0
        verdict = finiteness(loss, grad_norm)
        if verdict != OK:
            return verdict
        untrained = abs(_middle(sorted(self._first))) if self._first else 0.0
        if self._jumped(self._losses, loss, self._factor, max(self._min_rise, untrained)):
            return JUMP
        if judged and grad_norm is not None:
            if self._jumped(self._norms, grad_norm, self._factor_grad, self._min_rise):
                return JUMP
            self._norms.learn(grad_norm)
        self._losses.learn(loss)
        if len(self._first) < self._min_count:
            self._first.append(loss)
        return OK

    def accept(self, loss: float) -> None:
        """Add a loss that jumped to the window: no remedy follows, and the data may explain the jump."""
        self._losses.learn(loss)

    def usual(self) -> str:
        """Describe the losses in the window and the limit above which a loss is a jump."""
        ordered = self._losses.ordered
        if not ordered:
            return "no losses yet"
        median = self._losses.median()
        untrained = abs(_middle(sorted(self._first))) if self._first else 0.0
        rise = max(
            self._min_rise,
            untrained,
            self._factor * RELATIVE_SPREAD * abs(median),
            ABOVE_HIGHEST * (ordered[-1] - median),
            self._factor * MAD_TO_SIGMA * self._losses.mad(median),
        )
        return (
            f"last {len(ordered)}: median {median:.4g}, highest {ordered[-1]:.4g}; limit {median + rise:.4g}"
        )

    def learned(self) -> dict[str, Collection[float]]:
        """Return the live collections of recorded values; the caller must copy them before the next check."""
        return {"losses": self._losses.recent, "grad_norms": self._norms.recent, "first": self._first}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `learned`, converted to lists.

        Raises `ValueError`, and changes nothing, if `state` lacks one of the lists or has an invalid number.
        """
        losses, norms = _numbers(state, "losses"), _numbers(state, "grad_norms")
        first = _numbers(state, "first")
        self._losses.replace(losses)
        self._norms.replace(norms)
        self._first = first

    def _jumped(self, seen: _Window, value: float, factor: float, least: float) -> bool:
        if len(seen.ordered) < self._min_count:
            return False
        median = seen.median()
        rise = value - median
        if rise <= max(least, factor * RELATIVE_SPREAD * abs(median)):
            return False  # in the usual case the spread need not be computed
        highest = seen.ordered[-1] - median
        return rise > ABOVE_HIGHEST * highest and rise > factor * MAD_TO_SIGMA * seen.mad(median)


class _Window:
    """The most recent values, in order of arrival and in sorted order."""

    def __init__(self, size: int) -> None:
        self.recent: deque[float] = deque(maxlen=size)
        self.ordered: list[float] = []

    def learn(self, value: float) -> None:
        if len(self.recent) == self.recent.maxlen:
            del self.ordered[bisect_left(self.ordered, self.recent[0])]
        self.recent.append(value)
        insort(self.ordered, value)

    def replace(self, values: Sequence[float]) -> None:
        self.recent.clear()
        self.recent.extend(values)
        self.ordered = sorted(self.recent)

    def median(self) -> float:
        return _middle(self.ordered)

    def mad(self, median: float) -> float:
        return _middle(sorted([abs(value - median) for value in self.ordered]))


def _middle(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return ordered[half - 1] / 2 + ordered[half] / 2  # halved first, because the sum may overflow


def _numbers(state: Mapping[str, Any], key: str) -> list[float]:
    values = state.get(key)
    if not isinstance(values, list) or not all(
        isinstance(value, (int, float)) and math.isfinite(value) for value in values
    ):
        raise ValueError(f"loss guard: {key} is not a list of finite numbers")
    return [float(value) for value in values]
