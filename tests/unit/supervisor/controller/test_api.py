from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from holdfast.process.network import Door
from holdfast.protocol.member_messages import CheckpointReport
from supervisor.controller import api
from supervisor.controller.checkpoint_index import CheckpointIndex
from supervisor.controller.drills import Drills
from supervisor.controller.member_server import MemberServer
from supervisor.controller.records import RunDirectoryRecords
from supervisor.controller.supervised_run import SupervisedRun
from supervisor.observability.publisher import StatusPublisher
from supervisor.store.run_directory import RunDir
from supervisor.view.model import Policy
from tests.unit.supervisor.controller.test_supervised_run import Backend
from tests.unit.supervisor.job_views import launcher, memory, progress, rank, report

TOKEN = "secret"
KNOWN = {"Authorization": f"Bearer {TOKEN}"}

Serve = Callable[..., Awaitable[Any]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SupervisedRun]:
    """Yield a run that forms its group and has published its status once."""
    connections = MemberServer(time.monotonic_ns, lambda: None)
    made = SupervisedRun(
        Policy(),
        StatusPublisher(RunDir(tmp_path)),
        Backend(),
        connections,
        RunDirectoryRecords(tmp_path),
        fresh=True,
        started_ns=0,
    )
    made.publish()
    yield made
    made.publisher.files.do(lambda: None, 30.0)
    made.journal.decisions.close()


@pytest.fixture
async def serve(run: SupervisedRun) -> AsyncIterator[Serve]:
    """Serve the run, with or without drills."""
    clients: list[Any] = []

    async def serving(drills: bool = True) -> Any:
        app = api.application(run, run.member_server, TOKEN, Door(), drills=drills)
        clients.append(TestClient(TestServer(app)))
        await clients[-1].start_server()
        return clients[-1]

    yield serving
    for each in clients:
        await each.close()


async def test_only_probes_and_scrapers_need_no_token(serve: Serve) -> None:
    client = await serve()
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await client.get(path)).status == 200
    for path in ("/v1/status", "/v1/incidents", "/v1/member", "/nowhere"):
        assert (await client.get(path)).status == 401
        assert (await client.get(path, headers={"Authorization": "Bearer wrong"})).status == 401
    assert (await client.get("/v1/status", headers=KNOWN)).status == 200
    assert await (await client.get("/v1/incidents", headers=KNOWN)).json() == []


async def test_a_drill_that_no_sidecar_accepts_is_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drills.await_outcome, "__defaults__", (0.01,))
    monkeypatch.setattr(
        SupervisedRun, "cause_fault", lambda run, what, rank: run.drills.ask("m0", 1, what, rank)
    )
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


async def test_reads_between_two_ticks_change_nothing_and_all_return_the_last_published_status(
    serve: Serve, run: SupervisedRun, tmp_path: Path
) -> None:
    """The members report a slow rank and a checkpoint, which would show in a status built by a reader."""
    client = await serve()
    run.publisher.files.do(lambda: None, 30.0)
    run.memory = memory()
    for number, own_s in enumerate((0.03, 0.09)):
        slow = replace(progress(number, 200), own_s=own_s, own_least_s=own_s, own_steps=50)
        said = report(f"m{number}", launcher(rank(number)), progress=(slow,))
        line = run.member_server.connection(f"m{number}")
        line.connected, line.report = True, replace(said, durable=CheckpointReport(12, 1))
    assert isinstance(run.backend, Backend)
    run.backend.members = ("m0", "m1")
    bodies = {path: await _read(client, path) for path in ("/v1/status", "/metrics")}
    before = _state(run, tmp_path)
    for _ in range(500):
        for path, body in bodies.items():
            assert await _read(client, path) == body
    assert _state(run, tmp_path) == before
    run.publish()
    run.publisher.files.do(lambda: None, 30.0)
    assert [each["slow"] for each in json.loads(await _read(client, "/v1/status"))["ranks"]] == [None, 3.0]
    assert await _read(client, "/metrics") != bodies["/metrics"]
    assert json.loads((tmp_path / "status.json").read_text()) == json.loads(await _read(client, "/v1/status"))


async def _read(client: Any, path: str) -> bytes:
    answer = await client.get(path, headers=KNOWN)
    assert answer.status == 200
    return bytes(await answer.read())


def _state(run: SupervisedRun, folder: Path) -> tuple[object, ...]:
    """Return everything that a query could change."""
    written, publisher, index = folder / "status.json", run.publisher, run.checkpoints
    assert isinstance(index, CheckpointIndex)
    return (
        (written.stat().st_mtime_ns, written.stat().st_ino, written.read_bytes()),
        (publisher.files.backlog, id(publisher.published), publisher._slow_ranks, publisher._known),
        (run.memory, run.watch, run._existed, index.stored, index._wanted.is_set()),
        tuple(index._reported),
        run.bookkeeping.ledger.snapshot(),
    )
