"""A member receives the newest order, once."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import ClientSession, WSMsgType, web
from aiohttp.test_utils import TestClient, TestServer

from holdfast.process import clock
from holdfast.protocol import codec, foreign_text
from holdfast.protocol.launcher_messages import Ending
from holdfast.protocol.member_messages import (
    MUST_CONFIRM,
    MUST_REACH,
    NEIGHBOURS,
    UPDATES,
    HeldPrivateState,
    HeldSnapshot,
    MemberOrder,
    MemberReport,
)
from sidecar.report_updates import ReportWriter
from supervisor.controller import member_server as lines_of
from supervisor.controller.limits.decoding_turns import TURN_S
from supervisor.controller.limits.owner import ReportOwner
from supervisor.controller.limits.report_memory import ReportMemory, member_bytes
from supervisor.controller.limits.shared import SharedLimits
from supervisor.controller.member_server import CONVERTED_BYTES, MemberServer, largest_report
from supervisor.controller.reports.report_decoder import ReportDecoder
from tests.unit.supervisor.job_views import launcher, progress, rank, report

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


@pytest.mark.parametrize(
    ("features", "kept"),
    [
        ("", ()),
        (NEIGHBOURS, ("neighbours",)),
        (f"{NEIGHBOURS} {MUST_REACH}", ("neighbours", "must_reach")),
        (f"{NEIGHBOURS} {MUST_REACH} {MUST_CONFIRM}", ("neighbours", "must_reach", "must_confirm")),
    ],
)
def test_an_order_lacks_the_fields_that_the_sidecar_does_not_know(
    features: str, kept: tuple[str, ...]
) -> None:
    given: dict[str, Any] = dict.fromkeys(("neighbours", "must_reach", "must_confirm"), ("http://m0:1",))
    found = lines_of._readable(replace(RUN, **given), frozenset(features.split()))
    assert found == replace(RUN, **{name: given[name] for name in kept})


async def test_a_replacement_for_a_half_open_connection_receives_the_orders() -> None:
    """The old connection accepted the orders but delivered them to nobody, because its other end was gone."""
    made = MemberServer(time.monotonic_ns, lambda: None)
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
            known = made.connection("m0")
            assert (known.back_ns > 0) is (step > 0), "it has reported again over another connection"
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


def test_time_in_which_this_process_was_stopped_is_no_evidence_against_a_member() -> None:
    now_ns = [20_000]
    made = MemberServer(lambda: now_ns[0], lambda: None)
    for name, heard_ns in (("m0", 5_000), ("m1", 19_000)):
        line = made.connection(name)
        line.heard_ns, line.unanswered_ns = heard_ns, 6_000
    awaited = made.connection("m2")  # its silence begins later
    awaited.heard_ns, awaited.since_ns = 50_000, 2_000
    made.connection("m1").first_ns = 3_000
    made.discount_own_pause(10_000)
    lines = made.connections.values()
    heard = [(each.heard_ns, each.unanswered_ns) for each in lines]
    assert heard == [(15_000, 0), (20_000, 0), (60_000, 0)]
    assert [each.first_ns for each in lines] == [0, 13_000, 0], "it has waited no longer than the others took"
    assert awaited.since_ns == 12_000


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
async def proven(
    made: MemberServer,
    name: Callable[[], str | None],
    max_bytes: int = codec.MAX_MESSAGE_BYTES,
    why_refused: Callable[[MemberReport], str] = lambda _: "",
) -> AsyncIterator[TestClient[Any, Any]]:
    app = web.Application()

    async def serve(request: web.Request) -> web.StreamResponse:
        return await made.serve(request, name, max_bytes, why_refused)

    app.router.add_get("/v1/member", serve)
    async with TestClient(TestServer(app)) as client:
        yield client


def says(name: str, step: int = 0) -> str:
    return codec.encode(report(name, launcher(rank(step)))).decode()


async def test_a_member_may_send_updates_if_it_offers_to() -> None:
    made = Telling(SharedLimits(), "n")
    async with proven(made, lambda: "m7") as client:
        async with client.ws_connect("/v1/member") as line:
            assert line.protocol is None
        async with client.ws_connect("/v1/member", protocols=(UPDATES,)) as line:
            assert line.protocol == UPDATES
            writer = ReportWriter(updates=True)
            for number in (1, 2, 3):
                sent = report("m0", launcher(rank(0)), sequence=number, progress=(progress(0, 4 + number),))
                made.changes.clear()
                await line.send_str(writer.text(sent))
                await asyncio.wait_for(made.changes.wait(), LIMIT_S)
                found = made.connection("m7").report
                assert found is not None
                assert (found.member, found.sequence, found.progress) == ("m7", number, sent.progress)
                assert found.launcher is made.connection("m7").launcher
            await line.send_str('{"update_of":9,"report":[10,1,0.0,0.0,-1.0],"room":[],"progress":[]}')
            assert "an update of report 9, not of 3" in await asyncio.wait_for(made.told.get(), LIMIT_S)
            assert (await line.receive(timeout=LIMIT_S)).type is WSMsgType.CLOSE


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


async def test_a_report_that_the_caller_refuses_is_not_stored_and_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, said = connections(), list[str]()
    monkeypatch.setattr(made, "tell_refusal", said.append)
    made.order("m7", RUN)
    refused = proven(made, lambda: "m7", why_refused=lambda found: f"{found.peer_url} is not its address")
    async with refused as client, client.ws_connect("/v1/member") as line:
        await line.send_str(says("m7"))
        assert (await line.receive(LIMIT_S)).type in (WSMsgType.CLOSE, WSMsgType.CLOSED)
    assert made.connection("m7").report is None
    assert said == ["http://m7:1 is not its address"]


@pytest.mark.parametrize("after", [None, "m7.1"])
async def test_a_connection_ends_when_its_member_is_replaced_or_gone(after: str | None) -> None:
    """The kubelet has restarted the container, or the pod is gone."""
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


# -- members that other jobs need not trust


async def test_a_new_connection_of_a_proven_member_closes_the_former_before_it_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server reads only one connection of a pod, however many it opens."""
    monkeypatch.setattr(lines_of.MemberServer, "heartbeat_s", 3600.0)  # the server reads only this one
    made = connections()
    async with proven(made, lambda: "m7") as client:
        sockets = [await client.ws_connect("/v1/member") for _ in range(5)]
        for socket in sockets[:-1]:
            found = await socket.receive(timeout=LIMIT_S)
            assert found.type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.ERROR)
        made.order("m7", RUN)
        await sockets[-1].send_str(says("m7"))
        assert codec.decode(MemberOrder, await sockets[-1].receive_str(timeout=LIMIT_S)) == RUN


