from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSMsgType, web
from aiohttp.abc import AbstractResolver, ResolveResult

from holdfast.launcher import sidecar_server
from holdfast.process import event_loop
from holdfast.protocol import codec
from holdfast.protocol.launcher_messages import LauncherOrder, LauncherState
from holdfast.protocol.member_messages import UPDATES, MemberOrder, MemberReport
from sidecar import clients
from sidecar.clients import AddressesInTurn, LauncherClient, SupervisorClient
from supervisor.controller.reports import report_updates
from supervisor.controller.reports.report_decoder import ReportDecoder
from tests.sandbox import memory_directory
from tests.unit.sidecar.fake_launcher import LIMIT_S, Launcher
from tests.unit.supervisor.job_views import launcher, report

ADDRESSES = ("127.0.0.1", "127.0.0.2")


@asynccontextmanager
async def running(link: LauncherClient | SupervisorClient) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(link.run())
    try:
        yield task
    finally:
        await event_loop.end([task])


# -- to the launcher


@pytest.fixture
def here() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


class Known:
    """Records the notifications of a link."""

    def __init__(self, path: Path) -> None:
        self.link = LauncherClient(path, self._changed)
        self.states: asyncio.Queue[LauncherState | None] = asyncio.Queue()

    def _changed(self) -> None:
        self.states.put_nowait(self.link.state)

    async def next(self) -> LauncherState | None:
        return await asyncio.wait_for(self.states.get(), LIMIT_S)


async def test_the_launchers_newest_state_is_known_until_the_launcher_disconnects(here: Path) -> None:
    path = here / "launcher.sock"
    there, known = Launcher(path), Known(path)
    async with running(known.link):
        for generation in (1, 2):  # the launcher has been restarted
            async with there.listening():
                writer = await asyncio.wait_for(there.came.get(), LIMIT_S)
                state = launcher(generation=generation)
                writer.write(codec.encode(state) + codec.encode(state))
                assert [await known.next(), await known.next()] == [state, state]
                known.link.send(LauncherOrder("settle", generation))
                heard = await asyncio.wait_for(there.heard.get(), LIMIT_S)
                assert codec.decode(LauncherOrder, heard) == LauncherOrder("settle", generation)
                writer.close()
                assert await known.next() is None


@pytest.mark.parametrize("line", [b"{}\n", b"\xff\n", b'{"pid":"x"}\n', b"x" * (codec.MAX_MESSAGE_BYTES + 1)])
async def test_a_launcher_that_sends_anything_else_is_disconnected_and_retried(
    here: Path, line: bytes
) -> None:
    path = here / "launcher.sock"
    there, known = Launcher(path), Known(path)
    async with running(known.link), there.listening():
        first = await asyncio.wait_for(there.came.get(), LIMIT_S)
        first.write(line)
        second = await asyncio.wait_for(there.came.get(), LIMIT_S)
        second.write(codec.encode(launcher()))
        assert await known.next() == launcher()
        for writer in (first, second):
            writer.close()


