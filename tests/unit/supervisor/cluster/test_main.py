"""The supervisor's process serves proven members, leads in one replica, and evicts pods with care."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import ssl
import sys
import time
import weakref
from asyncio import sslproto
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import ClientError, ClientSession, web
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from holdfast.process import event_loop, network
from holdfast.process.network import Door
from holdfast.protocol import codec
from supervisor.admission import pod_layout
from supervisor.cluster import jobs, main, pods, supervised_job
from supervisor.cluster.host_probe import HostProbes
from supervisor.cluster.main import ClusterSupervisor
from supervisor.cluster.pods import PodMember
from supervisor.controller.limits.incoming import MeteredConnection
from supervisor.kubernetes import certificates
from supervisor.kubernetes.identity import ReviewUnavailable, TokenRefused
from supervisor.kubernetes.leadership import LeaderProbes, Leadership, SilentLeader
from supervisor.kubernetes.lease import EarlyTakeover, LeaseLock, LeaseLost, LeaseTerms, boot_s
from supervisor.kubernetes.own_pod import OwnPod
from supervisor.kubernetes.replicas import PATH, Replicas
from supervisor.observability import cluster_metrics
from supervisor.quarantine.model import RunFault
from tests.unit.supervisor.cluster.api_server import LIMIT_S, NEVER, ServedObjects
from tests.unit.supervisor.cluster.simulated_member import SimulatedPod
from tests.unit.supervisor.cluster.test_jobs import LABELS, member, owner
from tests.unit.supervisor.job_views import launcher, progress, rank, report
from tests.unit.supervisor.nodes.test_controller import ServedNodes

ME = OwnPod("supervisor-1", "holdfast-system", "10.0.0.9")
TOKEN = "aaa.bbb.ccc"


@dataclass
class Place:
    served: ServedObjects
    supervisor: ClusterSupervisor
    client: TestClient[web.Request, web.Application]
    lock: LeaseLock

    async def connect(self, token: str = TOKEN) -> int:
        """Return the status of a member's plain request. An accepted one gets 400, as it is no WebSocket."""
        async with self.client.get("/v1/member", headers={"Authorization": f"Bearer {token}"}) as answer:
            return answer.status

    async def epoch(self) -> object:
        """Return the epoch that the process reports to another replica."""
        async with self.client.get(PATH) as answer:
            found: dict[str, object] = await answer.json()
            return found["epoch"]

    async def job_of_one_pod(self) -> None:
        """Create a job whose only pod has `TOKEN`, and return once it is supervised."""
        self.served.put("jobs", by := owner(completions=1))
        found = member(0, by)
        found["metadata"]["labels"].update(LABELS)
        found["status"] = {
            "phase": "Running",
            "containerStatuses": [{"name": "train", "state": {"running": {}}, "restartCount": 0}],
        }
        self.served.put("pods", found)
        self.served.tokens[TOKEN] = vouched(found["metadata"]["uid"])
        await self.served.until(
            lambda: self.served.objects.get(("supervisions", "team", "llama"), {}).get("status")
        )

    async def lead(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.supervisor._supervise(Leadership(self.lock, 7, 1e9)))

    async def until_leading(self) -> asyncio.Task[None]:
        """Begin to lead, and return once members are served."""
        leading = await self.lead()
        while self.supervisor._jobs is None:  # noqa: ASYNC110  it has requests to make
            await asyncio.sleep(0.001)
        return leading


@asynccontextmanager
async def place(request_s: float = 10.0, served: ServedObjects | None = None) -> AsyncIterator[Place]:
    served = served or ServedObjects()
    async with served.serving(request_s) as server:
        supervisor = ClusterSupervisor(server, ME, event_loop.Lag())
        app = web.Application()
        app.router.add_get("/v1/member", supervisor.member)
        app.router.add_get("/readyz", supervisor.ready)
        app.router.add_get(PATH, supervisor.leader)
        async with TestClient(TestServer(app)) as client:
            lock = LeaseLock(server, ME.namespace, pod_layout.SUPERVISOR_LEASE, ME.name)
            yield Place(served, supervisor, client, lock)


