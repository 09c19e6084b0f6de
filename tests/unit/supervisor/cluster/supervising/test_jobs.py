"""All jobs of a cluster: which pods belong together, and which resource describes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from holdfast.process import event_loop
from supervisor.admission import pod_layout
from supervisor.cluster import jobs, supervised_job
from supervisor.cluster.jobs import MEMBERS, PODS, ClusterJobs, OwnerCache
from supervisor.cluster.pods import PodGroup
from supervisor.cluster.supervised_job import ClusterContext, SupervisedJob
from supervisor.cluster.supervision import SUPERVISIONS
from supervisor.kubernetes.client import ApiServer
from supervisor.kubernetes.events import EventRecorder
from supervisor.kubernetes.watch import Mirror
from tests.unit.supervisor.cluster.supervising.api_server import LIMIT_S, ServedObjects
from tests.unit.supervisor.cluster.workloads import COMPLETION, Json, made, pod

LABELS = {pod_layout.MEMBER_LABEL: pod_layout.IS_MEMBER}


class ObservedJobs(ClusterJobs):
    """Says when it has looked at everything once more."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.round = asyncio.Event()

    async def reconcile(self) -> None:
        await super().reconcile()
        self.round.set()
        self.round = asyncio.Event()


@dataclass
class Place:
    """A cluster, its mirrors, and the registry of its jobs."""

    served: ServedObjects
    server: ApiServer
    directory: Path
    groups: list[PodGroup] = field(default_factory=list)
    changes: int = 0

    def begin(self) -> ObservedJobs:
        changed = asyncio.Event()
        self.pods = Mirror(self.server, PODS, lambda *_: changed.set(), labels=MEMBERS)
        self.supervisions = Mirror(self.server, SUPERVISIONS, lambda *_: changed.set())
        self.events = EventRecorder(self.server, "holdfast-supervisor", "s-1")
        self.jobs = ObservedJobs(self.server, self.pods, self.supervisions, self.events, self._make)
        self.jobs.changed = changed
        return self.jobs

    def _make(self, group: PodGroup) -> SupervisedJob:
        self.groups.append(group)
        context = ClusterContext(
            self.server, self.events, self.directory, 1, b"secret", lambda: (0.0, 0.0), lambda *_: None
        )
        return SupervisedJob(context, group)

    async def until(self, condition: Callable[[], object]) -> None:
        """Return once `condition` holds, which is tried after every look of the registry."""

        async def wait() -> None:
            while not condition():
                await self.jobs.round.wait()

        await asyncio.wait_for(wait(), LIMIT_S)

    def add(self, found: Json) -> Json:
        found["metadata"].setdefault("namespace", "team")
        found["metadata"]["labels"] = {**found["metadata"].get("labels", {}), **LABELS}
        return self.served.put("pods", found)

    def job(self, name: str, uid: str = "") -> SupervisedJob:
        (found,) = [each for key, each in self.jobs.jobs.items() if key.name == name and uid in ("", key.uid)]
        return found


@asynccontextmanager
async def place(directory: Path) -> AsyncIterator[Place]:
    """Give a cluster whose registry runs."""
    served = ServedObjects()
    async with served.serving() as server:
        there = Place(served, server, directory)
        registry = there.begin()
        work = (there.pods.run(), there.supervisions.run(), there.events.run(), registry.run())
        running = asyncio.create_task(event_loop.until_one_ends(*work))
        try:
            yield there
        finally:
            await event_loop.end([running])


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "AGAIN_S", 0.02)
    monkeypatch.setattr(jobs, "GATHER_S", 0.001)
    monkeypatch.setattr(supervised_job, "AGAIN_S", 0.02)


def owner(name: str = "llama", completions: int = 2, kind: str = "Job", **given: Any) -> Json:
    found = made("batch/v1", kind, name, {"completions": completions, "parallelism": completions})
    found["metadata"].update(given)
    return found


def member(number: int, by: Json, **annotations: str) -> Json:
    name = f"{by['metadata']['name']}-{number}"
    labels = {COMPLETION: str(number)}
    notes = {COMPLETION: str(number), **{f"holdfast.dev/{key}": text for key, text in annotations.items()}}
    return pod(name, by, labels, notes, nproc=1)