async def test_a_launcher_refused_repeatedly_is_logged_once_for_each_cause(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, said = here / "launcher.sock", list[str]()
    monkeypatch.setattr(clients.log, "warning", lambda _, extra: said.append(extra["error"]))
    there, known = Launcher(path), Known(path)
    torn = [b'{"a": "' + b"x" * length + b"\n" for length in (3, 50, 900)]
    too_long = b"x" * (codec.MAX_MESSAGE_BYTES + 1)
    async with running(known.link), there.listening():
        for line in (*torn, b"{}\n", too_long, too_long, codec.encode(launcher()), torn[0], torn[1]):
            writer = await asyncio.wait_for(there.came.get(), LIMIT_S)
            writer.write(line)
            if line == codec.encode(launcher()):
                assert await known.next() == launcher()
                writer.close()
                assert await known.next() is None
        (await asyncio.wait_for(there.came.get(), LIMIT_S)).close()
    parts = ["not JSON", "pid: missing", "more than 4,194,304 bytes", "not JSON"]
    assert len(said) == len(parts)
    assert all(part in each for part, each in zip(parts, said, strict=True)), said


async def test_a_sign_of_life_is_received_and_is_not_a_change(here: Path) -> None:
    path = here / "launcher.sock"
    there, known = Launcher(path), Known(path)
    assert known.link.heard_s == 0.0
    async with running(known.link), there.listening():
        writer = await asyncio.wait_for(there.came.get(), LIMIT_S)
        for state in (launcher(), launcher(generation=2)):
            before_s = known.link.heard_s
            writer.write(sidecar_server.HEARTBEAT + codec.encode(state))
            assert await known.next() == state
            assert known.link.heard_s > before_s
        writer.close()
        assert await known.next() is None
        assert known.states.empty()


def test_an_order_without_a_launcher_is_dropped_silently(here: Path) -> None:
    link = LauncherClient(here / "launcher.sock", lambda: None)
    link.send(LauncherOrder("settle"))
    assert link.state is None


# -- to the supervisor


class Supervisor:
    """The supervisor's end: accepts members, and collects their reports."""

    def __init__(self, protocols: tuple[str, ...] = ()) -> None:
        self._protocols = protocols
        self.texts: list[list[str]] = []  # of each connection
        self.came: asyncio.Queue[web.WebSocketResponse] = asyncio.Queue()
        self.reports: asyncio.Queue[MemberReport] = asyncio.Queue()
        self.refuse = False
        self.refuses = False  # each connection
        self.refused = 0

    @asynccontextmanager
    async def listening(self, port: int = 0, host: str = "127.0.0.1") -> AsyncIterator[int]:
        app = web.Application()
        app.router.add_get("/v1/member", self._serve)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, host, port, reuse_address=True)
        await site.start()
        try:
            yield runner.addresses[0][1]
        finally:
            while not self.came.empty():
                await self.came.get_nowait().close()
            await runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if self.refuse or self.refuses:
            self.refuse = False
            self.refused += 1
            raise web.HTTPServiceUnavailable
        assert request.headers["Authorization"] == "Bearer secret"
        socket = web.WebSocketResponse(protocols=self._protocols)
        await socket.prepare(request)
        self.came.put_nowait(socket)
        decoder = ReportDecoder()
        texts: list[str] = []
        self.texts.append(texts)
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                texts.append(message.data)
                self.reports.put_nowait(decoder.decode(message.data))
        return socket

    async def line(self) -> web.WebSocketResponse:
        return await asyncio.wait_for(self.came.get(), LIMIT_S)

    async def report(self) -> MemberReport:
        return await asyncio.wait_for(self.reports.get(), LIMIT_S)


class Speaker:
    """A member that numbers its reports."""

    def __init__(self, port: int, interval_s: float = 60.0, host: str = "127.0.0.1") -> None:
        self.sequence = 0
        self.fails = False
        self.orders: asyncio.Queue[MemberOrder] = asyncio.Queue()
        url = f"http://{host}:{port}"
        self.unreadable: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.link = SupervisorClient(
            url,
            lambda: "secret",
            self.tell,
            self.orders.put,
            interval_s,
            unreadable=lambda text, why: self.unreadable.put_nowait((text, why)),
        )

    def tell(self) -> MemberReport:
        self.sequence += 1 // (not self.fails)
        return report("m0", None, sequence=self.sequence)

    async def order(self) -> MemberOrder:
        return await asyncio.wait_for(self.orders.get(), LIMIT_S)


async def test_a_member_reports_when_it_connects_when_something_changes_and_at_intervals() -> None:
    there = Supervisor()
    async with there.listening() as port:
        quiet, regular = Speaker(port), Speaker(port, interval_s=0.001)
        async with running(quiet.link):
            assert (await there.report()).sequence == 1
            quiet.link.dirty.set()
            assert (await there.report()).sequence == 2
        async with running(regular.link):
            assert [(await there.report()).sequence for _ in range(4)] == [1, 2, 3, 4]


