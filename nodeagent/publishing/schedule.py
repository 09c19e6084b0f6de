"""Decides when to write to the Node object: after a change, as a heartbeat, or again after a failure. Pure.

A change is written at once. Each such write takes a token, so that a flapping node cannot overload the API
server.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from math import inf

HEARTBEAT_S = 30.0  # the time between two writes without a change
SOON_S = 0.2  # the shortest time between two writes; findings of one fault arrive together
TOKENS = 10.0  # writes of changes that may follow each other closely
REFILL_S = 3.0  # the time until another token
RETRY_S = 1.0  # the wait after a failure, doubled after each further failure
MAX_RETRY_S = 10.0


@dataclass(frozen=True, slots=True)
class WriteSchedule:
    """When the last write was tried and what it contained. Times are monotonic."""

    written: Hashable = None  # the verdict of the last successful write
    tried_s: float = -inf
    failures: int = 0  # in a row
    tokens: float = TOKENS
    asked_s: float = 0.0  # how long the server asked to wait, with the last failure

    def due_s(self, verdict: Hashable) -> float:
        """Return when the next write is due, assuming the verdict does not change before then."""
        if self.failures:
            backoff_s = min(MAX_RETRY_S, RETRY_S * 2.0 ** min(self.failures - 1, 10))
            return self.tried_s + max(backoff_s, min(self.asked_s, HEARTBEAT_S))
        if verdict == self.written:
            return self.tried_s + HEARTBEAT_S
        return self.tried_s + max(SOON_S, min(HEARTBEAT_S, (1.0 - self.tokens) * REFILL_S))

    def succeeded(self, verdict: Hashable, now_s: float) -> WriteSchedule:
        """Return the schedule after a write that began at `now_s`."""
        passed = TOKENS if self.tried_s == -inf else (now_s - self.tried_s) / REFILL_S
        tokens = min(TOKENS, self.tokens + passed) - (verdict != self.written)
        return WriteSchedule(verdict, now_s, 0, tokens)

    def failed(self, now_s: float, asked_s: float = 0.0) -> WriteSchedule:
        """Return the schedule after a failed write; the server may have asked to wait for `asked_s`."""
        return replace(self, tried_s=now_s, failures=self.failures + 1, asked_s=asked_s)