async def test_reports_that_wait_on_a_replaced_connection_are_never_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = connections()
    decoded: list[int] = []
    monkeypatch.setattr(made, "_read", lambda _, data: decoded.append(len(data)))
    made.connection("m7").budget = lines_of.ByteBudget(-lines_of.BURST_BYTES, 1e12)
    async with proven(made, lambda: "m7") as client:
        socket = await client.ws_connect("/v1/member")
        await socket.send_str(says("m7"))
        await socket.ping()
        newer = await client.ws_connect("/v1/member")
        assert (await socket.receive(timeout=LIMIT_S)).type is not WSMsgType.TEXT
        made.connection("m7").budget = lines_of.ByteBudget()
        await newer.send_str(says("m7") + " ")
        await newer.receive(timeout=LIMIT_S)
        assert decoded == [len(says("m7")) + 1]


def test_a_member_may_send_a_burst_and_then_waits_as_long_as_its_rate_requires() -> None:
    budget = lines_of.ByteBudget()
    now_s, sent, limit = 1000.0, 0, largest_report(1)
    for _ in range(100):
        wait_s = budget.spend(limit, now_s)
        assert wait_s <= 2.0, "a connection with unanswered pings must end"
        now_s += wait_s
        sent += limit
    assert sent <= lines_of.BURST_BYTES + (now_s - 1000.0) * lines_of.RATE_BYTES + 1
    before = now_s
    for _ in range(20_000):
        now_s += budget.spend(0, now_s)
    assert now_s > before, "empty messages count too"


