"""Messages that are being received take limited memory, and other namespaces do not wait for them."""

from __future__ import annotations

import asyncio
import gc
import struct
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from aiohttp import ClientSession, WSCloseCode, WSMsgType, web

from holdfast.protocol import codec
from holdfast.protocol.member_messages import MemberOrder
from supervisor.controller.limits import incoming as places
from supervisor.controller.limits.incoming import (
    NAMESPACE_PLACES,
    PLACE_S,
    PLACES,
    SMALL_BYTES,
    IncomingMessages,
    MemberBuffer,
    MeteredConnection,
)
from supervisor.controller.limits.owner import ReportOwner
from supervisor.controller.limits.shared import SharedLimits
from supervisor.controller.member_server import MemberServer, largest_report
from tests.unit.supervisor.job_views import launcher, rank, report

LIMIT_S = 20.0


@dataclass(eq=False)
class Buffer:
    """A buffer that records what it is told."""

    namespace: str
    has_whole_message: bool = False
    told: list[str] = field(default_factory=list)

    def resume(self) -> None:
        self.told.append("go on")

    def abort(self) -> None:
        self.told.append("abort")


def test_places_are_limited_for_each_namespace_and_the_longest_wait_comes_first() -> None:
    made = IncomingMessages()
    first, *more = [Buffer("n") for _ in range(NAMESPACE_PLACES + 2)]
    assert made.ask(first, 0.0)
    assert [made.ask(each, 0.0) for each in more] == [True] * (NAMESPACE_PLACES - 1) + [False, False]
    assert made.ask(Buffer("another"), 0.0)
    made.leave(first, 1.0)
    made.leave(first, 1.0)
    assert [each.told for each in more[-2:]] == [["go on"], []]