async def test_pods_of_one_owner_are_one_job(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        first, second = owner(), owner("gpt", completions=1)
        for each in (first, second):
            there.served.put("jobs", each)
        for number in (1, 0):
            there.add(member(number, first, grace="9s"))
        there.add(member(0, second))
        await there.served.until(lambda: there.served.objects.get(("supervisions", "team", "gpt")))
        await there.served.until(lambda: there.served.objects.get(("supervisions", "team", "llama")))
        await there.served.until(lambda: len(there.job("llama").backend.pods) == 2)
        job = there.job("llama")
        assert (job.group.members, job.group.nproc, job.group.policy.grace_s) == (2, 1, 9.0)
        assert job.group.settings == {"grace": "9s"}
        assert [each.name for each in job.group.pods] == ["llama-0", "llama-1"], (
            "in the order of their numbers"
        )
        assert job.group.policy.checkpoint_every_s == 0.0, "each pod has a storage of its own"
        uid = job.group.pods[0].uid
        await there.served.until(lambda: there.jobs.job_of(uid) is job)
        assert there.jobs.job_of("unknown") is None


async def test_a_pod_that_is_not_a_member_gets_an_event_with_the_reason(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        there.add(pod("alone", nproc=1))
        await there.served.until(lambda: there.served.events)
        event = there.served.events[0]
        assert (event["reason"], event["involvedObject"]["name"]) == ("NotSupervised", "alone")
        assert "neither an owner" in event["message"]
        assert there.jobs.jobs == {}


async def test_a_wrong_setting_on_a_pod_affects_only_its_job(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        first, second = owner(), owner("gpt", completions=1)
        for each in (first, second):
            there.served.put("jobs", each)
        there.add(member(0, first, grace="soon"))
        there.add(member(0, second))
        await there.served.until(lambda: there.served.objects.get(("supervisions", "team", "gpt")))
        assert [key.name for key in there.jobs.jobs] == ["gpt"]


async def test_a_user_stops_a_job_through_its_resource(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        there.served.put("jobs", by := owner())
        there.add(member(0, by))
        await there.served.until(lambda: there.served.objects.get(("supervisions", "team", "llama")))
        there.served.change(spec={"stop": "graceful"})
        await there.until(lambda: there.job("llama").backend.asked == "graceful")


async def test_the_resource_of_a_deleted_owner_does_not_affect_the_next_owner_of_that_name(
    tmp_path: Path,
) -> None:
    """A job is stopped, deleted, and created again under its name, before its resource is collected."""
    async with place(tmp_path) as there:
        spec = {"stop": "now", "owner": {"kind": "Job", "uid": "an older one"}}
        there.served.put("supervisions", {"metadata": {"namespace": "team", "name": "llama"}, "spec": spec})
        there.served.put("jobs", by := owner())
        there.add(member(0, by))
        await there.until(lambda: there.jobs.jobs)
        await there.jobs.reconcile()
        job = there.job("llama")
        assert (job.backend.asked, job.was_seen) == ("", False)
        there.served.remove("supervisions", "team", "llama")
        await there.served.until(lambda: there.served.objects.get(("supervisions", "team", "llama")))
        await there.until(lambda: job.was_seen)
        assert there.job("llama") is job, "the deletion was not that of its own resource"
        assert not job.backend.asked


async def test_owners_of_two_kinds_with_one_name_are_two_jobs_with_two_resources(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        spec = {"stop": "now", "owner": {"kind": "PyTorchJob", "uid": "uid-other"}}
        there.served.put("supervisions", {"metadata": {"namespace": "team", "name": "llama"}, "spec": spec})
        there.served.put("jobs", by := owner())
        there.add(member(0, by))
        await there.served.until(lambda: there.served.objects.get(("supervisions", "team", "llama-job")))
        job = there.job("llama")
        await there.until(lambda: job.was_seen)
        assert not job.backend.asked
        there.served.change("llama-job", spec={"stop": "graceful"})
        await there.until(lambda: job.backend.asked == "graceful")


async def test_a_job_whose_resource_is_deleted_is_supervised_from_the_start(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        there.served.put("jobs", by := owner())
        there.add(member(0, by))
        await there.served.until(lambda: there.served.objects.get(("supervisions", "team", "llama")))
        before = there.job("llama")
        await there.until(lambda: before.was_seen)
        there.served.remove("supervisions", "team", "llama")
        await there.served.until(lambda: there.served.objects.get(("supervisions", "team", "llama")))
        assert there.job("llama") is not before
        assert before.backend.pods == {}


async def test_pods_that_are_deleted_with_their_owner_keep_their_supervision_until_they_are_gone(
    tmp_path: Path,
) -> None:
    """The garbage collector deletes the resource at once, and the pods have their grace to save the state."""
    async with place(tmp_path) as there:
        there.served.put("jobs", by := owner())
        found = there.add(member(0, by))
        await there.served.until(lambda: there.served.objects.get(("supervisions", "team", "llama")))
        job = there.job("llama")
        await there.until(lambda: job.was_seen)
        found["metadata"]["deletionTimestamp"] = "2026-11-25T00:00:00Z"
        there.served.put("pods", found)
        await there.until(lambda: job.backend.is_leaving)
        there.served.remove("supervisions", "team", "llama")
        await there.until(lambda: not there.supervisions.objects)
        await there.jobs.reconcile()
        assert there.job("llama") is job
        there.served.remove("pods", "team", "llama-0")
        await there.until(lambda: not there.jobs.jobs)


async def test_an_owner_is_read_again_periodically(tmp_path: Path) -> None:
    now = [100.0]
    served = ServedObjects()
    async with served.serving() as server:
        cache = OwnerCache(server, lambda: now[0])
        served.put("jobs", by := owner(completions=2))
        found = member(0, by)
        for completions, passed_s, expected in ((2, 0.0, 2), (5, 1.0, 2), (5, jobs.OWNER_S, 5)):
            by["spec"]["completions"] = completions
            now[0] += passed_s
            cache.forget_old()
            chain = await cache.chain(found)
            assert chain.owners[0].content["spec"]["completions"] == expected


async def test_an_elastic_owner_is_read_again_even_if_the_cluster_never_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "OWNER_S", 0.05)
    monkeypatch.setattr(jobs, "AGAIN_S", 60.0)
    async with place(tmp_path) as there:
        there.served.put("jobs", by := owner(completions=1))
        there.add(member(0, by))
        await there.until(lambda: there.jobs.jobs)
        there.served.put("jobs", owner(completions=3, uid=by["metadata"]["uid"]))

        def restless() -> bool:
            there.jobs.changed.set()
            return there.job("llama").group.members == 3

        await there.until(restless)


async def test_an_owner_that_cannot_be_read_prevents_adoption(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        there.served.broken["jobs"] = 403
        there.add(member(0, owner()))
        await there.served.until(lambda: there.served.events)
        assert "Job team/llama cannot be read" in there.served.events[0]["message"]


async def test_unreachable_owners_delay_no_other_job_and_lose_no_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API of one kind may be served by something that is down. That is no statement about its pods."""
    monkeypatch.setattr(jobs, "OWNER_S", 0.02)
    async with place(tmp_path) as there:
        there.served.put("jobs", by := owner())
        first = there.add(member(0, by))
        await there.until(lambda: there.jobs.job_of(first["metadata"]["uid"]))
        there.served.broken["jobs"] = 503
        bare = pod("bare", None, {}, {"holdfast.dev/group": "bare", "holdfast.dev/members": "1"}, nproc=1)
        there.add(bare)
        await there.until(lambda: there.jobs.job_of(bare["metadata"]["uid"]))
        for _ in range(5):
            await there.jobs.reconcile()
        assert [each.name for each in there.job("llama").backend.pods.values()] == ["llama-0"]
        del there.served.broken["jobs"]
        second = there.add(member(1, by))
        await there.until(lambda: there.jobs.job_of(second["metadata"]["uid"]))
        assert len(there.job("llama").backend.pods) == 2


async def test_pods_that_the_webhook_missed_get_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "SCAN_S", 0.01)
    async with place(tmp_path) as there:
        asks = {pod_layout.INJECT: "true"}

        def put(name: str, annotations: Json | None, **rest: Json) -> None:
            metadata = {"name": name, "namespace": "team", "annotations": annotations}
            there.served.put("pods", {"metadata": metadata, **rest})

        put("refused", {**asks, pod_layout.NOT_INJECTED: "why"})
        put("never", None)
        put("over", asks, status={"phase": "Failed"})
        put("missed", asks)
        scanning = asyncio.create_task(there.jobs.find_unsupervised())
        await there.served.until(lambda: there.served.events)
        assert {each["involvedObject"]["name"] for each in there.served.events} == {"missed"}
        assert there.served.events[0]["reason"] == "NotInjected"
        await event_loop.end([scanning])


async def test_the_registry_is_cut_off_while_fewer_than_half_of_the_running_members_are_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "REACH_S", 0.0)
    async with place(tmp_path) as there:
        assert not there.jobs.is_cut_off(), "there is no member"
        running = {"containerStatuses": [{"name": "train", "state": {"running": {}}, "restartCount": 0}]}
        for name in ("llama", "gpt"):
            there.served.put("jobs", by := owner(name, completions=2))
            for number in (0, 1):
                there.add({**member(number, by), "status": {"phase": "Running", **running}})
        await there.until(lambda: sum(each.reach.running for each in there.jobs.jobs.values()) == 4)
        for count, job in enumerate(there.jobs.jobs.values()):
            assert there.jobs.is_cut_off() == (count < 1)
            for name in list(job.backend.members)[: 2 - count]:
                job._server.connection(name).connected = True
        assert not there.jobs.is_cut_off()