@pytest.mark.parametrize("nproc", [1, 8, 64, codec.MAX_RANKS])
def test_the_largest_report_of_a_member_is_within_its_limit_and_usual_ones_are_not_delayed(
    nproc: int,
) -> None:
    usual = report("w-0.00000000", launcher(*(replace(rank(k), local_rank=k) for k in range(nproc))))
    usual = replace(usual, progress=tuple(progress(k, 300_000) for k in range(nproc)))
    privates = tuple(
        HeldPrivateState(rank=k, generation=3, step=300_000 + n, final=True)
        for k in range(nproc)
        for n in range(30)
    )
    texts = foreign_text.ENDINGS_BYTES + foreign_text.INSPECTIONS_BYTES + 3 * foreign_text.WORDS_BYTES
    texts += 3 * foreign_text.WHOLE_BYTES
    assert len(codec.encode(replace(usual, privates=privates))) + texts < largest_report(nproc)
    budget, now_s, size = lines_of.ByteBudget(), 0.0, len(codec.encode(usual))
    for _ in range(100):
        now_s += 0.2
        assert budget.spend(size, now_s) == 0.0


async def test_a_report_above_the_limit_is_refused_without_being_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(lines_of.log, "warning", lambda _, extra: said.put_nowait(extra["error"]))
    made = connections()
    async with proven(made, lambda: "m7", 1000) as client, client.ws_connect("/v1/member") as socket:
        await socket.send_str(says("m7") + " " * 1000)
        assert (await socket.receive(timeout=LIMIT_S)).type is WSMsgType.CLOSE
        assert await asyncio.wait_for(said.get(), LIMIT_S) == "a report of more than 1000 bytes"
    assert not made.has_heard


async def test_other_work_runs_between_the_reports_of_many_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 members report at once, and each report takes 5 ms."""
    made, members = connections(), 40
    decoded, most, since = 0, 0, 0
    read = made._read

    def slowly(decoder: ReportDecoder, data: str) -> Any:
        nonlocal decoded
        time.sleep(0.005)
        decoded += 1
        return read(decoder, data)

    async def watch() -> None:
        nonlocal most, since
        while decoded < members:
            most, since = max(most, decoded - since), decoded
            await asyncio.sleep(0)

    monkeypatch.setattr(made, "_read", slowly)
    app = web.Application()
    app.router.add_get("/v1/member", made.serve)
    async with TestServer(app) as server, ClientSession() as session:
        lines = [await session.ws_connect(server.make_url("/v1/member")) for _ in range(members)]
        await asyncio.gather(*(line.send_str(says(f"m{n}")) for n, line in enumerate(lines)))
        await asyncio.wait_for(watch(), LIMIT_S)
        assert 0 < most <= 1 + TURN_S / 0.005
        for line in lines:
            await line.close()


async def test_an_order_that_no_member_would_accept_is_logged_and_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, logged = connections(), asyncio.Event()
    monkeypatch.setattr(lines_of.log, "error", lambda event, extra: logged.set())
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 2_000)
    async with proven(made, lambda: "m7") as client, client.ws_connect("/v1/member") as line:
        made.order("m7", replace(RUN, void=tuple(range(1_000))))
        await line.send_str(says("m7"))
        await asyncio.wait_for(logged.wait(), LIMIT_S)
        made.order("m7", RUN)
        assert codec.decode(MemberOrder, await line.receive_str(timeout=LIMIT_S)) == RUN


async def test_members_that_are_gone_are_forgotten_unless_they_are_connected() -> None:
    made = connections()
    for name in ("gone", "kept", "m7"):
        made.order(name, RUN)
    async with proven(made, lambda: "m7") as client, client.ws_connect("/v1/member") as socket:
        await socket.send_str(says("m7"))
        await socket.receive_str(timeout=LIMIT_S)
        made.keep({"kept"})
        assert set(made.connections) == {"kept", "m7"}


def corrected(server: MemberServer, update: bool) -> tuple[bool, float]:
    """Correct the offset of a member's clock. Return whether that was news, and what it cost."""
    line = server.connection("m7")
    line.connected, server.is_news_of = True, list[bool]()  # type: ignore[attr-defined]
    ranks = tuple(map(rank, range(100)))
    for now_ns in (0, 5_000_000_000):  # the second report took 5 s less to arrive
        sent = replace(report("m7", launcher(*ranks)), now_ns=now_ns, clock="another")
        before = line.budget.left_bytes
        server._receive(line, sent, update and now_ns > 0)
    return server.is_news_of[-1], before - line.budget.left_bytes  # type: ignore[attr-defined]


