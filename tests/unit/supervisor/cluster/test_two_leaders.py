"""Two processes that both believe that they lead: members obey one, and nothing is done twice."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from holdfast.fileio.storage_thread import StorageThread
from supervisor.cluster.pods import PodGroup, PodMember
from supervisor.cluster.supervised_job import ClusterContext, SupervisedJob
from supervisor.controller.member_server import MemberConnection
from supervisor.kubernetes.client import ApiServer
from supervisor.kubernetes.errors import ServerUnreachable
from tests.unit.supervisor.cluster.api_server import LIMIT_S, ServedObjects, accept_the_rest
from tests.unit.supervisor.cluster.simulated_member import SimulatedPod
from tests.unit.supervisor.cluster.test_takeovers import Cluster, soon

assert soon  # this module uses its fixture

ENDED = 1  # the exit code of a rank that crashes


@dataclass
class LeaderProcess(Cluster):
    """One process that leads, with its own connection to the API server."""

    epoch: int = 1  # as in the lease
    is_frozen: bool = False  # it was suspended, and does not know yet whether it leads
    is_cut: bool = False  # it cannot reach the API server
    evicted: list[str] = field(default_factory=list)  # the pods that it wanted to evict, by uid

    def _make(self, group: PodGroup) -> SupervisedJob:
        def evict(_namespace: str, pod: PodMember) -> None:
            if not (self.is_frozen or self.is_cut):
                self.evicted.append(pod.uid)

        context = ClusterContext(
            server=self.server,
            events=self.events,
            records=StorageThread("records"),
            epoch=self.epoch,
            secret=b"secret",
            lag=lambda: (0.0, 0.0),
            evict=evict,
            term_left_s=lambda: 0.0 if self.is_frozen or self.is_cut else 1e6,
            may_order=lambda: not self.is_frozen,
        )
        return SupervisedJob(context, group)

    def begin(self) -> Any:
        registry = super().begin()
        registry.leads = lambda: not (self.is_frozen or self.is_cut)
        return registry


@dataclass
class TwoLeaders:
    """The former leader and its successor, and the pods of a job that connect to one of the two."""

    served: ServedObjects
    former: LeaderProcess
    successor: LeaderProcess
    reached: dict[str, LeaderProcess] = field(default_factory=dict)  # by uid; others reach the former leader
    open: dict[str, Any] = field(default_factory=dict)  # the transport of each pod's connection, by uid

    @property
    def sidecars(self) -> dict[int, SimulatedPod]:
        return self.former.sidecars

    async def serve(self, request: web.Request) -> web.StreamResponse:
        uid = request.match_info["uid"]
        leader = self.reached.get(uid, self.former)
        job = leader.jobs.job_of(uid)
        self.open[uid] = request.transport
        return await job.serve(request, uid) if job is not None else web.Response(status=503)

    def move(self, number: int, leader: LeaderProcess) -> None:
        """End the connection of a pod, and have it reach `leader` from now on."""
        uid = self.former.found[number]["metadata"]["uid"]
        if self.reached.get(uid, self.former) is not leader:
            self.reached[uid] = leader
            if self.open.get(uid) is not None:
                self.open[uid].abort()

    def assert_one_leader_was_obeyed(self) -> None:
        """No member obeys an epoch after a higher one, and no generation has one rank in two pods."""
        places: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        for number, each in self.sidecars.items():
            versions = [(order.epoch, order.generation) for order in each.orders]
            assert versions == sorted(versions), f"pod {number}: {versions}"
            for order in each.orders:
                if order.do == "run":
                    for rank in order.ranks:
                        places[order.generation, rank.rank].add(number)
        assert {place: pods for place, pods in places.items() if len(pods) > 1} == {}

    async def until_reports(self, lines: Iterable[MemberConnection], condition: Callable[[], object]) -> None:
        """Return once all members have reported to the former leader, after `condition` holds."""

        async def wait() -> None:
            held = False
            while not held:
                held, before = bool(condition()), {line.member: line.heard_ns for line in lines}
                while any(line.heard_ns == before.get(line.member) for line in lines):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

        await asyncio.wait_for(wait(), LIMIT_S)

    async def until_trains(self, generation: int) -> None:
        """Make the ranks train in `generation` under the successor until the job is settled."""
        self.successor.sidecars, self.successor.found = self.former.sidecars, self.former.found
        await self.successor.until_training(generation)


def _cuttable(server: ApiServer, leader: LeaderProcess) -> None:
    send = server._send

    async def sending(request: Any, *words: Any) -> Any:
        if leader.is_cut:
            raise ServerUnreachable(str(request.words), "no route to host", sent=False)
        return await send(request, *words)

    server._send = sending  # type: ignore[method-assign, assignment]


@asynccontextmanager
async def two(tmp_path: Path) -> AsyncIterator[TwoLeaders]:
    served = ServedObjects()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(served.serving())
        other = await stack.enter_async_context(ApiServer(server._access))
        made = TwoLeaders(
            served, LeaderProcess(served, server, tmp_path), LeaderProcess(served, other, tmp_path, epoch=2)
        )
        _cuttable(server, made.former)
        _cuttable(other, made.successor)
        app = web.Application()
        app.router.add_get("/{uid}", made.serve)
        members = await stack.enter_async_context(TestServer(app))
        made.former.url = members.make_url("/")
        async with made.former.stack:
            yield made
        await accept_the_rest()


def assert_all_done_once(there: TwoLeaders, incidents: int, generation: int) -> None:
    there.assert_one_leader_was_obeyed()
    status = there.successor.status
    assert (status["incidents"], status["generation"]) == (incidents, generation), status.get("recent")
    assert (there.former.evicted, there.successor.evicted) == ([], [])
    assert [each for each in there.served.requests if each.startswith("POST pods")] == []


async def test_a_frozen_leader_orders_and_records_nothing_when_it_wakes_up(tmp_path: Path) -> None:
    """Both members are still connected to it, and one of their ranks has crashed in the meantime."""
    async with two(tmp_path) as there, there.former.leading():
        await there.former.form()
        run = there.former.only.run
        assert run is not None
        there.former.is_frozen = True
        given = {number: len(each.orders) for number, each in there.sidecars.items()}
        recorded = len(there.served.requests)
        await there.sidecars[1].end_rank(ENDED)
        lines = run.member_server.connections.values()
        await there.until_reports(
            lines, lambda: any(line.order and line.order.do == "secure" for line in lines)
        )
        for _ in range(5):  # it has decided, and has an order to give
            await there.until_reports(lines, lambda: True)
        assert {number: len(each.orders) for number, each in there.sidecars.items()} == given
        assert there.served.requests[recorded:] == []
        async with there.successor.leading():
            for number in there.sidecars:
                there.move(number, there.successor)
            await there.until_trains(2)
            await there.served.until(lambda: there.successor.status.get("incidents") == 1)
            assert_all_done_once(there, incidents=1, generation=2)
            there.former.is_frozen = False  # too late: its records are refused
            await there.former.until(lambda: not there.former.jobs.jobs or there.former.only.has_ended)
            assert_all_done_once(there, incidents=1, generation=2)


async def test_a_frozen_leader_does_not_take_over_a_job_when_it_wakes_up(tmp_path: Path) -> None:
    """Taking over would give it an epoch above that of its successor."""
    async with two(tmp_path) as there:
        there.former.is_frozen = True
        async with there.former.leading():
            there.served.put("jobs", there.former.by)
            for number in range(2):
                await there.former.create(number)
            await there.former.until(lambda: len(there.former.jobs.jobs) == 1)
            for _ in range(20):
                await there.former.jobs.reconcile()
                await asyncio.sleep(0.01)
            assert there.served.requests == []
            there.former.is_frozen = False
            await there.former.until_led()
            assert there.former.status["epoch"] == 1


@pytest.mark.parametrize("seed", range(4))
async def test_while_two_processes_lead_each_member_obeys_one_and_each_crash_costs_one_recovery(
    tmp_path: Path, seed: int
) -> None:
    """The former leader is cut off from the API server, or frozen for a while, and members change sides.

    It may recover the group in place while nobody else leads. Its successor then finds the group as it is.
    """
    chance = random.Random(seed)
    async with two(tmp_path) as there, AsyncExitStack() as leaders:
        former, successor = there.former, there.successor
        await leaders.enter_async_context(former.leading())
        await former.form()
        await former.served.until(lambda: former.status.get("incidents") == 0)
        if seed % 2:
            former.is_cut = True
        else:
            former.is_frozen = True
        async with successor.leading():
            await successor.until(lambda: len(successor.jobs.jobs) == 1 and successor.only.run is not None)
            await there.sidecars[chance.randrange(2)].end_rank(ENDED)
            for _ in range(12):
                there.move(chance.randrange(2), chance.choice((former, successor)))
                if chance.random() < 0.2:
                    former.is_frozen = not former.is_frozen
                await asyncio.sleep(chance.random() * 0.1)
            there.assert_one_leader_was_obeyed()
            former.is_frozen = former.is_cut = False
            for number in (0, 1):
                there.move(number, successor)
            await leaders.aclose()  # it has found out that it does not lead
            generation = max(2, *(each.generation for each in there.sidecars.values()))
            for each in there.sidecars.values():
                await each.until(lambda each=each: each.generation >= generation)  # type: ignore[misc]
            generation = max(each.generation for each in there.sidecars.values())
            await there.until_trains(generation)
            await there.served.until(lambda: successor.status.get("generation") == generation)
            assert generation <= 3, "one recovery by each of the two at most"
            there.assert_one_leader_was_obeyed()
            assert (former.evicted, successor.evicted) == ([], [])
