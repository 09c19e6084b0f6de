"""A missed pod that a job waits for is evicted once a dry run has shown that its successor is injected."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from supervisor.admission import pod_layout
from supervisor.cluster.adoption import job_membership
from supervisor.cluster.adoption.job_membership import JobKey, NotAdopted, PlaceInJob, top_owner
from supervisor.cluster.missed.notes import MAX_INCIDENTS, MAX_NOTES, MissedNotes
from supervisor.cluster.missed.replacement import EVICTED, LOOK_S, REFUSED_S, REMAINS, MissedPods
from supervisor.cluster.missed.rule import SETTLE_S, MissingMembers
from supervisor.kubernetes.client import ApiServer
from tests.unit.supervisor.cluster.adoption.workloads import Json, job_of, key_of, made, pod
from tests.unit.supervisor.cluster.api_server import LOST_ANSWER, ServedObjects

POD_INDEX = "apps.kubernetes.io/pod-index"
OWNER = made("apps/v1", "StatefulSet", "gpt", {"replicas": 3})
KEY = job_of(OWNER)
ONE = MissingMembers(1, frozenset({(0,), (2,)}))
QUOTA = "pods is forbidden: exceeded quota: team, requested: pods=1, used: pods=3, limited: pods=3"


def missed_pod(number: int = 1, owner: Json | None = OWNER) -> Json:
    name = f"gpt-{number}"
    found = pod(name, owner, {POD_INDEX: str(number), "app": "gpt"})
    found["metadata"]["annotations"] = {pod_layout.INJECT: "true"}
    found["metadata"]["uid"] = f"uid-{name}-1"
    found["spec"] = {"containers": [{"name": "train", "image": "gpt"}], "nodeName": "n1"}
    return found


@dataclass
class StubJob:
    """A supervised job that lacks what a test sets."""

    missing: MissingMembers | None = ONE
    supervision: tuple[str, str] = ("gpt", "uid-supervision")
    open_incident: str = "i-0001"
    missed: MissedNotes = field(default_factory=MissedNotes)
    events: list[tuple[str, str, bool]] = field(default_factory=list)

    def record(self, reason: str, message: str, bad: bool) -> None:
        self.events.append((reason, message, bad))


@dataclass
class Place:
    """A namespace with a job, its owner and its missed pods, and the work on them."""

    served: ServedObjects
    server: ApiServer
    job: StubJob = field(default_factory=StubJob)
    events: list[tuple[str, str]] = field(default_factory=list)  # about pods: the reason and the pod
    is_dry: bool = False
    term_s: float = 60.0
    now_s: float = 1000.0

    def __post_init__(self) -> None:
        self.jobs: dict[JobKey, StubJob] = {KEY: self.job}
        self.served.put("statefulsets", dict(OWNER))
        self.served.try_creation = injected
        self.work = MissedPods(
            self.server,
            lambda: self.jobs,
            self._place_of,
            lambda found, reason, _: self.events.append((reason, found["metadata"]["name"])),
            lambda: self.term_s,
            lambda: self.is_dry,
        )

    def _place_of(self, found: Mapping[str, object]) -> PlaceInJob | NotAdopted:
        owners = top_owner(found, {tuple(key_of(OWNER)): OWNER}.get)
        return job_membership.place_of(found, owners)

    async def round(self, after_s: float = SETTLE_S) -> None:
        self.now_s += after_s
        before = len(self.evicted)
        await self.work.round(self.now_s)
        for name in self.evicted[before:]:
            self.served.objects["pods", "team", name]["metadata"]["deletionTimestamp"] = "now"

    async def rounds(self, for_s: float) -> None:
        until_s = self.now_s + for_s
        while self.now_s < until_s:
            await self.round(2.5)

    @property
    def evicted(self) -> list[str]:
        return [each["metadata"]["name"] for each in self.served.evictions]

    @property
    def reasons(self) -> list[str]:
        return [reason for reason, _, _ in self.job.events]


@asynccontextmanager
async def place() -> AsyncIterator[Place]:
    served = ServedObjects()
    async with served.serving() as server:
        yield Place(served, server)


def injected(body: Json) -> web.Response:
    """Answer as the API server does while the webhook works."""
    body["metadata"]["labels"][pod_layout.MEMBER_LABEL] = pod_layout.IS_MEMBER
    body["metadata"]["annotations"][pod_layout.INJECTED] = "{}"
    return web.json_response(body, status=201)


def refused(message: str, *warnings: str) -> web.Response:
    answer = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": message}
    response = web.json_response(answer, status=403)
    for each in warnings:
        response.headers.add("Warning", f"299 - {json.dumps(each)}")
    return response


async def test_the_pod_that_a_job_waits_for_is_evicted_and_this_is_told() -> None:
    async with place() as there:
        found = there.served.put("pods", missed_pod())
        await there.round()
        assert there.evicted == [], "it was only just seen"
        await there.round()
        (eviction,) = there.served.evictions
        conditions = eviction["deleteOptions"]["preconditions"]
        expected = {"uid": "uid-gpt-1-1", "resourceVersion": found["metadata"]["resourceVersion"]}
        assert (eviction["metadata"]["name"], conditions) == ("gpt-1", expected)
        (reason, message, is_bad), *others = there.job.events
        assert (reason, is_bad, others) == (EVICTED, False, [])
        assert "gpt-1 was created without Holdfast" in message
        assert "StatefulSet gpt" in message
        assert there.events == [(EVICTED, "gpt-1")]
        assert there.job.missed.incident({"id": "i-0001"})["missed_pods"] == [message]


async def test_the_tried_copy_is_a_standby_for_the_policy_and_is_not_stored() -> None:
    async with place() as there:
        there.served.put("pods", missed_pod())
        await there.rounds(10)
        (tried,) = there.served.dry_runs
        (owner,) = tried["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("Supervision", "gpt", "uid-supervision")
        assert tried["metadata"]["labels"] == {"app": "gpt", pod_layout.STANDBY_OF: "gpt"}
        assert tried["metadata"]["annotations"][pod_layout.INJECT] == "true"
        assert "nodeName" not in tried["spec"]
        assert not [each for each in there.served.requests if each.startswith("POST pods")]


async def test_nothing_is_evicted_while_the_webhook_is_away_and_the_status_says_why() -> None:
    async with place() as there:
        there.served.put("pods", missed_pod())
        there.served.try_creation = lambda body: web.json_response(body, status=201)
        await there.rounds(300)
        assert there.evicted == []
        assert there.reasons == [REMAINS], "an unchanged reason is told once"
        (warning,) = there.job.missed.status({"open_incident": None})["warnings"]
        assert "gpt-1" in warning
        assert "webhook does not inject its pods yet" in warning
        assert len(there.served.dry_runs) <= 300 / REFUSED_S + 2
        there.served.try_creation = injected
        await there.rounds(REFUSED_S + LOOK_S[-1])
        assert there.evicted == ["gpt-1"]
        there.job.missing = None
        await there.round()
        assert there.job.missed.status({"warnings": []}) == {"warnings": []}


@pytest.mark.parametrize(
    ("message", "warnings", "is_evicted"),
    [
        (QUOTA, (f"Holdfast: {pod_layout.WOULD_INJECT}",), True),
        (QUOTA, (), False),
        ("violates PodSecurity", (f"Holdfast: {pod_layout.WOULD_INJECT}",), False),
    ],
    ids=["a quota, but injected", "a quota, not injected", "another refusal"],
)
async def test_a_used_up_quota_does_not_hide_that_the_webhook_works(
    message: str, warnings: tuple[str, ...], is_evicted: bool
) -> None:
    async with place() as there:
        there.served.put("pods", missed_pod())
        there.served.try_creation = lambda _: refused(message, *warnings)
        await there.rounds(15)
        assert bool(there.evicted) is is_evicted
        assert there.reasons == [EVICTED if is_evicted else REMAINS]


async def test_a_pod_of_a_job_that_lacks_nobody_is_not_even_looked_for() -> None:
    async with place() as there:
        there.job.missing = None
        there.served.put("pods", missed_pod())
        there.served.broken["pods"] = 500  # an answer would raise
        await there.rounds(60)
        assert (there.evicted, there.served.refused) == ([], 0)


@pytest.mark.parametrize("number", [0, 2])
async def test_a_pod_in_the_place_of_a_member_stays(number: int) -> None:
    async with place() as there:
        there.served.put("pods", missed_pod(number))
        await there.rounds(60)
        assert there.evicted == []


async def test_pods_that_do_not_ask_or_were_refused_or_injected_stay() -> None:
    async with place() as there:
        plain, refused_one, other, ours = (missed_pod(1) for _ in range(4))
        for number, each in enumerate((plain, refused_one, other, ours)):
            each["metadata"].update(name=f"gpt-1-{number}", uid=f"uid-{number}")
        plain["metadata"]["annotations"] = {}
        refused_one["metadata"]["annotations"][pod_layout.NOT_INJECTED] = "no command"
        other["metadata"]["ownerReferences"] = [{**other["metadata"]["ownerReferences"][0], "uid": "another"}]
        ours["metadata"]["annotations"][pod_layout.INJECTED] = "{}"
        for each in (plain, refused_one, other, ours):
            there.served.put("pods", each)
        await there.rounds(60)
        assert there.evicted == []


async def test_a_bare_pod_stays_and_this_is_told() -> None:
    async with place() as there:
        key = JobKey("team", "gpt")
        there.jobs = {key: there.job}
        bare = missed_pod(1, None)
        bare["metadata"]["annotations"][pod_layout.GROUP] = "gpt"
        there.served.put("pods", bare)
        await there.rounds(60)
        assert (there.evicted, there.reasons) == ([], [REMAINS])
        assert there.events == [(REMAINS, "gpt-1")]
        assert "no owner" in there.job.events[0][1]


async def test_a_dry_run_only_announces() -> None:
    async with place() as there:
        there.is_dry = True
        there.served.put("pods", missed_pod())
        await there.rounds(60)
        assert (there.evicted, there.reasons) == ([], [REMAINS])
        assert "dry run only announces" in there.job.events[0][1]


async def test_a_supervisor_that_may_have_been_replaced_evicts_nothing() -> None:
    async with place() as there:
        there.term_s = 0.0
        there.served.put("pods", missed_pod())
        await there.rounds(60)
        assert there.evicted == []


async def test_a_job_that_gets_its_member_meanwhile_keeps_the_pod() -> None:
    async with place() as there:
        there.served.put("pods", missed_pod())

        def arrive(body: Json) -> web.Response:
            there.job.missing = None
            return injected(body)

        there.served.try_creation = arrive
        await there.rounds(60)
        assert there.evicted == []


async def test_a_disruption_budget_is_honoured_and_told() -> None:
    async with place() as there:
        there.served.put("pods", missed_pod())
        there.served.budget = "The disruption budget gpt needs 2 healthy pods"
        await there.rounds(60)
        assert (there.evicted, there.reasons) == ([], [REMAINS])
        assert "gpt needs 2 healthy pods" in there.job.events[0][1]
        there.served.budget = ""
        await there.rounds(REFUSED_S + LOOK_S[-1])
        assert there.evicted == ["gpt-1"]


async def test_a_pod_that_is_missed_again_and_again_is_evicted_three_times() -> None:
    async with place() as there:
        for attempt in range(8):
            found = missed_pod()
            found["metadata"]["uid"] = f"uid-gpt-1-{attempt}"
            there.served.put("pods", found)
            await there.rounds(300)
        assert there.evicted == ["gpt-1"] * 3
        assert there.reasons.count(EVICTED) == 3
        assert "evicted 3 times" in there.job.events[-1][1]


async def test_a_namespace_without_missed_pods_is_read_rarely() -> None:
    async with place() as there:
        reads = 0
        found = there.server.list

        async def counted(*given: object, **named: object) -> object:
            nonlocal reads
            reads += 1
            return await found(*given, **named)  # type: ignore[arg-type]

        there.server.list = counted  # type: ignore[method-assign, assignment]
        await there.rounds(600)
        assert reads <= 600 / LOOK_S[-1] + len(LOOK_S)


async def test_a_failed_request_is_not_fatal() -> None:
    async with place() as there:
        there.served.put("pods", missed_pod())
        there.served.broken["statefulsets"] = 500
        await there.rounds(60)
        assert (there.evicted, there.reasons) == ([], [])
        del there.served.broken["statefulsets"]
        await there.rounds(REFUSED_S + LOOK_S[-1])
        assert there.evicted == ["gpt-1"]


async def test_an_eviction_whose_answer_is_lost_counts() -> None:
    async with place() as there:
        for attempt in range(8):
            found = missed_pod()
            found["metadata"]["uid"] = f"uid-gpt-1-{attempt}"
            there.served.put("pods", found)
            there.served.faults = [None, LOST_ANSWER]  # of the dry run, and of the eviction
            await there.rounds(300)
        assert there.evicted == ["gpt-1"] * 3


async def test_a_pod_that_has_changed_since_it_was_read_is_examined_again() -> None:
    async with place() as there:
        there.served.put("pods", missed_pod())
        there.served.faults = [None, 409]
        await there.rounds(7.5)
        assert (there.evicted, there.reasons) == ([], [])
        await there.round(2.5)
        assert there.evicted == ["gpt-1"]


async def test_two_missing_members_are_both_replaced() -> None:
    async with place() as there:
        there.job.missing = MissingMembers(2, frozenset({(0,)}))
        for number in (1, 2):
            there.served.put("pods", missed_pod(number))
        await there.rounds(20)
        assert sorted(there.evicted) == ["gpt-1", "gpt-2"]


def test_notes_are_bounded_and_belong_to_their_incident() -> None:
    notes = MissedNotes()
    for number in range(40):
        notes.set_now([f"pod {number} {each}" for each in range(20)], f"i-{number:04d}")
    assert len(notes.incident({"id": "i-0039"})["missed_pods"]) == MAX_NOTES
    assert "missed_pods" not in notes.incident({"id": f"i-{39 - MAX_INCIDENTS:04d}"})
    status = notes.status({"warnings": ["other"], "open_incident": {"id": "i-0039"}})
    assert status["warnings"][0] == "other"
    assert len(status["warnings"]) == 1 + MAX_NOTES
    assert len(status["open_incident"]["missed_pods"]) == MAX_NOTES
