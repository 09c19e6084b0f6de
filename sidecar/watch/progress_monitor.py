"""Watch the progress pages of a member's ranks: where each is, and who has stopped."""

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
from holdfast.protocol import member_messages
from holdfast.protocol import progress as pages
from holdfast.protocol.progress import Phase
from holdfast.snapshot import member_directory
from sidecar.watch.compute_time import ComputeTime
from sidecar.watch.hang_detector import PAUSES, HangPolicy, StepStats, activity, left_s, since_ns, stalled

_NOBODY: Mapping[int, int] = MappingProxyType({})
RECENT = 32  # step times whose median is the usual one
MOST_BETWEEN_S = 0.3  # that count between two looks: in a longer time the machine may have been away
SOON_S = 0.05  # until the next look at work before a commit: its end may be the process's
KNOWN = 8  # steps after which it is known how long the script usually works before a commit


@dataclass(frozen=True, slots=True)
class ObservedWork:
    """Work before a commit that was seen at several moments at which the process could do it."""

    since_ns: int = 0
    until_ns: int = 0
    worked_s: float = 0.0

    def later(self, since_ns: int, now_ns: int, is_able: bool) -> ObservedWork:
        """Return what is known at `now_ns` of the work that began at `since_ns`."""
        before = self if since_ns == self.since_ns else ObservedWork(since_ns, since_ns)
        if now_ns <= before.until_ns:
            return before
        more_s = min((now_ns - before.until_ns) / 1e9, MOST_BETWEEN_S) if is_able else 0.0
        return ObservedWork(since_ns, now_ns, before.worked_s + more_s)


@dataclass(frozen=True, slots=True)
class StoppedTime:
    """For how long the process was seen to be stopped, in work after a commit: it did none then."""

    began_ns: int = 0  # when that work began
    until_ns: int = 0  # when the process was last looked at
    is_stopped: bool = False  # then
    seconds: float = 0.0

    def later(self, began_ns: int, now_ns: int, is_stopped: bool) -> StoppedTime:
        """Return what is known at `now_ns` of the work that began at `began_ns`."""
        before = self if began_ns == self.began_ns else StoppedTime(began_ns, began_ns)
        if now_ns <= before.until_ns:
            return before
        more_s = (now_ns - before.until_ns) / 1e9 if is_stopped else 0.0
        if not before.is_stopped:  # it was stopped at some time since then
            more_s = min(more_s, MOST_BETWEEN_S)
        return StoppedTime(began_ns, now_ns, is_stopped, before.seconds + more_s)

    def by(self, began_ns: int, now_ns: int) -> float:
        """Return how long it was stopped of the work that began at `began_ns`, until `now_ns`."""
        if began_ns != self.began_ns:
            return 0.0
        return self.seconds + (max(0, now_ns - self.until_ns) / 1e9 if self.is_stopped else 0.0)


@dataclass(slots=True)
class MonitoredRank:
    """One local rank's page, its step times over the generations, and our own lateness meanwhile."""

    memory: mmap.mmap | None = None
    inode: int = 0
    stats: StepStats = field(default_factory=StepStats)
    own: ComputeTime = field(default_factory=ComputeTime)
    seen_times: int = -1
    begun_ns: int = 0
    lateness_s: float = 0.0
    last: pages.Progress | None = None
    early: ObservedWork = field(default_factory=lambda: ObservedWork())
    stopped: StoppedTime = field(default_factory=StoppedTime)