def test_the_namespace_with_the_fewest_places_has_the_next_one() -> None:
    made = IncomingMessages()
    taken = [Buffer(str(n // NAMESPACE_PLACES)) for n in range(PLACES)]
    assert all(made.ask(each, 0.0) for each in taken)
    more, new = Buffer("0"), Buffer("new")
    assert not made.ask(more, 0.0)
    assert not made.ask(new, 0.0)
    made.leave(taken[0], 1.0)
    assert (more.told, new.told) == ([], ["go on"])


def test_only_connections_that_keep_others_waiting_are_ended_for_being_slow() -> None:
    made = IncomingMessages()
    slow, whole = Buffer("n"), Buffer("n", has_whole_message=True)
    assert made.ask(slow, 0.0)
    assert made.ask(whole, 0.0)
    made.end_slow(10 * PLACE_S)
    assert slow.told == []
    for _ in range(NAMESPACE_PLACES - 1):
        made.ask(Buffer("n"), 9.5 * PLACE_S)
    made.end_slow(10 * PLACE_S)
    assert (slow.told, whole.told) == (["abort"], [])


# -- with real connections


@dataclass
class Served:
    """A server on which the members of each namespace are one job."""

    limits: SharedLimits
    port: int
    servers: dict[str, MemberServer] = field(default_factory=dict)
    connections: list[MeteredConnection] = field(default_factory=list)

    def buffers(self, namespace: str) -> list[MemberBuffer]:
        found = [each.buffer for each in self.connections]
        return [each for each in found if each is not None and each.namespace == namespace]


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    app, state = web.Application(), Served(SharedLimits(), 0)

    async def serve(request: web.Request) -> web.StreamResponse:
        namespace, member = request.match_info["namespace"], request.match_info["member"]
        owner = ReportOwner(namespace, "job")
        made = state.servers.setdefault(
            namespace, MemberServer(lambda: 0, lambda: None, limits=state.limits, reports_of=owner)
        )
        made.order(member, MemberOrder("run", 3))
        return await made.serve(request, lambda: member, largest_report(codec.MAX_RANKS))

    app.router.add_get("/{namespace}/{member}", serve)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    handler = runner.server
    assert handler is not None
    loop = asyncio.get_running_loop()

    def make() -> MeteredConnection:
        state.connections.append(MeteredConnection(handler, loop=loop, access_log=None))  # type: ignore[arg-type]
        return state.connections[-1]

    server = await loop.create_server(make, "127.0.0.1", 0)
    state.port = server.sockets[0].getsockname()[1]
    try:
        yield state
    finally:
        server.close()
        await runner.cleanup()


async def begin(state: Served, place: str, size: int) -> asyncio.StreamWriter:
    """Open a connection, and announce a message of `size` bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", state.port)
    headers = (
        f"GET /{place} HTTP/1.1",
        "Host: x",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    )
    writer.write("\r\n".join((*headers, "", "")).encode())
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LIMIT_S)
    writer.write(struct.pack("!BBQ4s", 0x81, 0x80 | 127, size, b"\0" * 4))
    return writer


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition that has no event, because it is within the server."""

    async def wait() -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)

    await asyncio.wait_for(wait(), LIMIT_S)


async def test_unfinished_messages_take_only_their_namespaces_places_and_delay_no_other() -> None:
    size = 3 << 20
    async with served() as state:
        writers = [await begin(state, f"greedy/{n}", size) for n in range(12)]
        for writer in writers:
            writer.write(b" " * (size - 1))
        await until(lambda: len(state.limits.incoming._waiting) == 12 - NAMESPACE_PLACES)
        await until(lambda: sum(b.held_bytes > size - 1 for b in state.buffers("greedy")) == NAMESPACE_PLACES)
        held = sum(each.held_bytes for each in state.buffers("greedy"))
        assert held <= NAMESPACE_PLACES * (size + SMALL_BYTES) + 12 * (SMALL_BYTES + (256 << 10))
        text = codec.encode(report("m", launcher(rank(0)))).decode() + " " * (1 << 20)
        async with ClientSession() as session:
            line = await session.ws_connect(f"http://127.0.0.1:{state.port}/modest/m")
            await line.send_str(text)
            assert codec.decode(MemberOrder, await line.receive_str(timeout=LIMIT_S)).generation == 3
            await line.close()
        assert state.limits.incoming._by_namespace == {"greedy": NAMESPACE_PLACES}
        for writer in writers:
            writer.write(b" ")  # complete, so the next ones have their turn; none of them is a report
        await until(lambda: not state.limits.incoming._held and not state.limits.incoming._waiting)
        for writer in writers:
            writer.close()


async def test_large_reports_of_many_members_all_arrive() -> None:
    """There are more of them than places, and each connection sends several."""
    members = 3 * NAMESPACE_PLACES
    async with served() as state, ClientSession() as session:

        async def send(name: str) -> None:
            line = await session.ws_connect(f"http://127.0.0.1:{state.port}/n/{name}")
            for step in range(1, 4):
                told = report(name, launcher(rank(0)), sequence=step)
                await line.send_str(codec.encode(told).decode() + " " * (SMALL_BYTES * 4))
            await until(lambda: (found := state.servers["n"].connection(name).report) and found.sequence == 3)
            await line.close()

        await asyncio.wait_for(asyncio.gather(*(send(f"m{n}") for n in range(members))), LIMIT_S)
        await until(lambda: not state.buffers("n"))
        assert not state.limits.incoming._held


async def test_a_slow_sender_is_ended_when_others_wait_for_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "PLACE_S", 0.0)
    async with served() as state:
        slow = [await begin(state, f"n/{n}", 1 << 20) for n in range(NAMESPACE_PLACES)]
        for writer in slow:
            writer.write(b" " * (SMALL_BYTES + 1))
        await until(lambda: len(state.limits.incoming._held) == NAMESPACE_PLACES)
        async with ClientSession() as session:
            line = await session.ws_connect(f"http://127.0.0.1:{state.port}/n/m")
            await line.send_str(codec.encode(report("m", launcher(rank(0)))).decode() + " " * (1 << 20))
            await until(lambda: state.limits.incoming._waiting)
            state.limits.incoming.end_slow(asyncio.get_running_loop().time())
            assert codec.decode(MemberOrder, await line.receive_str(timeout=LIMIT_S)).generation == 3
            await line.close()
        for writer in slow:
            writer.close()


async def test_what_arrives_on_a_connection_that_is_being_ended_takes_no_place() -> None:
    async with served() as state:
        writer = await begin(state, "n/m", 1 << 20)
        await until(lambda: state.buffers("n"))
        [connection], [buffer] = state.connections, state.buffers("n")
        buffer.close()
        connection.data_received(b" " * (SMALL_BYTES + 1))
        assert not state.limits.incoming._held
        writer.close()


async def test_an_ended_connection_leaves_no_messages_to_the_garbage_collector() -> None:
    """A pod could otherwise leave megabytes of unread messages behind with each of its connections."""
    was_enabled, count, size = gc.isenabled(), 8, 1_000_000
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        async with served() as state:
            before = tracemalloc.get_traced_memory()[0]
            for number in range(count):
                writer = await begin(state, f"n/m{number}", size)
                writer.write(b"x" * size)  # refused, because it is not JSON
                writer.write(struct.pack("!BBQ4s", 0x81, 0x80 | 127, size, b"\0" * 4) + b"x" * size)
                await writer.drain()
                writer.transport.abort()
                await until(lambda: all(each.transport is None for each in state.connections))
            await until(lambda: tracemalloc.get_traced_memory()[0] - before < size * count / 4)
    finally:
        tracemalloc.stop()
        if was_enabled:
            gc.enable()


# -- silent connections


async def test_a_silent_member_is_asked_and_its_connection_ends_if_it_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MemberServer, "heartbeat_s", 0.05)
    async with served() as state, ClientSession() as session:
        url = f"http://127.0.0.1:{state.port}/n/m"
        async with session.ws_connect(url, autoping=False) as line:
            assert (await line.receive(timeout=LIMIT_S)).type is WSMsgType.PING
            assert (await line.receive(timeout=LIMIT_S)).type in (WSMsgType.CLOSED, WSMsgType.ERROR)
            assert line.close_code != WSCloseCode.OK