@pytest.mark.parametrize(("update", "cost"), [(True, 100 * CONVERTED_BYTES), (False, 0)])
def test_an_update_that_corrects_the_clock_is_news_and_costs_what_it_makes_us_convert(
    update: bool, cost: float
) -> None:
    class Recording(MemberServer):
        def note_report(self, before: MemberReport | None, report: MemberReport, is_update: bool) -> None:
            self.is_news_of.append(not is_update)  # type: ignore[attr-defined]

    assert corrected(Recording(lambda: 0, lambda: None, clock="ours"), update) == (True, cost)


class Part:
    """An object that can be referred to weakly."""


def test_a_closed_server_keeps_no_reports_until_the_collector_runs() -> None:
    made = connections()
    line = made.connection("m7")
    made._receive(line, report("m7", launcher(rank(0))), False)
    part = Part()
    kept = weakref.ref(part)
    object.__setattr__(line.report, "member", part)
    del part
    assert kept() is not None
    made.close()
    assert kept() is None


# -- memory for reports


def shared(total_bytes: int) -> SharedLimits:
    return SharedLimits(memory=ReportMemory(total_bytes, total_bytes))


class Telling(MemberServer):
    """A server that keeps what it tells the user."""

    def __init__(self, limits: SharedLimits, namespace: str) -> None:
        self.changes = asyncio.Event()
        super().__init__(lambda: 0, self.changes.set, limits=limits, reports_of=ReportOwner(namespace, "job"))
        self.told: asyncio.Queue[str] = asyncio.Queue()

    def tell_refusal(self, why: str) -> None:
        self.told.put_nowait(why)


def large(name: str, size: int) -> str:
    return codec.encode(report(name, launcher(rank(0)), prepare_error="x" * size)).decode()


def reserved(text: str) -> int:
    decoder = ReportDecoder()
    decoder.decode(text)
    return member_bytes(decoder.retained_bytes)


async def test_a_member_whose_report_has_no_room_is_told_so_and_keeps_its_last_one() -> None:
    greedy, modest = (Telling(limits, name) for limits in (shared(400_000),) for name in ("greedy", "modest"))
    async with (
        proven(greedy, lambda: "m7") as one,
        proven(modest, lambda: "m0") as another,
        one.ws_connect("/v1/member") as line,
        another.ws_connect("/v1/member") as other,
    ):
        greedy.order("m7", RUN)
        modest.order("m0", RUN)
        await line.send_str(says("m7"))
        assert codec.decode(MemberOrder, await line.receive_str(timeout=LIMIT_S)) == RUN
        before = greedy.connection("m7").report
        await line.send_str(large("m7", 500_000))
        why = await asyncio.wait_for(greedy.told.get(), LIMIT_S)
        assert "namespace greedy" in why
        assert "MiB" in why
        assert (await line.receive(timeout=LIMIT_S)).type in (WSMsgType.CLOSE, WSMsgType.CLOSED)
        assert greedy.connection("m7").report is before
        await other.send_str(says("m0"))
        assert codec.decode(MemberOrder, await other.receive_str(timeout=LIMIT_S)) == RUN
        assert modest.told.empty()