@pytest.mark.parametrize("chosen", [True, False], ids=["newer", "older"])
async def test_a_supervisor_that_reads_updates_receives_one_complete_report_for_each_connection(
    chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "BACKOFF_S", (0.005,))
    there = Supervisor((UPDATES,) if chosen else ())
    async with there.listening() as port:
        speaker = Speaker(port)
        async with running(speaker.link):
            for _ in range(2):
                line = await there.line()
                sequence = (await there.report()).sequence
                for number in (1, 2):
                    speaker.link.dirty.set()
                    assert (await there.report()).sequence == sequence + number
                await line.close()
    complete = [
        [not each.startswith(report_updates.BEGINNING) for each in texts] for texts in there.texts[:2]
    ]
    assert [each[:3] for each in complete] == [[True, False, False] if chosen else [True] * 3] * 2


async def test_orders_are_handed_over_and_other_lines_are_ignored() -> None:
    there = Supervisor()
    async with there.listening() as port:
        speaker = Speaker(port)
        async with running(speaker.link):
            line = await there.line()
            for text in ("{}", "not json", codec.encode(MemberOrder("idle", 3)).decode()):
                await line.send_str(text)
            assert await speaker.order() == MemberOrder("idle", 3)


async def test_an_order_that_cannot_be_read_is_handed_over_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(clients.log, "error", lambda event, extra: logged.append(f"{event}: {extra}"))
    there = Supervisor()
    async with there.listening() as port:
        speaker = Speaker(port)
        async with running(speaker.link):
            line = await there.line()
            await line.send_str('{"do": "run", "generation": 3, "colour": "red"}')
            assert await asyncio.wait_for(speaker.unreadable.get(), LIMIT_S) == (
                '{"do": "run", "generation": 3, "colour": "red"}',
                "MemberOrder.'colour': unknown field",
            )
    assert [each.partition(":")[0] for each in logged] == ["order not readable"]


async def test_a_broken_connection_is_made_again_and_receives_the_whole_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clients, "BACKOFF_S", (0.005,))
    there = Supervisor()
    there.refuse = True
    async with there.listening() as port:
        speaker = Speaker(port)
        async with running(speaker.link):
            for _ in range(3):
                line = await there.line()
                await there.report()
                await line.close()
            await there.line()
            assert (await there.report()).sequence == 4


async def test_a_member_is_alone_until_an_order_is_accepted_and_again_when_the_connection_ends() -> None:
    """A connection alone is no supervisor: this one refuses the report, because it has another version."""
    there = Supervisor()
    async with there.listening() as port:
        speaker = Speaker(port)
        begun_s = speaker.link.alone_since_s
        async with running(speaker.link):
            line = await there.line()
            await there.report()
            await line.close()
            line = await there.line()
            assert speaker.link.alone_since_s == begun_s is not None
            speaker.link.alone_since_s = None  # as `Sidecar.obey` does
            await there.report()
            assert speaker.link.alone_since_s is None
            await line.close()
            await there.line()
            assert speaker.link.alone_since_s is not None
            assert speaker.link.alone_since_s > begun_s


async def test_a_restarted_supervisor_reaches_the_member_again() -> None:
    there, again = Supervisor(), Supervisor()
    async with there.listening() as port:
        speaker = Speaker(port)
        link = running(speaker.link)
        await link.__aenter__()
        await there.report()
    async with again.listening(port):
        assert (await again.report()).sequence >= 2
        await link.__aexit__(None, None, None)


async def test_a_report_that_cannot_be_encoded_ends_the_service_instead_of_being_dropped() -> None:
    there = Supervisor()
    async with there.listening() as port:
        speaker = Speaker(port)
        async with running(speaker.link) as task:
            await there.report()
            speaker.fails = True
            speaker.link.dirty.set()
            await asyncio.wait({task}, timeout=LIMIT_S)
            assert isinstance(task.exception(), ZeroDivisionError)


