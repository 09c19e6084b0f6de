"""One job over its whole life, with an API server on a socket and members that connect."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from holdfast import exit_codes
from holdfast.fileio.storage_thread import StorageThread
from holdfast.process import event_loop
from holdfast.protocol.member_messages import MemberOrder, RankStall, StorageListing
from supervisor.cluster import host_probe, job_takeover, pods, run_summary, supervised_job
from supervisor.cluster.adoption.job_membership import JobKey
from supervisor.cluster.host_probe import HostAnswer, HostProbes
from supervisor.cluster.missed.rule import MissingMembers
from supervisor.cluster.pod_server import job_secret
from supervisor.cluster.pods import PodGroup, PodMember, member_name
from supervisor.cluster.reach import Reach
from supervisor.cluster.standbys.node_fit import read_pod_needs
from supervisor.cluster.supervised_job import ClusterContext, SupervisedJob
from supervisor.cluster.supervision import fenced_records
from supervisor.cluster.supervision.contents import RunSize
from supervisor.cluster.supervision.resource import SupervisionResource, ensure_resource, run_has_ended
from supervisor.controller.limits import report_memory
from supervisor.decision import closing
from supervisor.kubernetes.client import ApiServer
from supervisor.kubernetes.errors import InvalidObject
from supervisor.kubernetes.events import EventRecorder
from supervisor.kubernetes.watch import ObjectName
from supervisor.quarantine.model import RunFault
from supervisor.view import members as view_members
from supervisor.view.model import Policy, Wait
from tests.unit.supervisor.cluster.api_server import ServedObjects, accept_the_rest
from tests.unit.supervisor.cluster.simulated_member import LIMIT_S, SimulatedPod

KEY = JobKey("team", "llama", "uid-1", "PyTorchJob", "kubeflow.org/v1", "llama")
NO_OWNER = JobKey("team", "llama")  # nobody deletes the Supervision of such pods
POLICY = Policy(members=2, max_restarts=0, secure_s=0.2, victim_s=0.05, checkpoint_every_s=0.0)


@dataclass
class Place:
    """A cluster with one job, its supervisor, and the pods that connect to it."""

    served: ServedObjects
    server: ApiServer
    directory: Path
    url: Any
    stack: AsyncExitStack
    job: SupervisedJob = field(init=False)
    context: ClusterContext = field(init=False)
    deleted: list[str] = field(default_factory=list)
    policy: Policy = POLICY
    key: JobKey = KEY
    pods: dict[str, PodMember] = field(default_factory=dict)
    is_out_of_reach: bool = False
    noted: list[tuple[str, RunFault]] = field(default_factory=list)  # faults reported to the quarantine

    def begin(self, epoch: int = 1) -> SupervisedJob:
        """Make a leader of this epoch supervise the job."""
        self.context = ClusterContext(
            server=self.server,
            events=EventRecorder(self.server, "holdfast-supervisor", "s-1"),
            records=StorageThread("records"),
            epoch=epoch,
            secret=b"secret",
            lag=lambda: (0.0, 0.0),
            evict=lambda namespace, pod: self.deleted.append(f"{namespace}/{pod.name}"),
            is_out_of_reach=lambda _: self.is_out_of_reach,
            note_run_fault=lambda node, fault: self.noted.append((node, fault)),
        )
        self.job = SupervisedJob(self.context, self.group())
        self.job.start()
        self.job.update(self.group())
        return self.job

    def work(self, name: str) -> list[asyncio.Task[None]]:
        """Return the job's tasks of this name."""
        return [each for each in self.job._tasks if each.get_name().startswith(f"{name} ")]

    def group(self) -> PodGroup:
        return PodGroup(self.key, 2, 1, self.policy, {}, tuple(self.pods.values()))

    async def add(self, number: int, restarts: int = 0) -> SimulatedPod:
        """Create a pod as its owner does, and connect its sidecar."""
        uid, name = f"{number:08x}-{restarts}", f"w-{number}"
        member = member_name(name, uid, restarts)
        self.pods[uid] = PodMember(uid, name, member, f"n{number}", "c", is_running=True)
        self.look()
        made = SimulatedPod(name)
        await self.stack.enter_async_context(made.connecting(self.url / uid))
        return made

    def look(self) -> None:
        """Make the registry notice the current pods and the resource."""
        self.job.update(self.group())
        found = self.served.objects.get(("supervisions", "team", "llama"))
        if found is not None:
            self.job.update_spec(found.get("spec"))

    def end_pods(self) -> None:
        """End all containers, as they do on an order to stop."""
        for uid, pod in self.pods.items():
            self.pods[uid] = replace(pod, is_running=False, has_ended=True)
        self.look()

    def fail(self, number: int, code: int, said: str = "") -> None:
        """End a pod, or create one that has ended, with the exit code of its training container."""
        uid, name = f"{number:08x}-0", f"w-{number}"
        self.pods[uid] = PodMember(
            *(uid, name, member_name(name, uid, 0), f"n{number}", "c"),
            is_running=False,
            has_ended=True,
            exit_code=code,
            last_words=said,
        )
        self.look()

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.served.supervision().get("status", {})
        return found

    async def until(self, **expected: object) -> None:
        """Return once the status has these values."""
        await self.served.until(
            lambda: (
                ("supervisions", "team", "llama") in self.served.objects
                and {name: self.status.get(name) for name in expected} == expected
            )
        )

    async def finish(self, members: Iterable[SimulatedPod]) -> None:
        """Make the script exit with 0, and the containers end as ordered."""
        for each in members:
            await each.end_rank(0)
        for each in members:
            await each.until_stopped()
        self.end_pods()
        await self.until(phase="ended", exitCode=0)

    async def form(self) -> tuple[SimulatedPod, SimulatedPod]:
        """Form a group of two members, and make it do a step."""
        self.begin()
        members = (await self.add(0), await self.add(1))
        for each in members:
            await each.until_formed(1)
        for each in members:
            await each.train(3)
            await each.until_settled()
        return members