class ProgressMonitor:
    """All pages of a member. `poll` is cheap: some 50 microseconds a rank."""

    def __init__(self, directory: Path, nproc: int, policy: HangPolicy) -> None:
        self._paths = [str(directory / member_directory.page_name(local_rank)) for local_rank in range(nproc)]
        self._watched = [MonitoredRank() for _ in range(nproc)]
        self.policy = policy
        self.left_s = math.inf  # from the last poll until the next is due: the first rank may have stalled

    def poll(self, generation: int, now_ns: int, own_lateness_s: float) -> list[member_messages.RankStall]:
        """Read every page; return the ranks of `generation` that have stalled.

        `own_lateness_s` is by how much this poll itself came late: the machine was suspended or
        starved, and so were the ranks.
        """
        stalls, left = [], [math.inf]
        for local_rank, watched in enumerate(self._watched):
            found = self._read(local_rank, watched)
            if found is None or found.generation != generation:
                continue
            self._learn(watched, found)
            watched.own = watched.own.later(found, now_ns)
            if _see(watched, found, now_ns) and not pages.is_declared(found):
                left.append(SOON_S)
            _see_stopped(watched, found, now_ns)
            self._excuse(watched, since_ns(found), now_ns, own_lateness_s)
            stall = stalled(found, now_ns, watched.stats, self.policy, watched.lateness_s)
            if stall is None:
                left.append(left_s(found, now_ns, watched.stats, self.policy, watched.lateness_s))
            else:
                stalls.append(
                    member_messages.RankStall(
                        stall.rank,
                        generation,
                        found.step,
                        int(found.phase),
                        found.phase_seq,
                        activity(found),
                        round(stall.waited_s, 3),
                        round(stall.limit_s, 3),
                        stall.limited,
                        stall.begun,
                    )
                )
        self.left_s = min(left)
        return stalls

    def progress(
        self, generation: int, now_ns: int = 0, ended: Mapping[int, int] = _NOBODY
    ) -> tuple[member_messages.RankProgress, ...]:
        """Return what the pages of `generation` say now: what is told of a fault beside them is not older.

        `ended` has the time when a rank ended: from then on its page stands still, and the clock does not.
        """
        for local_rank, watched in enumerate(self._watched):
            self._read(local_rank, watched)
        return tuple(
            _message(watched, watched.last, ended.get(watched.last.rank, now_ns))
            for watched in self._watched
            if watched.last is not None and watched.last.generation == generation
        )

    def uncommitted(self, generation: int, now_ns: int) -> frozenset[int]:
        """Return the ranks of `generation` at work before a commit; to be asked while it is to be seen."""
        ranks = set()
        for local_rank, watched in enumerate(self._watched):
            found = self._read(local_rank, watched)
            if found is not None and found.generation == generation and _see(watched, found, now_ns):
                ranks.add(found.rank)
        return frozenset(ranks)

    def step_s(self) -> float:
        """Return the slowest rank's usual step time; 0 while none is known."""
        recent = [watched.stats.times_s[-RECENT:] for watched in self._watched if watched.stats.times_s]
        return max(map(statistics.median, recent), default=0.0)

    def raw(self, generation: int) -> tuple[pages.Progress, ...]:
        """Read the pages now; a page whose writer died inside a write counts as well."""
        found = []
        for local_rank, watched in enumerate(self._watched):
            last = self._read(local_rank, watched)
            if last is None and watched.memory is not None:
                last = pages.read_torn_ok(watched.memory)
            if last is not None and last.generation == generation:
                found.append(last)
        return tuple(found)

    def _read(self, local_rank: int, watched: MonitoredRank) -> pages.Progress | None:
        path = self._paths[local_rank]
        try:
            inode = os.stat(path).st_ino  # noqa: PTH116  # in every poll: pathlib takes five times as long
            if watched.memory is None or watched.inode != inode:
                with open(path, "rb") as file:
                    watched.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                watched.inode = inode
        except FileNotFoundError:
            if watched.memory is None:
                return None  # else somebody has removed the file, and the rank writes on
        except (OSError, ValueError):
            return None
        found = pages.read(watched.memory)
        watched.last = found or watched.last
        return found

    def _excuse(self, watched: MonitoredRank, begun_ns: int, now_ns: int, own_lateness_s: float) -> None:
        """Sum up our lateness since what the rank does now has begun; what came before is no excuse."""
        late_s = max(0.0, min(own_lateness_s, (now_ns - begun_ns) / 1e9))
        if begun_ns != watched.begun_ns:
            watched.begun_ns, watched.lateness_s = begun_ns, 0.0
        watched.lateness_s += late_s

    def _learn(self, watched: MonitoredRank, found: pages.Progress) -> None:
        """Take the step times that are new since the last poll."""
        assert watched.memory is not None
        if found.times_written == watched.seen_times:
            return
        count = found.times_written - max(watched.seen_times, 0)
        if watched.seen_times < 0 or count < 0 or count > pages.RING:
            count = min(found.times_written, pages.RING)
        watched.seen_times = found.times_written
        times_s = pages.step_times_s(watched.memory, count)
        watched.stats = watched.stats.extended(times_s or ())


