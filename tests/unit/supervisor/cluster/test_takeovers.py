"""A job keeps its pods, size and settings under one leader after another, whatever changes around it."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from holdfast.process import event_loop
from holdfast.protocol.member_messages import ListedCheckpoint, StorageListing
from supervisor.cluster import job_takeover, jobs, run_summary, supervised_job
from supervisor.cluster.supervised_job import SupervisedJob
from supervisor.controller import reported_storage
from supervisor.kubernetes import object_cache
from supervisor.store.run_lead import Deposed
from tests.unit.supervisor.cluster import test_jobs
from tests.unit.supervisor.cluster.adoption.workloads import Json, reference_to
from tests.unit.supervisor.cluster.api_server import ServedObjects, accept_the_rest
from tests.unit.supervisor.cluster.simulated_member import SimulatedPod
from tests.unit.supervisor.cluster.test_jobs import Place, owner

NOTHING = StorageListing(1)
STATUS = {"name": "train", "state": {"running": {}}, "restartCount": 0, "containerID": "c"}
RUNNING = {"phase": "Running", "containerStatuses": [STATUS]}
SETTINGS = {"checkpoints": "hostpath:///kept", "grace": "9s"}
EITHER_LEADER = pytest.mark.parametrize("leader", ["the same", "another"])


@dataclass
class Cluster(Place):
    """A cluster with one job, whose pods connect to the present leader."""

    by: Json = field(default_factory=lambda: owner(completions=2))
    found: dict[int, Json] = field(default_factory=dict)  # the pods, by number
    sidecars: dict[int, SimulatedPod] = field(default_factory=dict)
    url: Any = None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    storage: StorageListing = NOTHING  # what all members list
    tells_pods: bool = False  # whether the owner's controller writes the size into new pods, as PET_NNODES

    def scale(self, size: int) -> None:
        self.by = owner(completions=size, uid=self.by["metadata"]["uid"])
        self.served.put("jobs", self.by)

    async def create(self, number: int, nproc: int = 1) -> SimulatedPod:
        """Create a running pod of the owner, and connect its sidecar."""
        pod = test_jobs.member(number, self.by, **SETTINGS)
        if self.tells_pods:
            annotations = pod["metadata"]["annotations"]
            record = json.loads(annotations["holdfast.dev/injected"])
            record["members"] = self.by["spec"]["completions"]
            annotations["holdfast.dev/injected"] = json.dumps(record)
        pod["metadata"]["uid"] = f"{len(self.served.requests):08x}-{number}-{id(pod)}"
        self.found[number] = self.add({**pod, "status": RUNNING})
        made = self.sidecars[number] = SimulatedPod(pod["metadata"]["name"])
        made.storage = self.storage
        uid = pod["metadata"]["uid"]
        await self.stack.enter_async_context(made.connecting(self.url / uid))
        return made

    def annotate(self, number: int, **annotations: str) -> None:
        found = copy.deepcopy(self.found[number])
        found["metadata"]["annotations"] |= {f"holdfast.dev/{k}": text for k, text in annotations.items()}
        self.found[number] = self.served.put("pods", found)

    def remove(self, number: int) -> None:
        metadata = self.found.pop(number)["metadata"]
        del self.sidecars[number]
        self.served.remove("pods", metadata["namespace"], metadata["name"])

    @asynccontextmanager
    async def leading(self) -> AsyncIterator[None]:
        """Have another process lead."""
        registry = self.begin()
        work = (self.pods.run(), self.supervisions.run(), self.events.run(), registry.run())
        running = asyncio.create_task(event_loop.until_one_ends(*work))
        try:
            yield
        finally:
            await event_loop.end([running])

    @asynccontextmanager
    async def terms(self, leader: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Have a process lead, and yield a function that replaces it if `leader` is "another"."""
        async with AsyncExitStack() as leaders:
            await leaders.enter_async_context(self.leading())

            async def next_term() -> None:
                if leader == "another":
                    await leaders.aclose()
                    await leaders.enter_async_context(self.leading())

            yield next_term

    @property
    def only(self) -> SupervisedJob:
        (job,) = self.jobs.jobs.values()
        return job

    @property
    def status(self) -> Json:
        found: Json = self.served.objects.get(("supervisions", "team", "llama"), {}).get("status", {})
        return found

    async def form(self) -> None:
        """Create the pods, form the group, and make it do a step."""
        self.served.put("jobs", self.by)
        for number in range(2):
            await self.create(number)
        for each in self.sidecars.values():
            await each.until_formed(1)
        await self.until_training(1)

    async def until_training(self, generation: int) -> None:
        """Make all ranks do steps in `generation`, and have a checkpoint of the third one."""
        members = [each for each in self.sidecars.values() if each.orders and each.order.ranks]
        for each in members:
            await each.until_formed(generation)
        kept = ListedCheckpoint("step-00000003", 3, 1, len(members), created=1.0)
        self.storage = StorageListing(2, checkpoints=(kept,), generation=1)
        for each in members:
            each.storage = self.storage
            await each.train(3 + generation)
            await each.until_settled()
        await self.until_listed()
        await self.served.until(lambda: self.status.get("phase") == "running")
        await self.served.until(lambda: "memory" in self.status)

    async def until_listed(self) -> None:
        """Return once the leader knows the checkpoint that the members list."""

        await self.until(
            lambda: any(
                each.run and each.run.checkpoints.stored.checkpoints for each in self.jobs.jobs.values()
            )
        )

    async def until_led(self) -> SupervisedJob:
        """Return the job once all of its members obey the present leader."""
        await self.until(lambda: len(self.jobs.jobs) == 1 and self.only.run is not None)
        assert self.only.run is not None
        for each in self.sidecars.values():
            await each.until_obeying(self.only.run.lead.epoch)
        return self.only

    def reasons(self) -> set[str]:
        return {each["reason"] for each in self.served.events if "reason" in each}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((jobs, "RETRY_S"), (object_cache, "RETRY_S"), (object_cache, "FRESH_S")):
        monkeypatch.setattr(module, name, 0.02)
    monkeypatch.setattr(jobs, "GATHER_S", 0.001)
    monkeypatch.setattr(reported_storage, "POLL_S", 0.02)
    for name in ("POLL_S", "RETRY_S", "CALM_S"):
        monkeypatch.setattr(supervised_job, name, 0.02)
    monkeypatch.setattr(job_takeover, "RETRY_S", 0.02)
    for name in ("SUMMARY_S", "SPACING_S", "RETRY_S"):
        monkeypatch.setattr(run_summary, name, 0.02)


