"""Standbys are created only where there is room, and make way for the pods that wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from supervisor.cluster.standbys import cluster_room
from supervisor.cluster.standbys.cluster_room import (
    AGAIN_S,
    IN_VAIN_S,
    MAX_WAITING,
    POLL_S,
    SURVEY_S,
    IdleStandby,
    NoRoom,
)
from supervisor.cluster.standbys.node_fit import PodNeeds, read_pod_needs
from supervisor.cluster.standbys.waiting_pods import HOLD_S, SCHEDULER_S
from tests.unit.supervisor.cluster.api_server import ServedObjects
from tests.unit.supervisor.cluster.standbys.cluster_objects import Json, WatchedRoom, node, pod, watched_room

LACKS = "0/3 nodes are available: 3 Insufficient cpu."
RESERVED_S = cluster_room.RESERVED_S


class Room:
    """A cluster of three nodes with four cores each, of which one job's standbys can yield."""

    def __init__(self, served: ServedObjects, found: WatchedRoom) -> None:
        self.served, self.room, self.known = served, found.room, found.known
        self.idle: dict[str, str] = {}  # by uid of an idle standby: its node
        self.own: set[str] = set()  # uids of the pods of its job
        self.yielded: list[tuple[str, str, str]] = []  # the standby, the pod and the resource
        self.room.idle = lambda: [self._standby(uid, on) for uid, on in self.idle.items()]

    def _standby(self, uid: str, on: str) -> IdleStandby:
        async def give_way(to: PodNeeds, resource: str) -> bool:
            if uid not in self.idle:
                return False
            del self.idle[uid]
            self.yielded.append((uid.removeprefix("uid-"), to.place, resource))
            return True

        return IdleStandby(uid, on, self.own, give_way)

    async def put(self, *pods: Json) -> None:
        """Store pods, and return once the mirror of those that wait has them."""
        for each in pods:
            self.served.put("pods", each)
        await self.known()

    def standby(self, name: str, cpu: str, on: str) -> Json:
        self.idle[f"uid-{name}"] = on
        return pod(name, cpu, on=on)

    async def look(self, *times_s: float) -> list[tuple[str, str, str]]:
        for at_s in times_s:
            await self.room.make_way(at_s)
        return self.yielded

    async def nodes(self, cpu: str, *avoid: str, now_s: float = 0.0, **spec: Any) -> tuple[str, ...] | str:
        found = await self.room.nodes_for(read_pod_needs(pod("new", cpu, **spec)), avoid, now_s)
        return found.why if isinstance(found, NoRoom) else found


@asynccontextmanager
async def cluster() -> AsyncIterator[Room]:
    async with watched_room() as (served, found):
        yield Room(served, found)


FULL = [pod("a", "4", on="n1"), pod("b", "4", on="n2"), pod("c", "2", on="n3")]


async def test_a_standby_yields_once_a_pod_has_lacked_its_room_for_a_while() -> None:
    async with cluster() as there:
        await there.put(*FULL, there.standby("s", "2", "n3"), pod("w", "2", message=LACKS))
        assert await there.look(0.0, SCHEDULER_S / 2) == []
        assert await there.look(SCHEDULER_S) == [("s", "team/w", "cpu")]


@pytest.mark.parametrize(
    "waiting",
    [
        pod("w", "3", message=LACKS),  # it does not fit without the standby either
        pod("w", "2", message=LACKS, nodeSelector={"zone": "b"}),
        pod("w", "2", message=LACKS, status={"nominatedNodeName": "n2"}),  # the scheduler makes room
        pod("w", "2", message="3 node(s) had volume node affinity conflict"),
        pod("w", "2", message=LACKS, labels={"holdfast.dev/standby-of": "other"}),
    ],
)
async def test_a_standby_stays_where_the_pod_would_not_run(waiting: Json) -> None:
    async with cluster() as there:
        await there.put(*FULL, there.standby("s", "2", "n3"), waiting)
        assert await there.look(0.0, SCHEDULER_S, SCHEDULER_S + AGAIN_S) == []


