"""Decide whether to copy the state before a pause begins, based on what earlier pauses have done.

If a script swaps in averaged weights for a pause, and a peer dies during the pause, the real weights can no
longer be copied. A pause that only reads the weights needs no copy. It is not known whether the first pause
with a label will write weights, so the state is copied before it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from holdfast.errors import members_of_group

MAX_FIRST_COPY_S = 2.0  # a copy that takes longer is not made before the first pause with a label
MIN_PAUSE_PER_COPY = 10.0  # a copy is worthwhile only if the pause takes at least this many times as long
_MARK = "_holdfast_left_pause"  # the attribute that marks an exception
_MAX_CHAINED = 50  # the maximum number of exceptions to follow through causes, contexts and groups


@dataclass(slots=True)
class _LabelHistory:
    writes: bool = False
    longest_s: float = 0.0


class PauseHistory:
    """Records, by label, what the pauses of one generation have done."""

    def __init__(self) -> None:
        self._by_label: dict[str, _LabelHistory] = {}
        self._present = _LabelHistory()
        self._label = ""
        self._began_s = 0.0

    def wants_copy(self, label: str, copy_s: float) -> bool:
        """Return True if the state should be copied, which takes `copy_s`, before a pause with this label."""
        history = self._by_label.get(label)
        if history is None:
            return copy_s <= MAX_FIRST_COPY_S
        return history.writes and history.longest_s >= MIN_PAUSE_PER_COPY * copy_s

    @property
    def known(self) -> bool:
        """True if the current pause is known to have written the state."""
        return self._present.writes

    def began(self, label: str, now_s: float) -> None:
        """Record that a pause begins."""
        self._label, self._began_s, self._present = label, now_s, _LabelHistory()

    def writes(self) -> None:
        """Record that the current pause has written the state."""
        self._present.writes = True

    def ended(self, now_s: float) -> None:
        """Record the end of the current pause. If it wrote, pauses with its label are expected to write."""
        before = self._by_label.get(self._label, _LabelHistory())
        longest_s = max(before.longest_s, now_s - self._began_s)
        self._by_label[self._label] = _LabelHistory(before.writes or self._present.writes, longest_s)


def mark_left_pause(error: BaseException, step: int) -> None:
    """Mark `error` as having left a pause after `step` steps, which leaves the work of the pause unfinished.

    The mark is needed because the rank's phase does not show this later. If the script handles the exception,
    the mark disappears together with it.
    """
    with suppress(Exception):  # the exception's class may forbid attributes
        vars(error)[_MARK] = step


def step_of_left_pause(error: BaseException) -> int:
    """Return the step count when `error` or one of its causes last left a pause; -1 if none did."""
    found, chain = -1, [error]
    for each in chain:
        found = max(found, vars(each).get(_MARK, -1))
        for other in (each.__cause__, each.__context__, *members_of_group(each)):
            if other is not None and len(chain) < _MAX_CHAINED and not any(other is known for known in chain):
                chain.append(other)
    return found
