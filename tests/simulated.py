"""Members in simulated time: sidecar, launcher and ranks as they behave, without a process.

A rank's state is the number of steps it contains, the steps that were passed over, and whether a bad number is
in it. As in the real group, private state is stored and given away before the optimizer writes, a rank stands
still once it has been secured, and nobody commits what the others did not compute with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from holdfast import ruler
from holdfast.messages import (
    PROTOCOL,
    Durable,
    Ending,
    Flag,
    Launch,
    LauncherState,
    Look,
    Marks,
    MemberOrder,
    MemberReport,
    PrivateHeld,
    Progress,
    RankState,
    Slot,
    Stall,
)

if TYPE_CHECKING:
    from tests.world import World

MS = 1_000_000
START_MS, JOIN_MS, RESTORE_MS, WARM_MS = 10, 10, 5, 400
WAITING = 'Thread 1 (idle): "MainThread"\n    all_reduce (torch/distributed/c10d.py:3)\n'
STUCK = 'Thread 1 (active): "MainThread"\n    read (train.py:7)\n'


@dataclass(frozen=True)
class Content:
    """What a state contains."""

    step: int
    skipped: frozenset[int] = frozenset()
    poisoned: bool = False


@dataclass
class Rank:
    """One process."""

    number: int
    local: int
    member: Member
    generation: int
    content: Content
    state: str = "starting"
    writing: bool = False
    frozen: bool = False
    secured: bool = False
    away: str = ""  # why it takes no part: hang, stop, flag
    ending: Ending | None = None
    flag: Flag | None = None
    marks: Marks = field(default_factory=Marks)
    moved_ns: int = 0

    @property
    def alive(self) -> bool:
        return self.state in ("starting", "running") and self.ending is None


@dataclass
class Member:
    """One node's worth of processes, and its memory."""

    world: World
    name: str
    slots: list[tuple[int, Content]] = field(default_factory=list)  # oldest first
    privates: dict[tuple[str, int, int], PrivateHeld] = field(default_factory=dict)
    launch: Launch | None = None
    ranks: tuple[Rank, ...] = ()
    parked: set[int] = field(default_factory=set)
    secure_asked: int = 0
    asking: int = 0
    filling: bool = False
    gone: bool = False
    sidecar: Sidecar | None = None

    def __post_init__(self) -> None:
        self.world.after(self.world.boot_ms, self.fill)
        self.restart_sidecar()

    @property
    def generation(self) -> int:
        return self.launch.generation if self.launch else 0

    def restart_sidecar(self) -> None:
        self.sidecar = None
        self.world.hang_up(self.name)
        self.world.after(self.world.sidecar_ms, self._start_sidecar)

    def _start_sidecar(self) -> None:
        if not self.gone and self.sidecar is None:
            self.sidecar = Sidecar(self)
            self.world.connect(self)

    def lose(self) -> None:
        """All processes and all memory, at once."""
        self.gone, self.sidecar = True, None
        self.slots, self.privates = [], {}
        for rank in self.ranks:
            rank.state = "exited"
            self.world.notice(rank)

    # -- the launcher

    def fill(self) -> None:
        self.filling = False
        if not self.gone:
            self.parked = set(range(self.world.policy.nproc))
            self._match()
            self.changed()

    def begin(self, launch: Launch, ranks: tuple[tuple[int, int], ...], found: Content) -> None:
        if launch.generation <= self.generation or self.gone:
            return
        for rank in self.ranks:
            rank.state = "exited"
        self.launch, self.secure_asked = launch, min(self.secure_asked, launch.generation - 1)
        self.ranks = tuple(Rank(number, local, self, launch.generation, found) for number, local in ranks)
        self.world.began(self, launch)
        self.world.after(5000, lambda: self.refill(launch.generation))
        self._match()

    def _match(self) -> None:
        for rank in self.ranks:
            if rank.state == "starting" and not rank.marks.started_ns and rank.local in self.parked:
                self.parked.discard(rank.local)
                rank.marks = Marks(started_ns=self.world.now_ns)
                self.world.after(START_MS, lambda rank=rank: self.world.arrive(rank))
        if any(rank.state == "starting" and not rank.marks.started_ns for rank in self.ranks):
            self.refill(self.generation)
        self.changed()

    def refill(self, generation: int) -> None:
        if generation == self.generation and not self.filling and len(self.parked) < self.world.policy.nproc:
            self.filling = True
            self.world.after(WARM_MS, self.fill)

    def secure(self) -> None:
        """Ask those at the lowest step first: what they hold, all can have."""
        if self.asking == self.generation:
            return
        self.asking = self.generation
        able = [rank for rank in self.ranks if rank.alive and rank.away != "stop"]
        if not able:
            self.secure_asked = self.generation
            self.changed()
            return
        lowest = min(rank.content.step + rank.writing for rank in able)
        for rank in able:
            if rank.content.step + rank.writing == lowest:
                self._freeze(rank)
        self.world.after(150, lambda: [self._freeze(rank) for rank in able])
        generation = self.generation
        self.world.after(1000, lambda: self._give_up(generation))

    def _freeze(self, rank: Rank) -> None:
        rank.secured = True
        if not rank.writing:
            self.write_just_in_time(rank)

    def write_just_in_time(self, rank: Rank) -> None:
        if rank.generation != self.generation or rank.frozen or self.gone:
            return
        rank.frozen = True
        self.snapshot(rank)
        self.secure_asked = self.generation
        self.changed()

    def _give_up(self, generation: int) -> None:
        if generation == self.generation > self.secure_asked:
            self.secure_asked = generation
            self.changed()

    # -- the memory

    def snapshot(self, rank: Rank) -> None:
        """Into the slot that is not the newest, unless the resume point has to be kept."""
        entry = (rank.generation, rank.content)
        if entry in self.slots:
            return
        restore = self.launch.restore if self.launch else None
        base = (restore.generation, restore.step) if restore else None
        mine = any(generation == rank.generation for generation, _ in self.slots)
        if len(self.slots) > 1:
            older = sorted(self.slots, key=lambda slot: (slot[0], slot[1].step))
            if not mine and base is not None:
                older = [s for s in older if (s[0], s[1].step) != base] or older
            self.slots.remove(older[0])
        self.slots.append(entry)

    def store(self, kind: str, rank: int, generation: int, step: int) -> None:
        for place in ruler.places(step, 0):
            self.privates[kind, rank, place] = PrivateHeld(rank, generation, step, True)

    def holds(self, generation: int, step: int) -> Content | None:
        return next((c for g, c in self.slots if (g, c.step) == (generation, step)), None)

    # -- telling

    def changed(self) -> None:
        if self.sidecar is not None:
            self.sidecar.pursue()
            self.world.tell(self)

    def launcher_state(self) -> LauncherState:
        ranks = tuple(
            RankState(r.number, r.local, 1000 + r.number, r.generation, self._told(r), r.ending, r.flag, r.marks)
            for r in self.ranks
        )
        parked = tuple(sorted(self.parked))
        return LauncherState(1, self.generation, ranks, parked, 4000, self.secure_asked)

    @staticmethod
    def _told(rank: Rank) -> str:
        return "failing" if rank.state != "exited" and rank.ending is not None else rank.state


