"""Standbys are created where there is room, and deleted when they are in the way, with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from supervisor.cluster.departures.announced import AnnouncedDepartures
from supervisor.cluster.pods import PodMember, pod_policy, read_pod
from supervisor.cluster.standbys import standby_pods
from supervisor.cluster.standbys.node_fit import read_pod_needs
from supervisor.cluster.standbys.plan import END_S, PLACE_S
from supervisor.cluster.standbys.standby_pods import (
    IDLE_POLL_S,
    POLL_S,
    SEEN_S,
    StandbyNeeds,
    StandbyPods,
)
from supervisor.cluster.supervision.contents import KIND, SUPERVISIONS
from supervisor.kubernetes.errors import ApiError
from supervisor.view.model import JobState
from tests.unit.supervisor.cluster.api_server import ServedObjects
from tests.unit.supervisor.cluster.standbys.cluster_objects import Json, WatchedRoom, node, pod, watched_room

MEMBER: dict[str, Any] = {"labels": {"app": "gpt"}}
RUNNING = {"phase": "Running", "containerStatuses": [{"name": "c", "state": {"running": {}}}]}


class Place:
    """A job of two members on a cluster of three nodes."""

    def __init__(self, served: ServedObjects, found: WatchedRoom) -> None:
        self.served, self.found, self.room = served, found, found.room
        self.events: list[tuple[str, str]] = []
        self.memory = JobState(2, 1, "running", settled=True)
        self.leads_s = 60.0
        self.departures = AnnouncedDepartures()
        self.withdrawn: set[str] = set()  # uids of pods that get no ranks
        self.asked_before = 0  # how many requests were received before a pod was withdrawn
        self.others: set[str] = set()  # names of pods that the job does not have
        self.policy = replace(pod_policy({}, 2, 1), standby=1)
        self.pods = StandbyPods(
            self.room.server,
            "team",
            self.needs,
            lambda: self.leads_s,
            lambda reason, message, _: self.events.append((reason, message)),
            self.room,
            self.withdraw,
        )
        for number in (1, 2):
            served.put(
                "pods", pod(f"gpt-{number}", "2", on=f"n{number}", priority=7, status=RUNNING, **MEMBER)
            )
        self.memory = replace(self.memory, placement=tuple(each.member for each in self.members()))

    def members(self) -> list[PodMember]:
        found = [each for (kind, _, _), each in self.served.objects.items() if kind == "pods"]
        pods = [read_pod(each, "c") for each in found if each["metadata"]["name"].startswith("gpt-")]
        return [each for each in pods if each.name not in self.others]

    def needs(self) -> StandbyNeeds:
        members = self.members()
        leaving = self.departures.observe(members, {}, 0.0, placed=self.memory.placement)
        return StandbyNeeds(self.memory, self.policy, members, "gpt", "s-uid", leaving)

    def withdraw(self, uid: str, is_going: bool) -> None:
        if is_going:
            self.withdrawn.add(uid)
            self.asked_before = len(self.served.requests)
        else:
            self.withdrawn.discard(uid)

    async def round(self, now_s: float) -> None:
        await self.pods._round(self.needs(), now_s)

    @property
    def standby(self) -> Json | None:
        return self.served.objects.get(("pods", "team", "gpt-standby-1"))

    def run(self, on: str) -> str:
        """Schedule the standby and start it. Return its uid."""
        assert self.standby is not None
        found = {**self.standby, "spec": {**self.standby["spec"], "nodeName": on}, "status": RUNNING}
        return str(self.served.put("pods", found)["metadata"]["uid"])


@asynccontextmanager
async def place(*nodes: Json) -> AsyncIterator[Place]:
    async with watched_room(*nodes) as (served, found):
        yield Place(served, found)


async def test_a_standby_is_created_on_a_node_with_room_at_the_jobs_priority() -> None:
    async with place() as there:
        await there.round(0.0)
        assert there.standby is not None
        terms = next(iter(there.standby["spec"]["affinity"]["nodeAffinity"].values()))["nodeSelectorTerms"]
        assert [each["matchFields"][0]["values"] for each in terms] == [["n3"]]
        assert "priority" not in there.standby["spec"], "the API server derives it from the class"
        assert [reason for reason, _ in there.events] == ["StandbyCreated"]


async def test_without_room_none_is_created_and_the_reason_is_told_if_that_lasts() -> None:
    async with place(node("n1"), node("n2"), node("n3", cpu="1")) as there:
        await there.round(0.0)
        assert (there.standby, there.events) == (None, []), "the room may be there in a moment"
        await there.round(6.0)
        assert there.events == [
            (
                "StandbyNotCreated",
                "the job lacks a standby: no node without a member of the job has room for it",
            )
        ]
        assert there.pods.shown()["problem"].startswith("no node")
        there.served.put("nodes", node("n3"))
        await there.round(12.0)
        assert there.standby is None, "the list of all pods is not read again every second"
        await there.round(60.0)
        assert there.standby is not None
        there.run("n3")
        await there.round(80.0)
        assert there.pods.shown()["problem"] == ""


async def test_a_refusal_of_the_api_server_is_told() -> None:
    async with place() as there:
        there.served.faults.append(403)
        await there.round(0.0)
        [(reason, message)] = there.events
        assert reason == "StandbyNotCreated"
        assert "said the server: Refused" in message
        assert "said the server: Refused" in there.pods.shown()["problem"]


async def test_another_jobs_pod_that_has_the_standbys_name_is_told() -> None:
    async with place() as there:
        owner = {"apiVersion": SUPERVISIONS.api_version, "kind": KIND, "name": "gp", "uid": "other"}
        other = pod("gpt-standby-1", on="n3", labels={"holdfast.dev/standby-of": "gp"})
        other["metadata"]["ownerReferences"] = [{**owner, "controller": True}]
        there.served.put("pods", other)
        there.others.add("gpt-standby-1")
        await there.round(0.0)
        assert there.events == [], "it may be one of an earlier Supervision, which is about to go"
        await there.round(2 * SEEN_S)
        why = "pod gpt-standby-1, which does not belong to this job's Supervision, has the standby's name"
        assert there.events == [("StandbyNotCreated", f"the job lacks a standby: {why}")]
        assert there.pods.shown()["problem"] == why


async def test_a_standby_that_an_earlier_request_has_created_is_none_of_anothers() -> None:
    async with place() as there:
        await there.round(0.0)
        there.others.add("gpt-standby-1")  # the watch does not show it yet
        await there.round(2 * SEEN_S)
        await there.round(4 * SEEN_S)
        assert [reason for reason, _ in there.events] == ["StandbyCreated"]
        assert there.pods.shown()["problem"] == ""


async def test_a_standby_that_is_not_scheduled_is_deleted_and_the_scheduler_quoted() -> None:
    async with place() as there:
        await there.round(0.0)
        assert there.standby is not None
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "no disk",
        }
        there.served.put("pods", {**there.standby, "status": {"phase": "Pending", "conditions": [condition]}})
        await there.found.known()
        await there.round(1.0)
        await there.round(PLACE_S)
        assert there.standby is not None
        await there.round(1.0 + PLACE_S)
        assert there.standby is None
        [*_, (reason, message)] = there.events
        assert reason == "StandbyNotCreated"
        assert message.endswith("pod gpt-standby-1: the scheduler found no node for it within 10 s: no disk")
        await there.round(100.0)
        assert there.standby is None, "node n3 is avoided for a while"


async def test_an_idle_standby_yields_and_none_is_created_for_a_while() -> None:
    async with place() as there:
        await there.round(0.0)
        uid = there.run("n3")
        await there.round(SEEN_S + 1)
        [idle] = there.pods.idle()
        assert (idle.uid, idle.node) == (uid, "n3")
        assert await idle.give_way(read_pod_needs(pod("w", "3")), "cpu")
        assert there.standby is None
        assert there.events[-1] == (
            "StandbyYielded",
            "standby gpt-standby-1 on node n3 yields to pod team/w, which lacks cpu",
        )
        assert "yielded to pod team/w" in there.pods.shown()["problem"]
        assert not await idle.give_way(read_pod_needs(pod("w", "3")), "cpu"), "it is gone already"


async def test_a_standby_that_trained_is_not_deleted_while_the_last_checkpoint_is_saved() -> None:
    async with place() as there:
        await there.round(0.0)
        there.run("n3")
        active = next(each.member for each in there.members() if each.is_standby)
        saving = replace(there.memory, phase="saving", placement=(there.memory.placement[0], active))
        stopping, ended = replace(saving, phase="stopping"), replace(saving, phase="ended")
        for number, there.memory in enumerate((saving, stopping, ended)):
            await there.round(2 * number * END_S)
            await there.round(2 * number * END_S + END_S - 1)
            assert there.standby is not None, there.memory.phase
        await there.round(5 * END_S)
        assert there.standby is None, "its pod does not end"


async def test_a_standby_with_ranks_or_of_a_group_that_recovers_does_not_yield() -> None:
    async with place() as there:
        await there.round(0.0)
        there.run("n3")
        await there.round(SEEN_S + 1)
        [idle] = there.pods.idle()
        calm = there.memory
        active = next(each.member for each in there.members() if each.is_standby)
        for memory in (
            replace(calm, settled=False),
            replace(calm, phase="forming"),
            replace(calm, stop="graceful"),
            replace(calm, placement=(calm.placement[0], active)),
        ):
            there.memory = memory
            assert there.pods.idle() == []
            assert not await idle.give_way(read_pod_needs(pod("w", "3")), "cpu")
        there.memory, there.leads_s = calm, 0.0
        assert not await idle.give_way(read_pod_needs(pod("w", "3")), "cpu"), "another supervisor may lead"
        assert there.standby is not None


async def test_a_standby_does_not_yield_while_a_member_with_ranks_is_about_to_end() -> None:
    async with place() as there:
        await there.round(0.0)
        there.run("n3")
        await there.round(SEEN_S + 1)
        [idle] = there.pods.idle()
        drained = there.served.objects["pods", "team", "gpt-1"]
        condition = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
        there.served.put("pods", {**drained, "status": {**drained["status"], "conditions": [condition]}})
        assert there.pods.idle() == []
        assert not await idle.give_way(read_pod_needs(pod("w", "3")), "cpu")
        assert there.standby is not None
        there.memory = replace(there.memory, placement=there.memory.placement[1:])
        assert len(there.pods.idle()) == 1, "a member without ranks needs no standby"


async def test_a_standby_gets_no_ranks_from_before_its_deletion_is_requested() -> None:
    async with place() as there:
        await there.round(0.0)
        uid = there.run("n3")
        await there.round(SEEN_S + 1)
        [idle] = there.pods.idle()
        leaving = idle.give_way(read_pod_needs(pod("w", "3")), "cpu")
        deletion = asyncio.ensure_future(leaving)
        await asyncio.sleep(0)
        assert there.withdrawn == {uid}, "no decision of the job comes between the look at its ranks and this"
        assert await deletion
        assert there.asked_before == len(there.served.requests) - 1
        assert there.withdrawn == {uid}, "the watch may show it for some time"


async def test_a_standby_whose_deletion_is_refused_may_get_ranks_again() -> None:
    async with place() as there:
        await there.round(0.0)
        there.run("n3")
        await there.round(SEEN_S + 1)
        [idle] = there.pods.idle()
        asked = len(there.served.requests)
        there.served.faults.append(403)
        with pytest.raises(ApiError):
            await idle.give_way(read_pod_needs(pod("w", "3")), "cpu")
        assert (there.asked_before, there.withdrawn) == (asked, set())


async def test_a_standby_whose_deletion_is_uncertain_gets_ranks_again_once_it_would_be_seen() -> None:
    async with place() as there:
        await there.round(0.0)
        uid = there.run("n3")
        there.policy = replace(there.policy, standby=0)
        there.served.faults.append(503)
        await there.round(SEEN_S)
        assert there.withdrawn == {uid}
        await there.round(SEEN_S * 1.5)
        assert there.withdrawn == {uid}
        there.policy = replace(there.policy, standby=1)
        await there.round(SEEN_S * 2)
        assert there.withdrawn == set()


async def test_a_standby_that_gets_ranks_while_its_deletion_is_prepared_stays() -> None:
    async with place() as there:
        await there.round(0.0)
        there.run("n3")
        there.policy = replace(there.policy, standby=0)
        planned = there.needs()
        active = next(each.member for each in there.members() if each.is_standby)
        there.memory = replace(there.memory, placement=(there.memory.placement[0], active))
        await there.pods._round(planned, SEEN_S)
        assert there.standby is not None


async def test_what_standbys_reserve_is_shown_and_outlives_the_leader() -> None:
    async with place() as there:
        await there.round(0.0)
        there.run("n3")
        await there.round(20.0)
        await there.round(1800.0)
        shown = there.pods.shown()
        assert shown["pods"] == [{"name": "gpt-standby-1", "node": "n3", "state": "idle"}]
        assert (shown["wanted"], shown["gpus"], shown["cores"]) == (1, 0, "2")
        assert (shown["gpuHours"], shown["coreHours"]) == ("0", "1")
        later = Place(there.served, there.found)
        later.pods.restore(shown)
        assert later.pods.shown()["coreHours"] == "1"


@pytest.mark.parametrize(
    ("wanted", "has_standby", "pauses"),
    [(0, False, [POLL_S, IDLE_POLL_S, IDLE_POLL_S]), (1, False, [POLL_S] * 3), (0, True, [POLL_S] * 3)],
)
async def test_a_job_without_standbys_is_looked_at_less_often(
    monkeypatch: pytest.MonkeyPatch, wanted: int, has_standby: bool, pauses: list[float]
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) > 2:
            raise asyncio.CancelledError

    async def no_round(needs: StandbyNeeds, now_s: float) -> None:
        pass

    async with place() as there:
        await there.round(0.0)
        if has_standby:
            there.run("n3")
        else:
            there.others.add("gpt-standby-1")
        there.policy = replace(there.policy, standby=wanted)
        monkeypatch.setattr(there.pods, "_round", no_round)
        monkeypatch.setattr(standby_pods, "asyncio", SimpleNamespace(sleep=sleep))
        with pytest.raises(asyncio.CancelledError):
            await there.pods.run()
    assert slept == pauses
    assert max(pauses) <= 5, "a job that a user gives a standby gets it soon"
