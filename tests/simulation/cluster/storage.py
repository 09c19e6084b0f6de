"""States in simulated time: in the memory of members, and in checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from holdfast.protocol.member_messages import CheckpointReport, MemberOrder
from supervisor.view.model import Checkpoint, StorageContents, UnusableCheckpoint
from tests.simulation.cluster.member import Content, Member, Rank

if TYPE_CHECKING:
    from tests.simulation.cluster.world import World

KEPT = 3


@dataclass
class Store:
    """The checkpoints on storage. Ranks restore their state from them."""

    world: World
    found: list[Checkpoint] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)
    away: bool = False
    _seen: StorageContents = field(default_factory=StorageContents)
    _passed_over: set[str] = field(default_factory=set)  # checkpoints that the supervisor knows to be damaged
    _contents: dict[str, Content] = field(default_factory=dict)

    def stored(self) -> StorageContents:
        """Return the storage's content as the supervisor reads it. Reading and verifying take no time."""
        if self.away:
            return replace(self._seen, error="it is away")
        whole = [replace(c, verified=True) for c in self.found if c.path not in self._passed_over]
        unusable = [
            UnusableCheckpoint(c.path, c.step, "damaged") for c in self.found if c.path in self._passed_over
        ]
        self._seen = StorageContents(
            checkpoints=tuple(sorted(whole, key=lambda each: -each.step)),
            unusable=tuple(sorted(unusable, key=lambda each: -each.step)),
            generation=max((each.generation for each in self.found), default=0),
            looked_ns=self.world.now_ns,
            heard=1 << 30,
        )
        return self._seen

    def newest(self) -> Checkpoint | None:
        return max(self.found, key=lambda each: each.step, default=None)

    def prepare(self, member: Member, order: MemberOrder) -> Content | str:
        """Return the state that the ranks of `member` start from, or the reason why there is none."""
        assert order.launch is not None
        wanted = order.launch.restore
        if wanted is None:
            return Content(0)
        if wanted.source == "checkpoint":
            if wanted.path in self.damaged or self.away:
                self._passed_over |= self.damaged  # the supervisor looks again
                return f"checkpoint {wanted.path}: damaged"
            return self._contents[wanted.path]
        others = [
            m for m in self.world.members.values() if m.sidecar and m.name not in self.world.network.cut
        ]
        found = [c for m in (member, *others) if (c := m.holds(wanted.generation, wanted.step))]
        if not found:
            return f"no member has the snapshot of step {wanted.step}"
        for rank in order.ranks:
            if not any(m.has_private(rank.source, wanted.step) for m in (member, *others)):
                return f"no member has the private state of rank {rank.source}"
        return found[0]

    def now_and_then(self, rank: Rank) -> None:
        """At the checkpoint interval, write rank 0's newest snapshot that is older than the group's step."""
        every = int(self.world.policy.checkpoint_every_s * 1000 / self.world.step_ms)
        if rank.number or not every or rank.content.step % every or self.away:
            return
        for generation, content in reversed(rank.member.slots):
            if generation == rank.generation and content.step < rank.content.step:
                self._keep(generation, content)
                return

    def save(self, member: Member, generation: int, step: int) -> CheckpointReport:
        content = member.holds(generation, step)
        if content is None or self.away:
            return CheckpointReport(error="the snapshot is not here")
        return CheckpointReport(step, generation, self._keep(generation, content), 0.1)

    def _keep(self, generation: int, content: Content) -> str:
        assert not content.poisoned, "a bad state is on storage"
        path = f"step-{content.step}-{generation}"
        self._contents[path] = content
        skipped = tuple(sorted(content.skipped))
        world_size = self.world.group.launches[generation].world_size
        fresh = Checkpoint(content.step, generation, world_size, path, skipped)
        older = [each for each in self.found if each.step != content.step]
        self.found = [*older[1 - KEPT :], fresh]
        return path
