"""The quarantine of one leader over a real socket, with answers that get lost and writes of others."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import pytest
from aiohttp import web

from bench.scale.api_server import merged
from holdfast.node_report import REPORT, REPORT_AT
from supervisor.kubernetes.client import ApiServer
from supervisor.kubernetes.events import EventRecorder, api_time
from supervisor.nodes import controller
from supervisor.nodes.controller import QuarantineController, QuarantinedJobs
from supervisor.nodes.names import CONDITION, CONFIG, RECORD, REQUEST, TAINT, VERDICTS
from supervisor.nodes.node_mirror import NodeMirror
from supervisor.nodes.verdicts import AgentVerdicts, VerdictSwaps
from supervisor.quarantine.model import RunFault
from tests.unit.supervisor.cluster.api_server import LIMIT_S, LOST_ANSWER, Json, ServedObjects, status
from tests.unit.supervisor.nodes.node_samples import FOREIGN, XID, node_object, report_text

QUICK = {"dry-run": "false", "max-share": "1", "min-serving": "0"}


class NoJobs:
    """Jobs without members on any node."""

    def leave(self, node: str, why: str) -> None:
        """Do nothing: no member is on the node."""

    def members_on(self, node: str) -> int:
        return 0

    def heed_verdicts(self, nodes: frozenset[str]) -> None:
        """Do nothing: no member could move."""


class ServedNodes(ServedObjects):
    """Nodes too, whose metadata and spec are changed by merge patches, and whose conditions are applied."""

    def _write(
        self, request: web.Request, plural: str, namespace: str, name: str, part: str, body: Any
    ) -> web.Response:
        if plural != "nodes":
            return super()._write(request, plural, namespace, name, part, body)
        found = self.objects.get((plural, namespace, name))
        if found is None:
            return status(404, "NotFound")
        if part == "status":
            assert request.query["fieldManager"] == "holdfast-quarantine"
            [applied] = body["status"]["conditions"]
            kept = [each for each in found["status"]["conditions"] if each["type"] != applied["type"]]
            made = {**found, "status": {**found["status"], "conditions": [*kept, applied]}}
        elif body["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
            return status(409, "Conflict")
        else:
            made = merged(found, body)
        self.requests.append(f"PATCH {part or plural} {name}")
        return web.json_response(self.put(plural, json.loads(json.dumps(made))))

    # -- what a test does

    def judge(self, name: str, said: str = "", age_s: float = 0.0) -> None:
        """Set the verdict of a node's agent; "" if it is healthy. It has been so for `age_s`."""
        found = json.loads(json.dumps(self.node(name)))
        others = [each for each in found["status"]["conditions"] if each["type"] not in VERDICTS]
        at = api_time(datetime.fromtimestamp(time.time() - age_s, timezone.utc))
        verdict = {"type": VERDICTS[0], "status": "False" if said else "True", "message": said}
        verdict["lastTransitionTime"] = at
        found["status"]["conditions"] = [*others, verdict]
        self.put("nodes", found)

    def add(self, *names: str) -> None:
        for name in names:
            self.put("nodes", node_object(name, annotations={REPORT: report_text(name)}))

    def node(self, name: str) -> Json:
        return self.objects["nodes", "", name]

    def annotate(self, name: str, key: str, value: str) -> None:
        found = json.loads(json.dumps(self.node(name)))
        found["metadata"]["annotations"][key] = value
        self.put("nodes", found)

    def report(self, name: str, *findings: Json) -> None:
        self.annotate(name, REPORT, report_text(name, *findings, at_s=time.time()))

    def is_tainted(self, name: str) -> bool:
        ours = [each for each in self.node(name)["spec"]["taints"] if each["key"] == TAINT]
        assert len(ours) <= 1
        return bool(ours)

    def record(self, name: str) -> Json:
        found: Json = json.loads(self.node(name)["metadata"]["annotations"].get(RECORD, "{}"))
        return found

    def condition(self, name: str) -> Json:
        found = {each["type"]: each for each in self.node(name)["status"]["conditions"]}
        condition: Json = found.get(CONDITION, {})
        return condition

    def configure(self, **changed: str) -> None:
        data = {**QUICK, **{key.replace("_", "-"): each for key, each in changed.items()}}
        self.put("configmaps", {"metadata": {"name": CONFIG, "namespace": "holdfast-system"}, "data": data})

    def reasons(self, name: str) -> list[str]:
        return [each["reason"] for each in self.events if each["involvedObject"]["name"] == name]