async def test_the_largest_report_of_a_greedy_namespace_gives_way_to_that_of_another() -> None:
    much, little, more = (large(name, size) for name, size in (("m7", 230_000), ("m0", 10), ("m0", 50_000)))
    limits = shared(reserved(much) + reserved(little))
    greedy, modest = Telling(limits, "greedy"), Telling(limits, "modest")
    greedy.order("m7", RUN)
    modest.order("m0", RUN)
    async with (
        proven(greedy, lambda: "m7") as one,
        proven(modest, lambda: "m0") as another,
        one.ws_connect("/v1/member") as line,
        another.ws_connect("/v1/member") as other,
    ):
        await line.send_str(much)
        assert codec.decode(MemberOrder, await line.receive_str(timeout=LIMIT_S)) == RUN
        await other.send_str(little)
        assert codec.decode(MemberOrder, await other.receive_str(timeout=LIMIT_S)) == RUN
        greedy.changes.clear()
        await other.send_str(more)
        assert "other namespaces" in await asyncio.wait_for(greedy.told.get(), LIMIT_S)
        await asyncio.wait_for(greedy.changes.wait(), LIMIT_S)
        assert (await line.receive(timeout=LIMIT_S)).type is not WSMsgType.TEXT
        gone = greedy.connection("m7")
        assert (gone.report, gone.launcher, gone.connected) == (None, None, False)


async def test_the_memory_of_members_that_are_forgotten_is_free_again() -> None:
    limits = shared(1_000_000)
    made = Telling(limits, "n")
    async with proven(made, lambda: "m7") as client, client.ws_connect("/v1/member") as line:
        made.order("m7", RUN)
        await line.send_str(says("m7"))
        await line.receive_str(timeout=LIMIT_S)
        assert limits.memory.reserved_bytes > 0
        made.keep(())
        assert limits.memory.reserved_bytes > 0, "the member is connected"
        made.changes.clear()
        await line.close()
        await asyncio.wait_for(made.changes.wait(), LIMIT_S)
        made.keep(())
        assert limits.memory.reserved_bytes == 0


async def test_a_closed_server_takes_no_memory_for_late_reports() -> None:
    limits = shared(1_000_000)
    made = Telling(limits, "n")
    async with proven(made, lambda: "m7") as client, client.ws_connect("/v1/member") as line:
        made.order("m7", RUN)
        await line.send_str(says("m7"))
        await line.receive_str(timeout=LIMIT_S)
        made.close()
        await line.send_str(says("m7", 1))
        assert (await line.receive(timeout=LIMIT_S)).type in (WSMsgType.CLOSE, WSMsgType.CLOSED)
        assert limits.memory.reserved_bytes == 0


async def test_a_report_that_is_not_ascii_is_refused() -> None:
    made = Telling(shared(1_000_000), "n")
    async with proven(made, lambda: "m7") as client, client.ws_connect("/v1/member") as line:
        await line.send_str(says("m7").replace("m7", "\u00fc"))
        assert "ASCII" in await asyncio.wait_for(made.told.get(), LIMIT_S)
    assert not made.has_heard


def test_small_messages_are_read_no_more_often_than_reports() -> None:
    """A ping takes the event loop nearly as long as the smallest report."""
    budget = lines_of.ByteBudget()
    waits_s = [budget.spend(4, 0.0) for _ in range(2000)]
    assert not any(waits_s[:900]), "a burst is read at once"
    assert waits_s[-1] > 1.0, waits_s[-1]


@pytest.mark.parametrize("calm", [True, False])
async def test_a_job_with_frequent_rounds_is_woken_only_by_reports_that_need_one(calm: bool) -> None:
    asked: list[str] = []
    made = MemberServer(
        lambda: 0, lambda: asked.append("round"), is_calm=lambda: calm, has_frequent_rounds=True
    )
    held = (HeldSnapshot(1, 4, 8),)
    first = replace(
        report("m0", launcher(rank(0)), progress=(replace(progress(0, 7), snapshot_step=4),)), slots=held
    )

    def rounds(sent: MemberReport) -> int:
        before = len(asked)
        made._receive(made.connection("m0"), sent, False)
        return len(asked) - before

    assert rounds(first) == 1
    assert rounds(first) == (0 if calm else 1)
    assert rounds(replace(first, slots=(HeldSnapshot(1, 8, 8), *held))) == (0 if calm else 1)
    assert made._soon is None
    assert rounds(replace(first, launcher=None)) == 1