async def test_each_address_of_the_supervisors_name_is_tried_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver always puts the same replica first, which accepts connections but does not lead."""
    standby, leader = Supervisor(), Supervisor()
    standby.refuses = True
    async with leader.listening(0, "127.0.0.2") as port, standby.listening(port):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in ADDRESSES]
        real = socket.getaddrinfo

        def resolve(name: str, *rest: Any, **more: Any) -> Any:
            return found if name == "supervisor.test" else real(name, *rest, **more)

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        speaker = Speaker(port, host="supervisor.test")
        async with running(speaker.link):
            await leader.report()
            await (await leader.line()).close()
            await leader.report()
    assert standby.refused >= 1


async def test_a_connection_that_ends_at_once_is_not_made_again_at_full_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A supervisor that refuses the report ends the connection without an error, after a TLS handshake."""
    pauses: list[float] = []
    monkeypatch.setattr(clients, "BACKOFF_S", (0.0, 0.001, 0.002, 0.003))
    real = asyncio.sleep

    async def sleep(pause_s: float, *rest: Any) -> Any:
        pauses.append(pause_s)
        return await real(pause_s, *rest)

    there = Supervisor()
    async with there.listening() as port:
        speaker = Speaker(port)
        monkeypatch.setattr(asyncio, "sleep", sleep)
        async with running(speaker.link):
            for _ in range(4):
                await (await there.line()).close()
    assert [each for each in pauses if 0 < each <= 0.003][:3] == [0.001, 0.002, 0.003]


async def test_a_supervisor_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host was lost after it had accepted the connection."""
    monkeypatch.setattr(clients, "ANSWER_S", 0.05)
    arrived = asyncio.Semaphore(0)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.release()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server, running(Speaker(server.sockets[0].getsockname()[1]).link):
        for _ in range(2):
            await asyncio.wait_for(arrived.acquire(), LIMIT_S)


class Names(AbstractResolver):
    """A DNS whose answers the test gives."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[asyncio.Future[list[ResolveResult]]] = asyncio.Queue()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        answer: asyncio.Future[list[ResolveResult]] = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(answer)
        return await answer

    async def close(self) -> None:
        """There is nothing to close."""


def found_at(host: str) -> list[ResolveResult]:
    return [
        ResolveResult(hostname="s", host=host, port=1, family=socket.AF_INET, proto=6, flags=0),
    ]


async def test_while_the_dns_is_silent_the_last_known_addresses_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The DNS server may be on a lost node. Its later answer counts again."""
    monkeypatch.setattr(clients, "RESOLVE_S", 0.01)
    names = Names()
    addresses = AddressesInTurn(names)

    async def answered(answer: list[ResolveResult] | OSError) -> list[ResolveResult]:
        asking = asyncio.create_task(addresses.resolve("s"))
        lookup = await asyncio.wait_for(names.asked.get(), LIMIT_S)
        if isinstance(answer, OSError):
            lookup.set_exception(answer)
        else:
            lookup.set_result(answer)
        return await asking

    with pytest.raises(OSError, match="no answer"):
        await answered(OSError("no answer"))
    assert await answered(found_at("10.0.0.1")) == found_at("10.0.0.1")
    assert await answered(OSError("no answer")) == found_at("10.0.0.1")
    assert await addresses.resolve("s") == found_at("10.0.0.1")  # this lookup has no answer yet
    assert await addresses.resolve("s") == found_at("10.0.0.1")
    assert names.asked.qsize() == 1, "one lookup at a time, because each takes a thread"
    names.asked.get_nowait().set_result(found_at("10.0.0.2"))
    assert await addresses.resolve("s") == found_at("10.0.0.2")
    await addresses.close()