@dataclass
class Place:
    served: ServedNodes
    api: ApiServer
    left_s: float = 60.0
    jobs: QuarantinedJobs = field(default_factory=NoJobs)
    leaders: list[asyncio.Future[Any]] = field(default_factory=list)

    async def lead(self, *, hears: bool = True, ahead_s: float = 0.0) -> QuarantineController:
        """Begin another leader, and let it see each agent's report change if it `hears`."""
        events = EventRecorder(self.api, "holdfast-supervisor", "pod")
        nodes = NodeMirror(self.api)
        made = QuarantineController(
            self.api, events, "holdfast-system", self.jobs, lambda: self.left_s, nodes,
            lambda: time.time() + ahead_s,
        )  # fmt: skip
        self.leaders += [asyncio.ensure_future(each) for each in (nodes.run(), made.run(), events.run())]
        await asyncio.wait_for(made.synced.wait(), LIMIT_S)
        for _, _, name in [key for key in self.served.objects if hears and key[0] == "nodes"]:
            findings = [XID] if "xid" in self.served.node(name)["metadata"]["annotations"][REPORT] else []
            self.served.report(name, *findings)
        return made

    async def kill(self) -> None:
        for each in self.leaders:
            each.cancel()
        if self.leaders:
            await asyncio.wait(self.leaders)
        self.leaders.clear()


@asynccontextmanager
async def _serving(*names: str) -> AsyncIterator[Place]:
    served = ServedNodes()
    served.add(*names)
    served.configure()
    async with served.serving() as api:
        made = Place(served, api)
        try:
            yield made
        finally:
            await made.kill()


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with _serving("a", "b", "c") as made:
        yield made


def is_settled(served: ServedNodes, name: str) -> Callable[[], bool]:
    return lambda: served.is_tainted(name) and served.condition(name).get("status") == "True"


async def test_a_fault_is_carried_out_and_announced_once(place: Place) -> None:
    served = place.served
    await place.lead()
    served.report("a", XID)
    await served.until(is_settled(served, "a"))
    await served.until(lambda: served.reasons("a"))
    served.report("a", XID)
    served.report("b", XID)
    await served.until(is_settled(served, "b"))
    assert served.requests == ["PATCH nodes a", "PATCH status a", "PATCH nodes b", "PATCH status b"]
    assert served.reasons("a") == ["Quarantined"]
    assert [each for each in served.node("a")["spec"]["taints"] if each["key"] != TAINT] == FOREIGN


@pytest.mark.parametrize("fault", [LOST_ANSWER, 409, 500, 403])
async def test_a_write_that_fails_or_whose_answer_is_lost_is_neither_doubled_nor_forgotten(
    place: Place, fault: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "REFUSED_S", 0.05)
    served = place.served
    await place.lead()
    served.faults = [fault]
    served.report("a", XID)
    await served.until(is_settled(served, "a"))
    assert len(served.record("a")["history"]) == 1
    assert served.requests.count("PATCH nodes a") == 1


async def test_a_node_that_refuses_does_not_delay_another(place: Place) -> None:
    served = place.served
    await place.lead()
    served.faults = [403]
    served.report("a", XID)
    served.report("b", XID)
    await served.until(lambda: served.is_tainted("a") or served.is_tainted("b"))
    assert len(served.requests) <= 2


@pytest.mark.parametrize("writes", range(3))
async def test_a_successor_completes_what_a_killed_leader_has_begun(place: Place, writes: int) -> None:
    served = place.served
    await place.lead()
    if writes < 2:
        served.faults = [*[None] * writes, place.leaders[0].cancel]
    served.report("a", XID)
    await served.until(lambda: len(served.requests) >= max(1, writes))
    await place.kill()
    await place.lead()
    await served.until(is_settled(served, "a"))
    served.annotate("a", REQUEST, "release")
    await served.until(lambda: served.condition("a").get("reason") == "ReleasedByOperator")
    assert served.requests.count("PATCH nodes a") == 2
    assert len(served.record("a")["history"]) == 1


