from __future__ import annotations

import asyncio
import logging
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from holdfast.fileio.checksum import checksum
from holdfast.fileio.safetensors import plan
from holdfast.protocol.member_messages import StateSource
from holdfast.snapshot import arena as arenas
from holdfast.snapshot.arena import ArenaBusy
from sidecar.state import peers
from sidecar.state.snapshot_fetch import FetchFailed
from tests.unit.sidecar.fake_peer import TOKEN, answering, fetching, serving
from tests.unit.sidecar.memory import flip, holdings, member, private, snapshot

HEADERS = {"Authorization": f"Bearer {TOKEN}"}
LIMIT_S = 20.0


@pytest.fixture
def there() -> Iterator[Path]:
    with member() as path:
        yield path


@pytest.fixture
def here() -> Iterator[Path]:
    with member() as path:
        yield path


async def test_a_snapshot_arrives_whole_and_sealed(there: Path, here: Path) -> None:
    sent = snapshot(there, 2, 7, fill=9, size=3_000_000)
    async with serving(there) as url, fetching(here) as fetcher:
        record = await fetcher.snapshot(StateSource(url, -1, 2, 7))
    assert (record.generation, record.step, record.world_size) == (2, 7, sent.world_size)
    assert record.path.read_bytes() == sent.path.read_bytes()
    held = holdings(here)
    assert held.arena.sealed(record)
    assert held.good(record)
    assert held.arena.checksum(record) == checksum(memoryview(sent.path.read_bytes()))


def announced(total: int, *, world_size: bytes = b"2", seal: bytes = b"none", rest: int = 4) -> bytes:
    """Return the first lines of an answer that announces a whole snapshot."""
    return (
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nContent-Range: bytes 0-%d/%d\r\n"
        b"X-Holdfast-World-Size: %s\r\nX-Holdfast-Seal: %s\r\n\r\n"
    ) % (total + rest, total - 1, total, world_size, seal)


@pytest.mark.parametrize("tail", [b"", b"abc", b"abcd"], ids=["none", "cut short", "another"])
async def test_a_snapshot_without_its_checksum_is_refused(there: Path, here: Path, tail: bytes) -> None:
    content = snapshot(there, 2, 7).path.read_bytes()
    async with answering(announced(len(content)), content, tail) as url, fetching(here) as fetcher:
        with pytest.raises(FetchFailed):
            await fetcher.snapshot(StateSource(url, -1, 2, 7))
    assert holdings(here).slots() == ()


async def test_a_private_state_arrives_whole(there: Path, here: Path) -> None:
    private(there, 1, 2, 7, b"x" * 20_000)
    async with serving(there) as url, fetching(here) as fetcher:
        assert await fetcher.private(StateSource(url, 1, 2, 7)) == b"x" * 20_000


@pytest.mark.parametrize("token", ["", "wrong", "s\u00e9cret"])
async def test_without_the_runs_token_nothing_is_sent(there: Path, here: Path, token: str) -> None:
    snapshot(there, 2, 7)
    private(there, 1, 2, 7)
    async with serving(there) as url, fetching(here, token) as fetcher:
        with pytest.raises(FetchFailed, match="401 the run's token is needed"):
            await fetcher.snapshot(StateSource(url, -1, 2, 7))
        with pytest.raises(FetchFailed, match="401"):
            await fetcher.private(StateSource(url, 1, 2, 7))
    assert holdings(here).slots() == ()


@pytest.mark.parametrize("path", ["/v1/slot/1/2/3", "/v1/slot/-1/2", "/v1/slot/../x", "/v1/private/0/1", "/"])
async def test_other_requests_are_refused(there: Path, path: str) -> None:
    async with serving(there) as url, aiohttp.ClientSession(headers=HEADERS) as session:
        async with session.get(url + path) as response:
            assert response.status == 404
        async with session.post(url + "/v1/slot/1/1", data=b"x") as response:
            assert response.status == 405


