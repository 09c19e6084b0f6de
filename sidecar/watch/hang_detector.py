"""Determine which ranks are late. Pure: the clock and the watcher's own lateness are arguments.

A step that takes longer than `floor_s + factor * p99` of the recent steps is late. That is no proof of a
hang: a late rank is examined, and the supervisor judges the evidence. Progress is counted from the
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
from dataclasses import dataclass, field

from holdfast.protocol.launcher_messages import LauncherState
from holdfast.protocol.member_messages import RankStall
from holdfast.protocol.progress import Phase, Progress, spoken

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


FIRST_S = 0.25  # from one look to the next; each gap is half as long again
LAST_S = 5.0
ANSWER_S = 10.0  # a look that is not answered by then was lost
DENSE_S = 1.0  # while gaps are shorter, one that the supervisor needs for a proof is not waited for


@dataclass(slots=True)
class LookSchedule:
    """Numbers the looks, and spaces them: dense at first, to tell a hang from work, then seldom."""

    _asked: int = 0
    _asked_s: float = 0.0
    _answered_s: float = 0.0
    _gap_s: float = FIRST_S
    _moment: int = 0  # what the newest was asked with

    def due(self, wanted: bool, looked: int, now_s: float, moment: int = 0) -> int:
        """Return the number of the look that is to be taken now, 0 for none.

        `looked` is the number of the newest look that was answered, perhaps to another sidecar. `moment` is
        what the supervisor asks with: a new one makes another look due at once while looks are dense.
        """
        if not wanted:
            self._asked, self._asked_s, self._answered_s, self._gap_s = 0, 0.0, 0.0, FIRST_S
            return 0
        if self._asked and looked >= self._asked and not self._answered_s:
            self._answered_s = now_s
        needed = moment != self._moment and self._gap_s < DENSE_S
        waits_s = ANSWER_S if not self._answered_s else 0.0 if needed else self._gap_s
        if self._asked and now_s < (self._answered_s or self._asked_s) + waits_s:
            return 0
        if self._asked:
            self._gap_s = min(LAST_S, self._gap_s * 1.5)
        self._asked, self._asked_s, self._answered_s = max(self._asked, looked) + 1, now_s, 0.0
        self._moment = moment
        return self._asked


LATE_S = 3.0  # a parked process begins within milliseconds: beyond this it is looked at


@dataclass(slots=True)
class StartMonitor:
    """Finds released processes that do not begin.

    A rank writes its progress page itself, so a process that never runs has none: it is timed here, from the
    launcher's report that it was released.
    """

    first_step_s: float
    _since_ns: dict[tuple[int, int, int], int] = field(default_factory=dict)  # by generation, rank, pid

    def late(self, state: LauncherState, now_ns: int, lateness_s: float) -> tuple[RankStall, ...]:
        """Return the processes that should have begun. `lateness_s`: how late the watcher itself is."""
        released = {
            (rank.generation, rank.rank, rank.pid)
            for rank in state.ranks
            if rank.state == "starting"
            and rank.pid
            and not rank.marks.started_ns
            and state.strategy
            != "cold"  # without a parked process it has yet to import, or is no script of ours
        }
        held_ns = int(lateness_s * 1e9)
        self._since_ns = {key: self._since_ns.get(key, now_ns - held_ns) + held_ns for key in released}
        return tuple(
            self._stall(rank, generation, (now_ns - since_ns) / 1e9)
            for (generation, rank, _), since_ns in sorted(self._since_ns.items())
            if now_ns - since_ns > LATE_S * 1e9
        )

    def _stall(self, rank: int, generation: int, waited_s: float) -> RankStall:
        over = waited_s > self.first_step_s
        limit_s = self.first_step_s if over else LATE_S
        phase = Phase.JOINING
        return RankStall(rank, generation, -1, int(phase), 0, "starting", round(waited_s, 3), limit_s, over)
