"""A server limits the number and the duration of idle connections, whatever they send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from holdfast.process import network
from holdfast.process.network import Door

MOST = 3


class Answering(asyncio.Protocol):
    """Answers each byte: with `trusted` for t, and a dot for others."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        with self.door.answering(self, trusted=data == b"t"):
            self.transport.write(b".")


class House:
    """A server behind a door, and its clients."""

    def __init__(self) -> None:
        self.door = Door(MOST, 5.0)
        self.clients: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def open(self) -> None:
        make = self.door.guarded(lambda: Answering(self.door))
        self.server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
        self.address = self.server.sockets[0].getsockname()

    async def enter(self, say: bytes = b"") -> int:
        """Connect and send `say`. Return the client's number, after its answer if it sent anything."""
        self.clients.append(await asyncio.open_connection(*self.address))
        number = len(self.clients) - 1
        if say:
            assert await self.asked(number, say)
        return number

    async def asked(self, number: int, say: bytes = b"x") -> bool:
        """Return True if the server still answers the client."""
        reader, writer = self.clients[number]
        try:
            writer.write(say)
            return await reader.read(1) == b"."
        except ConnectionError:
            return False


@pytest.fixture
async def house() -> AsyncIterator[House]:
    made = House()
    await made.open()
    yield made
    for _, writer in made.clients:
        writer.close()
    made.server.close()


async def test_the_oldest_idle_connection_makes_room_for_a_new_one(house: House) -> None:
    for _ in range(MOST + 2):
        await house.enter(b"x")
    assert [await house.asked(n) for n in range(MOST + 2)] == [False, False, True, True, True]


async def test_a_connection_with_a_new_request_is_not_the_oldest(house: House) -> None:
    for _ in range(MOST):
        await house.enter(b"x")
    assert await house.asked(0)
    await house.enter(b"x")
    assert [await house.asked(n) for n in range(MOST)] == [True, False, True]


async def test_a_connection_that_has_shown_the_token_is_kept_and_does_not_count(house: House) -> None:
    for _ in range(MOST + 2):
        await house.enter(b"t")
    for _ in range(MOST + 2):
        await house.enter(b"x")
    house.door.sweep(1e12)
    assert all([await house.asked(n) for n in range(MOST + 2)])


async def test_an_idle_connection_is_closed_in_time_however_much_of_a_request_it_has_sent(
    house: House,
) -> None:
    number = await house.enter(b"x")
    [since_s] = house.door._idle.values()
    house.door.sweep(since_s + 4.9)
    assert await house.asked(number)
    house.door.sweep(since_s + 1000.0)
    assert not await house.asked(number)
    assert house.door._idle == {}


async def test_connections_that_are_closed_are_forgotten(house: House) -> None:
    for _ in range(MOST):
        await house.enter(b"x")
    for reader, writer in house.clients:
        writer.write_eof()
        assert await reader.read() == b""
    house.door.sweep(1e12)
    assert (house.door._idle, house.door._trusted) == ({}, set())


async def test_a_door_without_connections_wakes_up_only_when_one_comes(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_POLL_S", 0.001)
    monkeypatch.setattr(house.door, "_idle_s", 0.0)
    swept = 0
    sweep, has_swept = house.door.sweep, asyncio.Event()

    def counted(now_s: float) -> None:
        nonlocal swept
        swept += 1
        sweep(now_s)
        has_swept.set()

    monkeypatch.setattr(house.door, "sweep", counted)
    watching = asyncio.create_task(house.door.watch())
    try:
        for _ in range(3):  # it sleeps again after each
            await asyncio.sleep(0.02)
            before = swept
            await asyncio.sleep(0.02)
            assert swept == before, "it looked although nobody was there"
            number = await house.enter(b"x")
            await asyncio.wait_for(has_swept.wait(), 20.0)
            assert await house.clients[number][0].read(1) == b"", "an idle connection must be closed"
            has_swept.clear()
    finally:
        watching.cancel()
