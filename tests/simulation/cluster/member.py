"""A member in simulated time: the behaviour of its launcher, its ranks and its memory, without processes.

A rank's state is the number of steps that it contains, the steps that were skipped, and whether it contains
a bad number. As in the real group, private state is stored and sent to a peer before the optimizer writes,
and a rank stops once it has been secured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from holdfast.protocol import kept_steps
from holdfast.protocol.launcher_messages import (
    BadNumber,
    Ending,
    Launch,
    LauncherState,
    ProcessPhase,
    RankStart,
    RankState,
    StartTimes,
)
from holdfast.protocol.member_messages import HeldPrivateState

if TYPE_CHECKING:
    from tests.simulation.cluster.sidecar import Sidecar
    from tests.simulation.cluster.world import World

MS = 1_000_000
START_MS, WARM_MS, REFILL_MS = 10, 400, 5000
SECURE_FIRST_MS, SECURE_MS = 150, 1000


@dataclass(frozen=True)
class Content:
    """The content of a state."""

    step: int
    skipped: frozenset[int] = frozenset()
    poisoned: bool = False


@dataclass
class Rank:
    """The process of one rank."""

    number: int
    local: int
    member: Member
    generation: int
    content: Content
    state: ProcessPhase = "starting"
    writing: bool = False  # the optimizer is writing
    asked: bool = False  # to copy its state and stop
    frozen: bool = False
    away: str = ""  # the reason why the rank does not train: hang, stop, flag
    ending: Ending | None = None
    flag: BadNumber | None = None
    marks: StartTimes = field(default_factory=StartTimes)
    moved_ns: int = 0

    @property
    def alive(self) -> bool:
        return self.state in ("starting", "running") and self.ending is None

    @property
    def waits(self) -> bool:
        """True if the rank's process has not started yet."""
        return self.state == "starting" and not self.marks.started_ns

    def told(self) -> RankState:
        state = "failing" if self.state != "exited" and self.ending is not None else self.state
        pid = 0 if self.waits else 1000 + self.number
        return RankState(
            self.number, self.local, pid, self.generation, state, self.ending, self.flag, self.marks
        )


