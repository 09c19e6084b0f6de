"""When is a rank late? Pure: the clock and the watcher's own lateness are arguments.

A step that takes longer than `floor_s + factor * p99` of the recent steps is late. That is no proof of a
hang: whoever is late is looked at, and the supervisor judges what is seen. Progress is counted from the
last commit, or from the end of a pause inside the step, and not from the last change of phase: a step with
gradient accumulation changes phase many times, and the limit for all of them together is what the step
times give. What is not work on a step (a pause that the script declares, a snapshot that Holdfast takes,
joining, restoring) and a first step have limits of their own, which are over when they are over.

Of a script that does not join only the steps of torch's optimizers are seen. Before the first of them nobody
knows whether there will be any (inference, a parent of the processes that train): it is late after half of
the time for a first step, to be looked at and warned of, and that time is no limit of its own.

With the defaults, a late rank is noticed at most 3 x p99 + 0.6 s after its last progress, which leaves 0.4
s of the promised second for the look.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.progress import Phase, Progress, spoken

KEPT = 256
_WORK = frozenset({Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.TAIL})
PAUSES = frozenset({Phase.CHECKPOINT, Phase.EVAL, Phase.PAUSED, Phase.SNAPSHOT})


@dataclass(frozen=True, slots=True)
class HangPolicy:
    """Limits in seconds, and factors of the p99 step time."""

    factor: float = 3.0
    floor_s: float = 0.6  # pauses of the machine and of the collector, for steps of milliseconds
    min_samples: int = 20  # below, the p99 says little: be generous
    few_factor: float = 10.0
    few_floor_s: float = 5.0
    first_step_s: float = 600.0  # compilers, caches, lazy initialisation, restoring
    pause_s: float = 1800.0  # a pause that declares no limit
    finish_s: float = 30.0  # from a failure that the rank reported to the end of its process
    joins: bool = True  # the script calls `holdfast.join`

    def __post_init__(self) -> None:
        for name in ("factor", "few_factor"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name}: {getattr(self, name):g} is not a factor of at least 1")
        for name in ("floor_s", "few_floor_s", "first_step_s", "pause_s", "finish_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name):g} is not a time above 0")


@dataclass(frozen=True, slots=True)
class StepStats:
    """The last step times of a rank, over its generations. Made by `of` or `extended`."""

    times_s: tuple[float, ...] = ()
    p99_s: float = 0.0  # nearest rank; the maximum while there are fewer than 100

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
    """A rank that made no progress for longer than it may. `why` is for people."""

    rank: int
    step: int  # the last committed
    phase: Phase
    since_ns: int  # when the progress ended: CLOCK_MONOTONIC
    waited_s: float
    limit_s: float
    limited: bool  # by a limit that is the activity's own: over is over
    why: str
    begun: bool = True  # False: of a script that does not join, and has done no step


def limit_s(progress: Progress, stats: StepStats, policy: HangPolicy) -> float:
    """Return how long the present activity may take, in seconds; infinite for IDLE and DONE."""
    if progress.failed_ns:
        return policy.finish_s
    if progress.phase in PAUSES:
        return progress.pause_limit_s if progress.pause_limit_s > 0 else policy.pause_s
    if progress.phase in (Phase.IDLE, Phase.DONE):
        return math.inf
    if not _is_begun(progress, policy):
        return policy.first_step_s / 2
    if progress.phase not in _WORK or progress.steps_done == 0 or not stats.times_s:
        return policy.first_step_s
    if len(stats.times_s) >= policy.min_samples:
        return policy.floor_s + policy.factor * stats.p99_s
    return max(policy.few_floor_s, policy.few_factor * stats.p99_s)


def _is_begun(progress: Progress, policy: HangPolicy) -> bool:
    """False while a script that does not join has done no step, and has not failed."""
    own = progress.phase in PAUSES or bool(progress.failed_ns)
    return policy.joins or own or progress.steps_done > 0


def is_limited(progress: Progress, policy: HangPolicy) -> bool:
    """True for what has a limit of its own: no step of which the recent ones say how long it takes."""
    first = progress.phase not in _WORK or progress.steps_done == 0
    return bool(progress.failed_ns) or (first and _is_begun(progress, policy))


def since_ns(progress: Progress) -> int:
    """Return since when the present activity is measured: CLOCK_MONOTONIC nanoseconds."""
    if progress.failed_ns:
        return progress.failed_ns
    return progress.step_started_ns if progress.phase in _WORK else progress.phase_since_ns


def activity(progress: Progress) -> str:
    """Return what the rank is doing, for people. The label of a pause stays in the page after it."""
    if progress.phase in PAUSES and progress.pause_label:
        return progress.pause_label
    return spoken(progress.phase)


def left_s(
    progress: Progress,
    now_ns: int,
    stats: StepStats,
    policy: HangPolicy,
    own_lateness_s: float = 0.0,
) -> float:
    """Return in how many seconds `stalled` may find this rank if nothing happens; 0 and less: now."""
    allowed_s = limit_s(progress, stats, policy) + max(0.0, own_lateness_s)
    return allowed_s - (now_ns - since_ns(progress)) / 1e9


def stalled(
    progress: Progress,
    now_ns: int,
    stats: StepStats,
    policy: HangPolicy,
    own_lateness_s: float = 0.0,
) -> Stall | None:
    """Return the stall of this rank, or None while it is in time.

    `own_lateness_s` is for how long the watcher itself did not run when it should have, since the
    rank's last progress: a machine that was suspended or starved held up the rank as well.
    """
    start_ns = since_ns(progress)
    waited_s = (now_ns - start_ns) / 1e9
    allowed_s = limit_s(progress, stats, policy) + max(0.0, own_lateness_s)
    if waited_s <= allowed_s:
        return None
    doing = activity(progress)
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
