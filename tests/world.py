"""A job in simulated time: members that train, fail and vanish on cue, and a supervisor that may die at any moment.

The simulation drives the real `decide`, `apply`, `order_for` and `Accounts`; only the world is fake. No
randomness: the same script gives the same history. What must hold is checked at every step of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.messages import Durable, Ending, Flag, Launch, Marks, MemberOrder, MemberReport
from supervisor import orders
from supervisor.accounts import Accounts
from supervisor.apply import apply, asked_to_stop
from supervisor.decide import decide
from supervisor.view import (
    Action,
    Checkpoint,
    End,
    Look,
    MemberView,
    Memory,
    Policy,
    Secure,
    Settle,
    Start,
    View,
    Wait,
)
from tests.simulated import JOIN_MS, MS, RESTORE_MS, Content, Member, Rank

LATENCY_MS, VICTIM_MS, SUPERVISOR_MS = 1, 4, 300


class Killed(Exception):
    """The supervisor dies here."""


@dataclass
class Line:
    """What the supervisor has of a member's connection."""

    report: MemberReport | None = None
    connected: bool = False
    heard_ns: int = 0
    sent: MemberOrder | None = None
    epoch: int = 0


@dataclass
class World:
    """`steps` are what the script wants to do. `kills` are the points at which the supervisor dies."""

    policy: Policy = field(default_factory=Policy)
    steps: int = 12
    step_ms: int = 40
    snapshot_every: int = 5
    kills: frozenset[int] = frozenset()
    boot_ms: int = 500
    sidecar_ms: int = 200
    hang_ms: int = 600
    peers_hang: bool = False  # as on a GPU: a dead peer leaves the others waiting
    now_ns: int = 1_000_000_000
    points: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    journal: list[tuple[View, Action, Memory]] = field(default_factory=list)
    ended: End | None = None
    stored: list[Checkpoint] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)
    storage_away: bool = False
    reached: dict[int, int] = field(default_factory=dict)  # generation: most steps that a rank committed
    starts: list[Start] = field(default_factory=list)
    closed: dict[int, str] = field(default_factory=dict)  # number of the incident: how it ended
    cues: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)  # (rank, step): what, how often
    finals: dict[int, Content] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)  # members whose network is away
    _heap: list[tuple[int, int, Callable[[], object]]] = field(default_factory=list)
    _events: int = 0
    _count: int = 0
    _memory: Memory | None = None  # the supervisor's; None while it is dead
    _accounts: Accounts | None = None
    _lines: dict[str, Line] = field(default_factory=dict)
    _launches: dict[int, Launch] = field(default_factory=dict)
    _seats: dict[tuple[int, int], str] = field(default_factory=dict)
    _exists: set[str] = field(default_factory=set)
    _deadline_ns: int = 0
    _stop: str = ""
    _ledger: object = None
    _want: tuple[int, tuple[str, ...]] | None = None
    _step_s: float = 0.0

    # -- the script

    def at(self, when_ms: int, fault: Callable[[World], object]) -> World:
        """Have `fault` happen `when_ms` after the start of the world."""
        self._push(1_000_000_000 + when_ms * MS, lambda: fault(self))
        return self

    def run(self, limit_s: float = 120.0) -> World:
        """Run until the job has ended. Fails when it has not in `limit_s`: then it is stuck."""
        self._start_supervisor()
        while self.ended is None:
            at_ns, _, call = heapq.heappop(self._heap)
            assert at_ns >= self.now_ns
            assert at_ns < limit_s * 1e9, f"stuck in {self.memory.phase}: {self.journal[-1][1]}"
            self.now_ns = at_ns
            self._guarded(call)
        return self

    @property
    def memory(self) -> Memory:
        return self._memory or self.journal[-1][2]

    @property
    def generation(self) -> int:
        return self.memory.generation

    def after(self, delay_ms: float, call: Callable[[], object]) -> None:
        self._push(self.now_ns + int(delay_ms * MS), call)

    def _push(self, at_ns: int, call: Callable[[], object]) -> None:
        self._events += 1
        heapq.heappush(self._heap, (at_ns, self._events, call))

    # -- the supervisor

    def _guarded(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Killed:
            self.kill_supervisor()

    def kill_supervisor(self) -> None:
        """All that it knows but the journal is gone; whoever keeps it starts another."""
        if self._memory is None:
            return
        self._memory, self._accounts, self._want = None, None, None
        for line in self._lines.values():
            line.epoch += 1
        self.after(SUPERVISOR_MS, self._start_supervisor)

    def _start_supervisor(self) -> None:
        fresh = Memory(self.policy.members * self.policy.nproc, self.policy.nproc, since_ns=self.now_ns)
        self._memory = self.journal[-1][2] if self.journal else fresh
        if self.journal:
            view, action, after = self.journal[-1]
            self._record(view.memory, action, after)
        self._accounts = Accounts(self.now_ns, self._ledger)  # type: ignore[arg-type]
        self._lines = {
            name: Line(heard_ns=self.now_ns, epoch=self._lines[name].epoch if name in self._lines else 0)
            for name in self.members
        }
        for number, name in enumerate(sorted(self._exists)):
            self.after(5 + 7 * number, lambda name=name: self.connect(self.members[name]))
        self._guarded(self._round)

    def _point(self) -> None:
        self.points += 1
        if self.points in self.kills:
            raise Killed

    def _round(self) -> None:
        if self._memory is None or self.ended is not None:
            return
        if self._stop and self._memory.stop != self._stop:
            self._memory = asked_to_stop(self._memory, self._stop)
        for _ in range(50):
            view = self._view()
            assert self._accounts is not None
            self._accounts.observe(view)
            action = decide(view, self.policy)
            if isinstance(action, Wait):
                break
            self._carry_out(view, action)
        else:
            raise AssertionError(f"decides without end: {action}")
        assert action.until_ns > self.now_ns, action
        self._deadline_ns = action.until_ns
        self._push(action.until_ns, lambda: self._wake(action.until_ns))
        self._give_orders()

    def _wake(self, deadline_ns: int) -> None:
        if deadline_ns == self._deadline_ns:
            self._round()

    def _carry_out(self, view: View, action: Action) -> None:
        assert self._accounts is not None
        before, after = view.memory, apply(view, action, self.policy)
        self._account(action, before, after, view)
        self._check(view, action, after)
        self.journal.append((view, action, after))
        self._ledger = self._accounts.ledger.snapshot()
        self._memory = after
        self._point()
        self._record(before, action, after)
        for name in set(after.lost) - set(before.lost):
            self.remove(name)

    def _record(self, before: Memory, action: Action, after: Memory) -> None:
        """What a supervisor writes after the journal, and a new one again."""
        if before.incident and (after.incident is None or after.incident.number != before.incident.number):
            self.closed[before.incident.number] = "settled" if isinstance(action, Settle) else "overtaken"
        if isinstance(action, End) and after.incident:
            self.closed[after.incident.number] = "ended"
        if after.phase == "ended":
            self.ended = next(a for _, a, _ in reversed(self.journal) if isinstance(a, End))

    def _account(self, action: Action, before: Memory, after: Memory, view: View) -> None:
        assert self._accounts is not None
        fresh = after.incident and (not before.incident or before.incident.number != after.incident.number)
        if isinstance(action, (Look, Secure)) and fresh:
            assert after.incident is not None
            self._accounts.opened(after.incident, before.incident)
        elif isinstance(action, Settle):
            marks = [r.marks for m in self.members.values() for r in m.ranks if r.generation == before.generation]
            last = Marks(*(max(getattr(m, name) for m in marks) for name in Marks.__slots__))
            self._accounts.closed(before, before.incident, last, self.step_ms / 1000)
        elif isinstance(action, End):
            self._accounts.stopped(view.now_ns, before.incident)
        ledger = self._accounts.ledger
        assert sum(ledger.buckets_ns().values()) + ledger.pending_ns == ledger.total_ns

    def _give_orders(self) -> None:
        memory = self._memory
        assert memory is not None
        wanted = (self.policy.members + self.policy.standby, memory.lost)
        if memory.phase not in ("stopping", "ended") and orders.wants_members(memory) and self._want != wanted:
            self._want = wanted
            self.after(LATENCY_MS, lambda: self._create(wanted[0]))
        for name in sorted(self._exists):
            line, order = self._line(name), orders.order_for(memory, name, self.policy, None)
            if line.connected and line.sent != order:
                line.sent = order
                self._send(name, order, line.epoch)
                self._point()

    def _send(self, name: str, order: MemberOrder, epoch: int) -> None:
        def deliver() -> None:
            member = self.members[name]
            line = self._line(name)
            if line.epoch == epoch and member.sidecar is not None and name not in self.cut:
                member.sidecar.obey(order)

        self.after(LATENCY_MS, deliver)

    def _view(self) -> View:
        assert self._memory is not None
        names = [*sorted(self._exists), *self._memory.placement]
        names += [name for name in self._lines if name not in self._memory.lost]
        members = tuple(self._member_view(name) for name in dict.fromkeys(names))
        found = max(
            (c for c in self.stored if c.path not in self.damaged), key=lambda c: c.step, default=None
        )
        return View(self.now_ns, self.now_ns / 1e9, self._memory, members, found)

    def _member_view(self, name: str) -> MemberView:
        assert self._memory is not None
        line = self._line(name)
        exists = name in self._exists and name not in self._memory.lost
        silent_s = round((self.now_ns - line.heard_ns) / 1e9, 3)
        return MemberView(name, exists, line.connected, silent_s, line.report)

    def _line(self, name: str) -> Line:
        return self._lines.setdefault(name, Line(heard_ns=self.now_ns))

    # -- the network

    def connect(self, member: Member) -> None:
        """Tell everything over a new line; try again while there is nobody to hear."""
        if member.gone or member.sidecar is None:
            return
        if self._memory is None or member.name in self.cut:
            sidecar = member.sidecar
            self.after(50, lambda: self.connect(member) if member.sidecar is sidecar else None)
            return
        line = self._line(member.name)
        line.epoch += 1
        line.sent = None
        self.tell(member)
        self._beat(member, line.epoch)

    def _beat(self, member: Member, epoch: int) -> None:
        if self._line(member.name).epoch == epoch and not member.gone:
            if member.sidecar is not None and member.sidecar.order.do == "run":
                self.tell(member)
            self.after(500, lambda: self._beat_again(member, epoch))

    def _beat_again(self, member: Member, epoch: int) -> None:
        if self._line(member.name).epoch == epoch:
            self.tell(member)
            self._beat(member, epoch)

    def hang_up(self, name: str) -> None:
        line = self._line(name)
        line.epoch += 1
        if line.connected:
            line.connected = False
            self.after(LATENCY_MS, self._round)

    def tell(self, member: Member) -> None:
        if member.sidecar is None or member.gone:
            return
        report, epoch = member.sidecar.report(), self._line(member.name).epoch
        self.after(LATENCY_MS, lambda: self._hear(member.name, report, epoch))

    def _hear(self, name: str, report: MemberReport, epoch: int) -> None:
        line = self._line(name)
        if self._memory is None or line.epoch != epoch or name in self.cut:
            return
        line.report, line.connected, line.heard_ns = report, True, self.now_ns
        self._point()
        self._round()

    def cut_off(self, name: str, for_ms: int) -> None:
        """Its messages are lost for a while; then its line is made anew."""
        self.cut.add(name)
        self.hang_up(name)

        def mend() -> None:
            self.cut.discard(name)
            self.connect(self.members[name])

        self.after(for_ms, mend)

    # -- whoever keeps the members

    def _create(self, count: int) -> None:
        for _ in range(count - len(self._exists)):
            name = f"m{self._count}"
            self._count += 1
            self._exists.add(name)
            self.members[name] = Member(self, name)
        self._round()

    def remove(self, name: str) -> None:
        """Power loss: its line breaks, and a little later its keeper knows."""
        member = self.members[name]
        if not member.gone:
            member.lose()
            self.hang_up(name)
        if name in self._exists:
            self.after(3, lambda: self._forget(name))

    def _forget(self, name: str) -> None:
        self._exists.discard(name)
        self._round()

    # -- the group

    def began(self, member: Member, launch: Launch) -> None:
        """A launcher has a new generation: there is one launch for each, and each seat is taken once."""
        assert self._launches.setdefault(launch.generation, launch) == launch
        for rank in member.ranks:
            assert self._seats.setdefault((launch.generation, rank.number), member.name) == member.name

    def _ranks(self, generation: int) -> list[Rank]:
        found = [r for m in self.members.values() if not m.gone for r in m.ranks if r.generation == generation]
        return sorted(found, key=lambda rank: rank.number)

    def arrive(self, rank: Rank) -> None:
        if rank.state != "starting":
            return
        rank.state, rank.moved_ns = "running", self.now_ns
        ranks = self._ranks(rank.generation)
        if len(ranks) == len(self._seats_of(rank.generation)) and all(r.state == "running" for r in ranks):
            self.after(JOIN_MS, lambda: self._join(rank.generation))

    def _seats_of(self, generation: int) -> range:
        return range(self._launches[generation].world_size)

    def _join(self, generation: int) -> None:
        assert generation == max(self._launches), "an old generation forms a group"
        for rank in self._ranks(generation):
            rank.marks = Marks(rank.marks.started_ns, self.now_ns, self.now_ns + RESTORE_MS * MS)
        self.after(RESTORE_MS, lambda: self._begin(generation))

    def _begin(self, generation: int) -> None:
        for rank in self._ranks(generation):
            restore = self._launches[generation].restore
            self._keep(rank, rank.content.step)
            if rank.local == 0 and rank.alive and (restore is None or restore.source != "slot"):
                rank.member.snapshot(rank)
        self._forward(generation)

    def _forward(self, generation: int) -> None:
        """All ranks compute a step together, or none does."""
        ranks = self._ranks(generation)
        if generation != max(self._launches) or not all(r.alive for r in ranks):
            return self._break(generation)
        step = ranks[0].content.step
        if step >= self.steps:
            return self._finish(ranks)
        for rank in ranks:
            rank.moved_ns = max(rank.moved_ns, self.now_ns)
        if step in self._launches[generation].skip:
            for rank in ranks:
                self._advance(rank, Content(step + 1, rank.content.skipped | {step}, rank.content.poisoned))
            return self.after(1, lambda: self._forward(generation))
        for rank in ranks:
            self._cue(rank, step, ("raise", "leave", "kill", "hang", "stop", "lose", "sidecar", "cut", "supervisor"))
        if all(r.alive for r in ranks) and not any(r.away for r in ranks):
            self.after(self.step_ms * 0.6, lambda: self._backward(generation, step))
        elif not all(r.alive for r in ranks):
            self._break(generation)
        return None

    def _backward(self, generation: int, step: int) -> None:
        ranks = self._ranks(generation)
        if len(ranks) < len(self._seats_of(generation)) or not all(r.alive for r in ranks):
            return self._break(generation)
        if any(r.away or r.frozen for r in ranks):
            return None  # somebody does not come: the others wait
        bad = {r.number for r in ranks if self._cue(r, step, ("nan",))}
        for rank in ranks:
            self._keep(rank, step + 1)
            rank.writing = not rank.secured
        for number, rank in enumerate(ranks):
            if rank.writing:
                delay_ms = self.step_ms * 0.3 + 2 * number
                self.after(delay_ms, lambda rank=rank: self._commit(rank, step, bad))
        return None

    def _keep(self, rank: Rank, step: int) -> None:
        """Store the private state of `step`, and give it to the rank a member further."""
        if not rank.alive:
            return
        world_size = len(self._seats_of(rank.generation))
        rank.member.store("own", rank.number, rank.generation, step)
        shift = self.policy.nproc % world_size or 1 % world_size
        home = self._seats[rank.generation, (rank.number + shift) % world_size]
        if shift and not self.members[home].gone:
            self.members[home].store("kept", rank.number, rank.generation, step)

    def _commit(self, rank: Rank, step: int, bad: set[int]) -> None:
        if not rank.alive:
            return self._break(rank.generation)
        content = Content(step + 1, rank.content.skipped, rank.content.poisoned or bool(bad))
        if rank.number in bad:
            rank.away = "flag"
            rank.flag = Flag("nan", step, "nan", step * 10, self.now_ns)
            rank.member.changed()
            return None
        rank.writing = False
        self._advance(rank, content)
        if rank.secured:
            rank.member.write_just_in_time(rank)
        ranks = self._ranks(rank.generation)
        if all(not r.alive or r.content.step == step + 1 for r in ranks):
            self.after(0, lambda: self._forward(rank.generation))
        return None

    def _advance(self, rank: Rank, content: Content) -> None:
        assert rank.generation == max(self._launches), "an old generation trains on"
        rank.content, rank.moved_ns = content, self.now_ns
        self.reached[rank.generation] = max(self.reached.get(rank.generation, 0), content.step)
        if rank.local == 0 and self.snapshot_every and content.step % self.snapshot_every == 0:
            rank.member.snapshot(rank)
        if not rank.marks.first_step_ns:
            first = Marks(rank.marks.started_ns, rank.marks.joined_ns, rank.marks.restored_ns, self.now_ns)
            rank.marks = first
            rank.member.changed()
        self._checkpoint_now_and_then(rank)

    def _finish(self, ranks: list[Rank]) -> None:
        for rank in ranks:
            self.finals[rank.number] = rank.content
            self.end_rank(rank, Ending(self.now_ns, 0))

    # -- faults of ranks

    def _cue(self, rank: Rank, step: int, kinds: tuple[str, ...]) -> bool:
        what, left = self.cues.get((rank.number, step), ("", 0))
        if what not in kinds or left <= 0:
            return False
        self.cues[rank.number, step] = (what, left - 1)
        if what == "raise":
            self.fail(rank, "exception", f'  File "train.py", line 7\nValueError: {step}\n', 1)
        elif what == "leave":
            self.fail(rank, "system_exit", "sys.exit(3)", 3)
        elif what == "kill":
            self.end_rank(rank, Ending(self.now_ns, None, 9))
        elif what == "lose":
            self.remove(rank.member.name)
        elif what == "sidecar":
            rank.member.restart_sidecar()
        elif what == "cut":
            self.cut_off(rank.member.name, 1500)
        elif what == "supervisor":
            self.kill_supervisor()
        elif what in ("hang", "stop"):
            rank.away = what
            self.after(self.hang_ms + 50, rank.member.changed)
            for other in self._ranks(rank.generation):
                self.after(self.hang_ms + 50, other.member.changed)
        return True

    def fail(self, rank: Rank, kind: str, message: str, code: int) -> None:
        """An exception: the rank leaves its state, says so, and is gone a little later."""
        if not rank.alive:
            return
        if not rank.writing and kind in ("exception", "distributed"):
            rank.member.write_just_in_time(rank)
        rank.ending = Ending(self.now_ns, code, None, False, kind, self.now_ns, message)
        rank.member.changed()
        self.after(15, lambda: self._exit(rank))
        self.notice(rank)

    def end_rank(self, rank: Rank, ending: Ending) -> None:
        if rank.state == "exited":
            return
        rank.ending = ending
        self._exit(rank)
        if ending.code != 0:
            self.notice(rank)

    def _exit(self, rank: Rank) -> None:
        if rank.state != "exited":
            rank.state = "exited"
            rank.member.changed()

    def notice(self, rank: Rank) -> None:
        """The peers of a dead rank learn of it in their next collective."""
        self.after(VICTIM_MS, lambda: self._break(rank.generation))

    def _break(self, generation: int) -> None:
        if self.peers_hang:
            for other in self._ranks(generation):
                self.after(self.hang_ms + 50, other.member.changed)
            return
        for rank in self._ranks(generation):
            if rank.alive and rank.away != "stop" and not rank.writing and rank.state == "running":
                self.fail(rank, "distributed", "Connection closed by peer", 1)

    # -- states

    def prepare(self, member: Member, order: MemberOrder) -> Content | str:
        """What `sidecar.prepare` does: have the state here, or say why not."""
        assert order.launch is not None
        wanted = order.launch.restore
        if wanted is None:
            return Content(0)
        if wanted.source == "checkpoint":
            if wanted.path in self.damaged or self.storage_away:
                return f"checkpoint {wanted.path}: damaged"
            return _CONTENTS[wanted.path]
        holders = [m for m in self.members.values() if not m.gone and m.sidecar and m.name not in self.cut]
        found = [c for m in (member, *holders) if (c := m.holds(wanted.generation, wanted.step))]
        if not found:
            return f"no member has the snapshot of step {wanted.step}"
        for rank in order.ranks:
            if not any(self._private(m, rank.rank, wanted.step) for m in (member, *holders)):
                return f"no member has the private state of rank {rank.rank}"
        return found[0]

    @staticmethod
    def _private(member: Member, rank: int, step: int) -> bool:
        return any((p.rank, p.step) == (rank, step) for p in member.privates.values())

    def _checkpoint_now_and_then(self, rank: Rank) -> None:
        every = int(self.policy.checkpoint_every_s * 1000 / self.step_ms)
        if rank.number or not every or rank.content.step % every or self.storage_away:
            return
        for generation, content in reversed(rank.member.slots):
            if generation == rank.generation and content.step < rank.content.step:
                self._store(generation, content)
                return

    def _store(self, generation: int, content: Content) -> None:
        path = f"step-{content.step}-{generation}"
        assert not content.poisoned
        _CONTENTS[path] = content
        found = Checkpoint(content.step, generation, self.memory.world_size, path, (), tuple(sorted(content.skipped)))
        self.stored = [c for c in self.stored if c.step != content.step][-2:] + [found]

    def save(self, member: Member, generation: int, step: int, durable: Durable) -> Durable:
        content = member.holds(generation, step)
        if content is None or self.storage_away:
            return Durable(asked=durable.asked, error="the snapshot is not here")
        self._store(generation, content)
        return Durable(step, generation, f"step-{step}-{generation}", 0.1, "", durable.asked)

    # -- what must hold

    def _check(self, view: View, action: Action, after: Memory) -> None:
        assert after.generation >= view.memory.generation
        assert after.generation >= max(self._launches, default=0)
        if not isinstance(action, Start):
            return
        self.starts.append(action)
        assert len(action.placement) == len(set(action.placement)) == self.policy.members
        resumed = action.resume
        assert resumed.step >= self._best(view)
        if resumed.source == "slot":
            holder = self.members[resumed.holders[0]].holds(resumed.generation, resumed.step)
            assert holder is None or not holder.poisoned, "resumes from a bad state"

    def _best(self, view: View) -> int:
        """Return the newest good step that somebody who can be reached has told us of, whole."""
        there = [m for m in view.members if m.connected and m.exists and not self.members[m.name].gone]
        members = [self.members[m.name] for m in there if m.report and m.report.secured_for >= view.memory.generation]
        void = [(n, s.resume.step) for n, s in enumerate(self.starts[:-1], 1)]
        best = 0
        for member in members:
            for generation, content in member.slots:
                if content.poisoned or any(content.step > step for n, step in void if n > generation):
                    continue
                ranks = range(view.memory.world_size)
                if all(any(self._private(m, rank, content.step) for m in members) for rank in ranks):
                    best = max(best, content.step)
        return best


_CONTENTS: dict[str, Content] = {}