@pytest.mark.parametrize("days", [60, -60])
async def test_a_leader_with_a_wrong_clock_keeps_an_operators_release(place: Place, days: int) -> None:
    """Three agents write what time it is, so the leader knows that its own clock is wrong."""
    served = place.served

    def report(name: str) -> None:
        now_s = time.time()
        found = [XID] if name == "a" else []
        text = report_text(name, *found, at_s=now_s, held_s=86400.0)
        at = api_time(datetime.fromtimestamp(now_s, timezone.utc))
        node = json.loads(json.dumps(served.node(name)))
        node["metadata"]["annotations"] |= {REPORT: text, REPORT_AT: at}
        served.put("nodes", node)

    await place.lead()
    report("a")
    await served.until(is_settled(served, "a"))
    served.annotate("a", REQUEST, "release")
    await served.until(lambda: served.condition("a").get("reason") == "ReleasedByOperator")
    released = served.record("a")
    await place.kill()
    await place.lead(hears=False, ahead_s=days * 86400.0)
    for name in ("a", "b", "c"):
        report(name)
    await served.until(lambda: "QuarantineAlert" in served.reasons("holdfast-supervisor"))
    [alert] = [each for each in served.events if each["reason"] == "QuarantineAlert"]
    assert "the supervisor's clock is" in alert["message"]
    report("b")
    served.report("b", XID)
    await served.until(is_settled(served, "b"))
    assert abs(served.record("b")["quarantine"]["at_s"] - time.time()) < 3600.0, "it uses the nodes' time"
    assert not served.is_tainted("a")
    kept = served.record("a")
    assert kept["waiver"]["evidence"] == released["waiver"]["evidence"]
    assert abs(kept["waiver"]["at_s"] - released["waiver"]["at_s"]) < 3.0, "the agents write whole seconds"
    assert abs(kept["history"][0]["at_s"] - released["history"][0]["at_s"]) < 3.0


async def test_two_leaders_at_once_taint_a_node_once(place: Place) -> None:
    served = place.served
    await place.lead()
    await place.lead()
    served.report("a", XID)
    await served.until(is_settled(served, "a"))
    served.report("b", XID)
    await served.until(is_settled(served, "b"))
    assert [len(served.record(name)["history"]) for name in ("a", "b")] == [1, 1]


async def test_without_a_term_nothing_is_written(place: Place) -> None:
    served = place.served
    place.left_s = 0.0
    await place.lead()
    served.report("a", XID)
    other = await place.lead()
    await asyncio.wait_for(other.synced.wait(), LIMIT_S)
    assert served.requests == []
    place.left_s = 60.0
    served.report("a", XID)
    await served.until(is_settled(served, "a"))


async def test_what_a_run_has_seen_is_stored_on_the_node(place: Place) -> None:
    made = await place.lead()
    made.note_run_fault("a", RunFault(time.time() + 1e6, "GPU-1"))
    made.note_run_fault("nowhere", RunFault(1.0))
    await place.served.until(lambda: place.served.record("a").get("runs"))
    [fault] = place.served.record("a")["runs"]
    assert fault["device"] == "GPU-1"
    assert fault["at_s"] <= time.time(), "a clock that was ahead is set to now"
    assert place.served.requests == ["PATCH nodes a"]


async def test_settings_take_effect_at_once_and_bad_ones_never(place: Place) -> None:
    served = place.served
    served.configure(dry_run="true")
    made = await place.lead()
    served.report("a", XID)
    await served.until(lambda: "QuarantineDryRun" in served.reasons("a"))
    good = made.settings
    served.configure(dry_run="flase")
    await served.until(lambda: "BadSettings" in served.reasons(CONFIG))
    assert made.settings is good
    assert served.requests == []
    served.configure()
    await served.until(is_settled(served, "a"))