async def test_a_standby_does_not_yield_to_a_pod_of_its_own_job() -> None:
    """The owner's replacement of a lost pod would only become a standby in its place."""
    async with cluster() as there:
        there.own.add("uid-w")
        await there.put(*FULL, there.standby("s", "2", "n3"), pod("w", "2", message=LACKS))
        assert await there.look(0.0, SCHEDULER_S) == []


async def test_one_standby_goes_for_one_pod() -> None:
    async with cluster() as there:
        full = [pod("a", "4", on="n1"), pod("b", "2", on="n2"), pod("c", "2", on="n3")]
        standbys = [there.standby("s", "2", "n2"), there.standby("t", "2", "n3")]
        await there.put(*full, *standbys, pod("w", "2", message=LACKS))
        times_s = [SCHEDULER_S + each for each in range(int(RESERVED_S) + 60)]
        assert len(await there.look(0.0, *times_s)) == 1, "the other one would go in vain as well"
        assert len(await there.look(SCHEDULER_S + IN_VAIN_S)) == 2


async def test_one_standby_goes_for_a_pod_that_lacks_something_else_for_a_moment() -> None:
    async with cluster() as there:
        lacks, spread = "1 Insufficient cpu", "1 node(s) didn't match pod topology spread constraints"
        await there.put(*FULL, there.standby("s", "2", "n3"), pod("w", "2", message=lacks))
        assert len(await there.look(0.0, SCHEDULER_S)) == 1
        there.served.remove("pods", "team", "s")
        await there.put(there.standby("t", "2", "n3"), pod("w", "2", message=spread))
        await there.look(RESERVED_S + SCHEDULER_S)
        await there.put(pod("w", "2", message=lacks))
        late_s = RESERVED_S + AGAIN_S
        assert len(await there.look(late_s, late_s + SCHEDULER_S)) == 1
        assert len(await there.look(SCHEDULER_S + IN_VAIN_S)) == 2


async def test_no_standby_goes_for_a_pod_that_fits_beside_it_however_often_it_is_considered() -> None:
    async with cluster() as there:
        full = [pod("a", "4", on="n1"), pod("b", "4", on="n2")]
        await there.put(*full, there.standby("s", "2", "n3"), pod("w", "2", message=LACKS))
        assert await there.look(0.0, SCHEDULER_S, *(SCHEDULER_S + AGAIN_S * each for each in (1, 2, 3))) == []


async def test_the_room_of_one_standby_is_enough_for_two_small_pods() -> None:
    async with cluster() as there:
        full = [pod("a", "4", on="n1"), pod("b", "2", on="n2"), pod("c", "2", on="n3")]
        standbys = [there.standby("s", "2", "n2"), there.standby("t", "2", "n3")]
        small = [pod(name, "1", message=LACKS) for name in ("v", "w")]
        await there.put(*full, *standbys, *small)
        assert len(await there.look(0.0, SCHEDULER_S, SCHEDULER_S + 1, SCHEDULER_S + 2)) == 1


async def test_a_standby_that_has_ranks_by_now_stays() -> None:
    async with cluster() as there:
        await there.put(*FULL, there.standby("s", "2", "n3"), pod("w", "2", message=LACKS))
        await there.look(0.0)
        standbys = there.room.idle()
        there.room.idle = lambda: standbys
        there.idle.clear()
        assert await there.look(SCHEDULER_S) == []


class Counted(dict[str, int]):
    """Requests that count how often all of them are read."""

    reads = 0

    def items(self) -> Any:
        Counted.reads += 1
        return super().items()


async def reads_of_a_look(waiting: int) -> int:
    """Return how often the requests of a node's pods are read for pods that no standby can help."""
    async with cluster() as there:
        pods = [pod(f"w{number}", "3", message=LACKS) for number in range(waiting)]
        await there.put(*FULL, there.standby("s", "2", "n3"), *pods)
        await there.look(0.0, SCHEDULER_S)
        read_s, room = there.room._rooms["n3"]
        counted = tuple(replace(each, requests=Counted(each.requests)) for each in room.pods)
        there.room._rooms["n3"] = read_s, replace(room, pods=counted)
        Counted.reads = 0
        there.room._again_s.clear()
        await there.look(read_s + POLL_S)
        assert there.room._again_s.keys() == {f"uid-w{number}" for number in range(waiting)}
        return Counted.reads


