"""The process group in simulated time: ranks that join, train in step, and fail on cue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from holdfast.protocol.launcher_messages import BadNumber, Ending, Launch, StartTimes
from tests.simulation.cluster.member import MS, Content, Member, Rank

if TYPE_CHECKING:
    from tests.simulation.cluster.world import World

JOIN_MS, RESTORE_MS, VICTIM_MS, EXIT_MS = 10, 5, 4, 15
LATER_MS = 50  # after the limit for a hang; by then the supervisor has requested an inspection
SLOW_MS = 30_000  # an evaluation that the script has not declared
BACK_MS = 50  # after LATER_MS, during the inspection
FAULTS = (
    *("raise", "leave", "crash", "kill", "hang", "stop", "late", "slow", "block", "lose", "mute"),
    *("sidecar", "cut", "supervisor"),
)
WHERE = '  File "train.py", line 7\nValueError: bad\n'


@dataclass
class Group:
    """All generations of the process group."""

    world: World
    launches: dict[int, Launch] = field(default_factory=dict)
    owners: dict[tuple[int, int], str] = field(default_factory=dict)  # (generation, rank): member
    reached: dict[int, int] = field(default_factory=dict)  # generation: most steps that a rank committed
    finals: dict[int, Content] = field(default_factory=dict)

    def began(self, member: Member, launch: Launch) -> None:
        """Check a new generation of a launcher: one launch per generation, and each rank on one member."""
        known = self.launches.setdefault(launch.generation, launch)
        assert known == launch or self.world.has_forgotten
        for rank in member.ranks:
            owner = self.owners.setdefault((launch.generation, rank.number), member.name)
            assert owner == member.name or self.world.has_forgotten

    def ranks(self, generation: int) -> list[Rank]:
        here = [rank for m in self.world.members.values() if not m.gone for rank in m.ranks]
        return sorted([r for r in here if r.generation == generation], key=lambda rank: rank.number)

    def _is_whole(self, ranks: list[Rank]) -> bool:
        full = bool(ranks) and len(ranks) == self.launches[ranks[0].generation].world_size
        return full and all(rank.alive for rank in ranks)

    # -- joining

    def arrive(self, rank: Rank) -> None:
        if rank.state != "starting":
            return
        rank.state, rank.moved_ns = "running", self.world.now_ns
        ranks = self.ranks(rank.generation)
        if self._is_whole(ranks) and all(each.state == "running" for each in ranks):
            self.world.after(JOIN_MS, partial(self._join, rank.generation))

    def _join(self, generation: int) -> None:
        now_ns, links = self.world.now_ns, self.world.links
        if links is not None:
            if not self._is_whole(self.ranks(generation)):
                return
            if links.hold_up(self, generation, -1, partial(self._join, generation)):
                return
        for rank in self.ranks(generation):
            rank.marks = StartTimes(rank.marks.started_ns, now_ns, now_ns + RESTORE_MS * MS)
        self.world.after(RESTORE_MS, partial(self._begin, generation))

    def _begin(self, generation: int) -> None:
        restore = self.launches[generation].restore
        for rank in self.ranks(generation):
            self._store(rank, rank.content.step)
            if rank.local == 0 and rank.alive and (restore is None or restore.source != "slot"):
                rank.member.snapshot(rank)
        self._forward(generation)

    # -- steps: all ranks compute a step together, or none does

    def _forward(self, generation: int) -> None:
        ranks = self.ranks(generation)
        if not self._is_whole(ranks):
            self._break(generation)
            return
        step = ranks[0].content.step
        if step >= self.world.steps:
            self._finish(ranks)
            return
        if step in self.launches[generation].skip:
            for rank in ranks:
                self._store(rank, step + 1)
                self._advance(
                    rank, replace(rank.content, step=step + 1, skipped=rank.content.skipped | {step})
                )
            self.world.after(1, partial(self._forward, generation))
            return
        for rank in ranks:
            self._cue(rank, step)
        if not self._is_whole(self.ranks(generation)):
            self._break(generation)
        elif not any(rank.away for rank in ranks):
            self.world.after(self.world.step_ms * 0.6, partial(self._backward, generation, step))

    def _backward(self, generation: int, step: int) -> None:
        ranks = self.ranks(generation)
        if not self._is_whole(ranks):
            self._break(generation)
            return
        if any(rank.away or rank.frozen for rank in ranks):
            return  # one rank is missing, and the others wait for it
        links = self.world.links
        if links and links.hold_up(self, generation, step, partial(self._backward, generation, step)):
            self._stall(generation)
            return
        bad = {rank.number for rank in ranks if self._take_cue(rank, step, ("nan",))}
        for rank in ranks:
            self._store(rank, step + 1)
            rank.writing = not rank.asked
        for number, rank in enumerate(ranks):
            if rank.writing:
                delay_ms = self.world.step_ms * 0.3 + 2 * number
                self.world.after(delay_ms, partial(self._commit, rank, step, bad))

    def _store(self, rank: Rank, step: int) -> None:
        """Store the private state of `step`, and send it to the peer on the next member."""
        if not rank.alive or self.world.keeps_itself:
            return
        rank.member.store("own", rank.number, rank.generation, step)
        world_size, nproc = self.launches[rank.generation].world_size, self.world.policy.nproc
        shift = nproc % world_size or 1 % world_size
        home = self.world.members[self.owners[rank.generation, (rank.number + shift) % world_size]]
        if shift and not home.gone:
            home.store("kept", rank.number, rank.generation, step)

    def _commit(self, rank: Rank, step: int, bad: set[int]) -> None:
        if not rank.alive:
            self._break(rank.generation)
            return
        if rank.number in bad:
            rank.away = "flag"
            rank.flag = BadNumber("nan", step, "nan", step * 10, self.world.now_ns)
            rank.member.changed()
            return
        rank.writing = False
        poisoned = rank.content.poisoned or bool(bad)
        self._advance(rank, replace(rank.content, step=step + 1, poisoned=poisoned))
        if rank.asked:
            rank.member.write_just_in_time(rank)
        ranks = self.ranks(rank.generation)
        if all(not each.alive or each.content.step == step + 1 for each in ranks):
            self.world.after(0, partial(self._forward, rank.generation))

    def _advance(self, rank: Rank, content: Content) -> None:
        newest = [g for g in self.launches if self._is_whole(self.ranks(g))]
        assert rank.generation == max(newest, default=rank.generation), "an old generation is still training"
        rank.content, rank.moved_ns = content, self.world.now_ns
        self.reached[rank.generation] = max(self.reached.get(rank.generation, 0), content.step)
        every = self.world.snapshot_every
        if rank.local == 0 and every and content.step % every == 0:
            rank.member.snapshot(rank)
        if not rank.marks.first_step_ns:
            resizes = self.world.resizes and self.launches[rank.generation].may_resize
            rank.marks = replace(rank.marks, first_step_ns=self.world.now_ns, resizes=resizes)
            rank.member.changed()
        self.world.store.now_and_then(rank)

    def _finish(self, ranks: list[Rank]) -> None:
        for rank in ranks:
            self.finals[rank.number] = rank.content
            self.end(rank, Ending(self.world.now_ns, 0))

    # -- faults

    def _take_cue(self, rank: Rank, step: int, kinds: Sequence[str]) -> str:
        what, left = self.world.cues.get((rank.number, step), ("", 0))
        if what not in kinds or left <= 0:
            return ""
        self.world.cues[rank.number, step] = (what, left - 1)
        return what

    def _cue(self, rank: Rank, step: int) -> None:
        world, now_ns = self.world, self.world.now_ns
        what = world.broken.get(rank.member.name) or self._take_cue(rank, step, FAULTS)
        match what:
            case "raise":
                self.fail(rank, "exception", WHERE, 1)
            case "leave":
                self.fail(rank, "system_exit", "sys.exit(3)", 3)
            case "kill" | "crash":
                self.end(rank, Ending(now_ns, None, 9 if what == "kill" else 11))
            case "lose":
                world.remove(rank.member.name)
            case "mute":  # its connection stays open, and its keeper does not notice
                rank.member.lose()
            case "sidecar":
                rank.member.restart_sidecar()
            case "cut":
                world.network.cut_off(rank.member.name, 1500)
            case "supervisor":
                world.kill_supervisor()
            case "hang" | "stop" | "block":
                rank.away = what
                self._stall(rank.generation)
            case "late" | "slow":
                rank.away = what
                self._stall(rank.generation)
                back_ms = SLOW_MS if what == "slow" else LATER_MS + BACK_MS
                world.after(world.hang_ms + back_ms, partial(self._come_back, rank, step))

    def _come_back(self, rank: Rank, step: int) -> None:
        """The late rank was healthy: the step continues as if the rank had been in time."""
        ranks = self.ranks(rank.generation)
        rank.away = ""
        if self._is_whole(ranks) and not any(each.away for each in ranks):
            self._backward(rank.generation, step)

    def _stall(self, generation: int) -> None:
        for rank in self.ranks(generation):
            self.world.after(self.world.hang_ms + LATER_MS, rank.member.changed)

    def fail(self, rank: Rank, kind: str, message: str, code: int) -> None:
        """Make a rank raise: it writes its state, reports the exception, and exits a little later."""
        if not rank.alive:
            return
        if not rank.writing and kind in ("exception", "distributed"):
            rank.member.write_just_in_time(rank)
        now_ns = self.world.now_ns
        rank.ending = Ending(now_ns, code, None, False, kind, now_ns, message)
        rank.member.changed()
        self.world.after(EXIT_MS, partial(self._exit, rank))
        self.notice(rank)

    def end(self, rank: Rank, ending: Ending) -> None:
        """End the process of a rank immediately."""
        if rank.state != "exited":
            rank.ending = ending
            self._exit(rank)
            if ending.code != 0:
                self.notice(rank)

    def _exit(self, rank: Rank) -> None:
        if rank.state != "exited":
            rank.state = "exited"
            rank.member.changed()

    def notice(self, rank: Rank) -> None:
        """Let the peers of a dead rank notice its end in their next collective."""
        self.world.after(VICTIM_MS, partial(self._break, rank.generation))

    def _break(self, generation: int) -> None:
        if self.world.peers_hang:
            self._stall(generation)
            return
        for rank in self.ranks(generation):
            if rank.alive and rank.away != "stop" and not rank.writing and rank.state == "running":
                self.fail(rank, "distributed", "Connection closed by peer", 1)
