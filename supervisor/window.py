"""How much of the last hour, or day, was good? Pure, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any


class Window:
    """Samples of a running sum at fixed times, for as long as the window is wide.

    Between samples the sum is taken as a straight line. It may fall (work that was counted
    as good is lost later), so a share is clamped to 0..1.
    """

    def __init__(self, slot_ns: int, slots: int) -> None:
        self.slot_ns = slot_ns
        self.width_ns = slot_ns * slots
        self._samples: deque[tuple[int, int]] = deque(maxlen=slots + 2)

    def advance(self, at_ns: int, to_ns: int, good_ns: int, grows: bool) -> None:
        """Sample the time from `at_ns`, when the sum was `good_ns`, to `to_ns`."""
        kept = self._samples.maxlen or 1
        first = at_ns // self.slot_ns + 1
        last = to_ns // self.slot_ns
        if not self._samples:
            self._samples.append((at_ns, good_ns))
        for slot in range(max(first, last - kept + 1), last + 1):
            edge_ns = slot * self.slot_ns
            self._samples.append((edge_ns, good_ns + (edge_ns - at_ns if grows else 0)))

    def share(self, width_ns: int, at_ns: int, good_ns: int) -> float:
        """Return the good share of the `width_ns` before `at_ns`, or of what is known of them."""
        if not self._samples:
            return 0.0
        start_ns = max(at_ns - width_ns, self._samples[0][0])
        if at_ns <= start_ns:
            return 0.0
        gained = good_ns - self._at(start_ns, (at_ns, good_ns))
        return min(1.0, max(0.0, gained / (at_ns - start_ns)))

    def snapshot(self) -> list[list[int]]:
        return [list(sample) for sample in self._samples]

    def restore(self, samples: object) -> None:
        """Take back what `snapshot` gave. Raises `ValueError` if it did not."""
        if not isinstance(samples, list):
            raise ValueError("ledger window: not a list")
        taken = [(int(at_ns), int(good_ns)) for at_ns, good_ns in samples]
        if taken != sorted(taken, key=lambda sample: sample[0]):
            raise ValueError("ledger window: not in the order of time")
        self._samples.clear()
        self._samples.extend(taken)

    def _at(self, start_ns: int, end: tuple[int, int]) -> float:
        before = self._samples[0]
        for sample in (*self._samples, end):
            if sample[0] > start_ns:
                share = (start_ns - before[0]) / (sample[0] - before[0])
                return before[1] + share * (sample[1] - before[1])
            before = sample
        return before[1]


def integers(state: Mapping[str, Any], *keys: str) -> list[int]:
    """Return these values of `state`. Raises `ValueError` naming the first that is no integer."""
    for key in keys:
        if type(state.get(key)) is not int:
            raise ValueError(f"ledger: {key} is {state.get(key)!r}, not a whole number")
    return [state[key] for key in keys]