async def test_a_peer_reports_what_it_does_not_hold(there: Path, here: Path) -> None:
    async with serving(there) as url, fetching(here) as fetcher:
        with pytest.raises(FetchFailed, match="404 no snapshot of generation 2, step 7"):
            await fetcher.snapshot(StateSource(url, -1, 2, 7))
        with pytest.raises(FetchFailed, match="404 no private state of rank 1, step 7"):
            await fetcher.private(StateSource(url, 1, 2, 7))


async def test_a_snapshot_damaged_on_the_peer_is_refused(there: Path, here: Path) -> None:
    record = snapshot(there, 2, 7)
    holdings(there).arena.seal(record)
    flip(record)
    async with serving(there) as url, fetching(here) as fetcher:
        with pytest.raises(FetchFailed, match=r"checksum [0-9a-f]{8}, expected"):
            await fetcher.snapshot(StateSource(url, -1, 2, 7))
    assert holdings(here).slots() == ()


async def test_without_space_for_it_a_snapshot_is_refused(there: Path, here: Path) -> None:
    snapshot(there, 2, 7)
    for step in (1, 2):
        snapshot(here, 1, step)
    mine = holdings(here).arena
    async with serving(there) as url, fetching(here) as fetcher:
        with mine.pin(mine.records()[1]), pytest.raises(ArenaBusy, match="no slot of the arena is free"):
            await fetcher.snapshot(StateSource(url, -1, 2, 7))
    assert [slot.step for slot in holdings(here).slots()] == [2, 1]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\xff garbage\r\n\r\n",
        b"HTTP/1.1 206\r\n\r\n",  # without an announced size
        b"x" * 100_000,  # without an end
        announced(80).replace(b"World-Size", b"Size") + b"x" * 84,
        announced(80, world_size=b"x") + b"x" * 84,
        announced(80, world_size=b"-2") + b"x" * 84,
        announced(80, seal=b"?") + b"x" * 84,
        announced(80).replace(b"bytes 0-", b"bytes 8-") + b"x" * 84,
        announced(0),
        announced(99999999999999999),
        announced(1 << 41) + b"x" * 80,  # larger than the available space
        announced(1000) + b"x" * 10,  # short
        announced(64, seal=b"00000000") + b"x" * 64,
        announced(64) + b"x" * 64 + zlib.crc32(b"x" * 64).to_bytes(4, "little"),  # no snapshot
        b"HTTP/1.1 200 OK\r\nContent-Length: 80\r\n\r\n" + b"x" * 80,
        b"HTTP/1.1 500 Oh\r\nContent-Length: 100000000\r\n\r\n" + b"y" * 100_000,
        b"HTTP/1.1 302 Over\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_a_hostile_answer_changes_nothing(here: Path, answer: bytes) -> None:
    snapshot(here, 1, 1)
    async with answering(answer) as url, fetching(here) as fetcher:
        with pytest.raises((FetchFailed, OSError)) as caught:
            await fetcher.snapshot(StateSource(url, -1, 2, 7))
        assert len(str(caught.value)) < 1000
    assert [slot.step for slot in holdings(here).slots()] == [1]


async def test_a_private_state_above_the_size_limit_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "MAX_CAPACITY_BYTES", 1000)
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    async with fetching(here) as fetcher:
        async with answering(head, b"x" * 1001) as url:
            with pytest.raises(FetchFailed, match="more than 1000 bytes"):
                await fetcher.private(StateSource(url, 0, 1, 1))
        sound = head[:-2] + b"X-Holdfast-Crc32: %08x\r\n\r\n" % zlib.crc32(b"x" * 1000)
        async with answering(sound, b"x" * 1000) as url:
            assert await fetcher.private(StateSource(url, 0, 1, 1)) == b"x" * 1000