@pytest.fixture
async def there(tmp_path: Path) -> AsyncIterator[Cluster]:
    served = ServedObjects()
    async with served.serving() as server:
        cluster = Cluster(served, server, tmp_path)

        async def serve(request: web.Request) -> web.StreamResponse:
            uid = request.match_info["uid"]
            job = cluster.jobs.job_of(uid)
            return await job.serve(request, uid) if job is not None else web.Response(status=503)

        app = web.Application()
        app.router.add_get("/{uid}", serve)
        async with TestServer(app) as members:
            cluster.url = members.make_url("/")
            async with cluster.stack:
                yield cluster
            await accept_the_rest()


def _wrong_setting(there: Cluster) -> None:
    there.annotate(0, grace="soon")


def _other_number(there: Cluster) -> None:
    there.annotate(1, members="3")


def _no_number(there: Cluster) -> None:
    there.annotate(1, members="x")


def _unknown_annotation_on_all(there: Cluster) -> None:
    for number in there.found:
        there.annotate(number, **{"snapshot-evry": "5"})


def _orphaned(there: Cluster) -> None:
    there.served.remove("jobs", "team", "llama")
    for number, pod in there.found.items():
        found = copy.deepcopy(pod)
        del found["metadata"]["ownerReferences"]
        there.found[number] = there.served.put("pods", found)


def _adopted_by_another_owner_of_the_name(there: Cluster) -> None:
    _orphaned(there)
    there.by = there.served.put("jobs", owner(completions=2, uid="another"))
    for number, pod in there.found.items():
        found = copy.deepcopy(pod)
        found["metadata"]["ownerReferences"] = [reference_to(there.by)]
        there.found[number] = there.served.put("pods", found)


def _owner_unreadable(there: Cluster) -> None:
    there.served.broken["jobs"] = 403


def _owner_scaled_up(there: Cluster) -> None:
    there.scale(3)


def _owner_scaled_down(there: Cluster) -> None:
    there.scale(1)


CHANGES = [
    _wrong_setting,
    _other_number,
    _no_number,
    _unknown_annotation_on_all,
    _orphaned,
    _adopted_by_another_owner_of_the_name,
    _owner_unreadable,
    _owner_scaled_up,
    _owner_scaled_down,
]


