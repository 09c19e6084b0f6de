"""The pods of a cluster are grouped into jobs, and each job has its resource."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from holdfast.fileio.storage_thread import StorageThread
from holdfast.process import event_loop
from supervisor.admission import pod_layout
from supervisor.cluster import job_takeover, jobs, pod_groups, run_summary, supervised_job
from supervisor.cluster.adoption.uninjected import MISSED
from supervisor.cluster.jobs import MEMBERS, ClusterJobs
from supervisor.cluster.pods import PodGroup, read_pod
from supervisor.cluster.supervised_job import ClusterContext, SupervisedJob
from supervisor.cluster.supervision.contents import SUPERVISIONS
from supervisor.kubernetes import object_cache
from supervisor.kubernetes.client import PODS, ApiServer
from supervisor.kubernetes.events import EventRecorder, api_time
from supervisor.kubernetes.watch import Mirror, ObjectName
from tests.unit.supervisor.cluster.adoption.workloads import COMPLETION, Json, made, pod
from tests.unit.supervisor.cluster.api_server import LIMIT_S, ServedObjects

LABELS = {pod_layout.MEMBER_LABEL: pod_layout.IS_MEMBER}


class ObservedJobs(ClusterJobs):
    """Signals when it has completed another round."""

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
    nodes: dict[ObjectName, Json] = field(default_factory=dict)
    changes: int = 0

    def begin(self) -> ObservedJobs:
        changed = asyncio.Event()
        self.pods = Mirror(self.server, PODS, lambda *_: changed.set(), labels=MEMBERS)
        self.supervisions = Mirror(self.server, SUPERVISIONS, lambda *_: changed.set())
        self.events = EventRecorder(self.server, "holdfast-supervisor", "s-1")
        self.jobs = ObservedJobs(
            self.server, self.pods, self.supervisions, self.events, self._make, self.nodes
        )
        self.jobs.changed = changed
        return self.jobs

    def _make(self, group: PodGroup) -> SupervisedJob:
        self.groups.append(group)
        context = ClusterContext(
            server=self.server,
            events=self.events,
            records=StorageThread("records"),
            epoch=1,
            secret=b"secret",
            lag=lambda: (0.0, 0.0),
            evict=lambda *_: None,
        )
        return SupervisedJob(context, group)

    async def until(self, condition: Callable[[], object]) -> None:
        """Return once `condition` holds. It is checked after every round of the registry."""

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

    def about_pods(self) -> list[tuple[str, str, str]]:
        """Return the reason, pod and message of every event that was created about a pod."""
        created = [each for each in self.served.events if "involvedObject" in each]
        found = [each for each in created if each["involvedObject"]["kind"] == "Pod"]
        return [(each["reason"], each["involvedObject"]["name"], each["message"]) for each in found]


@asynccontextmanager
async def place(directory: Path) -> AsyncIterator[Place]:
    """Yield a cluster with a running registry."""
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
    monkeypatch.setattr(jobs, "RETRY_S", 0.02)
    monkeypatch.setattr(jobs, "GATHER_S", 0.001)
    for module in (run_summary, job_takeover, supervised_job):
        monkeypatch.setattr(module, "RETRY_S", 0.02)
    monkeypatch.setattr(object_cache, "RETRY_S", 0.02)


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
            "pods must be in the order of their numbers"
        )
        assert job.group.policy.checkpoint_every_s == 0.0, "each pod has its own storage"
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


async def test_a_standing_reason_is_recorded_once_and_a_new_reason_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place(tmp_path) as there:
        alone = there.add(pod("alone", nproc=1))

        async def messages_of(expected: int) -> list[str]:
            """Return the recorded messages once this many exist and several more rounds have passed."""
            await there.served.until(lambda: len(there.served.events) >= expected)
            for _ in range(5):
                await there.jobs.reconcile()
            await there.events.flush(LIMIT_S)
            return [each["message"] for each in there.served.events]

        assert len(await messages_of(1)) == 1
        alone["metadata"]["annotations"]["holdfast.dev/group"] = "no name!"
        there.add(alone)
        first, second = await messages_of(2)
        assert first != second
        monkeypatch.setattr(jobs, "REMIND_S", 0.0)
        await there.jobs.reconcile()
        assert (await messages_of(3))[2] == second


async def test_a_wrong_setting_on_a_pod_affects_only_its_job(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        first, second = owner(), owner("gpt", completions=1)
        for each in (first, second):
            there.served.put("jobs", each)
        there.add(member(0, first, grace="soon"))
        there.add(member(0, second))
        await there.served.until(lambda: there.served.objects.get(("supervisions", "team", "gpt")))
        assert [key.name for key in there.jobs.jobs] == ["gpt"]


async def test_other_work_runs_between_the_slices_of_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "SLICE_S", 0.0)
    async with place(tmp_path) as there:
        there.served.put("jobs", by := owner(completions=20))
        for index in range(20):
            there.add(member(index, by))
        await there.until(lambda: there.jobs.jobs and len(there.job("llama").backend.pods) == 20)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count())
        await asyncio.sleep(0)
        before = turns
        await there.jobs.reconcile()
        made = turns - before
        await event_loop.end([counting])
        assert made >= 20


async def test_a_user_stops_a_job_through_its_resource(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        there.served.put("jobs", by := owner())
        there.add(member(0, by))
        await there.served.until(lambda: there.served.objects.get(("supervisions", "team", "llama")))
        there.served.change(spec={"stop": "graceful"})
        await there.until(lambda: there.job("llama").backend.user_stop == "graceful")


async def test_the_resource_of_a_deleted_owner_does_not_affect_the_next_owner_of_that_name(
    tmp_path: Path,
) -> None:
    """A job is stopped, deleted, and created again under its name before its resource is collected."""
    async with place(tmp_path) as there:
        spec = {"stop": "now", "owner": {"kind": "Job", "uid": "an older one"}}
        there.served.put("supervisions", {"metadata": {"namespace": "team", "name": "llama"}, "spec": spec})
        there.served.put("jobs", by := owner())
        there.add(member(0, by))
        await there.until(lambda: there.jobs.jobs)
        await there.jobs.reconcile()
        job = there.job("llama")
        assert (job.backend.user_stop, job.was_seen) == ("", False)
        there.served.remove("supervisions", "team", "llama")
        await there.served.until(lambda: there.served.objects.get(("supervisions", "team", "llama")))
        await there.until(lambda: job.was_seen)
        assert there.job("llama") is job, "another resource was deleted"
        assert not job.backend.user_stop


async def test_owners_of_two_kinds_with_one_name_are_two_jobs_with_two_resources(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        spec = {"stop": "now", "owner": {"kind": "PyTorchJob", "uid": "uid-other"}}
        there.served.put("supervisions", {"metadata": {"namespace": "team", "name": "llama"}, "spec": spec})
        there.served.put("jobs", by := owner())
        there.add(member(0, by))
        await there.served.until(lambda: there.served.objects.get(("supervisions", "team", "llama-job")))
        job = there.job("llama")
        await there.until(lambda: job.was_seen)
        assert not job.backend.user_stop
        there.served.change("llama-job", spec={"stop": "graceful"})
        await there.until(lambda: job.backend.user_stop == "graceful")


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


async def test_a_job_whose_resource_is_replaced_between_two_rounds_is_supervised_from_the_start(
    tmp_path: Path,
) -> None:
    async with place(tmp_path) as there:
        there.served.put("jobs", by := owner())
        found = there.add(member(0, by))
        await there.served.until(lambda: there.served.objects.get(("supervisions", "team", "llama")))
        before = there.job("llama")
        await there.until(lambda: before.was_seen)
        await there.served.until(lambda: there.served.supervision().get("status", {}).get("phase"))
        spec = there.served.supervision()["spec"]
        there.served.remove("supervisions", "team", "llama")
        there.served.put("supervisions", {"metadata": {"namespace": "team", "name": "llama"}, "spec": spec})
        await there.served.until(lambda: there.served.supervision().get("status", {}).get("phase"))
        await there.until(lambda: there.jobs.job_of(found["metadata"]["uid"]) not in (None, before))


async def test_a_job_that_was_taken_over_is_supervised_again_only_by_the_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_summary, "SUMMARY_S", 0.02)
    async with place(tmp_path) as there:
        there.served.put("jobs", by := owner())
        there.add(member(0, by))
        await there.served.until(lambda: there.served.objects.get(("supervisions", "team", "llama")))
        before = there.job("llama")
        await there.until(lambda: before.was_seen)
        await there.served.until(lambda: there.served.supervision().get("status", {}).get("phase"))
        there.jobs.leads = lambda: False
        there.served.change(status={"epoch": 50})
        await there.until(lambda: before.has_ended)
        for _ in range(3):
            await there.jobs.reconcile()
        assert there.job("llama") is before
        assert there.served.supervision()["status"]["epoch"] == 50
        there.jobs.leads = lambda: True
        await there.served.until(lambda: there.served.supervision()["status"]["epoch"] == 51)


@pytest.mark.parametrize("code", [403, 422])
async def test_a_job_whose_resource_is_refused_gets_an_event_and_ends_with_its_pods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(job_takeover, "REFUSED_S", 0.0)
    async with place(tmp_path) as there:
        there.served.put("jobs", by := owner(completions=1))
        await there.jobs.round.wait()  # these resources can be read, but not created
        there.served.broken["supervisions"] = code
        there.add(member(0, by))
        await there.served.until(lambda: there.served.events)
        event = there.served.events[0]
        assert (event["reason"], event["involvedObject"]["kind"]) == ("NotSupervised", "Job")
        assert "said the server" in event["message"]
        there.served.remove("pods", "team", "llama-0")
        await there.until(lambda: not there.jobs.jobs)


async def test_a_job_whose_name_another_job_has_for_long_gets_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, a batch Job and a Volcano Job of one name would have Supervisions of one name."""
    async with place(tmp_path) as there:
        by = {"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "name": "llama", "uid": "volcano"}
        there.served.put(
            "supervisions", {"metadata": {"namespace": "team", "name": "llama"}, "spec": {"owner": by}}
        )
        there.served.put("jobs", mine := owner(completions=1))
        there.add(member(0, mine))
        await there.until(lambda: there.jobs.jobs)
        assert there.served.events == [], "the resource is usually deleted soon"
        monkeypatch.setattr(job_takeover, "COLLECT_S", 0.0)
        await there.served.until(lambda: there.served.events)
        message = there.served.events[0]["message"]
        assert "belongs to batch.volcano.sh/v1alpha1 Job llama with the uid volcano" in message


async def test_pods_that_are_deleted_with_their_owner_keep_their_supervision_until_they_are_gone(
    tmp_path: Path,
) -> None:
    """The garbage collector deletes the resource immediately, while the pods use their grace to save."""
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


async def test_what_has_not_changed_is_not_read_from_the_pods_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading 2,000 pods takes a fifth of a second and blocks everything else in that time."""
    read: list[str] = []
    real = read_pod

    def noted(found: Any, container: str) -> Any:
        read.append(found["metadata"]["name"])
        return real(found, container)

    monkeypatch.setattr(pod_groups, "read_pod", noted)
    async with place(tmp_path) as there:
        first, second = owner(completions=1), owner("gpt", completions=1)
        for each in (first, second):
            there.served.put("jobs", each)
            there.add(member(0, each))
        await there.until(lambda: len(there.jobs.jobs) == 2)
        await there.served.until(lambda: there.served.objects.get(("supervisions", "team", "gpt")))
        await there.jobs.reconcile()
        read.clear()
        there.served.put("jobs", first)
        changed = there.add(member(0, second))
        await there.until(lambda: "gpt-0" in read)
        for _ in range(3):
            await there.jobs.reconcile()
        assert set(read) == {"gpt-0"}
        changed["status"] = {"phase": "Failed"}
        there.served.put("pods", {**changed, "metadata": dict(changed["metadata"])})
        await there.until(lambda: all(each.has_ended for each in there.job("gpt").backend.pods.values()))


async def test_an_elastic_owner_is_read_again_even_if_the_cluster_never_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache, "FRESH_S", 0.05)
    monkeypatch.setattr(jobs, "RETRY_S", 60.0)
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


@pytest.mark.parametrize("answer", [403, 404, 503])
async def test_owners_that_cannot_be_read_delay_no_other_job_and_lose_no_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    """The owner's kind cannot be read: its server has just started, is down, or the kind is applied again."""
    monkeypatch.setattr(object_cache, "FRESH_S", 0.02)
    async with place(tmp_path) as there:
        there.served.put("jobs", by := owner(completions=3))
        first = there.add(member(0, by))
        await there.until(lambda: there.jobs.job_of(first["metadata"]["uid"]))
        there.served.broken["jobs"] = answer
        refused = there.served.refused
        await there.served.until(lambda: there.served.refused > refused + 2)
        bare = pod("bare", None, {}, {"holdfast.dev/group": "bare", "holdfast.dev/members": "1"}, nproc=1)
        there.add(bare)
        await there.until(lambda: there.jobs.job_of(bare["metadata"]["uid"]))
        second = there.add(member(1, by))
        await there.until(lambda: there.jobs.job_of(second["metadata"]["uid"]))
        assert [each.name for each in there.job("llama").backend.pods.values()] == ["llama-0", "llama-1"]
        assert there.about_pods() == []
        there.served.broken.clear()
        third = there.add(member(2, by))
        await there.until(lambda: there.jobs.job_of(third["metadata"]["uid"]))
        assert len(there.job("llama").backend.pods) == 3


async def test_a_wrong_annotation_on_a_running_pod_changes_nothing_about_its_job(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        there.served.put("jobs", by := owner(completions=2))
        first = there.add(member(0, by, grace="9s"))
        await there.until(lambda: there.jobs.job_of(first["metadata"]["uid"]))
        job = there.job("llama")
        for key, text in (("note", "mine"), ("members", "many"), ("group", "other"), ("injected", "{")):
            there.served.events.clear()
            wrong = member(0, by, grace="9s", **{key: text})
            wrong["metadata"]["uid"] = first["metadata"]["uid"]
            there.add(wrong)
            await there.served.until(
                lambda: [each for each in there.served.events if "the job keeps" in each["message"]]
            )
            assert (job.group.policy.grace_s, len(job.backend.pods)) == (9.0, 1)
        second = there.add(member(1, by))
        await there.until(lambda: there.jobs.job_of(second["metadata"]["uid"]))
        assert [each.name for each in job.group.pods] == ["llama-0", "llama-1"]
        there.served.remove("pods", "team", "llama-0")
        await there.until(lambda: len(job.backend.pods) == 1)
        there.served.remove("pods", "team", "llama-1")
        await there.until(lambda: not job.backend.pods)


async def test_a_new_pod_that_contradicts_its_job_is_refused_and_the_others_stay(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        there.served.put("jobs", by := owner(completions=3))
        first = there.add(member(0, by))
        await there.until(lambda: there.jobs.job_of(first["metadata"]["uid"]))
        other = pod("llama-1", by, {COMPLETION: "1"}, {COMPLETION: "1"}, nproc=2)
        there.add(other)
        await there.served.until(there.about_pods)
        ((reason, name, why),) = there.about_pods()
        assert (reason, name, "3 members with 2 ranks each" in why) == ("NotSupervised", "llama-1", True), why
        job = there.job("llama")
        assert [each.name for each in job.backend.pods.values()] == ["llama-0"]
        last = there.add(member(2, by))
        await there.until(lambda: there.jobs.job_of(last["metadata"]["uid"]))
        assert (job.group.members, job.group.nproc) == (3, 1)


async def test_a_pod_whose_owner_is_gone_ends_with_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache, "FRESH_S", 0.02)
    async with place(tmp_path) as there:
        there.served.put("jobs", by := owner(completions=1))
        found = there.add(member(0, by))
        await there.until(lambda: there.jobs.job_of(found["metadata"]["uid"]))
        job = there.job("llama")
        there.served.remove("jobs", "team", "llama")
        refused = there.served.refused
        await there.served.until(lambda: there.served.refused > refused)
        found["metadata"]["deletionTimestamp"] = "2026-11-25T00:00:00Z"
        there.served.put("pods", found)
        await there.until(lambda: job.backend.is_leaving)
        there.served.remove("pods", "team", "llama-0")
        await there.until(lambda: not job.backend.pods)


async def test_pods_of_an_owner_that_is_replaced_under_its_name_stay_in_their_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting an owner without its pods removes their references to it."""
    monkeypatch.setattr(object_cache, "FRESH_S", 0.02)
    async with place(tmp_path) as there:
        there.served.put("jobs", by := owner(completions=1))
        found = there.add(member(0, by))
        await there.until(lambda: there.jobs.job_of(found["metadata"]["uid"]))
        job = there.job("llama")
        there.served.put("jobs", owner(completions=7, uid="another"))
        del found["metadata"]["ownerReferences"]
        there.add(found)
        await there.served.until(there.about_pods)
        assert there.about_pods()[0][0] == "ChangeIgnored"
        assert (job.group.members, len(job.backend.pods)) == (1, 1)


async def test_pods_that_are_not_injected_get_an_event_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "SCAN_S", 0.01)
    async with place(tmp_path) as there:
        asks = {pod_layout.INJECT: "true"}
        refused = {**asks, pod_layout.NOT_INJECTED: "no command"}
        now = api_time(datetime.now(timezone.utc))

        def put(name: str, annotations: Json | None, phase: str = "Running", created: str = now) -> None:
            metadata = {"name": name, "namespace": "team", "annotations": annotations}
            metadata["creationTimestamp"] = created
            there.served.put("pods", {"metadata": metadata, "status": {"phase": phase}})

        put("over", asks, "Failed", "2020-01-01T00:00:00Z")
        put("never", None)
        put("refused", refused)
        put("failed", refused, "Failed")
        put("missed", asks)
        scanning = asyncio.create_task(there.jobs.find_unsupervised())
        await there.served.until(lambda: len(there.about_pods()) >= 3)
        put("last", asks)  # another search has passed once this pod has an event
        await there.served.until(lambda: len(there.about_pods()) >= 4)
        assert sorted(there.about_pods()) == [
            ("NotInjected", "failed", "no command"),
            ("NotInjected", "last", MISSED),
            ("NotInjected", "missed", MISSED),
            ("NotInjected", "refused", "no command"),
        ]
        await event_loop.end([scanning])


async def test_a_registry_is_cut_off_while_most_jobs_have_lost_members_that_had_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "REACH_S", 0.0)
    async with place(tmp_path) as there:
        assert not there.jobs.is_out_of_reach("team"), "there is no member"
        running = {"containerStatuses": [{"name": "train", "state": {"running": {}}, "restartCount": 0}]}
        for name in ("llama", "gpt"):
            there.served.put("jobs", by := owner(name, completions=2))
            for number in (0, 1):
                there.add({**member(number, by), "status": {"phase": "Running", **running}})
        await there.until(lambda: sum(len(each.backend.members) for each in there.jobs.jobs.values()) == 4)
        assert not there.jobs.is_out_of_reach("team"), "no member has ever connected"
        first, second = there.jobs.jobs.values()
        lines = [job._server.connection(name) for job in (first, second) for name in job.backend.members]
        for line in lines:
            line.first_ns = 1
        assert there.jobs.is_out_of_reach("team")
        lines[0].connected = True
        assert not there.jobs.is_out_of_reach("team"), "half of the jobs are reached"


async def test_jobs_beyond_the_limit_of_their_namespace_wait_and_are_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MAX_JOBS", 1)
    async with place(tmp_path) as there:
        owners = [there.served.put("jobs", owner(name, 1)) for name in ("llama", "qwen")]
        there.add(member(0, owners[0]))
        await there.until(lambda: there.jobs.jobs)
        there.add(member(0, owners[1]))
        await there.served.until(lambda: there.about_pods())
        [(reason, name, why)] = there.about_pods()
        assert (reason, name) == ("NotSupervised", "qwen-0")
        assert "1 supervised jobs" in why
        assert [key.name for key in there.jobs.jobs] == ["llama"]
        elsewhere = member(0, there.served.put("jobs", owner("mistral", 1, namespace="another")))
        elsewhere["metadata"]["namespace"] = "another"
        there.add(elsewhere)
        await there.until(lambda: len(there.jobs.jobs) == 2)
        for plural, name in (("pods", "llama-0"), ("jobs", "llama"), ("supervisions", "llama")):
            there.served.remove(plural, "team", name)
        await there.until(lambda: any(key.name == "qwen" for key in there.jobs.jobs))


async def test_members_on_a_node_are_counted_and_asked_to_leave(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        by = owner(completions=1)
        there.served.put("jobs", by)
        found = member(0, by)
        found["spec"]["nodeName"] = "n1"
        found["status"] = {
            "phase": "Running",
            "containerStatuses": [{"name": "train", "state": {"running": {}}, "restartCount": 0}],
        }
        found = there.add(found)
        await there.until(lambda: there.jobs.job_of(found["metadata"]["uid"]))
        assert (there.jobs.members_on("n1"), there.jobs.members_on("n2")) == (1, 0)
        job = there.job("llama")
        there.jobs.leave("n2", "it is not about this job")
        assert job.backend.departures == {}
        there.jobs.leave("n1", "node n1 is quarantined")
        assert [each.why for each in job.backend.departures.values()] == ["node n1 is quarantined"]


async def test_the_jobs_look_again_once_other_verdicts_count(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        await there.until(lambda: not there.jobs.changed.is_set())
        there.jobs.heed_verdicts(frozenset())
        assert not there.jobs.changed.is_set(), "nothing is different"
        there.jobs.heed_verdicts(frozenset({"n1"}))
        assert there.jobs.changed.is_set()


async def test_a_notice_on_a_node_reaches_its_jobs(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        by = owner(completions=1)
        there.served.put("jobs", by)
        found = member(0, by)
        found["spec"]["nodeName"] = "n1"
        state = {"name": "train", "state": {"running": {}}, "restartCount": 0}
        found["status"] = {"phase": "Running", "containerStatuses": [state]}
        found = there.add(found)
        await there.until(lambda: there.jobs.job_of(found["metadata"]["uid"]))
        there.nodes[ObjectName("", "n1")] = {"metadata": {"name": "n1", "deletionTimestamp": "now"}}
        there.jobs.changed.set()
        await there.until(lambda: there.job("llama").backend.departures)
