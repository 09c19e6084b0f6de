"""A sidecar in simulated time: it follows the newest order, reports everything, and keeps nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from holdfast.protocol.launcher_messages import RankInspection
from holdfast.protocol.member_messages import (
    PROTOCOL,
    CheckpointReport,
    HeldPrivateState,
    HeldSnapshot,
    MemberOrder,
    MemberReport,
    RankProgress,
    RankStall,
)
from tests.simulation.cluster.links import Prober
from tests.simulation.cluster.member import MS, Member, Rank

PREPARE_MS, LOOK_MS, STOP_MS, SAVE_MS = 5, 100, 20, 50
WAITING = 'Thread 1 (idle): "MainThread"\n    all_reduce (torch/distributed/c10d.py:3)\n'
STUCK = 'Thread 1 (idle): "MainThread"\n    wait (threading.py:331)\n    read (train.py:7)\n'
WORK = "evaluate (train.py:42)"
WORKING = f'Thread 1 (active): "MainThread"\n    {WORK}\n'


@dataclass
class Sidecar:
    """One process of the sidecar."""

    member: Member
    order: MemberOrder = field(default_factory=lambda: MemberOrder("idle", 0))
    sequence: int = 0
    secured_for: int = 0
    looking: bool = False
    looked_for: int = 0
    look: int = 0
    looks: tuple[RankInspection, ...] = ()
    listed: tuple[HeldPrivateState, ...] = ()
    prepare_error: str = ""
    preparing: int = 0
    durable: CheckpointReport = field(default_factory=CheckpointReport)
    saving: int = 0
    prober: Prober | None = None

    def __post_init__(self) -> None:
        links = self.member.world.links
        self.prober = Prober(self, links) if links is not None else None

    def report(self) -> MemberReport:
        self.sequence += 1
        member = self.member
        unreached, unreached_s = self.prober.unreached() if self.prober is not None else ((), 0.0)
        return MemberReport(
            protocol=PROTOCOL,
            member=member.name,
            node=member.name,
            sidecar_pid=7,
            sequence=self.sequence,
            now_ns=member.world.now_ns,
            nproc=member.world.policy.nproc,
            launcher=member.launcher_state(),
            peer_url=f"http://{member.name}:1",
            progress=tuple(map(_progress, member.ranks)),
            stalls=self._stalls() if self.order.do == "run" else (),
            looks=self.looks if self._is_to_look() else (),
            looked_for=self.looked_for if self._is_to_look() else 0,
            look=self.look if self._is_to_look() else 0,
            slots=tuple(HeldSnapshot(generation, content.step, 8) for generation, content in member.slots),
            privates=self.listed,
            secured_for=self.secured_for,
            prepare_error=self.prepare_error,
            prepare_generation=self.order.generation,
            durable=self.durable,
            unreached=unreached,
            unreached_s=unreached_s,
        )

    @property
    def is_late(self) -> bool:
        """True if a rank of the member is late."""
        return bool(self._stalls())

    def _stalls(self) -> tuple[RankStall, ...]:
        now_ns, limit_ns = self.member.world.now_ns, self.member.world.hang_ms * MS
        hang_s = self.member.world.hang_ms / 1000
        stalled = [r for r in self.member.ranks if r.alive and r.state == "running" and r.away != "flag"]
        return tuple(
            RankStall(
                r.number, r.generation, r.content.step, 3, 0, "forward", (now_ns - r.moved_ns) / 1e9, hang_s
            )
            for r in stalled
            if now_ns - r.moved_ns > limit_ns
        )

    def obey(self, order: MemberOrder) -> None:
        if order.generation < self.order.generation:
            return
        if order.generation > self.order.generation:
            self.prepare_error = ""
        self.order = order
        if self.prober is not None:
            self.prober.note_order()
        self.pursue()

    def pursue(self) -> None:
        order, member, after = self.order, self.member, self.member.world.after
        if order.do == "run" and member.generation < order.generation:
            if self.preparing != order.generation and not self.prepare_error:
                self.preparing = order.generation
                after(PREPARE_MS, partial(self._run, order))
        elif order.do == "run" and order.settled:
            member.refill(order.generation)
        elif order.do == "secure" and self.secured_for < order.generation:
            self._secure(order)
        elif order.do == "stop":
            after(STOP_MS, partial(member.world.remove, member.name))
        if self._is_to_look() and not self.looking:
            self.looking = True
            self.member.world.after(LOOK_MS, self._look)
        if order.save > max(self.durable.asked, self.saving):
            self.saving = order.save
            after(SAVE_MS, partial(self._save, order))

    def _run(self, order: MemberOrder) -> None:
        assert order.launch is not None
        self.preparing = 0
        if self.member.sidecar is not self or self.order.generation != order.generation:
            return
        found = self.member.world.store.prepare(self.member, order)
        if isinstance(found, str):
            self.prepare_error = found
            self.member.changed()
        else:
            self.member.begin(order.launch, order.ranks, found)

    def _secure(self, order: MemberOrder) -> None:
        member = self.member
        if member.generation == order.generation and order.just_in_time and order.copy:
            member.secure()
            if member.secure_asked < order.generation:
                return
        self.listed = tuple(member.privates.values())
        self.secured_for = order.generation
        member.world.network.tell(member)

    def _is_to_look(self) -> bool:
        return self.order.do == "run" and bool(self.order.look or self._stalls())

    def _look(self) -> None:
        """Inspect all ranks of the member, and repeat this while any of them is late."""
        self.looking = False
        if self.member.sidecar is self and self._is_to_look():
            self.look += 1
            self.looked_for = self.member.generation
            mine = [rank for rank in self.member.ranks if rank.generation == self.looked_for and rank.alive]
            self.looks = tuple(_look(rank, self.look) for rank in mine)
            self.member.changed()

    def _save(self, order: MemberOrder) -> None:
        if self.member.sidecar is self:
            found = self.member.world.store.save(self.member, order.save_generation, order.save_step)
            self.durable = replace(found, asked=order.save)
            self.member.changed()


def _progress(rank: Rank) -> RankProgress:
    snapshot = max((content.step for _, content in rank.member.slots), default=-1)
    step = rank.content.step
    return RankProgress(rank.number, step, "forward", "", "0.5", "nan", 1, 1, 1.0, 0.05, 0.06, snapshot)


def _look(rank: Rank, number: int) -> RankInspection:
    """Inspect a rank: it is stopped, works, or waits for a lock, a file or other ranks."""
    waits = RankInspection(
        rank.number, rank.content.step, 3, 0, "S", 0.0, WAITING, number=number, window_s=0.15
    )
    match rank.away:
        case "":
            return waits
        case "stop":
            return replace(waits, process_state="T", stack=STUCK)
        case "slow" | "block":
            moved = rank.away == "slow"
            return replace(waits, process_state="D", stack=WORKING, moved=moved, where=WORK, at=WORK)
    return replace(
        waits, stack=STUCK, calls=("lock",), at="wait (threading.py:331)", where="read (train.py:7)"
    )