@pytest.mark.parametrize("change", CHANGES)
async def test_a_run_keeps_its_pods_and_size_under_each_of_several_leaders(
    there: Cluster, change: Callable[[Cluster], None]
) -> None:
    async with there.leading():
        await there.form()
    change(there)
    for _ in range(2):
        async with there.leading():
            job = await there.until_led()
            for _ in range(3):
                await there.jobs.reconcile()
            assert there.only is job
            assert len(job.backend.pods) == 2
            assert job.run is not None
            assert (job.run.policy.members, job.run.policy.grace_s) == (2, 9.0)
            assert {each.generation for each in there.sidecars.values()} == {1}, "nobody was restarted"
    async with there.leading():
        await there.until_led()
        await there.sidecars[1].end_rank(1)
        await there.until_training(2)
        assert there.only.run is not None
        assert len(there.only.run.memory.placement) == 2
        assert there.sidecars[0].order.launch is not None
        assert there.sidecars[0].order.launch.world_size == 2


@EITHER_LEADER
async def test_a_run_of_an_owner_that_was_scaled_up_has_the_additional_pod_as_a_standby(
    there: Cluster, leader: str
) -> None:
    async with there.terms(leader) as next_term:
        await there.form()
        there.scale(3)
        third = await there.create(2)
        await third.until(lambda: third.orders)
        await next_term()
        await there.until_led()
        await there.served.until(lambda: "SizeKept" in there.reasons())
        there.remove(1)
        await third.until_formed(2)
        await there.until_training(2)
        assert there.only.run is not None
        assert [name.partition(".")[0] for name in there.only.run.memory.placement] == ["llama-0", "llama-2"]


@EITHER_LEADER
async def test_a_controller_that_tells_new_pods_the_size_of_the_scaled_owner_can_replace_pods(
    there: Cluster, leader: str
) -> None:
    there.tells_pods = True
    async with there.terms(leader) as next_term:
        await there.form()
        there.scale(3)
        there.remove(1)
        await there.served.until(lambda: there.status.get("message") == "1 of 2 members are running")
        await there.served.until(lambda: "SizeKept" in there.reasons())
        assert "ChangeIgnored" not in there.reasons()
        again = await there.create(1)
        await again.until_formed(2)
        await next_term()
        await there.until_training(2)
        assert there.only.run is not None
        assert len(there.only.run.memory.placement) == 2


async def test_a_job_that_was_deleted_is_not_begun_again_for_its_last_pods(there: Cluster) -> None:
    """The next job of this name would find the deleted one writing to its resource."""
    async with there.leading():
        await there.form()
        (deleted,) = there.jobs.jobs.values()
        there.served.remove("jobs", "team", "llama")
        there.served.remove("supervisions", "team", "llama")
        for found in there.found.values():
            metadata = {**found["metadata"], "deletionTimestamp": "2026-11-26T00:00:00Z"}
            there.served.put("pods", {**found, "metadata": metadata, "status": {"phase": "Failed"}})
        await there.until(lambda: not there.jobs.jobs)
        for _ in range(3):
            await there.jobs.reconcile()
        assert not there.jobs.jobs
        assert ("supervisions", "team", "llama") not in there.served.objects
        for number in (0, 1):
            there.remove(number)
        there.by, there.storage = owner(completions=2, uid="uid-of-the-next"), NOTHING
        there.served.put("jobs", there.by)
        for number in range(2):
            await there.create(number)
        for each in there.sidecars.values():
            await each.until_formed(1)
        assert there.only.key.uid == "uid-of-the-next"
        assert deleted._records is not None
        with pytest.raises(Deposed):
            await deleted._records.write({"message": "of the deleted job"})
        assert there.status.get("message") != "of the deleted job"


@EITHER_LEADER
async def test_a_run_of_an_owner_that_was_scaled_down_waits_until_it_is_scaled_back(
    there: Cluster, leader: str
) -> None:
    async with there.terms(leader) as next_term:
        await there.form()
        there.scale(1)
        there.remove(1)
        await there.served.until(lambda: there.status.get("phase") == "securing")
        await next_term()
        await there.until_led()
        await there.served.until(lambda: "SizeKept" in there.reasons())
        assert there.status["phase"] == "securing"
        there.scale(2)
        again = await there.create(1)
        await again.until_formed(2)
        await there.until_training(2)


@EITHER_LEADER
async def test_a_job_whose_owner_is_scaled_before_it_trains_starts_with_the_new_size(
    there: Cluster, leader: str
) -> None:
    async with there.terms(leader) as next_term:
        there.scale(4)
        for number in range(2):
            await there.create(number)
        await there.until_led()
        await there.served.until(lambda: there.status.get("message") == "2 of 4 members ready")
        there.scale(2)
        await next_term()
        await there.sidecars[1].until_formed(1)
        await there.until_training(1)
        await there.until_led()
        assert there.only.run is not None
        assert there.only.run.memory.world_size == 2
        assert there.served.supervision()["spec"]["members"] == 2


