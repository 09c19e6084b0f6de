"""Only the current supervisor writes a job's resource, even with lost answers and concurrent writers."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from supervisor.cluster.adoption.job_membership import JobKey
from supervisor.cluster.supervision import contents, fenced_records, status_fields
from supervisor.cluster.supervision.contents import RunSize
from supervisor.cluster.supervision.fenced_records import SupervisionRecords
from supervisor.cluster.supervision.resource import (
    TAKE_OVER_TRIES,
    OwnerGone,
    SupervisionResource,
    Takeover,
    ensure_resource,
)
from supervisor.cluster.supervision.status_fields import MAX_INCIDENT_BYTES
from supervisor.controller.reported_storage import ReportedStorage
from supervisor.kubernetes.client import ApiServer
from supervisor.kubernetes.errors import ApiError, Conflict, NotFound, ServerUnreachable
from supervisor.observability import short_status
from supervisor.store.run_lead import Deposed
from supervisor.view.model import JobState, Policy, Replace, View
from tests.unit.supervisor.cluster.api_server import LOST_ANSWER, NEVER, ServedObjects
from tests.unit.supervisor.job_views import memory

KEY = JobKey("team", "llama", "uid-1", "PyTorchJob", "kubeflow.org/v1", "llama")
SETTINGS = {"max-restarts": "3"}
DECISION = Replace("m1", "m1 is lost")


@dataclass
class Place:
    served: ServedObjects
    server: ApiServer
    resource: SupervisionResource

    async def records(self, least_epoch: int = 1) -> SupervisionRecords:
        found = await self.resource.take_over(least_epoch)
        return SupervisionRecords(self.resource, found, lambda changed: ReportedStorage(list, changed))

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.served.supervision()["status"]
        return found


@asynccontextmanager
async def place(request_s: float = 10.0) -> AsyncIterator[Place]:
    served = ServedObjects()
    async with served.serving(request_s) as server:
        yield Place(served, server, await ensure_resource(server, KEY, RunSize(2, 4), SETTINGS))


async def decide(records: SupervisionRecords, after: JobState) -> None:
    """Write a decision as the journal's thread does."""
    view = View(0, 0.0, after)
    await asyncio.to_thread(records.open_log().write, view, Policy(), DECISION, after, {"format": 1})


def raised(served: ServedObjects, epoch: int) -> Callable[[], object]:
    return lambda: served.change(status={"epoch": epoch})


# -- making it


async def test_a_job_gets_a_resource_that_its_owner_owns() -> None:
    async with place() as there:
        found = there.served.supervision()
        assert found["spec"] == {
            "members": 2,
            "nprocPerNode": 4,
            "settings": SETTINGS,
            "owner": {
                "apiVersion": "kubeflow.org/v1",
                "kind": "PyTorchJob",
                "name": "llama",
                "uid": "uid-1",
            },
        }
        (owner,) = found["metadata"]["ownerReferences"]
        assert owner == found["spec"]["owner"]


async def test_the_resource_of_pods_without_an_owner_has_no_owner() -> None:
    async with place() as there:
        made = await ensure_resource(there.server, JobKey("team", "bare"), RunSize(2, 4), {})
        assert "ownerReferences" not in there.served.supervision(made.name)["metadata"]