def _message(watched: MonitoredRank, found: pages.Progress, now_ns: int) -> member_messages.RankProgress:
    stats, own = watched.stats, watched.own
    recent = stats.times_s[-RECENT:]
    own = own if own.generation == found.generation else ComputeTime()
    tail_s, usual_s, left_s = _tail(watched, found, now_ns)
    return member_messages.RankProgress(
        rank=found.rank,
        step=found.step,
        phase=Phase(found.phase).name.lower(),
        label=found.pause_label if found.phase in PAUSES else "",  # in the page it stays
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
        own_s=round(own.mean_s, 6),
        own_least_s=round(own.least_s, 6),
        own_data_s=round(own.data_s, 6),
        own_steps=own.window,
        tail_s=tail_s,
        tail_usual_s=usual_s,
        pause_left_s=left_s,
        late=found.late,
        amended=found.amended,
        early=_early(watched, found, now_ns),
        tail_declared=tail_s > 0 and pages.is_declared(found),
    )


def _see(watched: MonitoredRank, found: pages.Progress, now_ns: int) -> bool:
    """Note whether a rank is at work before its commit now; a plain step is over before it is seen twice."""
    since_ns = pages.uncommitted_since_ns(found)
    if since_ns:
        watched.early = watched.early.later(since_ns, now_ns, linux.is_able(found.pid))
    return since_ns > 0


def _see_stopped(watched: MonitoredRank, found: pages.Progress, now_ns: int) -> None:
    """Note whether a rank that is at work after its commit is stopped now; most such work is over at once."""
    began_ns = pages.tail_began_ns(found)
    at_work = began_ns > 0 and found.tail_since_ns >= 0 and found.phase is not Phase.SNAPSHOT
    if at_work and now_ns - began_ns > int(SOON_S * 1e9):
        watched.stopped = watched.stopped.later(began_ns, now_ns, process_stats.is_stopped(found.pid))


def _early(
    watched: MonitoredRank, found: pages.Progress, now_ns: int
) -> member_messages.UncommittedWork | None:
    """Return how long a rank works before its commit; None when it does not, or may only seem to.

    A large process takes half a second to end, and its page stands still meanwhile. So what is not declared
    must have been seen at it, and it must be known what is usual.
    """
    since_ns = pages.uncommitted_since_ns(found)
    if not since_ns or watched.memory is None:
        return None
    times_s = pages.uncommitted_times_s(watched.memory) or ()
    usual_s = round(statistics.median(times_s), 6) if times_s else 0.0
    if pages.is_declared(found):
        left_s = found.pause_limit_s - (now_ns - found.phase_since_ns) / 1e9
        seconds = max(1e-6, round((now_ns - since_ns) / 1e9, 6))
        return member_messages.UncommittedWork(seconds, usual_s, True, round(max(0.0, left_s), 3))
    seen = watched.early
    if len(times_s) < KNOWN or seen.since_ns != since_ns:
        return None
    return member_messages.UncommittedWork(round(seen.worked_s, 6), usual_s)


def _tail(watched: MonitoredRank, found: pages.Progress, now_ns: int) -> tuple[float, float, float]:
    """Return how long a rank works after its commit, how long it usually does, and a pause's time left."""
    began_ns = pages.tail_began_ns(found)
    if not began_ns or watched.memory is None:
        return 0.0, 0.0, 0.0
    times_s = pages.tail_times_s(watched.memory) or ()
    usual_s = statistics.median(times_s[:-1]) if len(times_s) > 1 else 0.0
    left_s = found.pause_limit_s - (now_ns - found.phase_since_ns) / 1e9 if found.phase in PAUSES else 0.0
    # A copy is no work of the script's: a rank that is killed within one leaves none undone.
    until_ns = found.phase_since_ns if found.phase is pages.Phase.SNAPSHOT else now_ns
    if found.tail_since_ns < 0:
        until_ns = min(until_ns, -found.tail_since_ns)
    worked_s = (until_ns - began_ns) / 1e9 - watched.stopped.by(began_ns, until_ns)
    return max(1e-6, round(worked_s, 6)), round(usual_s, 6), round(max(0.0, left_s), 3)