async def test_a_run_none_of_whose_pods_is_left_makes_way_for_pods_of_another_size(there: Cluster) -> None:
    async with there.leading():
        await there.form()
    for number in (0, 1):
        there.remove(number)
    there.scale(3)
    there.storage = NOTHING
    for number in range(3):
        await there.create(number)
    async with there.leading():
        await there.until(
            lambda: there.jobs.jobs and there.only.run and there.only.run.memory.world_size == 3
        )
        assert there.served.supervision()["spec"]["members"] == 3


async def test_a_job_that_waits_for_members_keeps_its_pods_under_the_next_leader(there: Cluster) -> None:
    async with there.leading():
        there.scale(2)
        await there.create(0)
        await there.until_led()
        await there.served.until(lambda: there.status.get("message") == "1 of 2 members ready")
        _wrong_setting(there)
    async with there.leading():
        job = await there.until_led()
        assert (len(job.backend.pods), job.group.members) == (1, 2)


async def test_settings_that_change_apply_from_the_next_run_on_whoever_leads(there: Cluster) -> None:
    async with there.leading():
        await there.form()
    for number in (0, 1):
        there.annotate(number, grace="11s")
    for _ in range(2):
        async with there.leading():
            job = await there.until_led()
            await there.until(lambda: there.only.group.policy.grace_s == 11.0)
            assert job.run is not None
            assert job.run.policy.grace_s == 9.0
            assert there.served.supervision()["spec"]["settings"]["grace"] == "9s"


async def test_another_pod_under_the_name_of_a_member_is_not_that_member(there: Cluster) -> None:
    async with there.leading():
        await there.form()
    there.remove(1)
    there.annotate(0, grace="soon")
    forged = copy.deepcopy(there.found[0])
    forged["metadata"] |= {"name": "llama-1", "uid": "ffffffff-1"}
    del forged["metadata"]["ownerReferences"]
    there.served.put("pods", forged)
    async with there.leading():
        await there.until(lambda: there.jobs.jobs)
        await there.served.until(lambda: ("NotSupervised", "llama-1") in _about(there))
        assert [each.name for each in there.only.backend.pods.values()] == ["llama-0"]


async def test_a_supervision_captures_no_pods_of_another_namespace(there: Cluster) -> None:
    async with there.leading():
        await there.form()
    stolen = copy.deepcopy(there.served.supervision())
    stolen["metadata"] |= {"namespace": "thief", "uid": "stolen"}
    there.served.put("supervisions", stolen)
    async with there.leading():
        await there.until_led()
        await there.jobs.reconcile()
        assert [key.namespace for key in there.jobs.jobs] == ["team"]
        assert len(there.only.backend.pods) == 2


@pytest.mark.parametrize(
    "claimed",
    [
        {"kind": "Job", "name": "gpt", "uid": "uid-job-gpt"},
        {"kind": "Job", "name": "llama", "uid": "../x"},
        {"kind": 3, "name": "llama", "uid": "uid-1"},
        {"kind": "Job", "name": "lla", "uid": "uid-job-gpt"},
    ],
)
async def test_a_supervision_whose_owner_was_edited_moves_its_pods_to_no_other_job(
    there: Cluster, claimed: Json
) -> None:
    async with there.leading():
        await there.form()
    there.served.change(spec={"owner": {"apiVersion": "batch/v1", **claimed}})
    there.served.put("jobs", other := owner("gpt", completions=1))
    there.add({**test_jobs.member(0, other), "status": RUNNING})
    async with there.leading():
        await there.until(lambda: len(there.jobs.jobs) == 2)
        for _ in range(3):
            await there.jobs.reconcile()
        pods = {key.name: len(job.backend.pods) for key, job in there.jobs.jobs.items()}
        assert pods == {"llama": 2, "gpt": 1}


async def test_a_run_that_another_supervisor_took_over_keeps_its_pods_when_this_one_continues_it(
    there: Cluster,
) -> None:
    async with there.leading():
        await there.form()
        before = there.only
        _wrong_setting(there)
        there.served.change(status={"epoch": 50})
        await there.until(lambda: there.jobs.jobs and there.only is not before)
        job = await there.until_led()
        assert len(job.backend.pods) == 2
        assert job.run is not None
        assert job.run.lead.epoch > 50


def _about(there: Cluster) -> set[tuple[str, str]]:
    return {(reason, name) for reason, name, _ in there.about_pods()}