async def test_an_existing_resource_describes_its_run_until_the_next_run_begins() -> None:
    async with place() as there:
        there.served.change(spec={"stop": "graceful"})
        before = dict(there.served.supervision())
        made = await ensure_resource(there.server, KEY, RunSize(3, 8), {"grace": "9s"})
        assert there.served.supervision() == before
        found = await made.take_over(1)
        await made.describe(found.epoch, found.spec, RunSize(3, 8), {"grace": "9s"})
        spec = there.served.supervision()["spec"]
        assert (spec["members"], spec["nprocPerNode"], spec["stop"]) == (3, 8, "graceful")
        assert spec["settings"] == {"grace": "9s"}, "a withdrawn setting must be gone"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (replace(KEY, kind="Job", uid="uid-2"), "llama-job"),
        (JobKey("team", "llama"), "llama-pods"),
    ],
)
async def test_owners_of_different_kinds_with_one_name_have_two_resources(key: JobKey, name: str) -> None:
    async with place() as there:
        made = await ensure_resource(there.server, key, RunSize(2, 4), {})
        assert made.name == name
        assert contents.names(key) == ("llama", name)
        again = await ensure_resource(there.server, key, RunSize(2, 4), {})
        assert again.name == name
        first, second = there.served.supervision(), there.served.supervision(name)
        for found, owner in ((first, KEY), (second, key)):
            assert [each for each in (KEY, key) if contents.belongs_to(found, each)] == [owner]


async def test_the_resource_of_a_deleted_owner_is_not_reused_by_the_next_owner_of_its_name() -> None:
    async with place() as there:
        before = dict(there.served.supervision())
        with pytest.raises(OwnerGone, match=r"belongs to .* with the uid uid-1"):
            await ensure_resource(there.server, replace(KEY, uid="uid-2"), RunSize(9, 9), {})
        assert there.served.supervision() == before


async def test_two_names_that_belong_to_others_are_a_failure_that_is_retried() -> None:
    async with place() as there:
        taken = {"metadata": {"namespace": "team", "name": "llama-job"}, "spec": {"owner": {"kind": "Other"}}}
        there.served.put("supervisions", taken)
        with pytest.raises(OwnerGone, match="both names"):
            await ensure_resource(there.server, replace(KEY, kind="Job"), RunSize(2, 4), {})


# -- taking it over


async def test_each_takeover_has_a_higher_epoch_of_at_least_the_leaders() -> None:
    async with place() as there:
        epochs = [(await there.resource.take_over(least)).epoch for least in (4, 4, 9, 2)]
        assert epochs == [4, 5, 9, 10]
        assert there.status == {"epoch": 10}


async def test_a_new_job_has_no_state() -> None:
    async with place() as there:
        assert await there.resource.take_over(1) == Takeover(1, None, None, ())


async def test_the_next_supervisor_reads_the_state_that_the_last_one_wrote() -> None:
    async with place() as there:
        records = await there.records()
        await decide(records, memory(generation=7, since_ns=5))
        await records.write(status_fields.summary({"step": 9, "message": "fine"}, [{"id": "i-0001"}]))
        found = await there.resource.take_over(1)
        assert found.state is not None
        assert found.state.memory == memory(generation=7, since_ns=5)
        assert found.view == {"step": 9, "message": "fine"}
        assert found.recent == ({"id": "i-0001"},)
        assert (there.status["decision"], there.status["why"]) == ("Replace", "m1 is lost")
        held = SupervisionRecords(there.resource, found, lambda changed: ReportedStorage(list, changed)).held
        assert held is not None
        assert (held.memory.generation, held.epoch, held.decision) == (7, 1, None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory": "no state", "view": "{", "recent": "no list", "epoch": "5"},
        {"memory": 3, "view": 3, "recent": [3, None], "epoch": None},
        {"memory": '{"format":1,"at_ns":1,"wall_s":Infinity,"clock":"","memory":{}}', "view": "[]"},
    ],
)
async def test_an_unreadable_status_is_that_of_a_new_job(wrong: dict[str, Any]) -> None:
    async with place() as there:
        there.served.change(status=wrong)
        assert await there.resource.take_over(3) == Takeover(3, None, None, ())


async def test_writes_by_others_during_a_takeover_are_retried() -> None:
    async with place() as there:
        served = there.served
        served.faults = [raised(served, epoch) for epoch in (20, 30)]
        assert (await there.resource.take_over(1)).epoch == 31


async def test_too_many_conflicts_end_the_takeover_and_change_nothing() -> None:
    async with place() as there:
        served = there.served
        served.faults = [raised(served, 20 + number) for number in range(TAKE_OVER_TRIES)]
        with pytest.raises(Conflict):
            await there.resource.take_over(1)
        assert there.status == {"epoch": 19 + TAKE_OVER_TRIES}
        assert (await there.resource.take_over(1)).epoch == 20 + TAKE_OVER_TRIES


