"""Determine which ranks are late. Pure: the time and the sidecar's own lateness are arguments.

A step that takes longer than `floor_s + factor * p99` of the recent steps is late. This does not prove a
hang: a late rank is inspected, and the supervisor judges the evidence. The limit counts from the last commit,
or from the end of a pause inside the step, and not from the last change of phase, because a step with
gradient accumulation changes phase many times, and the step times bound all of its phases together. The first
step, and everything that is not work on a step (a pause that the script declares, a snapshot that Holdfast
takes, joining, restoring), have separate limits. A rank that exceeds one of these counts as hung.

In a script that does not join, Holdfast sees only the steps of torch's optimizers. Before the first step it
is not known whether there will be any, because the script may do inference or be the parent of the processes
that train. Such a rank is late after half of the limit for a first step, so that it is inspected and a
warning appears, but even exceeding the whole limit does not mean that it hangs.

With the defaults, a late rank is noticed at most 3 x p99 + 0.6 s after its last progress, which leaves 0.4
s of the promised second for the inspection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.protocol import defaults
from holdfast.protocol.progress import PHASES, Phase, PhaseKind, Progress, of_kinds

KEPT = 256  # how many of a rank's newest step times are used
PAUSES = of_kinds(PhaseKind.PAUSE, PhaseKind.COPY)  # the page contains the limit and label of these phases
_WORK = of_kinds(PhaseKind.STEP, PhaseKind.TAIL)
_ENDS = of_kinds(PhaseKind.END)


@dataclass(frozen=True, slots=True)
class HangPolicy:
    """Limits in seconds, and factors of the p99 step time."""

    factor: float = defaults.HANG_FACTOR
    floor_s: float = (
        defaults.HANG_FLOOR_S
    )  # covers pauses of the host and of garbage collection when steps take milliseconds
    min_samples: int = 20  # with fewer step times the p99 means little, so the next two limits apply
    few_factor: float = 10.0
    few_floor_s: float = 5.0
    first_step_s: float = defaults.FIRST_STEP_S  # includes compilers, caches, lazy initialisation, restoring
    pause_s: float = defaults.PAUSE_S  # for a pause that declares no limit
    finish_s: float = 30.0  # the time from a failure that the rank recorded until its process ends
    joins: bool = True  # whether the script calls `holdfast.join`

    def __post_init__(self) -> None:
        for name in ("factor", "few_factor"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name}: {getattr(self, name):g} is not a factor of at least 1")
        for name in ("floor_s", "few_floor_s", "first_step_s", "pause_s", "finish_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name):g} is not a time above 0")


@dataclass(frozen=True, slots=True)
class StepStats:
    """The last step times of a rank, over all generations. Created by `of` or `extended`."""

    times_s: tuple[float, ...] = ()
    p99_s: float = 0.0  # by the nearest-rank method, so for fewer than 100 times it is their maximum

    @classmethod
    def of(cls, times_s: tuple[float, ...]) -> StepStats:
        kept = times_s[-KEPT:]
        if not kept:
            return cls()
        return cls(kept, sorted(kept)[math.ceil(len(kept) * 99 / 100) - 1])

    def extended(self, times_s: tuple[float, ...]) -> StepStats:
        return StepStats.of(self.times_s + times_s) if times_s else self


@dataclass(frozen=True, slots=True)
class Stall:
    """A rank that has made no progress for longer than its limit. `why` is for people."""

    rank: int
    step: int  # the last committed step
    phase: Phase
    since_ns: int  # when it last made progress, in CLOCK_MONOTONIC
    waited_s: float
    limit_s: float
    limited: bool  # whether `limit_s` is the activity's own limit, so that exceeding it counts as a hang
    why: str
    begun: bool = True  # False if its script does not join and has completed no step


def limit_s(progress: Progress, stats: StepStats, policy: HangPolicy) -> float:
    """Return how many seconds the current activity may take; infinite outside any loop."""
    if progress.failed_ns:
        return policy.finish_s
    if progress.phase in PAUSES:
        return progress.pause_limit_s if progress.pause_limit_s > 0 else policy.pause_s
    if progress.phase in _ENDS:
        return math.inf
    if not _is_begun(progress, policy):
        return policy.first_step_s / 2
    if progress.phase not in _WORK or progress.steps_done == 0 or not stats.times_s:
        return policy.first_step_s
    if len(stats.times_s) >= policy.min_samples:
        return policy.floor_s + policy.factor * stats.p99_s
    return max(policy.few_floor_s, policy.few_factor * stats.p99_s)


def _is_begun(progress: Progress, policy: HangPolicy) -> bool:
    """Return False only if the script does not join, has done no step, is in no pause and has not failed."""
    has_own_limit = progress.phase in PAUSES or bool(progress.failed_ns)
    return policy.joins or has_own_limit or progress.steps_done > 0


def is_limited(progress: Progress, policy: HangPolicy) -> bool:
    """Return whether the activity has its own limit, because recent step times do not apply to it."""
    is_unusual = progress.phase not in _WORK or progress.steps_done == 0
    return bool(progress.failed_ns) or (is_unusual and _is_begun(progress, policy))


def since_ns(progress: Progress) -> int:
    """Return the time from which the current activity is measured: CLOCK_MONOTONIC nanoseconds."""
    if progress.failed_ns:
        return progress.failed_ns
    return progress.step_started_ns if progress.phase in _WORK else progress.phase_since_ns


def pause_label(progress: Progress) -> str:
    """Return the label of the pause or copy that the rank is in; "" in any other phase.

    The page keeps the label after the pause, so the phase must be checked.
    """
    return progress.pause_label if progress.phase in PAUSES else ""


def left_s(
    progress: Progress,
    now_ns: int,
    stats: StepStats,
    policy: HangPolicy,
    own_lateness_s: float = 0.0,
) -> float:
    """Return in how many seconds `stalled` will report this rank without progress; 0 or less means now."""
    allowed_s = limit_s(progress, stats, policy) + max(0.0, own_lateness_s)
    return allowed_s - (now_ns - since_ns(progress)) / 1e9


def stalled(
    progress: Progress,
    now_ns: int,
    stats: StepStats,
    policy: HangPolicy,
    own_lateness_s: float = 0.0,
) -> Stall | None:
    """Return this rank's stall; None while the rank is within its limit.

    `own_lateness_s` is how late the sidecar itself has been since the rank's last progress. This time is
    added to the limit, because a machine that was suspended or overloaded has also delayed the rank.
    """
    start_ns = since_ns(progress)
    waited_s = (now_ns - start_ns) / 1e9
    allowed_s = limit_s(progress, stats, policy) + max(0.0, own_lateness_s)
    if waited_s <= allowed_s:
        return None
    doing = pause_label(progress) or PHASES[progress.phase].words
    if progress.failed_ns:
        doing = "ending after its failure"
    return Stall(
        rank=progress.rank,
        step=progress.step,
        phase=progress.phase,
        since_ns=start_ns,
        waited_s=waited_s,
        limit_s=allowed_s,
        limited=is_limited(progress, policy),
        why=f"rank {progress.rank} made no progress for {waited_s:.2f} s after step "
        f"{progress.step} ({doing}); the limit is {allowed_s:.2f} s",
        begun=_is_begun(progress, policy),
    )