def vouched(uid: str, audience: str = pod_layout.AUDIENCE) -> dict[str, Any]:
    extra = {"authentication.kubernetes.io/pod-name": ["w-0"], "authentication.kubernetes.io/pod-uid": [uid]}
    user = {"username": "system:serviceaccount:team:default", "extra": extra}
    return {"authenticated": True, "audiences": [audience], "user": user}


async def test_a_token_that_proves_no_pod_is_refused() -> None:
    async with place() as there:
        leading = await there.until_leading()
        there.served.tokens["aaa.bbb.ddd"] = vouched("uid", "another audience")
        for token in ("", "nonsense", TOKEN, "aaa.bbb.ddd"):
            assert await there.connect(token) == 401
        await event_loop.end([leading])


async def test_a_member_is_refused_while_this_process_cannot_identify_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with place() as there:
        leading = await there.until_leading()
        reviewer = SlowReviewer()
        reviewer.found = ReviewUnavailable("the API server does not respond")
        reviewer.answer.set()
        monkeypatch.setattr(there.supervisor, "_reviewer", reviewer)
        assert await there.connect() == 503
        await event_loop.end([leading])


async def test_a_replica_that_does_not_lead_refuses_members_before_it_asks_the_api_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The member then tries the next address; the API server may not respond to this replica."""
    async with place() as there:
        reviewer = SlowReviewer()
        monkeypatch.setattr(there.supervisor, "_reviewer", reviewer)
        assert await there.connect() == 503
        assert reviewer.asked == 0


async def test_a_leader_serves_only_the_members_of_its_jobs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(jobs, "GATHER_S", 0.001)
    async with place() as there:
        async with there.client.get("/readyz") as answer:
            assert await answer.text() == "waits for the lease\n"
        leading = await there.lead()
        await there.job_of_one_pod()
        there.served.tokens["aaa.bbb.stranger"] = vouched("another")
        assert await there.connect() == 400, (
            "the member is accepted, but this request does not speak the protocol"
        )
        assert await there.connect("aaa.bbb.stranger") == 503
        async with there.client.get("/readyz") as answer:
            assert await answer.text() == "leads\n"
        assert await there.epoch() == 7
        assert there.served.supervision()["status"]["epoch"] == 7
        pod = SimulatedPod("w-0")
        url = there.client.make_url("/v1/member")
        async with pod.connecting(url, TOKEN):
            await pod.until(lambda: pod.orders)
        await event_loop.end([leading])
        assert await there.connect() == 503, "the supervisor does not lead any more"
        assert await there.epoch() == 0


async def test_the_metrics_say_whether_this_process_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "GATHER_S", 0.001)

    def measured(there: Place) -> list[float]:
        there.supervisor.measure()
        return [each._value.get() for each in cluster_metrics.METRICS]

    async with place() as there:
        assert measured(there) == [0, 0, 0]
        leading = await there.lead()
        await there.job_of_one_pod()
        assert measured(there) == [1, 1, 0]
        await event_loop.end([leading])
        assert measured(there) == [0, 0, 0]


async def test_what_a_job_has_seen_of_a_node_is_stored_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "GATHER_S", 0.001)
    served = ServedNodes()
    served.add("n1")
    served.configure()
    async with place(served=served) as there:
        leading = await there.lead()
        await there.job_of_one_pod()
        assert there.supervisor._jobs is not None
        [job] = there.supervisor._jobs.jobs.values()
        fault = RunFault(time.time(), why="team/llama i-0001: an ECC error of rank 0")
        for _ in range(2):  # as the next leader does
            job._context.note_run_fault("n1", fault)
        await served.until(lambda: served.record("n1").get("runs"))
        assert [each["why"] for each in served.record("n1")["runs"]] == [fault.why]
        await event_loop.end([leading])


@dataclass
class Suspicion:
    """Whether the leader's host has not answered the last probe."""

    is_suspected: bool = True


def suspect(there: Place, monkeypatch: pytest.MonkeyPatch, *, is_suspected: bool = True) -> None:
    monkeypatch.setattr(there.supervisor, "_probes", Suspicion(is_suspected))
    there.supervisor._decide()