async def test_a_takeover_whose_answer_was_lost_is_repeated_with_the_next_epoch() -> None:
    async with place() as there:
        there.served.faults = [LOST_ANSWER]
        with pytest.raises(ServerUnreachable):
            await there.resource.take_over(5)
        assert there.status == {"epoch": 5}
        assert (await there.resource.take_over(5)).epoch == 6


async def test_a_write_does_not_recreate_a_deleted_resource() -> None:
    async with place() as there:
        records = await there.records()
        there.served.remove("supervisions", "team", "llama")
        with pytest.raises(NotFound):
            await records.write({"step": 1})
        with pytest.raises(OSError, match="NotFound"):
            await decide(records, memory())
        with pytest.raises(NotFound):
            await there.resource.take_over(1)
        assert there.served.objects == {}


# -- fencing


async def test_a_replaced_supervisor_changes_nothing() -> None:
    async with place() as there:
        first = await there.records()
        second = await there.records()
        await decide(second, memory(generation=2))
        before = there.served.supervision()
        with pytest.raises(Deposed):
            await first.write({"step": 99})
        with pytest.raises(Deposed):
            await decide(first, memory(generation=1))
        assert there.served.supervision() == before
        with pytest.raises(Deposed), first.lead.acting():
            raise AssertionError
        await decide(second, memory(generation=3))


async def test_a_decision_that_is_overtaken_while_it_is_sent_changes_nothing() -> None:
    async with place() as there:
        records = await there.records()
        there.served.faults = [raised(there.served, 50)]
        with pytest.raises(Deposed, match="epoch 50"):
            await decide(records, memory())
        assert there.status == {"epoch": 50}


async def test_a_resource_that_another_supervisor_recreated_is_not_written() -> None:
    """Its epoch may be lower, because the new supervisor does not know the one that the members reported."""
    async with place() as there:
        records = await there.records(40)
        there.served.remove("supervisions", "team", "llama")
        other = await ensure_resource(there.server, KEY, RunSize(2, 4), SETTINGS)
        await other.take_over(3)
        with pytest.raises(Deposed):
            await decide(records, memory())
        assert there.status == {"epoch": 3}


@pytest.mark.parametrize("left", [None, {"epoch": 2, "step": 4}, {"step": 4}])
async def test_a_removed_or_restored_status_is_written_again(
    left: dict[str, Any] | None,
) -> None:
    async with place() as there:
        records = await there.records(7)
        found = there.served.supervision()
        found.pop("status")
        there.served.put("supervisions", {**found, **({} if left is None else {"status": left})})
        await decide(records, memory(generation=4))
        assert (there.status["epoch"], there.status["generation"]) == (7, 4)
        await records.write({"step": 8})
        assert there.status["step"] == 8


async def test_a_status_that_another_supervisor_takes_during_the_rewrite_is_not_touched() -> None:
    async with place() as there:
        records = await there.records(7)
        there.served.change(status={"epoch": 2})
        there.served.faults = [None, raised(there.served, 60)]
        with pytest.raises(Conflict):
            await records.write({"step": 8})
        assert there.status == {"epoch": 60}
        with pytest.raises(Deposed):
            await records.write({"step": 8})


# -- an epoch that members have reported


