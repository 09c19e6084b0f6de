"""Read the progress pages of a member's ranks: what each rank is doing, and which ranks have stalled."""

from __future__ import annotations

import math
import mmap
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from holdfast.inspection import process_stats
from holdfast.process import linux
from holdfast.protocol import progress as pages
from holdfast.protocol.member_messages import RankProgress, RankStall, UncommittedWork
from holdfast.protocol.progress import Phase, Progress
from holdfast.snapshot import member_directory
from sidecar.watch.compute_time import ComputeTime
from sidecar.watch.late_ranks import PAUSES, HangPolicy, StepStats, left_s, pause_label, since_ns, stalled

RECENT = 32  # the usual step time is the median of this many step times
# At most this much of the time between two polls counts. In a longer gap, the machine may have been
# suspended.
MOST_BETWEEN_S = 0.3
# The time until the next poll while a rank works before a commit, because its process may end soon after.
SOON_S = 0.05
# All of a page that `holdfast.protocol.progress.read` reads. Several reads at a tick find the same content,
# and decoding it takes ten times as long as comparing it.
_CONTENT = slice(pages.SEQ_INDEX * 8, pages.COPYING_AT + pages.COPYING.size)
KNOWN = 8  # the number of steps after which the usual duration of the work before a commit is known
_NONE_ENDED: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ObservedWork:
    """How long a rank has worked before its commit, as observed by several polls."""

    since_ns: int = 0
    until_ns: int = 0  # the time of the last poll
    worked_s: float = 0.0  # only the time when the process was able to run

    def later(self, since_ns: int, now_ns: int, is_able: bool) -> ObservedWork:
        """Return the work as of a poll at `now_ns`, counted from 0 if `since_ns` has changed."""
        before = self if since_ns == self.since_ns else ObservedWork(since_ns, since_ns)
        if now_ns <= before.until_ns:
            return before
        more_s = min((now_ns - before.until_ns) / 1e9, MOST_BETWEEN_S) if is_able else 0.0
        return ObservedWork(since_ns, now_ns, before.worked_s + more_s)


@dataclass(frozen=True, slots=True)
class StoppedTime:
    """How long a process was stopped during a tail, and therefore did none of the tail's work."""

    began_ns: int = 0  # when the tail began
    until_ns: int = 0  # the time of the last poll
    is_stopped: bool = False  # at the last poll
    seconds: float = 0.0

    def later(self, began_ns: int, now_ns: int, is_stopped: bool) -> StoppedTime:
        """Return the stopped time as of a poll at `now_ns`, counted from 0 if `began_ns` has changed."""
        before = self if began_ns == self.began_ns else StoppedTime(began_ns, began_ns)
        if now_ns <= before.until_ns:
            return before
        more_s = (now_ns - before.until_ns) / 1e9 if is_stopped else 0.0
        if not before.is_stopped:  # it is unknown when, since the previous poll, the process was stopped
            more_s = min(more_s, MOST_BETWEEN_S)
        return StoppedTime(began_ns, now_ns, is_stopped, before.seconds + more_s)

    def total_s(self, began_ns: int, now_ns: int) -> float:
        """Return how long the process was stopped, until `now_ns`, in the tail that began at `began_ns`."""
        if began_ns != self.began_ns:
            return 0.0
        return self.seconds + (max(0, now_ns - self.until_ns) / 1e9 if self.is_stopped else 0.0)


@dataclass(slots=True)
class MonitoredRank:
    """What is known about one local rank: its page, its step times over all generations, and its lateness."""

    memory: mmap.mmap | None = None
    inode: int = 0
    stats: StepStats = field(default_factory=StepStats)
    compute: ComputeTime = field(default_factory=ComputeTime)
    times_read: int = -1  # `Progress.times_written` at the last read of step times; -1 before the first read
    activity_began_ns: int = 0
    lateness_s: float = 0.0  # the sidecar's own lateness since the rank's activity began
    last: Progress | None = None
    content: bytes = b""  # what `last` was read from; b"" if that is not certain
    uncommitted: ObservedWork = field(default_factory=ObservedWork)
    stopped: StoppedTime = field(default_factory=StoppedTime)
    sees_process: bool = True  # True if the rank's process id is valid in this container
    # The ranks that the launcher, which is in another container, reports as stopped.
    halted: frozenset[int] = frozenset()