async def test_a_member_waits_at_a_replica_that_will_probably_lead_soon(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It would otherwise try again only after up to a second."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(jobs, "GATHER_S", 0.001)
    async with place() as there:
        earlier = await there.lead()
        await there.job_of_one_pod()
        pod = SimulatedPod("w-0")
        async with pod.connecting(there.client.make_url("/v1/member"), TOKEN):
            await pod.until(lambda: pod.generation)
        await event_loop.end([earlier])
        suspect(there, monkeypatch)
        waiting = asyncio.create_task(there.connect())
        while not there.supervisor._held:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        monkeypatch.setattr(main, "MAX_HELD", 1)
        assert await there.connect() == 503, "there is room for one"
        assert not waiting.done()
        leading = await there.lead()
        assert await waiting == 400, "the member is accepted, but this request does not speak the protocol"
        assert there.supervisor._held == 0
        await event_loop.end([leading])


async def test_a_member_does_not_wait_long_at_a_replica_that_does_not_lead_after_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with place() as there:
        monkeypatch.setattr(main, "HELD_S", 0.05)
        suspect(there, monkeypatch)
        assert await there.connect() == 503
        monkeypatch.setattr(main, "HELD_S", 1e3)
        suspect(there, monkeypatch, is_suspected=False)
        assert await there.connect() == 503


class AnsweringReplicas:
    """Replicas of which the leader's host answers if `answers_now` is set."""

    def __init__(self) -> None:
        self.answers_now = False

    async def answers(self, holder: str, limit_s: float) -> bool:
        await asyncio.sleep(min(limit_s, 0.01))
        return self.answers_now

    async def rival(self, epoch: int) -> str:
        raise AssertionError

    async def end_of(self, holder: str) -> str:
        raise AssertionError


@pytest.mark.parametrize("how", ["the host answers", "the lease is not read", "the leader renews", "ends"])
async def test_a_member_is_refused_as_soon_as_the_suspicion_of_the_leader_ends(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It would otherwise lose seconds before it connects to the leader again."""
    begun: asyncio.Queue[LeaderProbes] = asyncio.Queue()
    replicas = AnsweringReplicas()

    async def wait(lock: LeaseLock, *others: Any) -> None:
        """Watch a leader whose renewal is late."""
        lock.terms = LeaseTerms(early=EarlyTakeover(probe_s=0.02))
        lock._read_s, lock._unrenewed_s = 100.0, 98.0
        await others[-1].observe("s-2_1")
        begun.put_nowait(others[-1])
        await asyncio.Event().wait()

    monkeypatch.setattr(main, "lead", wait)
    monkeypatch.setattr(main, "HELD_S", 1e3)
    async with place() as there:
        waits = asyncio.create_task(there.supervisor.lead(cast("Replicas", replicas)))
        probes = await begun.get()
        while not probes.is_suspected:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        member = asyncio.create_task(there.connect())
        while not there.supervisor._held:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if how == "the host answers":
            replicas.answers_now = True
        elif how == "the lease is not read":
            probes.note_unread()
        elif how == "the leader renews":
            await probes.observe("s-2_2")
        else:
            await probes.end()
        assert await asyncio.wait_for(member, LIMIT_S) == 503
        await event_loop.end([waits])
        await probes.end()


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_new_leader_knows_which_node_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    told: asyncio.Queue[tuple[str, float]] = asyncio.Queue()
    monkeypatch.setattr(HostProbes, "suspect", lambda _, *known: told.put_nowait(known))
    async with place() as there:
        if is_known:
            metadata = {"namespace": ME.namespace, "name": "s-0", "uid": "u"}
            there.served.put("pods", {"metadata": metadata, "spec": {"nodeName": "n7"}, "status": {}})
        now_s = there.lock.clock()
        silent = SilentLeader("s-0_0f1e2d3c-4b5a-4678-9abc-def012345678-0a1b2c3d", now_s - 3.0)
        term = Leadership(there.lock, 7, 1e9, silent)
        telling = asyncio.create_task(there.supervisor._suspect_node(term, HostProbes(lambda: ())))
        if is_known:
            node, silent_s = await asyncio.wait_for(told.get(), LIMIT_S)
            assert node == "n7"
            assert silent_s >= 3.0
        else:
            await there.served.until(lambda: there.served.refused)
        await event_loop.end([telling])
        assert told.empty()


async def test_a_leader_names_itself_before_it_has_read_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A former leader that is cut off from the API server, and the next one in line, ask for it."""
    monkeypatch.setattr(main, "HELD_S", 0.05)
    async with place() as there:
        async with there.client.get(PATH) as answer:
            assert await answer.json() == {"epoch": 0, "holder": ""}
        there.served.broken["secrets"] = 503
        leading = await there.lead()
        await there.served.until(lambda: there.served.refused)
        async with there.client.get(PATH) as answer:
            assert await answer.json() == {"epoch": 7, "holder": there.lock.holder}
        assert await there.connect() == 503, "it serves no members yet"
        del there.served.broken["secrets"]
        while there.supervisor._jobs is None:  # noqa: ASYNC110  it has requests to make
            await asyncio.sleep(0.001)
        await event_loop.end([leading])
        assert await there.epoch() == 0


async def test_a_pod_is_evicted_only_if_its_uid_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = PodMember("uid-9", "w-0", "w-0.uid-9", "n0", "c", is_running=True)
    async with place() as there:
        there.supervisor._term = Leadership(there.lock, 7, 1e9)
        there.supervisor._evict("team", lost)
        await there.served.until(lambda: there.served.evictions)
        (found,) = there.served.evictions
        assert found["metadata"] == {"name": "w-0", "namespace": "team"}
        assert found["deleteOptions"]["preconditions"]["uid"] == "uid-9"
        for code in (404, 429, 500, 409):
            there.served.faults = [code]
            await there.supervisor._evict_now("team", lost, there.supervisor._term)


async def train(
    there: Place, stack: AsyncExitStack, namespace: str, count: int, cut: str, first: int = 0
) -> list[SimulatedPod]:
    """Train a job of `count` pods, and then let the connection of one pod, or of all, break for good.

    `cut` is "one", "all", "later" (at the end of the test) or "never", for pods that never connect. `first`
    is the number of the first pod.
    """
    name = f"{namespace}-job"
    members = []
    for number in range(first, first + count):
        uid = f"{namespace}{number}".ljust(8, "0")
        written = {"version": "1", "container": "train", "nproc": 1, "members": count, "digest": ""}
        metadata = {
            "namespace": namespace,
            "name": f"{name}-{number}",
            "uid": uid,
            "labels": dict(LABELS),
            "annotations": {
                "holdfast.dev/group": name,
                "holdfast.dev/members": str(count),
                "holdfast.dev/injected": json.dumps(written),
            },
        }
        states = [{"name": "train", "state": {"running": {}}, "restartCount": 0}]
        status = {"phase": "Running", "containerStatuses": states}
        found = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status}
        there.served.put("pods", {**found, "spec": {"containers": [{"name": "train"}]}})
        there.served.tokens[f"a.b.{uid}"] = vouched(uid)
        members.append((SimulatedPod(name), f"a.b.{uid}"))
    if cut == "never":
        return []
    breaking = await stack.enter_async_context(AsyncExitStack())
    for number, (pod, token) in enumerate(members):
        lasting = cut == "later" or (cut == "one" and number)
        connecting = pod.connecting(there.client.make_url("/v1/member"), token)
        await (stack if lasting else breaking).enter_async_context(connecting)
    for pod, _ in members:
        await pod.until_settled()
        await pod.train(3)
    await breaking.aclose()
    return [pod for pod, _ in members]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(jobs, "GATHER_S", 0.001)
    monkeypatch.setattr(jobs, "REACH_S", 0.05)
    monkeypatch.setattr(pods, "MEMBER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(pods, "RESTART_S", 0.5)


async def test_a_pod_whose_launcher_refuses_the_script_ends_the_run_with_what_it_left(
    impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sidecar needs to have reached the launcher: the kubelet copies the reason into the pod's status."""
    monkeypatch.setattr(supervised_job, "POLL_S", 0.02)
    async with place() as there:
        leading = await there.lead()
        await there.job_of_one_pod()
        [(place_of, found)] = [each for each in there.served.objects.items() if each[0][0] == "pods"]
        ended = {"terminated": {"exitCode": 2, "message": "script 'trian.py' not found in /app\n"}}
        states = [{"name": "train", "state": ended, "restartCount": 0}]
        there.served.put("pods", {**found, "status": {"phase": "Failed", "containerStatuses": states}})

        def status() -> dict[str, Any]:
            known: dict[str, Any] = there.served.objects["supervisions", "team", "llama"].get("status", {})
            return known

        await there.served.until(lambda: status().get("exitCode") == 2 and status()["phase"] == "ended")
        said = "before its ranks were started: script 'trian.py' not found in /app"
        assert status()["message"] == f"pod {place_of[2]} ended with exit code 2 {said}"
        await event_loop.end([leading])


async def test_pods_that_never_connect_do_not_stop_the_evictions_of_other_users(impatient: None) -> None:
    """A NetworkPolicy keeps them away, or a user has written a member's annotations onto any pods."""
    async with place() as there, AsyncExitStack() as stack:
        leading = await there.lead()
        await train(there, stack, "tenant", 9, "never")
        await train(there, stack, "team", 3, "one")
        await there.served.until(lambda: there.served.evictions)
        assert {each["metadata"]["name"] for each in there.served.evictions} == {"team-job-0"}
        await event_loop.end([leading])


async def test_a_supervisor_that_has_lost_the_members_of_most_jobs_evicts_nobody(
    impatient: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each round asks before an eviction, which would follow in the same round if the answer were no."""
    monkeypatch.setattr(pods, "RESTART_S", 0.0)
    monkeypatch.setattr(supervised_job, "BUSY_S", 0.05)
    monkeypatch.setattr(supervised_job, "CALM_S", 0.05)
    asked: Counter[str] = Counter()
    enough = asyncio.Event()
    is_out_of_reach = jobs.ClusterJobs.is_out_of_reach

    def ask(registry: jobs.ClusterJobs, namespace: str) -> bool:
        asked[namespace] += 1
        if len(asked) == 2 and min(asked.values()) >= 5:
            enough.set()
        return is_out_of_reach(registry, namespace)

    async with place() as there, AsyncExitStack() as stack:
        leading = await there.lead()
        connections = await stack.enter_async_context(AsyncExitStack())
        await train(there, connections, "team", 3, "later")
        await train(there, connections, "tenant", 2, "later")
        monkeypatch.setattr(jobs.ClusterJobs, "is_out_of_reach", ask)
        await connections.aclose()
        await asyncio.wait_for(enough.wait(), LIMIT_S)
        assert (there.served.evictions, there.supervisor._deleting) == ([], set())
        printed = capsys.readouterr().err
        assert printed.count("evictions blocked") == 2
        assert "evicting the pod" not in printed
        await event_loop.end([leading])


def malformed_messages() -> list[str | bytes]:
    """Return messages that no sidecar sends: reports with one change, truncated reports, and junk."""
    chance = random.Random(20261125)
    good = codec.encode(report("w-0", launcher(rank(0)), progress=(progress(0, 5),))).decode()
    found: list[str | bytes] = ["", "{}", "[]", "null", "{" * 5000, b"", b"\x00" * 64, good.encode()]
    for _ in range(60):
        fields = json.loads(good)
        fields[chance.choice(list(fields))] = chance.choice([None, -1, 1 << 70, 1e308, "x" * 1000, [[]], {}])
        found.append(json.dumps(fields))
        found.append(good[: chance.randrange(len(good))])
        found.append(bytes(chance.randrange(256) for _ in range(chance.randrange(200))))
    return [*found, good + " " * codec.MAX_MESSAGE_BYTES]


async def test_malformed_messages_end_neither_the_process_nor_the_supervision_of_the_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(jobs, "GATHER_S", 0.001)
    async with place() as there:
        leading = await there.lead()
        await there.job_of_one_pod()
        url = there.client.make_url("/v1/member")
        async with ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            for message in malformed_messages():
                async with session.ws_connect(url) as socket:
                    with suppress(ConnectionError):
                        if isinstance(message, bytes):
                            await socket.send_bytes(message)
                        else:
                            await socket.send_str(message)
        pod = SimulatedPod("w-0")
        async with pod.connecting(url, TOKEN):
            await pod.until_settled()
        said = capsys.readouterr().err
        assert "report refused" in said
        assert not [word for word in ("Traceback", "failed") if word in said]
        assert not leading.done()
        await event_loop.end([leading])


async def test_large_pods_of_one_user_keep_a_leader_neither_from_its_jobs_nor_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One pod has at most about 3 MiB, and a page of 100 such pods more than any answer may have."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(jobs, "GATHER_S", 0.001)
    env = [{"name": "A", "value": "x" * 1_200_000}]
    async with place() as there:

        def add(number: int) -> None:
            metadata = {"namespace": "tenant", "name": f"p-{number}", "labels": dict(LABELS)}
            spec = {"containers": [{"name": "c", "env": env}]}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
            there.served.put("pods", {**pod, "status": {"phase": "Pending"}})

        for number in range(20):
            add(number)
        leading = await there.lead()
        await there.job_of_one_pod()
        add(20)
        assert there.supervisor._jobs is not None
        mirrored = there.supervisor._jobs._pods.objects
        await there.served.until(lambda: len(mirrored) == 22)
        assert len(json.dumps(list(mirrored.values()))) < 22 * 2_000
        await event_loop.end([leading])


@pytest.mark.parametrize("left", ["no pod", "pods that have ended"])
async def test_a_job_that_has_ended_takes_no_memory_and_is_supervised_again_with_new_pods(
    left: str, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised_job, "POLL_S", 0.01)
    monkeypatch.setattr(jobs, "RETRY_S", 0.02)
    async with place() as there, AsyncExitStack() as stack:
        leading = await there.lead()
        served = there.served
        (first,) = await train(there, stack, "team", 1, "later")
        assert there.supervisor._jobs is not None
        supervised = there.supervisor._jobs.jobs
        (job,) = supervised.values()
        await first.end_rank(0)
        await first.until_stopped()
        place_of_pod = ("pods", "team", "team-job-0")
        ended = {**served.objects[place_of_pod], "status": {"phase": "Succeeded"}}
        served.put("pods", {**ended, "metadata": dict(ended["metadata"])})
        if left == "no pod":
            served.remove("pods", "team", "team-job-0")
        await until(lambda: not (supervised or job._tasks))
        written = list(served.requests)
        await asyncio.sleep(0.2)
        assert (supervised, served.requests) == ({}, written)
        if left == "no pod":
            (second,) = await train(there, stack, "team", 1, "later", first=1)
            assert second.generation == 2
        else:  # a pod that joins those of a finished job ends as they did
            await train(there, stack, "team", 1, "never", first=1)
            second = SimulatedPod("team-job")
            url = there.client.make_url("/v1/member")
            await stack.enter_async_context(second.connecting(url, "a.b.team1000"))
            await second.until_stopped()
            assert (second.order.exit_code, second.generation) == (0, 0)
        await event_loop.end([leading])


async def until(condition: Callable[[], object]) -> None:
    """Return once `condition` holds."""
    for _ in range(2_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("not within 20 s")


@pytest.mark.parametrize("expired", [True, False], ids=["not renewed", "not leading"])
async def test_no_pod_is_evicted_without_a_confirmed_term(expired: bool) -> None:
    """Another process may be the leader, and may need the pod."""
    lost = PodMember("uid-9", "w-0", "w-0.uid-9", "n0", "c", is_running=True)
    async with place() as there:
        there.supervisor._term = Leadership(there.lock, 7, 0.0) if expired else None
        there.supervisor._evict("team", lost)
        assert not there.supervisor._deleting
        assert not there.served.evictions


async def test_every_leader_derives_the_same_secrets_of_jobs() -> None:
    async with place() as there:
        authorities = await there.supervisor._authorities.load()
        again = await there.supervisor._authorities.load()
        assert main._secret(authorities) == main._secret(again) != b""


# -- connections


async def test_a_member_that_hangs_up_is_not_logged_with_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a leader starts, many members time out and connect again."""
    logged: list[object] = []
    monkeypatch.setattr(
        logging.getLogger("aiohttp.server"), "error", lambda *given, **_: logged.append(given)
    )
    served = asyncio.Event()

    async def hung_up(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        served.set()
        raise ConnectionResetError("Cannot write to closing transport")

    app = web.Application(middlewares=[main._guard(Door(4))])
    app.router.add_get("/v1/member", hung_up)
    async with TestClient(TestServer(app)) as client:
        with pytest.raises(ClientError):
            await client.get("/v1/member")
        await served.wait()
    assert not logged


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no such buffers")
async def test_connections_with_small_buffers_carry_large_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    before: int = sslproto.SSLProtocol.max_size  # type: ignore[attr-defined]
    monkeypatch.setattr(sslproto.SSLProtocol, "max_size", before)  # restores the original
    event_loop.limit_tls_buffers()
    now = datetime.now(timezone.utc)
    authority = certificates.new_authority(now)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    leaf = certificates.new_leaf(authority, ("localhost",), ("127.0.0.1",), now)
    certificates._load_chain(server_side, leaf.chain)
    buffers: list[int] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        buffers.append(len(writer.transport._ssl_protocol._ssl_buffer))  # type: ignore[attr-defined]
        writer.write(await reader.readexactly(len(message)))
        await writer.drain()
        writer.close()

    message = bytes(range(256)) * 16_384  # 4 MiB, like the largest report
    async with await asyncio.start_server(echo, "127.0.0.1", 0, ssl=server_side) as server:
        port = server.sockets[0].getsockname()[1]
        client_side = ssl.create_default_context(cadata=authority.text)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client_side)
        writer.write(message)
        assert await reader.readexactly(len(message)) == message
        writer.close()
    assert buffers == [event_loop.TLS_BUFFER_BYTES]


async def test_an_eviction_is_given_up_when_the_term_ends() -> None:
    """Soon after that, another process may be the leader and may need the pod."""
    lost = PodMember("uid-9", "w-0", "w-0.uid-9", "n0", "c", is_running=True)
    async with place(request_s=3600.0) as there:
        there.served.faults = [NEVER]
        expires_s = boot_s() + 0.2
        there.supervisor._term = Leadership(there.lock, 7, expires_s)
        there.supervisor._evict("team", lost)
        await asyncio.wait_for(asyncio.wait(there.supervisor._deleting), LIMIT_S)


# -- the members' port


@asynccontextmanager
async def port_of(there: Place, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[int, Door]]:
    """Serve the members' port without TLS."""
    door = Door()
    runner = await main._member_app(there.supervisor, door)
    listener = network.listen_everywhere(0, network.SERVER_BACKLOG)
    accepting = asyncio.create_task(door.accept(listener, main._protocol(runner), None))
    try:
        yield listener.getsockname()[1], door
    finally:
        await event_loop.end([accepting])
        listener.close()
        await runner.cleanup()


@pytest.mark.parametrize("word", ["", "junk", TOKEN])
async def test_an_unverified_token_does_not_keep_a_connection_open(
    word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = f"Authorization: Bearer {word}\r\n" if word else ""
    async with place() as there, port_of(there, monkeypatch) as (port, door):
        there.served.tokens[TOKEN] = vouched("a pod of no job")
        opened = []
        for _ in range(network.MOST + 8):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            opened.append((reader, writer))
            writer.write(f"GET /v1/member HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode())
            answer = await asyncio.wait_for(reader.read(100), LIMIT_S)
            assert answer.startswith((b"HTTP/1.1 401", b"HTTP/1.1 503"))
            assert len(door._idle) <= network.MOST
        door.sweep(1e12)
        for reader, writer in opened:
            with suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), LIMIT_S)
            writer.close()


async def test_a_members_connection_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(jobs, "GATHER_S", 0.001)
    async with place() as there, port_of(there, monkeypatch) as (port, door):
        leading = await there.lead()
        await there.job_of_one_pod()
        pod = SimulatedPod("w-0")
        async with pod.connecting(URL(f"http://127.0.0.1:{port}/v1/member"), TOKEN):
            await pod.until(lambda: pod.orders)
            connected = pod.connected
            door.sweep(1e12)
            await pod.until_settled()
            assert pod.connected == connected
        await event_loop.end([leading])


async def test_what_members_send_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(jobs, "GATHER_S", 0.001)
    async with place() as there, port_of(there, monkeypatch) as (port, _):
        leading = await there.lead()
        await there.job_of_one_pod()
        pod = SimulatedPod("w-0")
        async with pod.connecting(URL(f"http://127.0.0.1:{port}/v1/member"), TOKEN):
            await pod.until(lambda: pod.orders)
            assert there.supervisor._jobs is not None
            [job] = there.supervisor._jobs.jobs.values()
            [line] = job._server.connections.values()
            assert line.transport is not None
            connection = line.transport.get_protocol()
            assert isinstance(connection, MeteredConnection)
            assert connection.buffer is not None
            assert connection.buffer.namespace == "team"
        await event_loop.end([leading])


class SlowReviewer:
    """Answers every request, with a refusal by default, once the test allows it to answer."""

    def __init__(self) -> None:
        self.asked = 0
        self.found: TokenRefused | ReviewUnavailable = TokenRefused("junk")
        self.answer = asyncio.Event()

    async def review(self, _: str) -> TokenRefused | ReviewUnavailable:
        self.asked += 1
        await self.answer.wait()
        return self.found


async def test_few_tokens_of_one_address_are_reviewed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, junk from one pod would delay the reviews of all members' tokens."""
    async with place() as there:
        leading = await there.until_leading()
        reviewer = SlowReviewer()
        monkeypatch.setattr(there.supervisor, "_reviewer", reviewer)
        requests = {asyncio.create_task(there.connect(f"a.b.{n}")) for n in range(40)}
        refused: list[int] = []
        while len(refused) < 40 - main.REVIEWS_PER_ADDRESS:
            done, requests = await asyncio.wait(
                requests, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED
            )
            assert done, "the other connections wait for a token review"
            refused += [each.result() for each in done]
        assert set(refused) == {503}
        assert reviewer.asked == main.REVIEWS_PER_ADDRESS
        reviewer.answer.set()
        assert set(await asyncio.gather(*requests)) == {401}
        assert not there.supervisor._reviewing
        await event_loop.end([leading])


@pytest.mark.parametrize(
    ("counts", "passed_s", "generation"),
    [
        ((999_999, 9, 9), 599.0, None),
        ((1_000_000, 0, 0), 10.0, 0),
        ((0, 10, 0), 10.0, 1),
        ((1_000_000, 10, 9), 10.0, 1),
        ((0, 0, 10), 10.0, 2),
        ((0, 0, 0), 600.0, 2),
    ],
)
def test_only_old_garbage_costs_a_pass_over_all_objects(
    counts: tuple[int, int, int], passed_s: float, generation: int | None
) -> None:
    assert main.due_generation(counts, passed_s) == generation


class Cycle:
    """An object that only the garbage collector frees."""

    def __init__(self) -> None:
        self.myself = self


@pytest.mark.parametrize(
    ("name", "limit"),
    [("COLLECT_S", 0.0), ("COLLECT_AFTER", (0, 99, 99)), ("COLLECT_AFTER", (0, 0, 0))],
    ids=["in time", "young", "old"],
)
async def test_cycles_are_freed_although_automatic_passes_are_off(
    name: str, limit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, name, limit)
    freed = asyncio.Event()
    was_enabled = gc.isenabled()
    gc.disable()
    collecting = asyncio.create_task(main.collect_garbage())
    try:
        weakref.finalize(Cycle(), freed.set)
        await asyncio.wait_for(freed.wait(), LIMIT_S)
    finally:
        await event_loop.end([collecting])
        if was_enabled:
            gc.enable()


@pytest.mark.parametrize("age_s", [main.BRIEF_S - 1, main.BRIEF_S + 1])
def test_a_supervisor_that_loses_the_lease_begins_again_in_its_container_unless_it_is_young(
    monkeypatch: pytest.MonkeyPatch, age_s: float
) -> None:
    """The kubelet would wait for up to five minutes, in which nobody could take over from the new leader."""
    now_s = 100.0
    replaced: list[tuple[Any, ...]] = []

    def lose(_: object) -> None:
        nonlocal now_s
        now_s += age_s
        raise LeaseLost("another leads")

    monkeypatch.setattr("supervisor.cluster.main.logs.setup", lambda: None)
    monkeypatch.setattr("supervisor.cluster.main.gc.disable", lambda: None)
    monkeypatch.setattr("supervisor.cluster.main.time.monotonic", lambda: now_s)
    monkeypatch.setattr("supervisor.cluster.main.event_loop.run", lose)
    monkeypatch.setattr("supervisor.cluster.main.os.execv", lambda *given: replaced.append(given))
    code = main.main()
    again = [(sys.executable, [sys.executable, *sys.orig_argv[1:]])]
    assert (code, replaced) == ((1, []) if age_s < main.BRIEF_S else (0, again))