async def test_a_member_that_answers_keeps_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemberServer, "heartbeat_s", 0.05)
    async with served() as state, ClientSession() as session:
        url = f"http://127.0.0.1:{state.port}/n/m"
        async with session.ws_connect(url, autoping=False) as line:
            for _ in range(5):  # longer than a silent member has
                message = await line.receive(timeout=LIMIT_S)
                assert message.type is WSMsgType.PING
                await line.pong(message.data)


async def test_only_a_member_that_could_send_and_did_not_is_asked() -> None:
    async with served() as state, ClientSession() as session:
        line = await session.ws_connect(f"http://127.0.0.1:{state.port}/n/m", autoping=False)
        async with line:
            connection, asked = state.connections[0], list[int]()

            def look() -> None:
                assert connection._looking is not None
                connection._looking.cancel()
                connection._look(3600.0, lambda: asked.append(1))

            [buffer] = state.buffers("n")
            buffer.is_paused = True
            look()
            assert not asked, "this side does not read"
            buffer.is_paused = False
            look()
            assert asked == [1]
            await line.send_str(codec.encode(report("m", launcher(rank(0)))).decode())
            await until(lambda: connection._has_received)
            look()
            assert asked == [1], "it has answered"
            look()
            look()
            assert asked == [1, 1]
            assert (await line.receive(timeout=LIMIT_S)).type is WSMsgType.TEXT  # the order
            assert (await line.receive(timeout=LIMIT_S)).type in (WSMsgType.CLOSED, WSMsgType.ERROR)
