from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from holdfast.process.network import Door
from supervisor.controller import api
from supervisor.controller.drills import Drills
from supervisor.controller.job import Job
from supervisor.controller.member_server import MemberServer
from supervisor.observability.metrics import Metrics
from supervisor.observability.status import StatusPublisher
from supervisor.store.run_directory import RunDir
from supervisor.view.model import Policy
from tests.unit.supervisor.controller.test_job import Backend

TOKEN = "secret"
KNOWN = {"Authorization": f"Bearer {TOKEN}"}

Serve = Callable[..., Awaitable[Any]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """Serve a job that forms its group; with drills or without."""
    connections = MemberServer(time.monotonic_ns, lambda: None)
    job = Job(Policy(), tmp_path, StatusPublisher(RunDir(tmp_path)), Backend(), connections, True, 0)
    clients: list[Any] = []

    async def serving(drills: bool = True) -> Any:
        app = api.application(job, connections, Metrics(), TOKEN, Door(), drills=drills)
        clients.append(TestClient(TestServer(app)))
        await clients[-1].start_server()
        return clients[-1]

    yield serving
    for each in clients:
        await each.close()
    job.publisher.files.do(lambda: None, 30.0)
    job.journal.close()


async def test_only_probes_and_scrapers_need_no_token(serve: Serve) -> None:
    client = await serve()
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await client.get(path)).status == 200
    for path in ("/v1/status", "/v1/incidents", "/v1/member", "/nowhere"):
        assert (await client.get(path)).status == 401
        assert (await client.get(path, headers={"Authorization": "Bearer wrong"})).status == 401
    assert (await client.get("/v1/status", headers=KNOWN)).status == 200
    assert await (await client.get("/v1/incidents", headers=KNOWN)).json() == []


async def test_a_drill_that_no_sidecar_takes_is_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drills.refusal, "__defaults__", (0.01,))
    monkeypatch.setattr(Job, "inject", lambda job, what, rank: job.drills.ask("m0", 1, what, rank))
    client = await serve()
    answer = await client.post("/v1/inject", json={"what": "kill"}, headers=KNOWN)
    assert answer.status == 409
    late = "the sidecar of member m0 has not carried it out within 0.01 s: the drill is withdrawn"
    assert late in await answer.text()


async def test_drills_can_be_switched_off(serve: Serve) -> None:
    for drills, status, said in ((True, 409, "a drill needs a running group"), (False, 403, "--no-drills")):
        client = await serve(drills)
        answer = await client.post("/v1/inject", json={"what": "kill"}, headers=KNOWN)
        assert answer.status == status
        assert said in await answer.text()
