"""Tell a loss that went wrong from one that is merely noisy. Pure.

A false alarm costs a rollback and, since the same batch gives the same loss again, perhaps the
run. So a jump has to be far outside in each of four ways: many times the usual spread (median and
MAD, which an outlier does not move), many times 2% of the loss itself, well above the highest loss
of the window (batch losses have heavy tails), and large in itself: as much as an untrained model's
loss (that of a model that has converged is tiny, and one hard sample is a hundred times it).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

OK, NAN, INF, JUMP = "ok", "nan", "inf", "jump"
MAD_TO_SIGMA = 1.4826  # of a normal distribution
RELATIVE_SPREAD = 0.02
ABOVE_HIGHEST = 4.0  # times the distance of the highest from the median: a tail of e^-x gives 1 in 10^7
MIN_RISE = 0.5  # in units of the loss


class LossGuard:
    """Judge each step's loss and gradient norm by those before it.

    Only values found ok are learned: a bad stretch cannot make itself the norm.
    `factor_grad` 0 leaves gradient norms unjudged, but for NaN and Inf.
    """

    def __init__(
        self,
        window: int = 64,
        min_count: int = 16,
        factor: float = 10.0,
        factor_grad: float = 0.0,
        min_rise: float = MIN_RISE,
    ) -> None:
        if not 1 <= min_count <= window:
            raise ValueError(f"min_count: {min_count} is not between 1 and the window, {window}")
        self._min_count = min_count
        self._factor, self._factor_grad, self._min_rise = factor, factor_grad, min_rise
        self._losses = _Window(window)
        self._norms = _Window(window)
        self._first: list[float] = []  # the losses of a model that has learned nothing

    def check(self, loss: float, grad_norm: float | None) -> str:
        """Return "ok", "nan", "inf" or "jump"; learn the values if ok."""
        judged = grad_norm is not None and self._factor_grad > 0
        if not math.isfinite(loss):
            return NAN if math.isnan(loss) else INF
        if grad_norm is not None and not math.isfinite(grad_norm):
            return NAN if math.isnan(grad_norm) else INF
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
        """Learn a loss that jumped and that nothing is to be done about: it may be the data's."""
        self._losses.learn(loss)

    def usual(self) -> str:
        """Say what a loss is compared with, and from where on it is a jump."""
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
        """Return what was learned, as it lies: for whoever copies it at once."""
        return {"losses": self._losses.recent, "grad_norms": self._norms.recent, "first": self._first}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `learned` gave, as lists. Raises `ValueError` and changes nothing if it did not."""
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
            return False  # nearly always: the spread is needed only by what is suspect
        highest = seen.ordered[-1] - median
        return rise > ABOVE_HIGHEST * highest and rise > factor * MAD_TO_SIGMA * seen.mad(median)


class _Window:
    """The last values, in order of arrival and of size."""

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
    return ordered[half - 1] / 2 + ordered[half] / 2  # halves first: the sum may overflow


def _numbers(state: Mapping[str, Any], key: str) -> list[float]:
    values = state.get(key)
    if not isinstance(values, list) or not all(
        isinstance(value, (int, float)) and math.isfinite(value) for value in values
    ):
        raise ValueError(f"loss guard: {key} is not a list of finite numbers")
    return [float(value) for value in values]