@dataclass
class Member:
    """The processes and the memory of one simulated node."""

    world: World
    name: str
    slots: list[tuple[int, Content]] = field(default_factory=list)  # (generation, content)
    privates: dict[tuple[str, int, int], HeldPrivateState] = field(default_factory=dict)
    launch: Launch | None = None
    ranks: tuple[Rank, ...] = ()
    parked: set[int] = field(default_factory=set)
    secure_asked: int = 0
    asking: int = 0
    filling: bool = False
    gone: bool = False
    sidecar: Sidecar | None = None

    def __post_init__(self) -> None:
        self.world.after(self.world.boot_ms, self._fill)
        self.restart_sidecar()

    @property
    def generation(self) -> int:
        return self.launch.generation if self.launch else 0

    def restart_sidecar(self) -> None:
        self.sidecar = None
        self.world.network.hang_up(self.name)
        self.world.after(self.world.sidecar_ms, self._start_sidecar)

    def _start_sidecar(self) -> None:
        from tests.simulation.cluster.sidecar import Sidecar

        if not self.gone and self.sidecar is None:
            self.sidecar = Sidecar(self)
            self.world.network.connect(self)

    def lose(self) -> None:
        """Lose all processes and all memory at the same moment."""
        self.gone, self.sidecar = True, None
        self.slots, self.privates = [], {}
        for rank in self.ranks:
            rank.state = "exited"
            self.world.group.notice(rank)

    def changed(self) -> None:
        """Call this when the launcher's state has changed: the sidecar acts on it, and reports it."""
        if self.sidecar is not None:
            self.sidecar.pursue()
            self.world.network.tell(self)

    def launcher_state(self) -> LauncherState:
        ranks, parked = tuple(rank.told() for rank in self.ranks), tuple(sorted(self.parked))
        joins = not self.world.keeps_itself
        return LauncherState(1, self.generation, ranks, parked, 4000, self.secure_asked, joins=joins)

    # -- processes

    def begin(self, launch: Launch, places: tuple[RankStart, ...], found: Content) -> None:
        """Kill the remaining ranks of the previous generation, and create the ranks of the new one."""
        if launch.generation <= self.generation or self.gone:
            return
        for rank in self.ranks:
            rank.state = "exited"
        self.launch = launch
        self.ranks = tuple(Rank(p.rank, p.local_rank, self, launch.generation, found) for p in places)
        self.world.group.began(self, launch)
        self.world.after(REFILL_MS, partial(self.refill, launch.generation))
        self._match()

    def _match(self) -> None:
        for rank in self.ranks:
            if rank.waits and rank.local in self.parked:
                self.parked.discard(rank.local)
                rank.marks = StartTimes(started_ns=self.world.now_ns)
                self.world.after(START_MS, partial(self.world.group.arrive, rank))
        if any(rank.waits for rank in self.ranks):
            self.refill(self.generation)
        self.changed()

    def refill(self, generation: int) -> None:
        """Begin to start the missing warm processes."""
        if generation == self.generation and len(self.parked) < self.world.policy.nproc and not self.filling:
            self.filling = True
            self.world.after(WARM_MS, self._fill)

    def _fill(self) -> None:
        self.filling = False
        if not self.gone:
            self.parked = set(range(self.world.policy.nproc))
            self._match()

    # -- just in time

    def secure(self) -> None:
        """Request the states of the ranks at the lowest step first, because all ranks can resume from it."""
        if self.asking == self.generation:
            return
        self.asking = self.generation
        able = [rank for rank in self.ranks if rank.alive and rank.away != "stop"]
        if not able or self.world.keeps_itself:
            self._secured(self.generation)
            return
        lowest = min(rank.content.step + rank.writing for rank in able)
        for rank in able:
            if rank.content.step + rank.writing == lowest:
                self._ask(rank)
            else:
                self.world.after(SECURE_FIRST_MS, partial(self._ask, rank))
        self.world.after(SECURE_MS, partial(self._secured, self.generation))

    def _ask(self, rank: Rank) -> None:
        rank.asked = True
        if not rank.writing:
            self.write_just_in_time(rank)

    def write_just_in_time(self, rank: Rank) -> None:
        if rank.generation == self.generation and not rank.frozen and not self.gone:
            rank.frozen = True
            self.snapshot(rank)
            self._secured(self.generation)

    def _secured(self, generation: int) -> None:
        if generation == self.generation == self.asking > self.secure_asked:
            self.secure_asked = generation
            self.changed()

    # -- memory

    def snapshot(self, rank: Rank) -> None:
        """Copy into a slot that holds neither the newest snapshot nor the one that was restored."""
        entry = (rank.generation, rank.content)
        if entry in self.slots or self.world.keeps_itself:
            return
        restore = self.launch.restore if self.launch else None
        base = (restore.generation, restore.step) if restore else None
        if any(generation == rank.generation for generation, _ in self.slots):
            base = None
        if len(self.slots) > 1:
            oldest_first = sorted(self.slots, key=lambda slot: (slot[0], slot[1].step))
            free = [slot for slot in oldest_first if (slot[0], slot[1].step) != base]
            self.slots.remove(free[0])
        self.slots.append(entry)

    def store(self, kind: str, rank: int, generation: int, step: int) -> None:
        for place in kept_steps.places(step, 0):
            self.privates[kind, rank, place] = HeldPrivateState(rank, generation, step, True)

    def holds(self, generation: int, step: int) -> Content | None:
        return next((c for g, c in self.slots if (g, c.step) == (generation, step)), None)

    def has_private(self, rank: int, step: int, since: int = 0, before: int = 1 << 60) -> bool:
        """True if the member has a rank's private state of `step`, made by range(since, before)."""
        return any(
            (held.rank, held.step) == (rank, step) and since <= held.generation < before
            for held in self.privates.values()
        )
