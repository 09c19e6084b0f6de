"""A job in simulated time: members train, fail and vanish on cue, and the supervisor may die at any moment.

The simulation drives the real `decide`, `transition.after`, `order_for` and `Bookkeeping`; only the world is
simulated. It has no randomness: the same script gives the same history. The invariants are checked at every
decision.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from holdfast import exit_codes
from holdfast.protocol.launcher_messages import StartTimes
from supervisor.decision import closing, orders, transition
from supervisor.decision.decide import decide
from supervisor.decision.durable_facts import with_durable_facts
from supervisor.decision.membership import cut_off_members, departures
from supervisor.decision.transition import taken_over, with_stop_request
from supervisor.hangs import observation
from supervisor.observability.bookkeeping import Bookkeeping
from supervisor.view.model import (
    Departure,
    End,
    JobState,
    Policy,
    RunAction,
    Save,
    Secure,
    Settle,
    StallWatch,
    Start,
    StopRequest,
    View,
    Wait,
)
from tests.simulation.cluster.group import Group
from tests.simulation.cluster.links import Links
from tests.simulation.cluster.member import MS, Content, Member
from tests.simulation.cluster.network import Network
from tests.simulation.cluster.storage import Store

BEGIN_NS = 1_000_000_000


class Killed(Exception):
    """Raised at the point where the supervisor dies."""


@dataclass
class World:
    """A simulated job of `steps` steps. `kills` are the points where the supervisor dies.

    `cues` determine what happens to a rank when it begins a step, and how often.
    """

    policy: Policy = field(default_factory=Policy)
    steps: int = 12
    step_ms: int = 40
    snapshot_every: int = 5  # 0: only the first
    kills: frozenset[int] = frozenset()
    supervisor_ms: int = 300  # until its successor starts
    cues: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)  # what happens on a member in each step
    boot_ms: int = 500
    sidecar_ms: int = 200
    hang_ms: int = 600
    peers_hang: bool = False  # as on a GPU, where a dead peer leaves the others waiting
    keeps_itself: bool = False  # the script never joins, so holdfast has none of its state
    links: Links | None = None  # None: all members reach each other, and no sidecar probes this
    resizes: bool = False  # the script can go on with another number of ranks
    now_ns: int = BEGIN_NS
    points: int = 0
    decided: list[int] = field(default_factory=list)  # the points of the decisions
    members: dict[str, Member] = field(default_factory=dict)
    exists: set[str] = field(default_factory=set)  # members that the keeper knows
    _existed: tuple[str, ...] = ()  # members that the keeper has reported and the supervisor has not given up
    journal: list[tuple[View, RunAction, JobState]] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    closed: dict[int, str] = field(default_factory=dict)  # number of the incident: how it ended
    ended: End | None = None
    stop: StopRequest = ""
    departures: dict[str, Departure] = field(default_factory=dict)  # members that are about to end
    disk_full: bool = False  # decisions cannot be written to the journal
    has_forgotten: bool = False  # the supervisor died before it wrote its last decision
    _unrecorded: bool = False  # the supervisor's newest decision is not on disk
    _disk: tuple[View, RunAction, JobState] | None = None
    _heap: list[tuple[int, int, Callable[[], Any]]] = field(default_factory=list)
    _events: int = 0
    _count: int = 0
    _memory: JobState | None = None  # the supervisor's; None while it is dead
    _accounts: Bookkeeping | None = None
    ledger: dict[str, Any] | None = None  # as in the journal
    _want: tuple[int, tuple[str, ...]] | None = None
    _deadline_ns: int = 0
    _watch: StallWatch = field(default_factory=StallWatch)

    def __post_init__(self) -> None:
        self.group, self.store, self.network = Group(self), Store(self), Network(self)

    # -- the script

    def at(self, when_ms: int, fault: Callable[[World], object]) -> World:
        """Schedule `fault` for `when_ms` after the start."""
        self.at_ns(BEGIN_NS + when_ms * MS, partial(fault, self))
        return self

    def run(self, limit_s: float = 120.0) -> World:
        """Run until the job has ended. Fails as stuck when it has not ended within `limit_s`."""
        self._start_supervisor()
        while self.ended is None:
            at_ns, _, call = heapq.heappop(self._heap)
            assert at_ns < limit_s * 1e9, f"stuck in {self.memory.phase} after {self.journal[-1][1]}"
            self.now_ns = at_ns
            self._guarded(call)
        return self

    def after(self, delay_ms: float, call: Callable[[], object]) -> None:
        self.at_ns(self.now_ns + int(delay_ms * MS), call)

    def at_ns(self, at_ns: int, call: Callable[[], object]) -> None:
        self._events += 1
        heapq.heappush(self._heap, (at_ns, self._events, call))

    @property
    def memory(self) -> JobState:
        """The memory of the supervisor, or of one that would start now."""
        fresh = JobState(self.policy.members * self.policy.nproc, self.policy.nproc, since_ns=self.now_ns)
        return self._memory or (self._disk[2] if self._disk else fresh)

    @property
    def final(self) -> Content:
        """Return the final state of all ranks; fails unless it is the same on all."""
        [content] = set(self.group.finals.values())
        assert len(self.group.finals) == self.memory.world_size
        return content

    # -- start and end of the supervisor

    @property
    def is_supervised(self) -> bool:
        return self._memory is not None

    def kill_supervisor(self) -> None:
        """Lose everything that the supervisor knows except the journal. Its keeper starts a successor."""
        if self._memory is not None:
            self.has_forgotten |= self._unrecorded
            self._unrecorded = False
            self._memory, self._accounts, self._want, self._watch = None, None, None, StallWatch()
            self.network.forget()
            self.after(self.supervisor_ms, self._start_supervisor)

    def _start_supervisor(self) -> None:
        self._memory = taken_over(self.memory, self.now_ns)
        self._accounts = Bookkeeping(self.now_ns, self.ledger)
        self._existed = ()
        self.network.forget()
        if self._disk is not None:
            view, action, after = self._disk
            self._record(view.memory, action, after)
        self._guarded(self.look)

    def _guarded(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Killed:
            self.kill_supervisor()

    def _point(self) -> None:
        self.points += 1
        if self.points in self.kills:
            raise Killed

    def heard(self) -> None:
        self._point()
        self.look()

    # -- observe, decide, record, act: as the supervisor's job does

    def look(self) -> None:
        if self._memory is None or self._accounts is None or self.ended is not None:
            return
        if self.stop and self._memory.stop != self.stop:
            self._memory = with_stop_request(self._memory, self.stop)
        for _ in range(50):
            view = self._view(self._memory)
            self._memory = view.memory
            self._accounts.observe(view)
            action = decide(view, self.policy)
            if isinstance(action, Wait) and (self.disk_full or not self._unrecorded):
                break
            if isinstance(action, Wait):
                self._write(view, action, self._memory, self._accounts)
                continue
            self._carry_out(view, action, self._accounts)
        else:
            raise AssertionError(f"the decision does not converge: {action}")
        assert action.until_ns > self.now_ns, action
        self._deadline_ns = action.until_ns
        self.at_ns(action.until_ns, partial(self._wake, action.until_ns))
        self._give_orders(self._memory)

    def _wake(self, deadline_ns: int) -> None:
        if deadline_ns == self._deadline_ns:
            self.look()

    def _view(self, memory: JobState) -> View:
        names = [*sorted(self.exists), *memory.placement]
        known = dict.fromkeys((*self._existed, *sorted(self.exists)))
        self._existed = tuple(name for name in known if name not in memory.lost)
        names += self._existed
        members = tuple(self.network.view(name, memory) for name in dict.fromkeys(names))
        members = tuple(replace(each, departure=self.departures.get(each.name)) for each in members)
        stored = self.store.stored()
        seen = View(self.now_ns, self.now_ns / 1e9, memory, members, stored, unrecorded=self._unrecorded)
        seen = departures.without_ended(seen, self.policy)
        self._watch = observation.update(self._watch, seen)
        seen = replace(seen, memory=with_durable_facts(seen), watch=self._watch)
        return replace(seen, memory=cut_off_members.with_unconfirmed_reports(seen, self.policy))

    def _carry_out(self, view: View, action: RunAction, accounts: Bookkeeping) -> None:
        after = transition.after(view, action, self.policy)
        self._account(view, action, after, accounts)
        self._write(view, action, after, accounts)
        if self._unrecorded and transition.is_resized(view.memory, after):
            return
        self._check(view, action, after)
        self.journal.append((view, action, after))
        self._memory = after
        self.decided.append(self.points + 1)
        self._point()
        self._record(view.memory, action, after)
        for name in set(after.lost) - set(view.memory.lost):
            self.remove(name)

    def _write(self, view: View, action: RunAction, after: JobState, accounts: Bookkeeping) -> None:
        self._unrecorded = self.disk_full
        if not self.disk_full:
            self._disk, self.ledger = (view, action, after), accounts.ledger.snapshot()

    def _record(self, before: JobState, action: RunAction, after: JobState) -> None:
        """Do what a supervisor does after it has written the journal, and what its successor repeats."""
        if before.incident and (after.incident is None or after.incident.number != before.incident.number):
            self.closed[before.incident.number] = "settled" if isinstance(action, Settle) else "overtaken"
        if isinstance(action, End) and after.incident:
            self.closed[after.incident.number] = "ended"
        if after.phase == "ended":
            self.ended = next(a for _, a, _ in reversed(self.journal) if isinstance(a, End))

    def _account(self, view: View, action: RunAction, after: JobState, accounts: Bookkeeping) -> None:
        before, opened = view.memory, after.incident
        if isinstance(action, Secure) and opened is not None:
            if before.incident is None or before.incident.number != opened.number:
                accounts.opened(opened, before.incident)
        elif isinstance(action, Settle):
            told = [m.report.launcher for m in view.members if m.report and m.report.launcher]
            marks = [r.marks for each in told for r in each.ranks if r.generation == before.generation]
            last = StartTimes(*(max(getattr(each, name) for each in marks) for name in StartTimes.__slots__))
            accounts.closed(before, before.incident, last, self.step_ms / 1000)
        elif isinstance(action, Save) and after.end is not None:
            accounts.saving(view.now_ns, None if before.phase == "saving" else before.incident)
        elif isinstance(action, End):
            is_counted = before.phase == "saving" and before.end is not None
            known = None if is_counted else before.incident
            accounts.stopped(view.now_ns, known, finished=closing.is_finish(action))

    def _give_orders(self, memory: JobState) -> None:
        wanted = (self.policy.members + self.policy.standby, memory.lost)
        if orders.may_create_members(memory, self.now_ns) and self._want != wanted:
            self._want = wanted
            self.after(1, partial(self._create, *wanted))
        for name in sorted(self.exists):
            if self.network.order(
                name,
                orders.order_for(memory, name, self.policy, None, inspection_id=int(bool(self._watch.ranks))),
            ):
                self._point()

    # -- the keeper of the members

    def _create(self, count: int, discard: tuple[str, ...]) -> None:
        self.exists -= set(discard)
        for _ in range(count - len(self.exists)):
            name = f"m{self._count}"
            self._count += 1
            self.exists.add(name)
            self.members[name] = Member(self, name)
        self.look()

    def announce(self, name: str, *, ends_ms: int = 0, has_begun: bool = False) -> None:
        """Announce that a member is about to end. It ends after `ends_ms`, or never if that is 0."""
        ends_ns = self.now_ns + ends_ms * MS if ends_ms else 0
        self.departures[name] = Departure("its node is drained", ends_ns, has_begun)
        if ends_ms:
            self.after(ends_ms, partial(self.end_departed, name))
        self.look()

    def withdraw(self, name: str) -> None:
        """Withdraw the announcement that a member is about to end."""
        self.departures.pop(name, None)
        self.look()

    def end_departed(self, name: str) -> None:
        """End a member at the announced time, unless the announcement was withdrawn."""
        if name in self.departures and name in self.exists:
            self.remove(name)

    def remove(self, name: str) -> None:
        """Cut a member's power: its connection breaks, and the keeper notices a little later."""
        self.members[name].lose()
        self.network.hang_up(name)
        self.after(3, partial(self._forget, name))

    def _forget(self, name: str) -> None:
        self.exists.discard(name)
        self.look()

    # -- invariants

    def _check(self, view: View, action: RunAction, after: JobState) -> None:
        assert decide(view, self.policy) == action
        assert after.generation >= view.memory.generation
        assert self.has_forgotten or after.generation >= max(self.group.launches, default=0)
        assert self._accounts is not None
        ledger = self._accounts.ledger
        assert sum(ledger.buckets_ns().values()) + ledger.pending_ns == ledger.total_ns
        if isinstance(action, End) and "left to resume from" in action.why:
            assert self._best(view) == 0, "ends although members hold a state"
            assert not self.store.found, "ends although there is a checkpoint"
        if isinstance(action, End) and self._must_keep_state(action, view):
            newest = self.store.newest()
            kept = newest.step if newest is not None else 0
            assert self._best(view) <= kept, "ends although members hold a state that is not on storage"
        if isinstance(action, Save):
            order = orders.order_for(after, action.member, self.policy, None)
            assert order.save == after.save > 0, "the member that saves does not receive the request"
        if isinstance(action, Start):
            self.starts.append(action)
            least = self.policy.min_members if self.resizes else 0
            assert len(set(action.placement)) == len(action.placement)
            assert (least or self.policy.members) <= len(action.placement) <= self.policy.members
            assert action.resume.step >= self._best(view), "resumes from an older state than it could"
            if action.resume.source == "slot":
                held = self.members[action.resume.holders[0]]
                found = held.holds(action.resume.generation, action.resume.step)
                assert found is None or not found.poisoned, "resumes from a bad state"

    def _must_keep_state(self, end: End, view: View) -> bool:
        """True if a fault ends the run, and storage could take the newest state."""
        is_fault = end.exit_code not in (0, exit_codes.INTERRUPTED, exit_codes.CUT_SHORT)
        is_able = self.policy.has_storage and not self.store.away and not self.keeps_itself
        return is_fault and is_able and view.memory.phase != "forming"

    def _best(self, view: View) -> int:
        """Return the newest good step that reachable members hold completely and have reported."""
        generation = view.memory.generation
        told = [m.name for m in view.members if m.connected and m.exists and m.silent_s < 1.5 and m.report]
        members = [self.members[name] for name in told if not self.members[name].gone]
        members = [m for m in members if m.sidecar and m.sidecar.secured_for >= generation]
        members = [m for m in members if m.name not in self.network.slow_ms]
        void = [(number, each.resume.step) for number, each in enumerate(self.starts[:-1], 1)]
        best = 0
        for member in members:
            for made_by, content in member.slots:
                beyond = any(content.step > step for number, step in void if number > made_by)
                launch, sizes = self.group.launches.get(made_by), view.memory.sizes
                ranks = range(launch.world_size if launch is not None else view.memory.world_size)
                since = max((each.generation for each in sizes if each.generation <= made_by), default=0)
                before = min(
                    (each.generation for each in sizes if each.generation > made_by), default=1 << 60
                )
                whole = all(
                    any(m.has_private(rank, content.step, since, before) for m in members) for rank in ranks
                )
                if whole and not beyond and not content.poisoned:
                    best = max(best, content.step)
        return best
