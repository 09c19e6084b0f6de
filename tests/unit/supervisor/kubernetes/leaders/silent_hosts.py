"""Two supervisors in simulated time, whose hosts can be cut off from the API server and from each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from supervisor.kubernetes.client import KubernetesObject, ResourceKind
from supervisor.kubernetes.leadership import LeaderProbes, Leadership, lead
from supervisor.kubernetes.lease import EarlyTakeover, LeaseLock, LeaseLost, LeaseTerms
from tests.unit.supervisor.kubernetes.object_store import Line, ObjectStore
from tests.unit.supervisor.kubernetes.simulated_time import now_s

EARLY = EarlyTakeover()
TERMS = LeaseTerms(early=EARLY)
OLD_TERMS = LeaseTerms()  # of a version that permits no early takeover
DROPPED_S = 1e6
CHECK_S = 0.05


class SlowLine(Line):
    """A connection to the API server. Each request takes `latency_s`, half of it before it takes effect."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.latency_s = 0.004
        self.is_frozen = False  # the process is stopped, so it sends nothing and receives nothing

    async def _travel(self) -> None:
        await asyncio.sleep(DROPPED_S if self.cut else self.latency_s / 2)
        while self.is_frozen:  # noqa: ASYNC110  time is simulated
            await asyncio.sleep(CHECK_S)

    async def get(self, kind: ResourceKind, name: str, namespace: str = "") -> KubernetesObject:
        await self._travel()
        found = await self._store.get(kind, name, namespace)
        await self._travel()
        return found

    async def create(
        self, kind: ResourceKind, body: KubernetesObject, namespace: str = ""
    ) -> KubernetesObject:
        await self._travel()
        made = await self._store.create(kind, body, namespace)
        await self._travel()
        return made

    async def replace(self, kind: ResourceKind, body: KubernetesObject) -> KubernetesObject:
        await self._travel()
        made = await self._store.replace(kind, body)
        await self._travel()
        return made


class EarlierLine(SlowLine):
    """The connection of an earlier version, which writes the metadata back as it has read it."""

    async def replace(self, kind: ResourceKind, body: KubernetesObject) -> KubernetesObject:
        metadata = body["metadata"]
        found = self._store.objects[kind.plural, metadata["namespace"], metadata["name"]]["metadata"]
        return await super().replace(
            kind, {**body, "metadata": {**metadata, "annotations": found.get("annotations")}}
        )


class Supervisor:
    """A process that contends for the lease once, with its host. `OLD_TERMS` are an earlier version's."""

    def __init__(self, pair: Pair, name: str, terms: LeaseTerms) -> None:
        self.pair, self.name = pair, name
        self.line = EarlierLine(pair.store) if terms is OLD_TERMS else SlowLine(pair.store)
        self.lock = LeaseLock(self.line, "ns", "leader", name, terms, clock=now_s)
        self.probes = LeaderProbes(self.lock, pair.answers, self._note_suspicion)
        self.expected: list[bool] = []  # after each change, whether this process leads or expects to
        self.term: Leadership | None = None
        self.led_s = 0.0
        self.is_lost = False  # the process has found out that it no longer leads
        self.host_answers: bool | None = True
        self.task = asyncio.ensure_future(self._contend())

    @property
    def is_only_leader(self) -> bool:
        """True if this process may do what no epoch protects."""
        return self.term is not None and self.term.left_s > 0

    async def _contend(self) -> None:
        with suppress(LeaseLost):
            await lead(self.lock, self._body, self._rival, None, self.probes)
        self.is_lost = True

    async def _body(self, term: Leadership) -> None:
        self.term, self.led_s = term, now_s()
        try:
            await asyncio.Event().wait()
        finally:
            self.term = None

    def _note_suspicion(self) -> None:
        expects = self.probes.is_suspected or self.term is not None
        if self.expected[-1:] != [expects]:
            self.expected.append(expects)

    async def _rival(self, epoch: int) -> str:
        other = self.pair.other(self)
        if other.host_answers is not True or self.host_answers is not True:
            await asyncio.sleep(1.0)
            return ""
        return other.name if other.term is not None and other.term.epoch > epoch else ""

    def cut_off(self) -> None:
        """Drop all packets from and to this host."""
        self.line.cut, self.host_answers = True, False


class Pair:
    """The first of two supervisors leads, and its renewals follow each other as usual."""

    def __init__(self, first: LeaseTerms = TERMS, second: LeaseTerms = TERMS) -> None:
        self.store = ObjectStore()
        self.first = Supervisor(self, "s-1", first)
        self.terms = second
        self.second = self.first  # until `begin`

    async def begin(self, phase_s: float = 0.0) -> None:
        """Let the second process contend `phase_s` after the first began to lead, and wait a while."""
        while self.first.term is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(phase_s)
        self.second = Supervisor(self, "s-2", self.terms)
        await self.passes(10.0)
        assert self.first.is_only_leader

    def other(self, one: Supervisor) -> Supervisor:
        return self.second if one is self.first else self.first

    async def answers(self, holder: str, limit_s: float) -> bool | None:
        found = self.first if holder.startswith("s-1") else self.second
        asking = self.other(found)
        if found.host_answers is None:
            return None
        if not found.host_answers or not asking.host_answers:
            await asyncio.sleep(limit_s)
            return False
        return True

    def check(self) -> None:
        leaders = [each.name for each in {self.first, self.second} if each.is_only_leader]
        assert len(leaders) <= 1, leaders

    async def passes(self, duration_s: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass until `until` holds, and check all the time that at most one process leads."""
        end_s = now_s() + duration_s
        while now_s() < end_s and not until():
            self.check()
            await asyncio.sleep(min(CHECK_S, end_s - now_s()))

    async def until_second_leads(self, limit_s: float) -> float:
        """Return how long it takes until the second process leads."""
        since_s = now_s()
        await self.passes(limit_s, lambda: self.second.term is not None)
        assert self.second.term is not None, f"nobody has taken over within {limit_s} s"
        return self.second.led_s - since_s
