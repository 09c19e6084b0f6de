from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import pytest_asyncio
from aiohttp.test_utils import TestClient, TestServer

from nodeagent.agent.agent import Published
from nodeagent.agent.sensor_threads import NOT_YET, SensorStatus
from nodeagent.evaluation.evaluator import verdicts
from nodeagent.model import Action, HealthFinding, Level
from nodeagent.server import http_api

FOUND = HealthFinding(
    "gpu/0000:3b:00.0", "xid", 79, Level.UNHEALTHY, Action.REBOOT_NODE, 5.0, 6.0, "Xid 79: gone",
    ("NVRM: Xid 79",), "a reboot", ("kmsg",),
)  # fmt: skip
SEES = SensorStatus("kmsg", True, "", 3, 2, 0.01, False)
EVENTS = tuple({"seq": n, "kind": "raised"} for n in range(1, 6))


@dataclass
class Shown:
    now: Published = field(
        default_factory=lambda: Published(100.0, verdicts([FOUND], ["node"]), (SEES,), EVENTS, 4)
    )
    time_s: float = 101.0
    injected: list[Mapping[str, Any]] = field(default_factory=list)

    def inject(self, asked: Mapping[str, Any]) -> str:
        if "what" not in asked:
            raise ValueError("what: expected xid, kernel, sample")
        self.injected.append(asked)
        return "done"


Make = Callable[..., Any]


@pytest_asyncio.fixture
async def client_of() -> AsyncIterator[Make]:
    clients: list[Any] = []

    async def make(shown: Shown, inject: bool = False) -> Any:
        app = http_api.application(
            lambda: shown.now, lambda: {"node": "n1"}, lambda: shown.time_s, shown.inject if inject else None
        )
        clients.append(TestClient(TestServer(app)))
        await clients[-1].start_server()
        return clients[-1]

    yield make
    for each in clients:
        await each.close()


async def test_health_contains_all_fields(client_of: Make) -> None:
    found = await (await (await client_of(Shown())).get("/v1/health")).json()
    assert (found["node"], found["level"], found["action"], found["schema"]) == (
        "n1",
        "unhealthy",
        "reboot_node",
        1,
    )
    assert (found["clean_s"], found["quiet_s"], found["calmed_s"]) == (0.0, 0.0, None)
    [gpu, node] = found["entities"]
    assert (gpu["entity"], node["level"]) == ("gpu/0000:3b:00.0", "healthy")
    assert gpu["findings"][0]["evidence"] == ["NVRM: Xid 79"]
    assert found["sensors"][0]["name"] == "kmsg"


async def test_events_are_returned_after_a_given_number_and_up_to_a_limit(client_of: Make) -> None:
    client = await client_of(Shown())
    found = await (await client.get("/v1/events?after=2&limit=2")).json()
    assert ([each["seq"] for each in found["events"]], found["after"]) == ([3, 4], 4)
    found = await (await client.get("/v1/events?after=5&wait_s=0")).json()
    assert found == {"events": [], "after": 5, "state_id": "", "restarted": False}


@pytest.mark.parametrize(
    ("query", "after"),
    [("after=11", []), ("after=2&state_id=old", []), ("after=2", [1, 2]), ("after=2&state_id=new", [1, 2])],
)
async def test_a_client_that_follows_a_state_that_was_lost_gets_the_new_one_from_the_beginning(
    client_of: Make, query: str, after: list[int]
) -> None:
    client = await client_of(Shown(replace(Shown().now, state_id="new")))
    found = await (await client.get(f"/v1/events?{query}&wait_s=30")).json()
    assert [each["seq"] for each in found["events"]] == [n for n in range(1, 6) if n not in after]
    assert (found["after"], found["state_id"], found["restarted"]) == (5, "new", not after)


async def test_a_state_without_changes_resets_the_cursor_at_once(client_of: Make) -> None:
    client = await client_of(Shown(replace(Shown().now, events=(), state_id="new")))
    found = await (await client.get("/v1/events?after=11&wait_s=30")).json()
    assert found == {"events": [], "after": 0, "state_id": "new", "restarted": True}


@pytest.mark.parametrize(
    "query", ["after=-1", "after=x", "limit=1001", "wait_s=31", "after=nan", "limit=inf"]
)
async def test_a_malformed_number_is_refused_with_the_accepted_range(client_of: Make, query: str) -> None:
    answer = await (await client_of(Shown())).get(f"/v1/events?{query}")
    assert answer.status == 400
    assert "expected 0 to" in await answer.text()


async def test_an_agent_that_completes_no_cycles_is_not_alive(client_of: Make) -> None:
    shown = Shown()
    client = await client_of(shown)
    assert (await client.get("/healthz")).status == 200
    shown.time_s = 100.0 + http_api.SILENT_S + 1
    answer = await client.get("/healthz")
    assert (answer.status, await answer.text()) == (503, "no cycle for 11 s\n")


async def test_the_agent_is_ready_when_every_sensor_has_been_tried(client_of: Make) -> None:
    shown = Shown()
    client = await client_of(shown)
    assert (await client.get("/readyz")).status == 200
    shown.now = replace(shown.now, sensors=(SEES, replace(SEES, name="host", sees=False, why=NOT_YET)))
    assert (await client.get("/readyz")).status == 503
    shown.now = replace(shown.now, sensors=(SEES, replace(SEES, name="host", sees=False, why="no right")))
    assert (await client.get("/readyz")).status == 200


async def test_metrics_are_in_the_text_format(client_of: Make) -> None:
    text = await (await (await client_of(Shown())).get("/metrics")).text()
    assert "holdfast_node_level 2.0" in text
    assert 'holdfast_node_action{action="reboot_node"} 1.0' in text
    assert (
        'holdfast_node_finding{check="xid",code="79",entity="gpu/0000:3b:00.0",level="unhealthy"} 1.0' in text
    )
    assert 'holdfast_node_sensor_sees{sensor="kmsg"} 1.0' in text
    assert "holdfast_node_dropped_total 4.0" in text
    assert "holdfast_node_changes_total 5.0" in text


async def test_injection_is_refused_unless_the_agent_was_started_for_it(client_of: Make) -> None:
    shown = Shown()
    assert (await (await client_of(shown)).post("/v1/inject", json={"what": "xid"})).status == 404
    client = await client_of(shown, inject=True)
    assert (await client.post("/v1/inject", json={"what": "xid"})).status == 202
    for body in (b"{}", b"[]", b"{", b"[" * 10_000):
        assert (await client.post("/v1/inject", data=body)).status == 400
    assert (await client.post("/v1/inject", data=b"x" * (http_api.MAX_BODY_BYTES + 1))).status == 413
    assert shown.injected == [{"what": "xid"}]