@pytest.mark.parametrize("crc", [b"", b"X-Holdfast-Crc32: 00000000\r\n"], ids=["none", "another"])
async def test_a_private_state_that_differs_from_its_announcement_is_refused(here: Path, crc: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + crc + b"\r\n"
    async with fetching(here) as fetcher, answering(head, b"x" * 1000) as url:
        with pytest.raises(FetchFailed, match="checksum"):
            await fetcher.private(StateSource(url, 0, 1, 1))


@pytest.mark.parametrize("pieces", [(), (announced(1000),), (announced(1000) + b"x" * 10,)])
async def test_a_silent_peer_is_abandoned(here: Path, pieces: tuple[bytes, ...]) -> None:
    async with answering(*pieces, then="silence") as url, fetching(here, silence_s=0.02) as fetcher:
        for ask in (fetcher.snapshot(StateSource(url, -1, 2, 7)), fetcher.private(StateSource(url, 1, 2, 7))):
            with pytest.raises(FetchFailed):
                await ask
    assert holdings(here).slots() == ()
    assert snapshot(here, 1, 1).step == 1  # the slot is free again


async def test_an_unreachable_peer_is_named(here: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with fetching(here) as fetcher:
            with pytest.raises(FetchFailed, match=url):
                await fetcher.private(StateSource(url, 1, 2, 7))


async def test_a_receiver_that_reads_nothing_does_not_keep_the_slot(there: Path) -> None:
    record = snapshot(there, 2, 7, size=16_000_000)
    arena = holdings(there).arena
    arena.seal(record)
    async with serving(there, silence_s=0.05) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(
            f"GET /v1/slot/2/7 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        )
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        snapshot(there, 2, 8)
        layout = plan([("w", "U8", (10,))], {})
        while (draft := arena.begin(layout, 2, 9, 2)) is None:  # noqa: ASYNC110  a lock sends no notification
            await asyncio.sleep(0)
        assert draft.commit().step == 9
        writer.close()


async def test_a_slot_that_is_being_written_blocks_no_other_request(
    there: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arenas, "PIN_PATIENCE_S", 60.0)
    record = snapshot(there, 2, 7)
    private(there, 1, 2, 7, b"own")
    writer = holdings(there).arena._slots[record.slot]
    assert writer.acquire()
    async with serving(there) as url, fetching(here) as fetcher:
        waits = asyncio.create_task(fetcher.snapshot(StateSource(url, -1, 2, 7)))
        try:
            assert await fetcher.private(StateSource(url, 1, 2, 7)) == b"own"
            assert not waits.done()
        finally:
            writer.release()
        assert (await waits).step == 7


async def test_a_pin_whose_requester_has_given_up_is_released(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arenas, "PIN_PATIENCE_S", 60.0)
    record, held = snapshot(there, 2, 7), holdings(there)
    writer = holdings(there).arena._slots[record.slot]

    async def pin() -> None:
        async with held.pinned(record):
            raise AssertionError

    assert writer.acquire()
    task = asyncio.create_task(pin())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    writer.release()
    async with held.pinned(record) as path:
        assert path == record.path
    while not writer.acquire():  # noqa: ASYNC110  a lock sends no notification
        await asyncio.sleep(0)
    writer.release()


async def test_a_receiver_that_stops_reading_a_private_state_is_abandoned(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop once copied the whole state, and kept the copy as long as the connection."""
    given_up = asyncio.Event()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg == "private state not sent":
                given_up.set()

    log = logging.getLogger("a peer that takes nothing")
    log.setLevel(logging.DEBUG)
    log.addHandler(Heard())
    monkeypatch.setattr(peers, "log", log)
    private(there, 1, 2, 7, b"x" * 50_000_000)
    async with serving(there, silence_s=0.05) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        try:
            writer.write(
                f"GET /v1/private/1/2/7 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
            )
            await reader.readuntil(b"\r\n\r\n")
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.wait_for(given_up.wait(), LIMIT_S)
        finally:
            writer.close()