async def test_a_leader_that_starts_with_bad_settings_only_announces(place: Place) -> None:
    served = place.served
    served.configure(dry_run="flase")
    made = await place.lead()
    served.report("a", XID)
    await served.until(lambda: "QuarantineDryRun" in served.reasons("a"))
    assert made.settings.dry_run == "true"
    assert served.requests == []


async def test_a_deleted_node_is_forgotten(place: Place) -> None:
    served = place.served
    await place.lead()
    served.report("a", XID)
    await served.until(is_settled(served, "a"))
    served.remove("nodes", "", "a")
    served.add("a")
    served.report("a")
    served.report("b", XID)
    await served.until(is_settled(served, "b"))
    assert not served.is_tainted("a")


NUMBERS = ("1" + "0" * 400, "1" + "0" * 5000, "-1" + "0" * 307, "1e308")


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("key", [REPORT, RECORD])
async def test_a_number_that_nobody_can_compute_with_stops_the_quarantine_of_its_own_node_alone(
    place: Place, key: str, number: str
) -> None:
    served = place.served
    place.served.configure(max_share="1")
    made = await place.lead()
    text = f'{{"released_at_s": {number}}}'
    if key == REPORT:
        raw = json.loads(report_text("c", XID, at_s=time.time()))
        raw["entities"][0]["findings"][0]["since_s"] = "SINCE"
        text = json.dumps(raw).replace('"SINCE"', number)
    served.annotate("c", key, text)
    served.report("a", XID)
    await served.until(is_settled(served, "a"))
    await served.until(lambda: "QuarantineAlert" in served.reasons("c"))
    assert not any(each.done() for each in place.leaders)
    assert [each.name for each in made._plan().pool.nodes if each.refused] == ["c"]