async def raise_above(records: SupervisionRecords, known: int) -> None:
    """Take a higher epoch as the journal's thread does."""
    await asyncio.to_thread(records.lead.raise_above, known)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make failed attempts to take an epoch repeat without a pause."""
    monkeypatch.setattr(fenced_records, "RAISE_AGAIN_S", 0.0)


async def test_an_epoch_that_members_know_is_written_before_it_is_used() -> None:
    async with place() as there:
        records = await there.records()
        seen: list[int] = []
        there.served.faults = [lambda: seen.append(records.lead.epoch)]
        await raise_above(records, 40)
        assert (seen, records.lead.epoch, there.status["epoch"]) == ([1], 41, 41)
        await raise_above(records, 40)
        assert records.lead.epoch == 41
        await decide(records, memory())
        await records.write({"step": 4})
        assert (there.status["epoch"], there.status["step"]) == (41, 4)


async def test_the_epoch_of_a_successor_is_not_exceeded() -> None:
    """The successor's members write checkpoints, which the replaced supervisor's members list."""
    async with place() as there:
        first, second = await there.records(), await there.records()
        before = there.served.supervision()
        with pytest.raises(Deposed):
            await raise_above(first, second.lead.epoch)
        assert first.lead.epoch == 1
        assert there.served.supervision() == before
        with pytest.raises(Deposed):
            await raise_above(first, second.lead.epoch)
        with pytest.raises(Deposed), first.lead.acting():
            raise AssertionError
        await decide(second, memory(generation=3))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("fault", [503, 403, NEVER])
async def test_an_epoch_is_not_raised_while_the_server_does_not_accept_it(
    fault: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with place() as there:
        records = await there.records()
        there.served.faults = [fault]
        monkeypatch.setattr(fenced_records, "RAISE_S", 0.1)
        with pytest.raises(OSError, match=r"."):
            await raise_above(records, 40)
        assert records.lead.epoch == 1
        monkeypatch.setattr(fenced_records, "RAISE_S", 20.0)
        await raise_above(records, 44)
        assert (records.lead.epoch, there.status["epoch"]) == (45, 45)


async def test_a_server_that_fails_is_not_asked_for_an_epoch_at_every_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fenced_records, "RAISE_AGAIN_S", 3600.0)
    async with place() as there:
        records = await there.records()
        there.served.faults = [503, 503]
        with pytest.raises(OSError, match="503"):
            await raise_above(records, 40)
        await raise_above(records, 40)
        assert there.served.faults == [503]
        assert records.lead.epoch == 1


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("again", ["decision", "summary", "epoch", "higher epoch"])
async def test_a_new_epoch_whose_answer_was_lost_deposes_no_supervisor(again: str) -> None:
    async with place() as there:
        records = await there.records()
        await decide(records, memory())
        there.served.faults = [LOST_ANSWER]
        with pytest.raises(OSError, match=r"."):
            await raise_above(records, 40)
        assert (records.lead.epoch, there.status["epoch"]) == (1, 41)
        if again == "decision":
            await decide(records, memory(generation=6))
            assert there.status["generation"] == 6
        elif again == "summary":
            await records.write({"step": 3})
        elif again == "epoch":
            await raise_above(records, 40)
        else:
            there.served.faults = [None, LOST_ANSWER]  # the first one tests the old epoch
            with pytest.raises(OSError, match=r"."):
                await raise_above(records, 50)
            assert there.status["epoch"] == 51
        await records.write({"step": 4})
        assert there.status["step"] == 4
        assert records.lead.epoch == there.status["epoch"]
        with records.lead.acting():
            pass


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("again", ["decision", "epoch"])
async def test_a_new_epoch_that_another_supervisor_has_also_taken_deposes_this_one(again: str) -> None:
    """The request was lost, and the successor has chosen the same number."""
    async with place() as there:
        records = await there.records()
        await decide(records, memory())
        there.served.faults = [503]
        with pytest.raises(OSError, match="503"):
            await raise_above(records, 40)
        there.served.change(status={"epoch": 41})
        writes = decide(records, memory(generation=5)) if again == "decision" else raise_above(records, 40)
        with pytest.raises(Deposed):
            await writes
        assert there.status["generation"] == 1
        assert records.lead.epoch == 1


async def test_a_summary_is_written_while_the_epoch_is_raised() -> None:
    async with place() as there:
        records = await there.records()
        await decide(records, memory())
        writes = [raise_above(records, 40), *(records.write({"step": n}) for n in range(4))]
        await asyncio.gather(*writes, decide(records, memory(generation=2)))
        assert (there.status["epoch"], there.status["generation"]) == (41, 2)
        with records.lead.acting():
            pass


async def test_a_decision_that_the_server_does_not_answer_is_a_failure_of_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fenced_records, "SAVE_S", 0.05)
    async with place() as there:
        records = await there.records()
        there.served.faults = [NEVER]
        with pytest.raises(OSError, match=r"not responded for 0\.05 s"):
            await decide(records, memory(generation=5))
        monkeypatch.setattr(fenced_records, "SAVE_S", 5.0)
        await decide(records, memory(generation=6))
        assert there.status["generation"] == 6


@pytest.mark.parametrize("code", [403, 422, 500])
async def test_a_decision_that_the_server_refuses_is_a_failure_of_storage(code: int) -> None:
    async with place() as there:
        records = await there.records()
        there.served.faults = [code]
        with pytest.raises(OSError, match=r"Refused|500"):
            await decide(records, memory())
        with records.lead.acting():
            pass
        await decide(records, memory())


async def test_a_stop_that_was_requested_is_in_the_spec_until_it_is_removed() -> None:
    async with place() as there:
        epoch = (await there.resource.take_over(1)).epoch
        await there.resource.request_stop(epoch, "now")
        assert there.served.supervision()["spec"]["stop"] == "now"
        for _ in range(2):  # a removal whose answer was lost is repeated
            await there.resource.request_stop(epoch, None)
            assert "stop" not in there.served.supervision()["spec"]


@pytest.mark.parametrize(
    "late",
    [
        lambda resource, found: resource.describe(found.epoch, found.spec, RunSize(9, 9), {"grace": "1s"}),
        lambda resource, found: resource.request_stop(found.epoch, "now"),
        lambda resource, found: resource.request_stop(found.epoch, None),
    ],
    ids=["describe", "stop", "forget"],
)
@pytest.mark.parametrize("taken", ["by another supervisor", "with another resource"])
async def test_a_supervisor_that_was_replaced_cannot_change_the_spec(
    late: Callable[[SupervisionResource, Takeover], Awaitable[None]], taken: str
) -> None:
    async with place() as there:
        found = await there.resource.take_over(1)
        there.served.change(spec={"stop": "graceful"})
        if taken == "by another supervisor":
            there.served.change(status={"epoch": found.epoch + 1})
        else:
            there.served.remove("supervisions", "team", "llama")
            again = await ensure_resource(there.server, KEY, RunSize(2, 4), SETTINGS)
            assert again.name == "llama"
        before = dict(there.served.supervision()["spec"])
        with pytest.raises(Deposed):
            await late(there.resource, found)
        assert there.served.supervision()["spec"] == before


async def test_every_failure_of_a_request_is_one_that_callers_expect() -> None:
    async with place() as there:
        for code in (400, 401, 403, 409, 410, 429, 500, 503):
            there.served.faults = [code] * TAKE_OVER_TRIES
            with pytest.raises((ApiError, ServerUnreachable)):
                await there.resource.take_over(1)


# -- the summary


def test_an_ettr_that_is_no_longer_known_replaces_the_last_number() -> None:
    assert status_fields.summary({"ettr": None}, [])["ettr"] == "unknown"
    assert status_fields.summary({"ettr": 0.99996}, [])["ettr"] == "99.99 %", "as `holdfast status` shows it"
    assert "ettr" not in status_fields.summary({}, []), "there is no status yet"


def test_an_incident_at_an_unknown_step_names_no_step() -> None:
    found = status_fields.summary({}, [{"id": "i-0001", "kind": "lost_track", "rank": None, "step": -1}])
    assert found["lastIncident"] == "i-0001: lost_track"


def test_the_summary_contains_the_fields_for_people() -> None:
    published = {"step": 12, "ettr": 0.9731, "message": "all is well", "exit_code": 0}
    incidents = [{"id": "i-0001", "kind": "crash", "rank": 3, "step": 7}]
    found = status_fields.summary(published, incidents)
    assert found["lastIncident"] == "i-0001: crash of rank 3 at step 7"
    assert (found["step"], found["ettr"], found["exitCode"]) == (12, "97.3 %", 0)
    assert found["message"] == "all is well"
    assert found["recent"] == incidents


def test_an_incident_without_a_single_rank_names_none() -> None:
    for rank in (-1, None):
        found = status_fields.summary(
            {"last_incident": {"id": "i-2", "kind": "x", "rank": rank, "step": 1}}, []
        )
        assert found["lastIncident"] == "i-2: x at step 1"
    assert status_fields.summary({}, []) == {"lastIncident": "", "message": "", "recent": [], "view": "{}"}


def test_data_too_large_for_the_resource_is_shortened_or_omitted() -> None:
    large = {"id": "i-0020", "why": "x" * MAX_INCIDENT_BYTES, "stacks": ["y" * MAX_INCIDENT_BYTES]}
    incidents = [{"id": n} for n in range(20)] + [large]
    noise = random.Random(1).randbytes(short_status.MAX_BYTES).hex()
    found = status_fields.summary({"message": "m" * 9_000, "rest": noise}, incidents)
    assert found["view"] == "", "the view in the resource is out of date"
    assert len(found["message"]) == MAX_INCIDENT_BYTES
    assert [each["id"] for each in found["recent"]] == [*range(11, 20), "i-0020"]
    last = found["recent"][-1]
    assert last["stacks"] == []
    assert last["why"].startswith("xxx")
    assert len(json.dumps(last)) <= MAX_INCIDENT_BYTES


def test_an_incident_with_thousands_of_entries_keeps_its_identifying_fields() -> None:
    endless = {"id": "i-0001", "kind": "crash", "evidence": ["line"] * 5_000}
    (kept,) = status_fields.summary({}, [endless])["recent"]
    assert kept == {"id": "i-0001", "kind": "crash", "stacks": []}


def test_a_decision_of_a_loop_that_has_ended_is_a_failure_of_storage_and_leaves_nothing_behind() -> None:
    loop = asyncio.new_event_loop()
    called: list[int] = []

    async def work() -> None:
        called.append(1)

    with pytest.raises(OSError, match=r"not responded for 0\.05 s"):  # the loop does not run
        fenced_records.in_loop(work, loop, 0.05)
    loop.close()
    with pytest.raises(OSError, match="this supervisor is ending"):
        fenced_records.in_loop(work, loop, 5.0)
    assert not called


def test_a_mirror_of_all_jobs_keeps_what_users_request_and_notices_only_that() -> None:
    owner = {"kind": "Job", "uid": "u", "name": "llama", "apiVersion": "batch/v1"}
    settings = {"grace": "x" * 4_000}
    identity = {"namespace": "team", "name": "llama", "uid": "s", "resourceVersion": "7"}
    metadata = {**identity, "labels": {"a": "b"}}
    whole = {"metadata": metadata, "spec": {"owner": owner, "settings": settings}, "status": {"view": "x"}}
    kept = contents.requests_only(whole)
    assert kept["metadata"] == identity
    assert kept["spec"] == {"owner": {"kind": "Job", "uid": "u"}}
    key = JobKey("team", "llama", "u", "Job", "batch/v1", "llama")
    assert contents.belongs_to(kept, key) is contents.belongs_to(whole, key) is True
    later = {**whole, "spec": {"owner": owner, "settings": {}}, "status": {"view": "y"}}
    assert not contents.is_news(kept, contents.requests_only(later))
    for request in ({"stop": "now"}, {"drill": {"number": 1, "what": "kill"}}):
        asked = contents.requests_only({**whole, "spec": {"owner": owner, **request}})
        assert contents.is_news(kept, asked)
        assert asked["spec"] == {**kept["spec"], **request}
    assert contents.requests_only({"metadata": metadata, "spec": None})["spec"] == {"owner": {}}
