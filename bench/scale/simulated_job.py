"""A job whose members obey orders like real ones: they form, train, fail, secure their state, resume. Pure.

The members of a job share its step, as ranks in a collective do. Each is on a host with a separate clock.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import lru_cache

from bench.scale import cluster_objects
from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import Ending, LauncherState, RankState, SecureAnswer, StartTimes
from holdfast.protocol.member_messages import (
    PROTOCOL,
    HeldChecksum,
    HeldPrivateState,
    HeldSnapshot,
    KnownHistory,
    MemberOrder,
    MemberReport,
    MemoryUse,
    RankProgress,
    StorageListing,
)

S = 1_000_000_000
STEP_S = 0.5
START_S = 0.1  # from the order to run to the beginning of the ranks' first step
EVERY = 128  # steps between two snapshots
SEALS = 8
STATE_BYTES = 14_000_000_000
# The ages, in steps, of the private states that a member holds of each rank.
_STEPS_BACK = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 40, 56, 104)


@dataclass(slots=True)
class JobProgress:
    """The generation of a job and its step, which all of its ranks share."""

    generation: int = 0
    base: int = 0  # the step that the generation resumed from
    base_generation: int = 0
    begun_ns: int = 0
    failed_step: int = -1  # the step when a rank failed; -1: none has

    def step(self, now_ns: int) -> int:
        if self.failed_step >= 0:
            return self.failed_step
        if not self.generation:
            return 0
        passed_s = (now_ns - self.begun_ns) / S - START_S
        return self.base + max(0, int(passed_s / STEP_S))

    def begin(self, order: MemberOrder, now_ns: int) -> None:
        """Begin the generation in an order to run, which all members receive."""
        if order.generation <= self.generation:
            return
        restore = order.launch.restore if order.launch is not None else None
        self.base = restore.step if restore is not None else 0
        self.base_generation = restore.generation if restore is not None else 0
        self.generation, self.begun_ns, self.failed_step = order.generation, now_ns, -1

    def first_step_ns(self, now_ns: int) -> int:
        """Return the time when the first step of this generation ended; 0 if it has not ended yet."""
        return self.begun_ns + int((START_S + STEP_S) * S) if self.step(now_ns) > self.base else 0

    def slots(self, now_ns: int) -> tuple[HeldSnapshot, ...]:
        """Return the snapshots that every member holds, the newest first."""
        step = self.step(now_ns)
        made = [each for each in (step // EVERY * EVERY, step // EVERY * EVERY - EVERY) if each > self.base]
        found = [HeldSnapshot(self.generation, each, STATE_BYTES) for each in made]
        if self.base:
            found.append(HeldSnapshot(self.base_generation, self.base, STATE_BYTES))
        return tuple(found[:2])

    def seals(self, now_ns: int) -> tuple[HeldChecksum, ...]:
        newest = self.step(now_ns) // EVERY
        steps = [EVERY * each for each in range(max(0, newest - SEALS) + 1, newest + 1)]
        return tuple(
            HeldChecksum(self.generation, each, STATE_BYTES, each * 2_654_435_761 % (1 << 32))
            for each in steps
            if each > self.base
        )


@dataclass(slots=True)
class SimulatedMember:
    """One pod's sidecar, launcher and ranks. Times are on the bench's clock unless they are in a report."""

    job: JobProgress
    number: int  # of the job
    index: int  # within the job
    members: int  # of the job
    nproc: int
    order: MemberOrder | None = None
    state: LauncherState = field(default_factory=lambda: LauncherState(9, 0, (), (), 4000))
    secured_for: int = 0
    epoch: int = 0
    privates: tuple[HeldPrivateState, ...] = ()
    secured_slot: HeldSnapshot | None = None
    sequence: int = 0

    def __post_init__(self) -> None:
        self.state = replace(self.state, parked=tuple(range(self.nproc)), port=30_000 + self.index)

    @property
    def uid(self) -> str:
        return cluster_objects.pod_uid(self.number, self.index)

    @property
    def clock_ns(self) -> int:
        """How far the clock of this member's host is ahead of the bench's clock, in nanoseconds."""
        return (self.number * cluster_objects.MAX_MEMBERS + self.index + 1) * 977 * S

    @property
    def is_settled(self) -> bool:
        return self.order is not None and self.order.do == "run" and self.order.settled

    def obey(self, order: MemberOrder, now_ns: int) -> bool:
        """Carry out an order. Return True if it changes the member's state, which the member then reports."""
        if order.epoch < self.epoch:
            return False
        before, self.epoch, self.order = self.epoch, order.epoch, order
        if order.do == "run" and order.generation > self.state.generation:
            self.job.begin(order, now_ns)
            ranks = tuple(
                RankState(each.rank, each.local_rank, 1000 + each.rank, order.generation, "running")
                for each in order.ranks
            )
            self.state = replace(self.state, generation=order.generation, ranks=ranks)
            self.secured_slot = None
            return True
        if order.do == "secure" and order.generation > self.secured_for:
            self._secure(order.generation, now_ns)
            return True
        if order.do == "stop" and not self.state.stopped:
            self.state = replace(self.state, stopped=True, ranks=())
            return True
        return before != order.epoch

    def _secure(self, generation: int, now_ns: int) -> None:
        """Copy the survivors' state, and list it with the private states.

        The member holds the private states of its own ranks and of the previous member's ranks, which sent
        them.
        """
        step = self.job.step(now_ns)
        alive = [each for each in self.state.ranks if each.state != "exited"]
        if alive and step > 0:
            self.secured_slot = HeldSnapshot(generation, step, STATE_BYTES)
        own = self.index * self.nproc
        sent = (self.index - 1) % self.members * self.nproc
        ranks = [*range(own, own + self.nproc), *range(sent, sent + self.nproc)]
        steps = [step - back for back in _STEPS_BACK if step - back > self.job.base]
        self.privates = tuple(
            HeldPrivateState(rank, generation, each, True) for rank in dict.fromkeys(ranks) for each in steps
        )
        self.secured_for = generation
        answers = tuple(SecureAnswer(each.rank, step, True) for each in alive)
        self.state = replace(self.state, secure_asked=generation, secured=answers)

    def fail(self, local_rank: int, now_ns: int) -> None:
        """Simulate that a signal kills the process of one rank."""
        self.job.failed_step = self.job.step(now_ns)
        ending = Ending(now_ns + self.clock_ns, signal=9, message="killed by SIGKILL")
        ranks = tuple(
            replace(each, state="exited", ending=ending) if each.local_rank == local_rank else each
            for each in self.state.ranks
        )
        self.state = replace(self.state, ranks=ranks)

    def report(self, now_ns: int) -> MemberReport:
        """Return the complete state, as a sidecar reports it."""
        self.sequence += 1
        job, order = self.job, self.order
        is_current = job.generation == self.state.generation
        step = job.step(now_ns) if is_current else 0
        slots = (self.secured_slot, *job.slots(now_ns)) if self.secured_slot else job.slots(now_ns)
        launch = order.launch if order is not None else None
        told = KnownHistory(order.generation, order.lineage, launch.skip if launch else ()) if order else None
        return MemberReport(
            protocol=PROTOCOL,
            member=f"{cluster_objects.job_name(self.number)}-{self.index}",
            node=cluster_objects.node_name(self.number, self.index),
            sidecar_pid=7,
            sequence=self.sequence,
            now_ns=now_ns + self.clock_ns,
            nproc=self.nproc,
            launcher=replace(
                self.state,
                epoch=self.epoch,
                ranks=tuple(self._with_marks(each, now_ns) for each in self.state.ranks),
            ),
            peer_url=f"http://{cluster_objects.pod_address(self.number, self.index)}:8470",
            progress=tuple(self._progress(each.rank, step) for each in self.state.ranks),
            slots=slots[:2],
            seals=job.seals(now_ns) if is_current else (),
            privates=self.privates,
            secured_for=self.secured_for,
            room=MemoryUse(
                self.uid, STATE_BYTES, 2 * STATE_BYTES, 4_000_000, 90_000_000_000, 400_000_000_000
            ),
            lag_s=0.0021,
            lag_p99_s=0.0006,
            epoch=self.epoch,
            clock=f"boot of {cluster_objects.node_name(self.number, self.index)}",
            told=told or KnownHistory(),
            storage=StorageListing(1),
        )

    def _with_marks(self, rank: RankState, now_ns: int) -> RankState:
        begun_ns = self.job.begun_ns + self.clock_ns
        first_ns = self.job.first_step_ns(now_ns)
        marks = StartTimes(
            begun_ns, begun_ns + S // 50, begun_ns + S // 20, first_ns and first_ns + self.clock_ns, 1_000_000
        )
        return replace(rank, marks=marks)

    def _progress(self, rank: int, step: int) -> RankProgress:
        done = step - self.job.base
        return RankProgress(
            rank=rank,
            step=step,
            phase="forward",
            label="",
            loss=f"{2.0 + 1.0 / (step + 1):.6f}",
            grad_norm="nan",
            samples=done * 32,
            tokens=done * 32 * 4096,
            flops=1.25e15,
            step_s=STEP_S,
            p99_s=1.05 * STEP_S,
            snapshot_step=max((each.step for each in self.job.slots(self.job.begun_ns)), default=0),
            own_s=0.41,
            own_least_s=0.40,
            own_data_s=0.012,
            own_steps=min(50, done),
            snapshot_s=1.8,
            state_bytes=STATE_BYTES,
        )