@dataclass
class Sidecar:
    """What a sidecar knows; all of it is lost with it."""

    member: Member
    order: MemberOrder = field(default_factory=lambda: MemberOrder("idle", 0))
    sequence: int = 0
    secured_for: int = 0
    looked_for: int = 0
    looks: tuple[Look, ...] = ()
    listed: tuple[PrivateHeld, ...] = ()
    prepare_error: str = ""
    preparing: int = 0
    durable: Durable = field(default_factory=Durable)
    saving: int = 0

    def report(self) -> MemberReport:
        self.sequence += 1
        member = self.member
        return MemberReport(
            protocol=PROTOCOL,
            member=member.name,
            node=member.name,
            sidecar_pid=id(self) % 100_000,
            sequence=self.sequence,
            now_ns=member.world.now_ns,
            nproc=member.world.policy.nproc,
            launcher=member.launcher_state(),
            peer_url=f"http://{member.name}:1",
            progress=tuple(_progress(rank) for rank in member.ranks),
            stalls=tuple(self._stalls()) if self.order.do == "run" else (),
            looks=self.looks,
            looked_for=self.looked_for,
            slots=tuple(Slot(g, c.step, 8) for g, c in member.slots),
            privates=self.listed,
            secured_for=self.secured_for,
            prepare_error=self.prepare_error,
            durable=self.durable,
        )

    def _stalls(self) -> list[Stall]:
        world, limit = self.member.world, self.member.world.hang_ms * MS
        return [
            Stall(r.number, r.generation, r.content.step, 3, 0, "forward", (world.now_ns - r.moved_ns) / 1e9, 1)
            for r in self.member.ranks
            if r.alive and r.state == "running" and r.away != "flag" and world.now_ns - r.moved_ns > limit
        ]

    def obey(self, order: MemberOrder) -> None:
        if order.generation < self.order.generation:
            return
        if order.generation > self.order.generation:
            self.prepare_error = ""
        self.order = order
        self.pursue()

    def pursue(self) -> None:
        order, member, world = self.order, self.member, self.member.world
        if order.do == "run" and member.generation < order.generation:
            if self.preparing != order.generation and not self.prepare_error:
                self.preparing = order.generation
                world.after(5, lambda: self._run(order))
        elif order.do == "run" and order.settled:
            member.refill(order.generation)
        elif order.do == "secure" and self.secured_for < order.generation:
            self._secure(order)
        elif order.do == "look" and self.looked_for < order.generation:
            world.after(100, lambda: self._look(order.generation))
        elif order.do == "stop":
            world.after(20, lambda: world.remove(member.name))
        if order.save > max(self.durable.asked, self.saving):
            self.saving = order.save
            world.after(50, lambda: self._save(order.save_generation, order.save_step, order.save))

    def _run(self, order: MemberOrder) -> None:
        assert order.launch is not None
        self.preparing = 0
        if self.member.sidecar is not self or self.order.generation != order.generation:
            return
        found = self.member.world.prepare(self.member, order)
        if isinstance(found, str):
            self.prepare_error = found
            self.member.changed()
            return
        self.member.begin(order.launch, tuple((r.rank, r.local_rank) for r in order.ranks), found)

    def _secure(self, order: MemberOrder) -> None:
        member = self.member
        waiting = member.generation == order.generation
        if waiting and order.just_in_time and member.secure_asked < order.generation:
            member.secure()
        if not waiting or not order.just_in_time or member.secure_asked >= order.generation:
            self.listed = tuple(member.privates.values())
            self.secured_for = order.generation
            member.world.tell(member)

    def _look(self, generation: int) -> None:
        if self.member.sidecar is self and self.looked_for < generation:
            self.looks = tuple(
                Look(r.number, r.content.step, 3, 0, "S", 0.0, STUCK if r.away else WAITING)
                for r in self.member.ranks
                if r.generation == generation
            )
            self.looked_for = generation
            self.member.changed()

    def _save(self, generation: int, step: int, asked: int) -> None:
        if self.member.sidecar is self:
            self.durable = self.member.world.save(self.member, generation, step, replace(self.durable, asked=asked))
            self.member.changed()


def _progress(rank: Rank) -> Progress:
    snapshot = max((c.step for _, c in rank.member.slots), default=-1)
    return Progress(rank.number, rank.content.step, "forward", "", "0.5", "nan", 1, 1, 1.0, 0.05, 0.06, snapshot)


Fault = Callable[["World"], None]
