"""What a member is sent: the newest order, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession, WSMsgType, web
from aiohttp.test_utils import TestClient, TestServer

from holdfast.process import clock
from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import Ending
from holdfast.protocol.member_messages import MemberOrder
from supervisor.controller import member_server as lines_of
from supervisor.controller.member_server import MemberServer
from supervisor.controller.report_decoder import ReportDecoder
from tests.unit.supervisor.job_views import launcher, rank, report

LIMIT_S = 20.0
RUN = MemberOrder("run", 3)


def connections() -> MemberServer:
    return MemberServer(lambda: 0, lambda: None)


def test_the_same_order_again_is_not_sent_again() -> None:
    made = connections()
    made.order("m0", RUN)
    line = made.connection("m0")
    line.sent = line.order
    line.changed.clear()
    made.order("m0", MemberOrder("run", 3))
    assert not line.changed.is_set()


async def test_a_replacement_for_a_half_open_connection_receives_the_orders() -> None:
    """The old connection accepted the orders and delivered them to no one, because its other end was gone."""
    made = connections()
    app = web.Application()
    app.router.add_get("/v1/member", made.serve)
    async with TestServer(app) as server, ClientSession() as session:
        lines = []
        made.order("m0", RUN)
        for step in range(2):
            lines.append(await session.ws_connect(server.make_url("/v1/member")))
            await lines[-1].send_str(codec.encode(report("m0", launcher(rank(step)))).decode())
            told = await lines[-1].receive_str(timeout=LIMIT_S)
            assert codec.decode(MemberOrder, told) == RUN, f"line {step}"
        made.order("m0", replace(RUN, settled=True))
        assert codec.decode(MemberOrder, await lines[-1].receive_str(timeout=LIMIT_S)).settled
        for line in lines:
            await line.close()


def test_times_from_a_member_of_another_host_are_converted_to_the_local_clock() -> None:
    made = MemberServer(lambda: 5_000, lambda: None, "ours")
    line = made.connection("m0")
    state = launcher(rank(0, Ending(90_100, 1)))
    made._accept(line, report("m0", state, now_ns=90_500, clock="theirs"))
    assert line.report is not None
    assert line.report.launcher == launcher(rank(0, Ending(4_600, 1)))
    assert (line.connected, line.heard_ns) == (True, 5_000)
    made._accept(line, report("m0", state, now_ns=90_500, clock="ours"))
    assert line.report.launcher == state


def test_a_member_is_well_while_it_reports_a_launcher_that_answers() -> None:
    now_ns = [1_000]
    made = MemberServer(lambda: now_ns[0], lambda: None)
    line = made.connection("m0")
    told = report("m0", launcher(rank(0)))
    for at_ns, said, well_ns in (
        (2_000, report("m0", None), 0),
        (3_000, told, 3_000),
        (4_000, replace(told, launcher_silent="it does not answer"), 3_000),
        (5_000, report("m0", None), 3_000),
    ):
        now_ns[0] = at_ns
        made._accept(line, said)
        assert line.well_ns == well_ns
        assert line.first_ns == 2_000


def test_processes_of_one_host_share_one_clock() -> None:
    assert clock.identity() == clock.identity() != ""


def test_a_report_that_is_refused_repeatedly_is_logged_once_for_each_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(lines_of.log, "warning", lambda _, extra: said.append(extra["error"]))
    made = connections()
    for data in (*('{"a": "' + "x" * n for n in (3, 50)), "{}", "{}", '{"a": "'):
        assert made._read(ReportDecoder(), data) is None
    assert len(said) == 2
    for n in range(200):
        made._read(ReportDecoder(), '{"' + chr(0x4E00 + n) + '": 0}')
    assert len(said) == 202
    assert len(made._refused) <= lines_of.MAX_CAUSES


# -- members whose identity was proven


@asynccontextmanager
async def proven(made: MemberServer, name: Callable[[], str | None]) -> AsyncIterator[TestClient[Any, Any]]:
    app = web.Application()

    async def serve(request: web.Request) -> web.StreamResponse:
        return await made.serve(request, name)

    app.router.add_get("/v1/member", serve)
    async with TestClient(TestServer(app)) as client:
        yield client


def says(name: str, step: int = 0) -> str:
    return codec.encode(report(name, launcher(rank(step)))).decode()


async def test_a_member_has_its_proven_name_and_not_the_one_in_its_reports() -> None:
    made = connections()
    made.order("m7", RUN)
    made.order("m0", MemberOrder("stop", 1))
    async with proven(made, lambda: "m7") as client, client.ws_connect("/v1/member") as line:
        await line.send_str(says("m0"))
        assert codec.decode(MemberOrder, await line.receive_str(timeout=LIMIT_S)) == RUN
        found = made.connection("m7").report
        assert found is not None
        assert found.member == "m7"
        assert made.connection("m0").report is None


@pytest.mark.parametrize("after", [None, "m7.1"])
async def test_a_connection_ends_when_its_member_is_replaced_or_gone(after: str | None) -> None:
    """The kubelet has started the container again, or the pod is gone."""
    heard = asyncio.Event()
    made = MemberServer(lambda: 0, heard.set)
    name: list[str | None] = ["m7"]
    async with proven(made, lambda: name[0]) as client, client.ws_connect("/v1/member") as line:
        await line.send_str(says("m7"))
        await asyncio.wait_for(heard.wait(), LIMIT_S)
        assert made.connection("m7").connected
        name[0] = after
        await line.send_str(says("m7"))
        assert (await line.receive(timeout=LIMIT_S)).type in (WSMsgType.CLOSE, WSMsgType.CLOSED)
        assert not made.connection("m7").connected
        assert set(made.connections) == {"m7"}, "no report was taken for that of another member"


async def test_a_connection_without_a_member_is_ended_at_its_first_report() -> None:
    made = connections()
    async with proven(made, lambda: None) as client, client.ws_connect("/v1/member") as line:
        await line.send_str(says("m7"))
        assert (await line.receive(timeout=LIMIT_S)).type in (WSMsgType.CLOSE, WSMsgType.CLOSED)
        assert made.connections == {}