class WatchedJobs(NoJobs):
    """Jobs that remember which verdicts they were told to heed."""

    def __init__(self) -> None:
        self.heeded = [frozenset[str]()]
        self._told = asyncio.Event()

    def heed_verdicts(self, nodes: frozenset[str]) -> None:
        if nodes != self.heeded[-1]:
            self.heeded.append(nodes)
        self._told.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Return once `condition` holds. It is checked whenever the quarantine has looked at the verdicts."""

        async def wait() -> None:
            while not condition():
                self._told.clear()
                await self._told.wait()

        await asyncio.wait_for(wait(), LIMIT_S)


async def judged(place: Place, **settings: str) -> WatchedJobs:
    """Begin a leader that has planned with these settings, and with healthy verdicts of all agents."""
    jobs = place.jobs = WatchedJobs()
    place.served.configure(**settings)
    for name in ("a", "b", "c"):
        place.served.judge(name)
    made = await place.lead()
    await jobs.until(lambda: made._service is not None and made._service.breaker.unknown == 0)
    return jobs


async def test_a_verdict_moves_members_at_once_and_only_one_of_two_that_the_breaker_allows(
    place: Place,
) -> None:
    jobs = await judged(place, max_share="0.1", min_serving="1", cooldown="1s")
    place.served.judge("a", "GPU 3 is lost")
    await jobs.until(lambda: jobs.heeded[-1] == {"a"})
    place.served.judge("b", "GPU 3 is lost")
    await place.served.until(lambda: "VerdictHeld" in place.served.reasons("b"))
    assert jobs.heeded == [frozenset(), {"a"}, frozenset()], "most nodes are bad: nobody moves"


async def test_a_new_leader_heeds_a_verdict_before_it_has_heard_all_agents(place: Place) -> None:
    jobs = place.jobs = WatchedJobs()
    place.served.configure(max_share="0.1", min_serving="1")
    for name in ("a", "b", "c"):
        place.served.judge(name, "GPU 3 is lost" if name == "a" else "")
    await place.lead(hears=False)
    await place.served.until(lambda: "VerdictHeld" in place.served.reasons("a"))
    place.served.report("b")
    place.served.report("a", XID)
    await jobs.until(lambda: jobs.heeded[-1] == {"a"})


@pytest.mark.parametrize(("age_s", "is_storm"), [(3600.0, False), (60.0, True)])
async def test_only_verdicts_of_the_last_minutes_are_a_storm_for_a_new_leader(
    age_s: float, is_storm: bool
) -> None:
    """The conditions on the Nodes outlive the leaders, so a new one finds them."""
    async with _serving(*"abcdefghijkl") as place:
        jobs = place.jobs = WatchedJobs()
        for name in "abcdefghijkl":
            place.served.judge(name, "GPU 3 is lost" if name in "abcde" else "", age_s)
        await place.lead()
        if is_storm:
            await place.served.until(
                lambda: any("a storm" in each["message"] for each in place.served.events)
            )
            assert jobs.heeded == [frozenset()]
        else:
            await jobs.until(lambda: jobs.heeded[-1] == frozenset("abcde"))


async def test_a_new_leader_knows_of_a_storm_although_one_of_its_nodes_has_recovered() -> None:
    async with _serving("a", "b", "c") as place:
        jobs = place.jobs = WatchedJobs()
        place.served.judge("a", "GPU 3 is lost", 120.0)
        place.served.judge("b", "", 60.0)
        place.served.judge("c", "", 9e6)
        place.served.annotate("b", REPORT, report_text("b", at_s=time.time(), calmed_s=60.0))
        place.served.annotate("b", REPORT_AT, api_time(datetime.now(timezone.utc)))
        await place.lead()
        await place.served.until(lambda: any("a storm" in each["message"] for each in place.served.events))
        assert jobs.heeded == [frozenset()]


async def test_verdicts_that_arrive_together_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, a storm of 5,000 nodes would occupy the process for a minute."""
    names = [f"n{number:03d}" for number in range(200)]
    looks = list[float]()
    swaps = AgentVerdicts.swaps

    def watched(self: AgentVerdicts, *given: Any, **named: Any) -> VerdictSwaps:
        looks.append(time.monotonic())
        return swaps(self, *given, **named)

    monkeypatch.setattr(AgentVerdicts, "swaps", watched)
    async with _serving(*names) as place:
        place.jobs = WatchedJobs()
        for name in names:
            place.served.judge(name)
        made = await place.lead()
        await place.served.until(lambda: made._service is not None)
        before = len(looks)
        for name in names:
            place.served.judge(name, "GPU 3 is lost")
        await place.served.until(lambda: len(made._swaps.held) == len(names))
        assert len(looks) - before < len(names) / 4


async def test_the_verdict_of_an_agent_that_has_died_moves_nobody(place: Place) -> None:
    jobs = place.jobs = WatchedJobs()
    for name in ("a", "b", "c"):
        place.served.judge(name, "GPU 3 is lost" if name == "a" else "")
    await place.lead(hears=False)
    for name in ("b", "c"):
        place.served.report(name)
    await place.served.until(lambda: "VerdictHeld" in place.served.reasons("a"))
    place.served.judge("c", "GPU 4 is lost")
    await jobs.until(lambda: jobs.heeded[-1])
    assert jobs.heeded == [frozenset(), {"c"}], "and no storm is seen, because that of a does not count"


async def test_in_a_dry_run_a_verdict_is_only_announced(place: Place) -> None:
    jobs = await judged(place, dry_run="true")
    place.served.judge("a", "GPU 3 is lost")
    await place.served.until(lambda: "VerdictDryRun" in place.served.reasons("a"))
    assert jobs.heeded == [frozenset()]
    place.served.configure()
    await jobs.until(lambda: jobs.heeded[-1] == {"a"})


async def test_a_leader_whose_term_has_ended_heeds_no_other_verdict(place: Place) -> None:
    jobs = await judged(place)
    place.left_s = 0.0
    place.served.judge("a", "GPU 3 is lost")
    other = Place(place.served, place.api)
    second = other.jobs = WatchedJobs()
    await other.lead()
    await second.until(lambda: second.heeded[-1] == {"a"})
    assert jobs.heeded == [frozenset()]
    await other.kill()