class ProgressMonitor:
    """Reads all progress pages of a member. `poll` takes about 50 microseconds per rank."""

    def __init__(
        self, directory: Path, nproc: int, policy: HangPolicy, *, sees_processes: bool = True
    ) -> None:
        """Set `sees_processes` to False if the ranks are in another container.

        Every rank is then assumed to run, unless the launcher reports it as stopped: see `note_stopped`.
        """
        self._paths = [str(directory / member_directory.page_name(local_rank)) for local_rank in range(nproc)]
        self._watched = [MonitoredRank(sees_process=sees_processes) for _ in range(nproc)]
        self.policy = policy
        self.left_s = math.inf  # until the next poll is due, because a rank then reaches its limit

    def note_stopped(self, ranks: frozenset[int]) -> None:
        """Record which ranks the launcher reports as stopped, if this container cannot see their processes.

        Because it is unknown when they were stopped, none of their current work counts. Otherwise, a restart
        might resume from an earlier step to repeat work that was never done.
        """
        for watched in self._watched:
            watched.halted = frozenset() if watched.sees_process else ranks

    def poll(self, generation: int, now_ns: int, own_lateness_s: float) -> list[RankStall]:
        """Read every page; return the ranks of `generation` that have stalled, or whose steps are too long.

        `own_lateness_s` is how late this poll is. It extends the limits, because a suspended or overloaded
        machine also delays the ranks.
        """
        stalls, left = [], [math.inf]
        for local_rank, watched in enumerate(self._watched):
            found = self._read(local_rank, watched)
            if found is None or found.generation != generation:
                continue
            self._learn(watched, found)
            watched.compute = watched.compute.later(found, now_ns)
            if _observe_uncommitted(watched, found, now_ns) and not pages.is_declared(found):
                left.append(SOON_S)
            _observe_stopped(watched, found, now_ns)
            self._excuse(watched, since_ns(found), now_ns, own_lateness_s)
            stall = stalled(found, now_ns, watched.stats, self.policy, watched.lateness_s)
            if stall is None or stall.early_s:
                left.append(left_s(found, now_ns, watched.stats, self.policy, watched.lateness_s))
            if stall is not None:
                stalls.append(
                    RankStall(
                        stall.rank,
                        generation,
                        found.step,
                        int(found.phase),
                        found.phase_seq,
                        pages.name_of(found.phase),
                        round(stall.waited_s, 3),
                        round(stall.limit_s, 3),
                        stall.limited,
                        stall.begun,
                        round(stall.early_s, 3),
                        stall.first_step,
                    )
                )
        self.left_s = min(left)
        return stalls

    def progress(
        self, generation: int, now_ns: int = 0, ended: Mapping[int, int] = _NONE_ENDED
    ) -> tuple[RankProgress, ...]:
        """Return the progress of the ranks of `generation`, from pages that are read now.

        The progress is therefore as recent as a fault in the same report. `ended` maps each rank that has
        ended to the time when it ended. Its page has not changed since, so its durations end at that time.
        """
        for local_rank, watched in enumerate(self._watched):
            self._read(local_rank, watched)
        return tuple(
            _message(watched, watched.last, ended.get(watched.last.rank, now_ns))
            for watched in self._watched
            if watched.last is not None and watched.last.generation == generation
        )

    def uncommitted(self, generation: int, now_ns: int) -> frozenset[int]:
        """Observe and return the ranks of `generation` that are working before a commit.

        The duration of the work is the sum of the observations, so call this repeatedly while it matters.
        """
        ranks = set()
        for local_rank, watched in enumerate(self._watched):
            found = self._read(local_rank, watched)
            if (
                found is not None
                and found.generation == generation
                and _observe_uncommitted(watched, found, now_ns)
            ):
                ranks.add(found.rank)
        return frozenset(ranks)

    def step_s(self) -> float:
        """Return the usual step time of the slowest rank; 0 if no step times are known yet."""
        recent = [watched.stats.times_s[-RECENT:] for watched in self._watched if watched.stats.times_s]
        return max(map(statistics.median, recent), default=0.0)

    def raw(self, generation: int) -> tuple[Progress, ...]:
        """Read and return the pages of `generation`, including pages whose writer died during a write."""
        found = []
        for local_rank, watched in enumerate(self._watched):
            last = self._read(local_rank, watched)
            if last is None and watched.memory is not None:
                last = pages.read_torn_ok(watched.memory)
            if last is not None and last.generation == generation:
                found.append(last)
        return tuple(found)

    def _read(self, local_rank: int, watched: MonitoredRank) -> Progress | None:
        path = self._paths[local_rank]
        try:
            # Every poll does this, and pathlib would take five times as long.
            inode = os.stat(path).st_ino  # noqa: PTH116
            if watched.memory is None or watched.inode != inode:
                with open(path, "rb") as file:
                    watched.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                watched.inode = inode
        except FileNotFoundError:
            if watched.memory is None:
                return None
            # The file was removed, but the rank still writes to the page that is mapped here.
        except (OSError, ValueError):
            return None
        content = watched.memory[_CONTENT]
        if content and content == watched.content:
            return watched.last
        found = pages.read(watched.memory)
        if found is not None:
            watched.last = found
            watched.content = content if content == watched.memory[_CONTENT] else b""
        return found

    def _excuse(self, watched: MonitoredRank, began_ns: int, now_ns: int, own_lateness_s: float) -> None:
        """Add this poll's lateness to the sidecar's lateness since the rank's activity began."""
        late_s = max(0.0, min(own_lateness_s, (now_ns - began_ns) / 1e9))
        if began_ns != watched.activity_began_ns:
            watched.activity_began_ns, watched.lateness_s = began_ns, 0.0
        watched.lateness_s += late_s

    def _learn(self, watched: MonitoredRank, found: Progress) -> None:
        """Add the step times recorded since the last poll."""
        assert watched.memory is not None
        if found.times_written == watched.times_read:
            return
        count = found.times_written - max(watched.times_read, 0)
        if watched.times_read < 0 or count < 0 or count > pages.RING:
            count = min(found.times_written, pages.RING)
        watched.times_read = found.times_written
        times_s = pages.step_times_s(watched.memory, count)
        watched.stats = watched.stats.extended(times_s or ())