@asynccontextmanager
async def place(directory: Path, policy: Policy = POLICY, key: JobKey = KEY) -> AsyncIterator[Place]:
    served = ServedObjects()
    async with AsyncExitStack() as outer:
        server = await outer.enter_async_context(served.serving())
        app = web.Application()
        there: Place

        async def serve(request: web.Request) -> web.StreamResponse:
            return await there.job.serve(request, request.match_info["uid"])

        app.router.add_get("/{uid}", serve)
        members = await outer.enter_async_context(TestServer(app))
        stack = AsyncExitStack()
        there = Place(served, server, directory, members.make_url("/"), stack, policy=policy, key=key)
        try:
            async with stack:
                yield there
        finally:
            await there.job.close()
            await accept_the_rest()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_S", "RETRY_S"):
        monkeypatch.setattr(supervised_job, name, 0.02)
    monkeypatch.setattr(job_takeover, "RETRY_S", 0.02)
    for name in ("SUMMARY_S", "SPACING_S", "RETRY_S"):
        monkeypatch.setattr(run_summary, name, 0.02)


async def test_pods_form_a_group_that_trains(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        first, second = await there.form()
        ranks = [each.rank for member in (first, second) for each in member.order.ranks]
        assert sorted(ranks) == [0, 1]
        assert {each.order.secret for each in (first, second)} == {job_secret(b"secret", KEY)}
        await there.until(phase="running", generation=1, epoch=1, incidents=0)
        assert first.order.launch is not None
        assert first.order.launch.world_size == 2
        await there.until(step=3)
        assert json.loads(there.status["view"])["step"] == 3


async def test_a_job_with_pending_pods_shows_that_it_is_forming_and_what_it_waits_for(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        there.begin()
        await there.until(phase="forming", message="0 of 2 members are running", exitCode=None)
        await there.add(0)
        await there.until(phase="forming", message="1 of 2 members ready")


async def test_a_member_that_cannot_reach_its_launcher_is_shown_and_becomes_an_event(tmp_path: Path) -> None:
    """Otherwise the job would seem to start forever."""
    async with place(tmp_path) as there:
        there.begin()
        events = asyncio.create_task(there.context.events.run())
        for number in range(2):
            (await there.add(number)).unreachable = "denied"
        await there.until(phase="forming")
        problem = "cannot start ranks: denied"
        await there.served.until(lambda: problem in there.status.get("message", ""))
        await there.served.until(
            lambda: "LauncherUnreachable" in {each["reason"] for each in there.served.events}
        )
        found = [each for each in there.served.events if each["reason"] == "LauncherUnreachable"]
        assert all(each["message"].endswith(problem) and each["type"] == "Warning" for each in found)
        await event_loop.end([events])


async def test_a_new_phase_is_published_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_summary, "SUMMARY_S", 3600.0)
    async with place(tmp_path) as there:
        members = await there.form()
        await there.until(phase="running")
        for each in members:
            await each.end_rank(0)
        await there.until(phase="stopping", exitCode=0)
        there.end_pods()
        await there.until(phase="ended")


async def test_the_next_supervisor_takes_over_without_a_restart(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        members = await there.form()
        await there.until(step=3, phase="running")
        before = [len(each.orders) for each in members]
        await there.job.close()
        for each in members:
            each.connected = 0
        there.begin(epoch=2)
        for each in members:
            await each.until_obeying(2)
            await each.train(4)
        await there.until(epoch=2, step=4, generation=1, phase="running", incidents=0)
        assert there.job.run is not None
        assert there.job.run.memory.generation == 1
        for each, count in zip(members, before, strict=True):
            assert each.connected == 1
            assert {(order.do, order.generation) for order in each.orders[count:]} == {("run", 1)}
            assert each.generation == 1
        assert there.deleted == []


async def test_a_replaced_supervisor_ends_its_work_on_the_job(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        await there.form()
        await there.until(step=3)
        there.served.change(status={"epoch": 9, "step": 77})
        (supervising,) = there.work("supervise")
        await asyncio.wait_for(asyncio.wait([supervising]), 20)
        assert (there.status["epoch"], there.status["step"]) == (9, 77)


async def test_a_supervisor_replaced_before_its_first_run_begins_leaves_the_job_to_the_other(
    tmp_path: Path,
) -> None:
    async with place(tmp_path) as there:
        await ensure_resource(there.server, KEY, RunSize(3, 8), {})
        created, taken = None, None  # requests without a fault
        there.served.faults = [created, taken, lambda: there.served.change(status={"epoch": 9})]
        there.begin()
        (supervising,) = there.work("supervise")
        await asyncio.wait_for(asyncio.wait([supervising]), 20)
        assert (there.status["epoch"], there.job.has_ended) == (9, True)
        assert there.served.supervision()["spec"]["members"] == 3


async def test_a_leader_that_was_cut_off_and_replaced_gives_no_orders_above_its_successors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own members list the checkpoints that the successor's members have written."""
    monkeypatch.setattr(fenced_records, "RAISE_AGAIN_S", 0.0)
    async with place(tmp_path, replace(POLICY, checkpoint_every_s=60.0)) as there:
        first, second = await there.form()
        await there.until(step=3, phase="running")
        there.served.broken["supervisions"] = 503
        there.served.change(status={"epoch": 2})
        lead = there.job.run.lead if there.job.run is not None else None
        assert isinstance(lead, fenced_records.SupervisionLead)
        for each in (first, second):
            each.storage = StorageListing(2, epoch=2)
        await first.until(lambda: lead._unsure)  # it has tried to take a higher epoch
        (supervising,) = there.work("supervise")
        there.served.broken.clear()
        await asyncio.wait_for(asyncio.wait([supervising]), 20)
        assert lead.deposed is not None
        assert {order.epoch for each in (first, second) for order in each.orders} == {1}
        assert there.status["epoch"] == 2


async def test_a_failed_rank_ends_the_job_and_the_owners_next_pods_get_a_new_run(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        first, second = await there.form()
        await first.end_rank(3)
        for each in (first, second):
            await each.until_stopped()
            assert each.order.exit_code == 3
        there.end_pods()
        await there.until(phase="ended", exitCode=3)
        epoch = there.status["epoch"]
        members = [await there.add(2)]
        await there.until(phase="forming", exitCode=None, why="")
        members.append(await there.add(3))
        for each in members:
            await each.until_formed(2)
            await each.train(1)
        await there.until(phase="running", generation=2, incidents=1)
        assert there.status["epoch"] == epoch + 1
        assert all(order.do != "stop" for each in members for order in each.orders)


async def test_pods_that_end_before_their_ranks_start_end_the_run_with_their_code_and_reason(
    tmp_path: Path,
) -> None:
    """The launchers refuse a script that does not exist. The owner's next pods may have another one."""
    async with place(tmp_path, replace(POLICY, has_storage=False)) as there:
        there.begin()
        events = asyncio.create_task(there.context.events.run())
        for number in (0, 1):
            there.fail(number, 2, "script '/src/trian.py' not found in /app")
        said = "before its ranks were started: script '/src/trian.py' not found in /app"
        why = f"pod w-0 ended with exit code 2 {said}"
        await there.until(phase="ended", exitCode=2, message=why)
        message = f"{why} (exit code 2)"
        await there.served.until(lambda: message in {each["message"] for each in there.served.events})
        members = [await there.add(2), await there.add(3)]
        for each in members:
            await each.until_formed(1)
            await each.train(1)
        await there.until(phase="running", exitCode=None)
        await event_loop.end([events])


async def test_a_failed_pod_of_an_earlier_attempt_does_not_end_the_next_run(tmp_path: Path) -> None:
    """The run has one failed pod of its own, and the owner creates its other pod a little later."""
    async with place(tmp_path) as there:
        there.begin()
        there.fail(0, 2)
        there.fail(1, 2)
        await there.until(phase="ended", exitCode=2)
        await there.add(2)
        await there.until(phase="forming", exitCode=None)
        there.fail(2, 1)
        members = [await there.add(3), await there.add(4)]
        for each in members:
            await each.until_formed(1)
        assert all(order.do != "stop" for each in members for order in each.orders)


async def test_pods_that_end_while_others_are_pending_do_not_end_the_run(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        there.begin()
        there.fail(0, 1)
        there.pods["pending"] = PodMember("pending", "w-1", "w-1.pending", "", "", is_running=False)
        there.look()
        second = await there.add(2)
        await second.until(lambda: second.orders)
        assert second.order.do == "idle"
        assert there.status["phase"] == "forming"


async def test_pods_that_arrive_after_the_job_has_finished_end_with_its_code(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        members = await there.form()
        for each in members:
            await each.end_rank(0)
        for each in members:
            await each.until_stopped()
            assert each.order.exit_code == 0
        there.end_pods()
        await there.until(phase="ended", exitCode=0)
        late = await there.add(0, restarts=1)
        await late.until(lambda: late.orders)
        assert (late.order.do, late.order.exit_code) == ("stop", 0)
        assert late.order.epoch == there.status["epoch"]
        assert late.generation == 0


async def test_an_end_while_the_api_server_is_unavailable_is_recorded_afterwards(tmp_path: Path) -> None:
    """Otherwise, the next leader would count the members of a finished run as lost."""
    async with place(tmp_path, replace(POLICY, form_s=0.5)) as there:
        members = await there.form()
        await there.until(step=3, phase="running")
        there.served.broken["supervisions"] = 503
        for each in members:
            await each.end_rank(0)
        for each in members:
            await each.until_stopped()
            assert each.order.exit_code == 0
        there.end_pods()
        run = there.job.run
        assert run is not None
        await asyncio.wait_for(run.ended.wait(), 20)
        assert there.status["phase"] == "running"
        there.served.broken.clear()
        await there.until(phase="ended", exitCode=0, decision="Done", incidents=0)
        assert json.loads(there.status["view"])["phase"] == "ended"
        held = await SupervisionResource(there.server, there.key, "llama").take_over(5)
        assert held.state is not None
        assert (held.state.memory.phase, held.state.memory.exit_code) == ("ended", 0)


async def test_an_end_that_a_successor_records_differently_is_not_overwritten(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        members = await there.form()
        await there.until(step=3, phase="running")
        there.served.broken["supervisions"] = 503
        for each in members:
            await each.end_rank(0)
        for each in members:
            await each.until_stopped()
        there.end_pods()
        run = there.job.run
        assert run is not None
        await asyncio.wait_for(run.ended.wait(), 20)
        there.served.change(status={"epoch": 7})
        (supervising,) = there.work("supervise")
        there.served.broken.clear()
        await asyncio.wait_for(asyncio.wait([supervising]), 20)
        assert (there.status["epoch"], there.status["phase"]) == (7, "running")


async def test_a_summary_that_the_server_refuses_does_not_keep_the_end_from_being_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place(tmp_path) as there:
        members = await there.form()
        await there.until(step=3, phase="running")
        write = SupervisionResource.write

        async def refuse(self: Any, epoch: int, values: Any) -> None:
            if "recent" in values:
                raise InvalidObject("PATCH", "too large", 422)
            await write(self, epoch, values)

        monkeypatch.setattr(SupervisionResource, "write", refuse)
        for each in members:
            await each.end_rank(0)
        for each in members:
            await each.until_stopped()
        there.end_pods()
        await there.until(phase="ended", exitCode=0)


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[bool]:
    """Return the record of checks whether a job has ended, with their results."""
    answers: asyncio.Queue[bool] = asyncio.Queue()
    examine = run_has_ended

    async def examine_and_tell(server: ApiServer, key: JobKey) -> bool:
        found = await examine(server, key)
        answers.put_nowait(found)
        return found

    monkeypatch.setattr(supervised_job, "run_has_ended", examine_and_tell)
    return answers


async def turns() -> None:
    """Let all ready tasks run, several times."""
    for _ in range(50):
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("key", [KEY, NO_OWNER])
async def test_a_job_that_has_ended_is_left_alone_by_the_next_supervisors(
    tmp_path: Path, key: JobKey, examined: asyncio.Queue[bool]
) -> None:
    async with place(tmp_path, key=key) as there:
        await there.finish(await there.form())
        await there.job.close()
        before, written = there.served.supervision(), len(there.served.requests)
        for epoch in (5, 6):
            job = there.begin(epoch)
            there.look()
            assert await asyncio.wait_for(examined.get(), 20)
            await turns()
            assert (job.run, there.context.events._series) == (None, {})
            await job.close()
        assert (there.served.supervision(), len(there.served.requests)) == (before, written)
        there.begin(7)
        late = await there.add(0, restarts=1)
        await late.until_stopped()
        assert (late.order.exit_code, late.order.epoch, late.generation) == (0, 7, 0)


async def test_an_end_that_users_do_not_see_yet_is_recorded_by_the_next_supervisor(tmp_path: Path) -> None:
    """Its predecessor died between its last decision and its last summary."""
    async with place(tmp_path) as there:
        await there.finish(await there.form())
        await there.job.close()
        there.served.change(status={"exitCode": None, "view": None})
        there.begin(epoch=2)
        await there.until(epoch=2, phase="ended", exitCode=0)


# -- pods without an owner


@pytest.mark.parametrize("how", ["finished", "stopped"])
@pytest.mark.parametrize("leader", ["the same", "another"])
async def test_pods_without_an_owner_train_again_once_the_earlier_ones_are_gone(
    tmp_path: Path, how: str, leader: str
) -> None:
    async with place(tmp_path, key=NO_OWNER) as there:
        members = await there.form()
        if how == "finished":
            await there.finish(members)
        else:
            there.served.change(spec={"stop": "now"})
            there.look()
            for each in members:
                await each.until_stopped()
            there.end_pods()
            await there.until(phase="ended", exitCode=members[0].order.exit_code)
        there.pods.clear()
        there.look()
        if leader == "another":
            await there.job.close()
        again = [await there.add(number) for number in (10, 11)]
        if leader == "another":
            there.begin(epoch=5)
        there.look()
        for each in again:
            await each.until_formed(2)
            await each.train(5)
            there.look()
        await there.until(phase="running", generation=2, step=5, exitCode=None)
        assert "stop" not in there.served.supervision()["spec"]
        assert all(order.do != "stop" for each in again for order in each.orders)
        there.look()  # a request that is made now is for the new run
        there.served.change(spec={"stop": "now"})
        there.look()
        for each in again:
            await each.until_stopped()


@pytest.mark.parametrize("leader", ["the same", "another"])
async def test_a_restarted_container_of_finished_pods_without_an_owner_ends_with_its_code(
    tmp_path: Path, leader: str
) -> None:
    async with place(tmp_path, key=NO_OWNER) as there:
        await there.finish(await there.form())
        if leader == "another":
            await there.job.close()
            there.begin(epoch=5)
        for uid in tuple(there.pods):
            del there.pods[uid]  # in a pod that stays, one container replaces the other
        late = await there.add(0, restarts=1)
        await late.until_stopped()
        assert (late.order.exit_code, late.generation) == (0, 0)


async def test_a_request_to_stop_that_the_mirror_still_shows_does_not_stop_the_next_run(
    tmp_path: Path,
) -> None:
    async with place(tmp_path, key=NO_OWNER) as there:
        there.begin()
        await there.add(0)
        await there.until(phase="forming")
        await there.job._forget_stop(1)
        asked = []
        for spec in ({"stop": "graceful"}, {}, {"stop": "graceful"}):
            there.job.update_spec(spec)
            asked.append(there.job.backend.user_stop)
        assert asked == ["", "", "graceful"]


async def test_what_a_user_writes_into_the_resource_stops_the_job(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        members = await there.form()
        there.served.change(spec={"stop": "now"})
        there.look()
        for each in members:
            await each.until_stopped()
        there.end_pods()
        await there.until(phase="ended")


NO_STORAGE = replace(POLICY, has_storage=False)
SHOWN = ("phase", "step", "ettr", "message", "why", "exitCode", "view", "generation")


async def stopped(there: Place) -> dict[str, Any]:
    """Stop a job that trains, end its pods, and return what users see."""
    members = await there.form()
    await there.until(step=3, phase="running")
    there.served.change(spec={"stop": "graceful"})
    there.look()
    for each in members:
        await each.until_stopped()
    there.end_pods()
    await there.until(phase="ended", exitCode=130)
    await there.served.until(lambda: there.status["why"] == there.status["message"])  # the last write
    return {name: there.status.get(name) for name in SHOWN}


def events_of(there: Place, reason: str) -> list[Any]:
    return [key for key in there.context.events._series if reason in str(key)]


@pytest.mark.parametrize("leader", ["the same", "another"])
async def test_the_next_pods_of_a_stopped_job_end_and_its_status_remains(tmp_path: Path, leader: str) -> None:
    """A Job's controller replaces pods that end with 130. The step and ETTR of the stopped run remain."""
    async with place(tmp_path, NO_STORAGE) as there:
        before = await stopped(there)
        assert before["step"] == 3
        if leader == "another":
            await there.job.close()
            there.begin(epoch=5)
            there.look()
        late = await there.add(7)
        await late.until_stopped()
        assert (late.order.exit_code, late.generation) == (130, 0)
        there.end_pods()
        await turns()
        assert {name: there.status.get(name) for name in SHOWN} == before
        if leader == "another":
            assert not events_of(there, "Finished"), "the earlier leader has recorded the event"


async def test_once_the_request_is_removed_the_next_pods_of_a_stopped_job_train(tmp_path: Path) -> None:
    async with place(tmp_path, NO_STORAGE) as there:
        await stopped(there)
        there.served.change(spec={"stop": ""})
        there.look()
        for each in [await there.add(number) for number in (7, 8)]:
            await each.until_formed(2)
            assert all(order.do != "stop" for order in each.orders)


async def test_a_stopped_job_ends_only_after_the_members_that_were_ordered_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "_SLACK_S", 0.0)
    policy = replace(POLICY, grace_s=0.05, members_created_externally=True)
    async with place(tmp_path, policy) as there:
        for each in await there.form():
            there.served.change(spec={"stop": "now"})
            there.look()
            await each.until_stopped()
        names = ", ".join(pod.member for pod in there.pods.values())
        await there.until(
            phase="stopping",
            message="stopped immediately, as requested; 2 members that were ordered to end have not ended: "
            + names,
        )
        await there.served.until(lambda: json.loads(there.status["view"])["unended"] == 2)
        run = there.job.run
        assert run is not None
        waits = closing.stopping(replace(run.view(), now_ns=run.view().now_ns + 3_600_000_000_000), policy)
        assert isinstance(waits, Wait), "the grace period has passed"
        there.end_pods()
        await there.until(phase="ended", exitCode=130, message="stopped immediately, as requested")


async def test_a_stop_over_the_api_is_recorded_for_the_next_supervisor(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        await there.form()
        assert there.job.run is not None
        there.job.run.stop(now=False)
        await there.served.until(lambda: there.served.supervision()["spec"].get("stop") == "graceful")


async def test_an_api_server_that_refuses_delays_the_job_and_does_not_end_it(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        there.served.faults = [503, 403, None, 409, 409, 409, 409, 409]
        await there.form()
        await there.until(phase="running", step=3)


async def test_a_job_keeps_training_while_its_resource_cannot_be_written(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        members = await there.form()
        there.served.broken["supervisions"] = 500
        before = there.status
        for each in members:
            await each.train(9)
        run = there.job.run
        assert run is not None
        await members[0].until(lambda: run.publisher.published.get("step") == 9)
        assert there.status == before
        del there.served.broken["supervisions"]
        await there.until(step=9)


async def test_the_name_in_a_report_is_not_trusted(tmp_path: Path) -> None:
    """The token of a member proves its identity, whatever its reports contain."""
    async with place(tmp_path) as there:
        await there.form()
        assert set(there.job._server.connections) == {"w-0.00000000", "w-1.00000001"}


async def test_members_leave_a_closed_job(tmp_path: Path) -> None:
    """They then connect to the next supervisor of the job. Otherwise they would report to nobody."""
    async with place(tmp_path) as there:
        members = await there.form()
        await there.job.close()
        before = [each.connected for each in members]
        for each, count in zip(members, before, strict=True):
            await each.until_connected(count)


async def test_a_member_without_room_for_its_report_gets_an_event_and_a_closed_job_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place(tmp_path) as there:
        members = await there.form()
        memory = there.context.limits.memory
        assert memory.reserved_bytes > 2 * report_memory.CONNECTION_BYTES
        monkeypatch.setattr(report_memory, "CONNECTION_BYTES", report_memory.NAMESPACE_BYTES)
        before = members[0].connected
        await members[0].until_connected(before)
        events = [each for each in there.context.events._series.values() if each.reason == "ReportRefused"]
        assert [each.reference.kind for each in events] == ["Supervision"]
        assert "namespace team" in events[0].message
        await there.job.close()
        assert memory.reserved_bytes == 0


async def test_a_failure_within_the_supervision_of_one_job_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect must not leave a job unsupervised until another supervisor leads."""
    monkeypatch.setattr(supervised_job, "CALM_S", 0.02)  # the defect shows in the next round
    async with place(tmp_path) as there:
        members = await there.form()
        await there.until(step=3)

        def fail(*_: object) -> None:
            raise RuntimeError("a defect")

        run = there.job.run
        assert run is not None
        monkeypatch.setattr(run, "_give_orders", fail)
        await there.until(epoch=2)
        for each in members:
            await each.train(5)
        await there.until(step=5, generation=1, phase="running")


async def test_incidents_of_a_predecessor_are_kept_if_they_have_an_id(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        await there.form()
        await there.until(step=3)
        await there.job.close()
        wrong = [{"id": "i-/../../../x"}, {"id": "i-"}, {"id": 4}, {"id": "i-0001\n"}, {}]
        there.served.change(status={"recent": [{"id": "i-0001", "open": False}, *wrong]})
        there.begin(epoch=2)
        await there.until(epoch=2, recent=[{"id": "i-0001", "open": False}])


# -- drills


@pytest.mark.parametrize(
    ("drill", "result"),
    [
        ({"number": 1, "what": "nonsense"}, "unknown drill 'nonsense'"),
        ({"number": 1, "what": "supervisor"}, "delete its pod instead"),
        ({"number": 1, "what": "member", "rank": 7}, "this run has ranks 0 to 1"),
        ({"number": 4, "what": "member", "rank": 1}, "carried out"),
    ],
)
async def test_a_drill_is_carried_out_once_and_its_result_is_recorded(
    tmp_path: Path, drill: dict[str, Any], result: str
) -> None:
    async with place(tmp_path) as there:
        await there.form()
        there.served.change(spec={"drill": drill})
        for _ in range(3):
            there.look()
        await there.served.until(lambda: result in there.status.get("drillResult", ""))
        assert there.status["drilled"] == drill["number"]
        assert len(there.deleted) == (result == "carried out")
        await there.job.close()
        there.begin(epoch=2)
        await there.until(epoch=2, phase="running")
        there.look()
        assert len(there.deleted) == (result == "carried out"), "the next supervisor does not repeat it"


@pytest.mark.parametrize("wrong", [None, 3, {}, {"number": "1", "what": "member"}, {"number": 1, "what": 3}])
async def test_a_malformed_drill_is_ignored(tmp_path: Path, wrong: object) -> None:
    async with place(tmp_path) as there:
        there.begin()
        there.job.update_spec({"drill": wrong, "stop": "nonsense"})
        assert not there.job.backend.user_stop
        there.job.update_spec(wrong)


def test_every_leader_derives_the_same_secret_of_a_job() -> None:
    others = [replace(KEY, uid="uid-2"), replace(KEY, name="b"), replace(KEY, namespace="a")]
    secrets = {job_secret(b"secret", each) for each in (KEY, *others)}
    assert len(secrets) == 4
    assert job_secret(b"secret", replace(KEY, api_version="kubeflow.org/v2")) in secrets
    assert job_secret(b"another", KEY) not in secrets


async def test_no_pod_of_a_job_is_evicted_while_only_this_supervisor_may_be_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All pods may be training: a broken network, a NetworkPolicy or a wrong CA looks the same from here."""
    monkeypatch.setattr(pods, "RESTART_S", 0.0)
    async with place(tmp_path) as there:
        there.pods["lost"] = PodMember("lost", "w-9", "w-9.lost", "n9", "c", is_running=True)
        backend = there.begin().backend

        def request() -> list[str]:
            for _ in range(3):
                backend.want(2, ("w-9.lost",))
            return there.deleted

        assert request() == [], "no member of the job has connected"
        other = await there.add(0)
        await other.until(lambda: other.orders)
        assert there.job.reach == Reach(1, 1), "the other pod has never connected"
        there.is_out_of_reach = True
        assert request() == [], "most jobs have lost their members"
        assert capsys.readouterr().err.count("evictions blocked") == 2, "each reason once"
        there.is_out_of_reach = False
        assert request() != []


@dataclass
class Hosts:
    """The hosts of the pods, and whether each answers probes."""

    place: Place
    lost: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    known: asyncio.Event = field(default_factory=asyncio.Event)  # all were asked

    async def answer(self, address: str) -> HostAnswer:
        self.asked.add(address)
        if len(self.asked) == len(self.place.pods):
            self.known.set()
        return HostAnswer.NONE if address in self.lost else HostAnswer.ANSWERED


@asynccontextmanager
async def probed(
    there: Place, members: Sequence[SimulatedPod], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Hosts]:
    """Probe the hosts of all members every few milliseconds, with limits as short."""
    for name, value in (("TICK_S", 0.01), ("QUIET_TICK_S", 0.01), ("PROBE_S", 0.05)):
        monkeypatch.setattr(host_probe, name, value)
    monkeypatch.setattr(host_probe, "SILENT_NS", 200_000_000)
    for name, value in (("QUIET_S", 0.3), ("LOST_HOST_S", 0.6), ("UNANSWERED_S", 0.3)):
        monkeypatch.setattr(view_members, name, value)
    for number, (uid, pod) in enumerate(there.pods.items()):
        there.pods[uid] = replace(pod, address=f"10.0.0.{number}")
        members[number].peer_url = f"http://10.0.0.{number}:1"
    there.look()
    hosts = Hosts(there)
    probing = asyncio.create_task(HostProbes(lambda: there.job.probed, hosts.answer).run())
    try:
        await asyncio.wait_for(hosts.known.wait(), LIMIT_S)
        yield hosts
    finally:
        await event_loop.end([probing])


LATE = RankStall(0, 1, 3, 4, 1, "backward", 2.0, 0.8)


async def test_a_member_whose_host_answers_nothing_is_lost_long_before_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = replace(POLICY, member_timeout_s=600.0, max_restarts=9, members_created_externally=True)
    async with place(tmp_path, policy) as there:
        members = await there.form()
        async with probed(there, members, monkeypatch) as hosts:
            hosts.lost.add("10.0.0.1")
            members[1].is_mute = True
            members[0].stalls = (LATE,)
            await members[0].until(lambda: members[0].order.do == "secure")
            assert there.job.run is not None
            assert there.job.run.memory.incident is not None
            (fault,) = there.job.run.memory.incident.faults
            assert (fault.kind, fault.member) == ("member_lost", member_name("w-1", "00000001-0", 0))
            assert "its host has not answered" in fault.detail


async def test_a_silent_member_is_kept_while_the_group_trains_or_its_host_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = replace(POLICY, member_timeout_s=600.0, max_restarts=9, members_created_externally=True)
    async with place(tmp_path, policy) as there:
        first, second = await there.form()
        async with probed(there, (first, second), monkeypatch) as hosts:
            second.is_mute = True
            first.stalls = (LATE,)  # so that only its steps show that the group trains
            line = there.job._server.connection(member_name("w-1", "00000001-0", 0))

            async def silent_for(silent_s: float) -> None:
                """Return once the second member has been silent for so much longer."""
                begun_ns = time.monotonic_ns()
                while time.monotonic_ns() < begun_ns + silent_s * 1e9:
                    await first.train(first.step + 1)
                    await asyncio.sleep(0.02)

            await silent_for(1.0)
            assert line.unanswered_ns == 0, "its host answers"
            hosts.lost.add("10.0.0.1")
            await silent_for(1.0)
            assert line.unanswered_ns > 0
            assert line.heard_ns < time.monotonic_ns() - 1_900_000_000
            assert there.status["incidents"] == 0
            second.is_mute = False
            await second.until(lambda: line.unanswered_ns == 0)
            assert there.status["incidents"] == 0


async def test_the_connection_of_a_host_without_power_ends_by_itself(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        await there.form()
        for line in there.job._server.connections.values():
            assert line.transport is not None
            connection = line.transport.get_extra_info("socket")
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def test_the_connections_of_members_that_are_lost_and_gone_are_forgotten(tmp_path: Path) -> None:
    """A job may run for months, and each restart of a container creates another member."""
    async with place(tmp_path) as there:
        await there.form()
        server = there.job._server
        members = set(server.connections)
        orders = set(server._given)
        for number in range(50):
            server.order(f"w-0.{number}", MemberOrder("idle", 1))
        there.look()
        assert set(server.connections) == members
        assert set(server._given) == orders
        server.order("w-0.3", MemberOrder("idle", 1))
        again = server.connection("w-0.3").order
        assert again is not None, "a member that comes back gets the order that it had before"
        assert again.do == "idle"


# -- members that are about to end


async def settled_with_standby(there: Place) -> tuple[SimulatedPod, SimulatedPod, SimulatedPod]:
    """Form a group of two members, with a third that is ready to replace one of them."""
    first, second = await there.form()
    third = await there.add(2)
    for each in (first, second, third):
        each.holds_state = True
    await third.until(lambda: third.orders and third.order.do == "idle")
    return first, second, third


async def train_in(generation: int, *members: SimulatedPod) -> None:
    for each in members:
        await each.until_formed(generation)
    for each in members:
        await each.train(each.step + 1)
        await each.until_settled()


async def test_a_member_that_must_leave_its_node_moves_and_its_pod_is_evicted_afterwards(
    tmp_path: Path,
) -> None:
    """This costs no restart, of which the policy allows none."""
    async with place(tmp_path) as there:
        first, _, third = await settled_with_standby(there)
        assert there.job.members_on("n1") == 1
        for _ in range(2):
            there.job.leave("n1", "node n1 is quarantined: Xid 79")
        for each in (first, third):
            await each.until_formed(2)
        assert there.deleted == [], "its state may still be needed"
        await train_in(2, first, third)
        await there.until(phase="running", generation=2, incidents=1)
        there.job.note_departures()
        assert there.deleted == ["team/w-1"]
        [incident] = there.status["recent"]
        assert (incident["kind"], incident["remedy"]) == ("departure", "swap")
        assert "node n1 is quarantined: Xid 79" in incident["why"]


async def test_a_member_that_must_leave_its_node_keeps_training_without_a_standby(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        first, second = await there.form()
        for _ in range(2):
            there.job.leave("n1", "node n1 is quarantined")
        events = asyncio.create_task(there.context.events.run())
        await there.served.until(
            lambda: "MemberLeaves" in [each.get("reason") for each in there.served.events]
        )
        await event_loop.end([events])
        said = [each["message"] for each in there.served.events if each.get("reason") == "MemberLeaves"]
        assert said == ["member w-1.00000001 is about to end: node n1 is quarantined"]
        for step in (4, 5):
            for each in (first, second):
                await each.train(step)
        await there.until(step=5)
        there.job.note_departures()
        assert (first.generation, second.generation, there.deleted) == (1, 1, [])


async def test_the_ranks_of_a_pod_that_is_being_deleted_move_before_they_are_ended(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        first, second, third = await settled_with_standby(there)
        uid = next(uid for uid, pod in there.pods.items() if pod.name == "w-1")
        there.pods[uid] = replace(there.pods[uid], is_leaving=True, grace_s=30.0)
        there.look()
        for each in (first, third):
            await each.until_formed(2)
        assert "secure" in [order.do for order in second.orders]
        assert "stop" not in [order.do for order in second.orders]
        await train_in(2, first, third)
        await second.until_stopped()
        assert second.order.exit_code == exit_codes.TERMINATED
        await there.until(phase="running", generation=2, incidents=1)
        assert there.deleted == []


async def test_a_notice_on_a_node_moves_the_member_that_is_there(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        _, second, third = await settled_with_standby(there)
        taint = {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}
        node = {"metadata": {"name": "n0"}, "spec": {"taints": [taint]}}
        there.job.note_departures({ObjectName("", "n0"): node})
        await train_in(2, second, third)
        await there.until(phase="running", generation=2)
        there.job.note_departures()
        assert there.deleted == [], "the autoscaler deletes the pod"


def verdict_on(name: str) -> dict[ObjectName, Any]:
    verdict = {"type": "GpuHealthy", "status": "False", "message": "GPU 3 is lost"}
    return {ObjectName("", name): {"metadata": {"name": name}, "status": {"conditions": [verdict]}}}


async def test_a_verdict_of_the_node_agent_moves_the_member_once_the_quarantine_lets_it(
    tmp_path: Path,
) -> None:
    async with place(tmp_path) as there:
        first, _, third = await settled_with_standby(there)
        there.job.note_departures(verdict_on("n1"), frozenset({"n0"}))
        assert there.job.backend.departures == {}, "the quarantine holds the verdict back"
        there.job.note_departures(heeded=frozenset({"n1"}))
        await train_in(2, first, third)
        await there.until(phase="running", generation=2)
        there.job.note_departures()
        assert there.deleted == []
        [incident] = there.status["recent"]
        assert "the node agent of n1 reports: GPU 3 is lost" in incident["why"]


async def test_an_idle_pod_that_must_leave_its_node_is_evicted_at_once(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        first, second, _ = await settled_with_standby(there)
        there.job.leave("n2", "node n2 is quarantined")
        there.job.note_departures()
        assert there.deleted == ["team/w-2"]
        assert (first.generation, second.generation) == (1, 1)


async def test_standbys_that_a_running_job_wants_and_that_are_not_ready_are_missing(tmp_path: Path) -> None:
    async with place(tmp_path, replace(POLICY, standby=2)) as there:
        await settled_with_standby(there)
        await there.until(phase="running")
        await there.served.until(lambda: there.job.standbys_missing == 1)


async def test_a_job_without_a_member_lacks_it_until_its_pod_is_there(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        there.begin()
        first = await there.add(0)
        await there.until(phase="forming")
        assert there.job.missing == MissingMembers(1, frozenset()), "its pod has no number"
        assert there.job.supervision == ("llama", there.served.supervision()["metadata"]["uid"])
        second = await there.add(1)
        await train_in(1, first, second)
        assert there.job.missing is None
        there.job.update_spec({"stop": "now"})
        there.pods.clear()
        assert there.job.missing is None


# -- faults that hardware explains


ECC = "Traceback (most recent call last):\nRuntimeError: CUDA error: uncorrectable ECC error encountered"


async def crash_in(generation: int, crashed: SimulatedPod, other: SimulatedPod, **ending: Any) -> None:
    """Make a rank crash, and the group train in the next generation."""
    await crashed.end_rank(None if "signal" in ending else 1, **ending)
    await train_in(generation, crashed, other)


async def test_a_fault_of_hardware_is_reported_once_whoever_leads(tmp_path: Path) -> None:
    async with place(tmp_path, replace(POLICY, max_restarts=9)) as there:
        first, second = await there.form()
        for each in (first, second):
            each.holds_state = True
        await crash_in(2, first, second, fail="exception", message=ECC)
        await there.until(phase="running", generation=2, incidents=1)
        [(node, reported)] = there.noted
        assert (node, reported.why) == ("n0", "team/llama i-0001: an ECC error of rank 0")
        await there.served.until(lambda: any(each.get("hardware") for each in there.status["recent"][-1:]))
        await there.job.close()
        there.begin(epoch=2)
        for each in (first, second):
            await each.until_obeying(2)
        assert there.noted == [(node, reported), (node, reported)], "the same again, which counts once"


async def test_an_incident_whose_end_a_leader_did_not_record_is_over_for_the_next_one(tmp_path: Path) -> None:
    async with place(tmp_path, replace(POLICY, max_restarts=9)) as there:
        first, second = await there.form()
        for each in (first, second):
            each.holds_state = True
        await crash_in(2, first, second, fail="exception", message="ValueError: no")
        await there.until(phase="running", generation=2, incidents=1)
        await there.served.until(lambda: there.status["recent"] and not there.status["recent"][-1]["open"])
        await there.job.close()
        [incident] = there.status["recent"]
        there.status["recent"] = [{**incident, "open": True, "recovered_s": None}]
        there.begin(epoch=2)
        await there.served.until(lambda: there.status["recent"] and not there.status["recent"][-1]["open"])
        [ended] = there.status["recent"]
        assert ended["evidence"][-1].startswith("another supervisor took over before the end")
        assert (ended["id"], ended["recovered_s"], ended["lost_steps"]) == ("i-0001", None, 0)


async def test_a_crash_of_the_script_is_no_evidence_against_a_node(tmp_path: Path) -> None:
    async with place(tmp_path, replace(POLICY, max_restarts=9)) as there:
        first, second = await there.form()
        for each in (first, second):
            each.holds_state = True
        await crash_in(2, first, second, fail="exception", message="ValueError: no")
        await there.until(phase="running", generation=2, incidents=1)
        assert there.noted == []


async def test_the_status_shows_standby_pods_and_only_those_without_ranks_may_yield(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        there.policy = replace(POLICY, standby=1)
        await settled_with_standby(there)
        uid = next(uid for uid, pod in there.pods.items() if pod.name == "w-2")
        there.pods[uid] = replace(there.pods[uid], is_standby=True)
        there.look()
        await there.until(phase="running")
        await there.served.until(lambda: there.status.get("standbys", {}).get("summary") == "1/1")
        shown = there.status["standbys"]
        assert shown["pods"] == [{"name": "w-2", "node": "n2", "state": "idle"}]
        assert (shown["wanted"], shown["ready"], shown["problem"]) == (1, 1, "")
        [idle] = there.job.idle_standbys()
        assert (idle.uid, idle.node, idle.own) == (uid, "n2", there.pods.keys())
        drained = next(uid for uid, pod in there.pods.items() if pod.name == "w-0")
        there.pods[drained] = replace(there.pods[drained], disruption="EvictionByEvictionAPI")
        there.look()
        assert there.job.idle_standbys() == [], "the member on node n0 needs it"
        there.pods[drained] = replace(there.pods[drained], disruption="")
        there.look()
        standby = there.pods[uid].member
        assert standby in there.job.backend.members
        waiting = {"metadata": {"namespace": "team", "name": "other"}}
        assert not await idle.give_way(read_pod_needs(waiting), "cpu"), (
            "the API server does not have this pod"
        )
        assert standby not in there.job.backend.members, "it gets no ranks until its deletion is seen"
