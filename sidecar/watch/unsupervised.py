"""Decide when a member without a supervisor ends, because only a supervisor could restart its ranks. Pure.

Training continues without a supervisor. After a fault, however, the ranks have ended or are frozen, and wait
for orders that may never arrive, for example because Holdfast was uninstalled. The pod would run without
progress forever, and its owner would never learn that the training has failed. The member therefore waits for
a limited time, and then ends its container with the exit code of the rank that failed. The owner's own
restart policy then acts as it does without Holdfast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast import exit_codes
from holdfast.protocol.launcher_messages import LauncherState, RankState

# Longer than the absence of a supervisor that will return: 350 s until Kubernetes replaces its pod on a lost
# node (50 s until the node is considered lost, and 300 s for which pods tolerate this), 300 s to pull the
# image, 60 s to start, and 8 s for the Lease make 718 s. Upgrades and failovers need only some of this time.
# A supervisor that cannot reach the API server keeps its connections, and a new one waits until the server is
# back.
LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class LoneWait:
    """The wait of a member whose ranks need a supervisor, since `since_s` on CLOCK_MONOTONIC."""

    since_s: float
    exit_code: int

    def left_s(self, now_s: float) -> float:
        """Return how long the wait still lasts; 0 if it has ended."""
        return max(0.0, self.since_s + LIMIT_S - now_s)


def later(
    known: LoneWait | None,
    state: LauncherState | None,
    alone_since_s: float | None,
    now_s: float,
    lateness_s: float = 0.0,
) -> LoneWait | None:
    """Return the wait after `known`; None while there is a supervisor or the ranks do not need one.

    The wait begins when there is neither a supervisor nor a rank that can train.

    Args:
        known: The result of the last call.
        state: The launcher's state; None if it is not connected.
        alone_since_s: The time since which there has been no supervisor; None if there is one.
        now_s: The current time.
        lateness_s: How long this process was delayed since the last call. It could not hear from a supervisor
            during that time, so the time is not counted.
    """
    code = exit_code(state)
    if code is None or alone_since_s is None:
        return None
    if known is None:
        return LoneWait(now_s, code)
    return replace(known, since_s=min(now_s, known.since_s + lateness_s), exit_code=code)


def exit_code(state: LauncherState | None) -> int | None:
    """Return the exit code for a member whose ranks can do nothing more without orders; None for any other.

    If ranks have failed, this is the code of the first rank that failed, not of a rank that failed because it
    lost that rank. It is 0 if all ranks have finished. A member whose ranks have not started yet needs a
    supervisor too, but it has neither failed nor finished, so it continues to wait.
    """
    if state is None or state.stopped or not state.ranks:
        return None
    failed = [each for each in state.ranks if _has_failed(each)]
    if failed:
        first = min(failed, key=_first_to_fail).ending
        assert first is not None  # because the rank has failed
        return exit_codes.of_failed_process(first.code, first.signal)
    if all(each.state == "exited" for each in state.ranks):
        codes = (each.ending.code for each in state.ranks if each.ending is not None)
        return next((code for code in codes if code), 0)
    is_frozen = state.secure_asked >= state.generation
    return exit_codes.TERMINATED if is_frozen else None


def _has_failed(rank: RankState) -> bool:
    """Return True if the rank has failed. While its `finally` blocks run, it may still recover."""
    ending = rank.ending
    if ending is None or ending.is_good:
        return False
    return rank.state == "exited" or (rank.state == "failing" and (ending.overdue or not ending.unwinding))


def _first_to_fail(rank: RankState) -> tuple[bool, int, int]:
    assert rank.ending is not None  # because the rank has failed
    return *rank.ending.blame_order, rank.rank
