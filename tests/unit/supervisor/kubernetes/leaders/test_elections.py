"""Processes that are killed and cut off at random: at most one has a confirmed term, and soon one leads."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from supervisor.kubernetes.leadership import Leadership, lead
from supervisor.kubernetes.lease import LeaseLock, LeaseLost
from tests.unit.supervisor.kubernetes.object_store import Line, ObjectStore
from tests.unit.supervisor.kubernetes.simulated_time import now_s, simulated
from tests.unit.supervisor.kubernetes.test_lease import TERMS

STEP_S = 0.1
RESTART_S = 1.0  # after this time, the kubelet has restarted a container


class Replica:
    """A process that contends, in a pod whose container is started again whenever it ends."""

    def __init__(self, election: Election, name: str) -> None:
        self.election, self.name = election, name
        self.line = Line(election.store)
        self.term: Leadership | None = None
        self.holder = ""
        self._process: asyncio.Task[None] | None = None
        self.pod = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            self._process = asyncio.ensure_future(self._contend())
            await asyncio.wait({self._process})
            self._process = None
            await asyncio.sleep(RESTART_S)

    async def _contend(self) -> None:
        lock = LeaseLock(self.line, "ns", "leader", self.name, TERMS, pod_uid=self.name, clock=now_s)
        with suppress(LeaseLost):
            await lead(lock, self._body, self._rival, self.election.end_of)

    async def _body(self, term: Leadership) -> None:
        self.term, self.holder = term, term.holder
        self.election.epochs.append(term.epoch)
        try:
            await asyncio.sleep(1e6)
        finally:
            self.term = None
            self.election.note_end(self.holder)

    async def _rival(self, epoch: int) -> str:
        others = (each for each in self.election.replicas if each is not self and each.term is not None)
        return next((each.name for each in others if each.term and each.term.epoch > epoch), "")

    async def kill(self) -> None:
        """End the process without a release of its lease, as SIGKILL does."""
        was_cut, self.line.cut = self.line.cut, True
        if self._process is not None:
            self._process.cancel()
            await asyncio.wait({self._process})
        self.line.cut = was_cut


class Election:
    def __init__(self, count: int) -> None:
        self.store = ObjectStore()
        self.epochs: list[int] = []  # of all terms, in the order in which they began
        self._ends: dict[str, asyncio.Event] = {}  # by holder
        self.replicas = [Replica(self, f"s-{number}") for number in range(count)]

    async def end_of(self, holder: str) -> str:
        await self._ends.setdefault(holder, asyncio.Event()).wait()
        return "nothing listens there"

    def note_end(self, holder: str) -> None:
        self._ends.setdefault(holder, asyncio.Event()).set()

    def check(self) -> None:
        confirmed = [each.name for each in self.replicas if each.term is not None and each.term.left_s > 0]
        assert len(confirmed) <= 1, confirmed
        assert self.epochs == sorted(set(self.epochs)), "each term has a higher epoch than all before it"

    async def passes(self, duration_s: float) -> None:
        for _ in range(round(duration_s / STEP_S)):
            self.check()
            await asyncio.sleep(STEP_S)


@pytest.mark.parametrize("seed", range(20))
def test_at_most_one_replica_has_a_confirmed_term(seed: int) -> None:
    _simulate(seed)


@simulated
async def _simulate(seed: int) -> None:
    chance = random.Random(seed)
    election = Election(3)
    for _ in range(40):
        replica = chance.choice(election.replicas)
        what = chance.choice(("kill", "kill", "cut", "cut", "outage", "heal", "heal", "heal"))
        if what == "kill":
            await replica.kill()
        elif what == "cut":
            replica.line.cut = True
        else:
            for each in election.replicas:
                each.line.cut = what == "outage"
        await election.passes(chance.uniform(0.0, 20.0))
    for each in election.replicas:
        each.line.cut = False
    await election.passes(TERMS.duration_s + 3 * TERMS.retry_s)
    assert sum(each.term is not None and each.term.left_s > 0 for each in election.replicas) == 1
    assert len(election.epochs) > 1
    for each in election.replicas:
        each.pod.cancel()
