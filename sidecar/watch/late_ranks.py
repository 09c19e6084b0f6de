"""Determine which ranks are late. Pure: the time and the sidecar's own lateness are arguments.

A step is late if it takes longer than `floor_s + factor * p99` of the recent steps. Lateness does not prove a
hang: the launcher inspects a late rank, and the supervisor judges the evidence. The clock starts at the last
commit, or at the end of a pause inside the step. A change of phase does not restart the clock, because a step
with gradient accumulation changes phase many times, and step times cover all phases. Separate limits apply to
the first step and to everything that is not work on a step: a pause that the script declares, a snapshot that
Holdfast takes, joining, and restoring. A rank that exceeds a separate limit is hung.

One slow step, such as a first evaluation, dominates the p99 for a long time. A step that is long compared to
the median is therefore reported early, so that the rank is inspected. Until the step exceeds its limit, only
evidence that proves a hang counts, and the time does not.

The limit for a first step is generous, because a first step may compile, import and load. A step that hangs
once may hang again when the group resumes from its state, and it is then the first step of its generation. A
first step is therefore reported early too, and the supervisor distinguishes work from a hang. A cold start is
reported later: only a warning can follow, and most cold starts are over by then.

If a script does not call `holdfast.join`, Holdfast sees only the steps of torch's optimizers. Before the
first such step, it cannot know whether there will be any: the script may run inference, or be the parent of
the training processes. Such a rank is late after half of the limit for a first step. It is then inspected,
and the user is warned. It is never considered hung, even after the full limit.

By default, Holdfast promises to notice a hang at most `factor * p99` plus one second after the rank's last
progress. `floor_s` uses part of that second, and leaves the rest for the inspection.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.protocol import defaults
from holdfast.protocol.progress import PHASES, Phase, PhaseKind, Progress, of_kinds

KEPT = 256  # how many of a rank's newest step times are used
PAUSES = of_kinds(PhaseKind.PAUSE, PhaseKind.COPY)  # phases whose limit and label are in the progress page
_WORK = of_kinds(PhaseKind.STEP, PhaseKind.TAIL)
_ENDS = of_kinds(PhaseKind.END)


@dataclass(frozen=True, slots=True)
class HangPolicy:
    """Limits in seconds, and factors for the p99 step time."""

    factor: float = defaults.HANG_FACTOR
    # When steps take milliseconds, this allows for pauses of the host and for garbage collection.
    floor_s: float = defaults.HANG_FLOOR_S
    min_samples: int = 20  # with fewer step times, the p99 is unreliable, so the next two fields apply
    few_factor: float = 10.0
    few_floor_s: float = 5.0  # also the shortest time after which a step is reported early
    cold_floor_s: float = 15.0  # the same for a first step that resumes from no state
    first_step_s: float = defaults.FIRST_STEP_S  # includes compiling, filling caches and restoring
    pause_s: float = defaults.PAUSE_S  # for a pause that declares no limit
    finish_s: float = 30.0  # from a failure that the rank recorded until its process ends
    joins: bool = True  # True if the script calls `holdfast.join`

    def __post_init__(self) -> None:
        for name in ("factor", "few_factor"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name}: {getattr(self, name):g} is not a factor of at least 1")
        for name in ("floor_s", "few_floor_s", "cold_floor_s", "first_step_s", "pause_s", "finish_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name):g} is not a time above 0")


@dataclass(frozen=True, slots=True)
class StepStats:
    """The last step times of a rank, over all generations. Use `of` or `extended` to create one."""

    times_s: tuple[float, ...] = ()
    p99_s: float = 0.0  # by the nearest-rank method; with fewer than 100 step times, it is their maximum
    median_s: float = 0.0  # also by the nearest-rank method

    @classmethod
    def of(cls, times_s: tuple[float, ...]) -> StepStats:
        kept = times_s[-KEPT:]
        if not kept:
            return cls()
        ordered = sorted(kept)
        return cls(kept, ordered[math.ceil(len(kept) * 99 / 100) - 1], ordered[(len(kept) - 1) // 2])

    def extended(self, times_s: tuple[float, ...]) -> StepStats:
        return StepStats.of(self.times_s + times_s) if times_s else self


@dataclass(frozen=True, slots=True)
class Stall:
    """A rank that has made no progress for longer than its limit. `why` is a message for users."""

    rank: int
    step: int  # the last committed step
    phase: Phase
    since_ns: int  # when the rank last made progress, by CLOCK_MONOTONIC
    waited_s: float
    limit_s: float
    limited: bool  # True if `limit_s` is the activity's own limit: exceeding it counts as a hang
    why: str
    begun: bool = True  # False if its script does not join and has completed no step
    # If the step is within `limit_s` but longer than usual: the shorter limit that it has exceeded.
    early_s: float = 0.0
    first_step: bool = False  # True if the rank has completed no step in this generation


def limit_s(progress: Progress, stats: StepStats, policy: HangPolicy) -> float:
    """Return how many seconds the current activity may take; infinity outside a training loop."""
    if progress.failed_ns:
        return policy.finish_s
    if progress.phase in PAUSES:
        return progress.pause_limit_s if progress.pause_limit_s > 0 else policy.pause_s
    if progress.phase in _ENDS:
        return math.inf
    if not _is_begun(progress, policy):
        return policy.first_step_s / 2
    if not _is_usual_step(progress, stats):
        return policy.first_step_s
    return _step_limit_s(stats.p99_s, len(stats.times_s), policy)


def early_limit_s(progress: Progress, stats: StepStats, policy: HangPolicy) -> float:
    """Return after how many seconds the current activity is reported, at most `limit_s`."""
    most_s = limit_s(progress, stats, policy)
    if is_first_step(progress, policy):
        floor_s = policy.few_floor_s if progress.step > 0 else policy.cold_floor_s
        return min(most_s, max(floor_s, policy.floor_s))
    if progress.failed_ns or not _is_usual_step(progress, stats):
        return most_s
    usual_s = _step_limit_s(stats.median_s, len(stats.times_s), policy)
    return min(most_s, max(policy.few_floor_s, usual_s))


def is_first_step(progress: Progress, policy: HangPolicy) -> bool:
    """Return True if the rank works on the first step of its generation.

    Before that step, a script that joins passes phases with names of their own. All that a script does before
    its first step counts as this step if it does not join.
    """
    if progress.failed_ns or progress.steps_done > 0:
        return False
    return progress.phase in _WORK or not (_is_begun(progress, policy) or progress.phase in _ENDS)


def _is_usual_step(progress: Progress, stats: StepStats) -> bool:
    """Return True if the rank is in a step, and the times of earlier steps apply to it."""
    return progress.phase in _WORK and progress.steps_done > 0 and bool(stats.times_s)


def _step_limit_s(step_s: float, samples: int, policy: HangPolicy) -> float:
    """Return the limit for a step if steps take up to `step_s`, according to this many samples."""
    if samples >= policy.min_samples:
        return policy.floor_s + policy.factor * step_s
    return max(policy.few_floor_s, policy.few_factor * step_s)


def _is_begun(progress: Progress, policy: HangPolicy) -> bool:
    """Return False if the script does not join, and has neither completed a step, paused nor failed."""
    has_own_limit = progress.phase in PAUSES or bool(progress.failed_ns)
    return policy.joins or has_own_limit or progress.steps_done > 0


def is_limited(progress: Progress, policy: HangPolicy) -> bool:
    """Return True if the activity has its own limit, because step times do not apply to it."""
    is_unusual = progress.phase not in _WORK or progress.steps_done == 0
    return bool(progress.failed_ns) or (is_unusual and _is_begun(progress, policy))


def since_ns(progress: Progress) -> int:
    """Return when the current activity began, in nanoseconds of CLOCK_MONOTONIC."""
    if progress.failed_ns:
        return progress.failed_ns
    return progress.step_started_ns if progress.phase in _WORK else progress.phase_since_ns


def pause_label(progress: Progress) -> str:
    """Return the label of the current pause or copy; "" in any other phase.

    The page still contains the label after the pause, so this function checks the phase.
    """
    return progress.pause_label if progress.phase in PAUSES else ""


def left_s(
    progress: Progress,
    now_ns: int,
    stats: StepStats,
    policy: HangPolicy,
    own_lateness_s: float = 0.0,
) -> float:
    """Return the seconds until `stalled` reports this rank if it makes no progress; 0 or less means now.

    If the rank has already been reported early, return the seconds until it exceeds its limit.
    """
    waited_s = (now_ns - since_ns(progress)) / 1e9 - max(0.0, own_lateness_s)
    early_s = early_limit_s(progress, stats, policy) - waited_s
    return early_s if early_s >= 0 else limit_s(progress, stats, policy) - waited_s


def stalled(
    progress: Progress,
    now_ns: int,
    stats: StepStats,
    policy: HangPolicy,
    own_lateness_s: float = 0.0,
) -> Stall | None:
    """Return this rank's stall; None while the rank is within its limit and its step is not unusually long.

    `own_lateness_s` is the sidecar's own lateness since the rank's last progress. It is added to the limit,
    because a suspended or overloaded machine also delays the rank.
    """
    start_ns = since_ns(progress)
    waited_s = (now_ns - start_ns) / 1e9
    late_s = max(0.0, own_lateness_s)
    allowed_s = limit_s(progress, stats, policy) + late_s
    early_s = early_limit_s(progress, stats, policy) + late_s
    if waited_s <= early_s:
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
        limited=waited_s > allowed_s and is_limited(progress, policy),
        why=f"rank {progress.rank} made no progress for {waited_s:.2f} s after step "
        f"{progress.step} ({doing}); the limit is {allowed_s:.2f} s",
        begun=_is_begun(progress, policy),
        early_s=early_s if waited_s <= allowed_s else 0.0,
        first_step=is_first_step(progress, policy),
    )