class ReportText:
    """The reports of one member as JSON: complete ones, and updates if only passing values have changed.

    Each update has new values of everything that usually changes between two reports while a group trains.
    """

    def __init__(self, member: SimulatedMember) -> None:
        self._member = member
        self._key: object = None
        self._parts: tuple[str, ...] = ()
        self._sent_step = -1  # the step in the last text; -1: no text on this connection yet

    def connect(self) -> None:
        """Begin the texts of a new connection with a complete report."""
        self._sent_step = -1

    def at(self, now_ns: int, updates: bool = False) -> str:
        """Return the next text. `updates` is True if the supervisor can read updates."""
        member, job = self._member, self._member.job
        step = job.step(now_ns)
        state = (member.state, member.secured_for, member.epoch, id(member.order))
        key = (state, step // EVERY, step > job.base, job.generation, step == job.base)
        if key == self._key and updates and self._sent_step >= 0:
            return self._update(now_ns, step)
        if key != self._key:
            self._key = key
            self._parts = _parts(member.report(now_ns), step)
        member.sequence += 1
        self._sent_step = step
        values = {"sequence": member.sequence, "now_ns": now_ns + member.clock_ns, "step": step}
        return "".join(str(values.get(each, each)) for each in self._parts)

    def _update(self, now_ns: int, step: int) -> str:
        member = self._member
        done = step - member.job.base
        progress = "" if step == self._sent_step else _progress_text(done, step, member.nproc)
        self._sent_step = step
        member.sequence += 1
        number = member.sequence
        values = f"{number},{now_ns + member.clock_ns},{0.001 + number % 7 / 1e4!r},0.0006,-1.0"
        room = (
            f"{STATE_BYTES},{2 * STATE_BYTES},4000000,90000000000,{400_000_000_000 - number % 1000 * 4096},0"
        )
        return f'{{"update_of":{number - 1},"report":[{values}],"room":[{room}],"progress":[{progress}]}}\n'


@lru_cache(maxsize=4096)
def _progress_text(done: int, step: int, nproc: int) -> str:
    """Return the JSON of the passing values of the progress of `nproc` ranks."""
    rows = []
    for rank in range(nproc):
        at = step + rank
        step_s, own_s = STEP_S + at % 100 / 1e4, 0.41 + at % 90 / 1e4
        loss = f"{2.0 + 1.0 / (at + 1):.6f}"
        known = (step, "forward", loss, "nan", done * 32, done * 32 * 4096, 1.25e15, step_s, 1.05 * STEP_S)
        rows.append((*known, own_s, 0.40, 0.012 + at % 80 / 1e5, min(50, done), 1.8, 0.0, 0.0))
    return json.dumps(rows, separators=(",", ":"))[1:-1]


def _parts(report: MemberReport, step: int) -> tuple[str, ...]:
    """Split the JSON of a report at the values that change with time, each replaced by its name."""
    sequence, now_ns = 7_000_000_000_001, 7_000_000_000_002
    marked = replace(
        report,
        sequence=sequence,
        now_ns=now_ns,
        progress=tuple(replace(each, step=now_ns + 1) for each in report.progress),
    )
    parts = [codec.encode(marked).decode()]
    for value, name in ((sequence, "sequence"), (now_ns, "now_ns"), (now_ns + 1, "step")):
        parts = [piece for part in parts for piece in _between(part, str(value), name)]
    return tuple(parts)


def _between(text: str, value: str, name: str) -> list[str]:
    if text in ("sequence", "now_ns", "step"):
        return [text]
    found: list[str] = []
    for piece in text.split(value):
        found += [piece, name]
    return found[:-1]