def _message(watched: MonitoredRank, found: Progress, now_ns: int) -> RankProgress:
    stats, compute = watched.stats, watched.compute
    recent = stats.times_s[-RECENT:]
    compute = compute if compute.generation == found.generation else ComputeTime()
    tail_s, usual_s, pause_left_s = _tail(watched, found, now_ns)
    return RankProgress(
        rank=found.rank,
        step=found.step,
        phase=pages.name_of(found.phase),
        label=pause_label(found),
        loss=repr(found.loss),
        grad_norm=repr(found.grad_norm),
        samples=found.samples,
        tokens=found.tokens,
        flops=found.flops if math.isfinite(found.flops) else 0.0,
        step_s=round(statistics.median(recent), 6) if recent else 0.0,
        p99_s=round(stats.p99_s, 6),
        snapshot_step=found.snapshot_step,
        snapshot_s=pages.copy_s(found),
        state_bytes=max(0, found.state_bytes),
        own_s=round(compute.mean_s, 6),
        own_least_s=round(compute.least_s, 6),
        own_data_s=round(compute.data_s, 6),
        own_steps=compute.window,
        tail_s=tail_s,
        tail_usual_s=usual_s,
        pause_left_s=pause_left_s,
        late=found.late,
        amended=found.amended,
        early=_uncommitted_work(watched, found, now_ns),
        tail_declared=tail_s > 0 and pages.is_declared(found),
    )


def _observe_uncommitted(watched: MonitoredRank, found: Progress, now_ns: int) -> bool:
    """Record work before a commit, and return True if the rank is doing such work."""
    since_ns = pages.uncommitted_since_ns(found)
    if since_ns:
        is_able = not watched.sees_process or linux.is_able(found.pid)
        watched.uncommitted = watched.uncommitted.later(since_ns, now_ns, is_able)
    return since_ns > 0


def _observe_stopped(watched: MonitoredRank, found: Progress, now_ns: int) -> None:
    """Record whether a rank in a tail is stopped, unless the tail has only just begun."""
    began_ns = pages.tail_began_ns(found)
    at_work = began_ns > 0 and found.tail_since_ns >= 0 and found.phase is not Phase.SNAPSHOT
    if at_work and now_ns - began_ns > int(SOON_S * 1e9):
        is_stopped = watched.sees_process and process_stats.is_stopped(found.pid)
        watched.stopped = watched.stopped.later(began_ns, now_ns, is_stopped)


def _uncommitted_work(watched: MonitoredRank, found: Progress, now_ns: int) -> UncommittedWork | None:
    """Return how long a rank has worked before its commit; None if it has not, or if that is not certain.

    A large process takes half a second to end. Its page does not change during this time, so the rank appears
    to be working. Undeclared work therefore counts only if it was observed and its usual duration is known.
    """
    since_ns = pages.uncommitted_since_ns(found)
    if not since_ns or watched.memory is None or found.rank in watched.halted:
        return None
    times_s = pages.uncommitted_times_s(watched.memory) or ()
    usual_s = round(statistics.median(times_s), 6) if times_s else 0.0
    if pages.is_declared(found):
        seconds = max(1e-6, round((now_ns - since_ns) / 1e9, 6))
        return UncommittedWork(seconds, usual_s, True, _pause_left_s(found, now_ns))
    observed = watched.uncommitted
    if len(times_s) < KNOWN or observed.since_ns != since_ns:
        return None
    return UncommittedWork(round(observed.worked_s, 6), usual_s)


def _tail(watched: MonitoredRank, found: Progress, now_ns: int) -> tuple[float, float, float]:
    """Return the durations of the current tail and of a usual tail, and the time left in a pause."""
    began_ns = pages.tail_began_ns(found)
    if not began_ns or watched.memory is None:
        return 0.0, 0.0, 0.0
    times_s = pages.tail_times_s(watched.memory) or ()
    usual_s = statistics.median(times_s[:-1]) if len(times_s) > 1 else 0.0
    pause_left_s = _pause_left_s(found, now_ns) if found.phase in PAUSES else 0.0
    # Do not count a copy: it is not the script's work, so killing the rank during a copy interrupts no work.
    until_ns = found.phase_since_ns if found.phase is Phase.SNAPSHOT else now_ns
    if found.tail_since_ns < 0:
        until_ns = min(until_ns, -found.tail_since_ns)
    worked_s = (until_ns - began_ns) / 1e9 - watched.stopped.total_s(began_ns, until_ns)
    if found.rank in watched.halted:
        worked_s = 0.0
    return max(1e-6, round(worked_s, 6)), round(usual_s, 6), pause_left_s


def _pause_left_s(found: Progress, now_ns: int) -> float:
    left_s = found.pause_limit_s - (now_ns - found.phase_since_ns) / 1e9
    return round(max(0.0, left_s), 3)