async def test_the_sums_of_a_node_are_the_same_for_all_pods_that_wait() -> None:
    assert await reads_of_a_look(20) == await reads_of_a_look(1)


async def test_other_work_of_the_supervisor_goes_between_two_pods_that_wait() -> None:
    async with cluster() as there:
        pods = [pod(f"w{number:02}", "3", message=LACKS) for number in range(MAX_WAITING)]
        await there.put(*FULL, there.standby("s", "2", "n3"), *pods)
        await there.look(0.0, SCHEDULER_S)
        there.room._again_s.clear()
        look = asyncio.ensure_future(there.room.make_way(SCHEDULER_S + POLL_S))
        turns = 0
        while not look.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns >= MAX_WAITING


async def test_a_standby_is_created_only_on_nodes_with_room() -> None:
    async with cluster() as there:
        await there.put(*FULL)
        assert await there.nodes("2") == ("n3",)
        assert await there.nodes("3") == "no node without a member of the job has room for it"
        assert await there.nodes("2", "n3") == "no node without a member of the job has room for it"


async def test_what_was_read_long_ago_is_only_a_hint() -> None:
    async with cluster() as there:
        await there.put(*FULL)
        assert await there.nodes("2") == ("n3",)
        there.served.put("pods", pod("d", "1", on="n3"))
        assert "no node" in str(await there.nodes("2", now_s=SURVEY_S / 2))
        there.served.remove("pods", "team", "a")
        assert await there.nodes("2", now_s=10 * SURVEY_S) == ("n1",)


async def test_nodes_on_which_nothing_could_be_preempted_come_first() -> None:
    async with cluster() as there:
        await there.put(pod("a", "1", on="n1"), pod("b", "1", on="n2", priority=-5), pod("c", "4", on="n3"))
        assert await there.nodes("2") == ("n1",)
        assert await there.nodes("2", preemptionPolicy="Never") == ("n1", "n2")
        assert await there.nodes("2", "n1") == ("n2",)


async def test_a_node_with_a_taint_that_asks_pods_to_go_elsewhere_comes_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_room, "CANDIDATES", 1)
    async with cluster() as there:
        taint = {"key": "holdfast.dev/unhealthy", "effect": "PreferNoSchedule"}
        for name in ("n1", "n3"):
            there.served.put("nodes", node(name, taints=[taint]))
        assert await there.nodes("2") == ("n2",)
        assert await there.nodes("2", "n2") in (("n1",), ("n3",))


async def test_no_standby_takes_the_room_that_another_pod_waits_for() -> None:
    async with cluster() as there:
        await there.put(*FULL, pod("w", "2"))
        why = await there.nodes("2")
        assert why == "the room on node n3 is reserved for pod team/w, which is waiting for a node"
        assert await there.nodes("2", now_s=HOLD_S) == ("n3",), "something else keeps it away"


async def test_a_pod_that_the_scheduler_does_not_consider_claims_no_room() -> None:
    async with cluster() as there:
        gated = pod("w", "2", schedulingGates=[{"name": "a"}])
        elsewhere = pod("v", "2", message="pod has unbound immediate PersistentVolumeClaims")
        await there.put(*FULL, gated, elsewhere)
        assert await there.nodes("2") == ("n3",)


async def test_room_that_the_scheduler_makes_for_a_pod_counts_as_taken() -> None:
    async with cluster() as there:
        await there.put(*FULL, pod("w", "1", message=LACKS, status={"nominatedNodeName": "n3"}))
        assert "no node" in str(await there.nodes("2"))


async def test_two_jobs_do_not_count_on_the_same_room() -> None:
    async with cluster() as there:
        await there.put(*FULL)
        assert await there.nodes("2") == ("n3",)
        there.room.promise(read_pod_needs(pod("s", "2")), 0.0)
        assert "reserved for pod team/s" in str(await there.nodes("2", now_s=1.0))
        assert await there.nodes("2", now_s=cluster_room.PROMISED_S) == ("n3",)