async def test_an_operators_release_ends_the_moves_for_a_known_fault(place: Place) -> None:
    jobs = await judged(place)
    place.served.judge("a", "GPU 3 is lost")
    place.served.report("a", XID)
    await jobs.until(lambda: jobs.heeded[-1] == {"a"})
    await place.served.until(is_settled(place.served, "a"))
    place.served.annotate("a", REQUEST, "release")
    await jobs.until(lambda: jobs.heeded[-1] == frozenset())
    place.served.report("a", XID, {**XID, "check": "ecc", "code": None})
    await jobs.until(lambda: jobs.heeded[-1] == {"a"})


@pytest.mark.parametrize("was_planned", [True, False])
async def test_a_new_fault_ends_an_operators_release_without_waiting_for_the_next_plan(
    place: Place, monkeypatch: pytest.MonkeyPatch, was_planned: bool
) -> None:
    """A round with many writes, as in a storm, can take a minute."""
    stops, waits = asyncio.Event(), asyncio.Event()
    carry_on = QuarantineController._round

    async def round_(self: QuarantineController) -> tuple[float, float]:
        if stops.is_set():
            waits.set()
            await asyncio.Event().wait()
        return await carry_on(self)

    monkeypatch.setattr(QuarantineController, "_round", round_)
    jobs = place.jobs = WatchedJobs()
    for name in ("a", "b", "c"):
        place.served.judge(name)
    made = await place.lead()
    await jobs.until(lambda: made._service is not None and made._service.breaker.unknown == 0)
    place.served.judge("a", "GPU 3 is lost")
    place.served.report("a", XID)
    await jobs.until(lambda: jobs.heeded[-1] == {"a"})
    await place.served.until(is_settled(place.served, "a"))
    place.served.annotate("a", REQUEST, "release")
    await jobs.until(lambda: jobs.heeded[-1] == frozenset())
    await place.served.until(lambda: made._service is not None and made._service.waived == {"a"})
    stops.set()
    place.served.report("b")
    await asyncio.wait_for(waits.wait(), LIMIT_S)
    assert made._service is not None
    if not was_planned:  # the release is newer than the last plan
        made._service, made._waived = replace(made._service, waived=frozenset()), {"a"}
    place.served.report("a", XID, {**XID, "check": "ecc", "code": None})
    await jobs.until(lambda: jobs.heeded[-1] == {"a"})
    assert (made._service.waived, made._waived) == (frozenset(), set())


async def test_a_node_that_an_operator_has_released_is_no_part_of_a_storm(place: Place) -> None:
    """Its agent restarts and reports the known fault again. Later, the next leader finds this verdict."""
    jobs = await judged(place, storm_nodes="2")
    place.served.judge("a", "GPU 3 is lost")
    place.served.report("a", XID)
    await place.served.until(is_settled(place.served, "a"))
    place.served.annotate("a", REQUEST, "release")
    await place.served.until(lambda: TAINT not in json.dumps(place.served.node("a")["spec"]))
    await jobs.until(lambda: jobs.heeded[-1] == frozenset())
    place.served.judge("a")
    place.served.judge("a", "GPU 3 is lost")
    place.served.judge("b", "GPU 4 is lost")
    await jobs.until(lambda: jobs.heeded[-1] == {"b"})
    assert not any("a storm" in each["message"] for each in place.served.events)
    await place.kill()
    place.served.configure()
    second = place.jobs = WatchedJobs()
    await place.lead()
    await second.until(lambda: second.heeded[-1] == {"b"})
    assert not any("a storm" in each["message"] for each in place.served.events)


@pytest.mark.parametrize(
    ("times", "age_s"),
    [
        ((), 0.0),
        (("1970-01-01T00:16:40Z",), 1000.0),
        (("1970-01-01T00:16:40Z", "1970-01-01T00:15:40Z"), 1060.0),
        (("1970-01-01T01:00:00Z",), 0.0),
        (("1970-01-01T00:16:40Z", ""), 0.0),
        (("yesterday",), 0.0),
    ],
)
def test_the_age_of_a_verdict_is_that_of_its_first_fault(times: tuple[str, ...], age_s: float) -> None:
    assert controller._age_s(times, 2000.0) == age_s
