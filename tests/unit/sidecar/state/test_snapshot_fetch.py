"""Snapshots of many chunks from several holders, some of which fail on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import pytest

from holdfast.fileio.checksum import chunk_crcs, combine
from holdfast.fileio.safetensors import plan
from holdfast.process.event_loop import end
from holdfast.protocol.member_messages import StateSource
from holdfast.snapshot import arena as arenas
from holdfast.snapshot.arena import Arena
from holdfast.snapshot.commit_records import CommitRecord
from sidecar.state import snapshot_fetch, snapshot_send
from sidecar.state.snapshot_fetch import FetchFailed
from sidecar.state.snapshot_send import ChunkRange, UnalignedRange
from tests.unit.sidecar.fake_peer import fetching, serving
from tests.unit.sidecar.memory import WORLD_SIZE, flip, holdings, member

CHUNK_BYTES = 64 << 10
SILENCE_S = 20.0  # longer than any answer of a busy machine; no test waits for so long
SIZE = 20 * CHUNK_BYTES + 12_345

Answer: TypeAlias = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
def folders() -> Iterator[list[Path]]:
    with ExitStack() as stack:
        yield [stack.enter_context(member()) for _ in range(3)]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use parts of a few small chunks, and give up on a silent holder soon."""
    for module in (snapshot_fetch, snapshot_send, arenas):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(snapshot_fetch, "PIECE_BYTES", 16 << 10)
    monkeypatch.setattr(snapshot_fetch, "LEAST_BYTES", 2 * CHUNK_BYTES)
    monkeypatch.setattr(snapshot_fetch, "STALLED_S", 0.2)
    monkeypatch.setattr(snapshot_fetch, "HEAD_S", 0.2)


def made(path: Path, seed: int = 0) -> CommitRecord:
    arena = Arena(path / "arena")
    draft = arena.begin(plan([("w", "U8", (SIZE,))], {}), 2, 7, WORLD_SIZE)
    assert draft is not None
    with draft:
        for at in range(0, SIZE, 4096):
            piece = (at + seed).to_bytes(8, "little") * 512
            draft.data[at : at + 4096] = piece[: SIZE - at]
        record = draft.commit()
    arena.close()
    return record


@asynccontextmanager
async def cut(url: str, after: int, then_silent: bool) -> AsyncIterator[str]:
    """Relay between a holder and a requester, but pass on only `after` bytes of each answer."""
    over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asked(url, await reader.readuntil(b"\r\n\r\n")) as there:
            left = after
            while left > 0 and (piece := await there.read(min(left, 1 << 16))):
                writer.write(piece)
                left -= len(piece)
                await writer.drain()
            if then_silent:
                await over.wait()

    async with answering_with(answer) as place:
        yield place


@asynccontextmanager
async def deaf_once(url: str) -> AsyncIterator[str]:
    """Relay to a holder, but pass on nothing until one requester has given up."""
    given_up = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if not given_up.is_set():
            await reader.read()
            given_up.set()
            return
        async with asked(url, request) as there:
            while piece := await there.read(1 << 16):
                writer.write(piece)
                await writer.drain()

    async with answering_with(answer) as place:
        yield place


@asynccontextmanager
async def asked(url: str, request: bytes) -> AsyncIterator[asyncio.StreamReader]:
    host, _, port = url.removeprefix("http://").partition(":")
    there, ask = await asyncio.open_connection(host, int(port))
    try:
        ask.write(request)
        yield there
    finally:
        ask.close()


@asynccontextmanager
async def answering_with(answer: Answer) -> AsyncIterator[str]:
    """Serve every connection with `answer`, and end the remaining tasks afterwards.

    This function holds references to the tasks, because asyncio's server does not. Otherwise the garbage
    collector could free a task that waits for another connection, with its sockets, once its peer hangs up.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await answer(reader, writer)
        finally:
            writer.close()

    def come(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(one(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(come, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await end(tasks)
        await server.wait_closed()


def seal(*paths: Path) -> None:
    for path in paths:
        arena = holdings(path).arena
        arena.seal(arena.records()[0])


def sources(*urls: str) -> list[StateSource]:
    return [StateSource(url, -1, 2, 7) for url in urls]


@pytest.mark.parametrize("sealed", [False, True])
async def test_two_holders_serve_one_snapshot(folders: list[Path], sealed: bool) -> None:
    one, other, here = folders
    sent, _ = made(one), made(other)
    if sealed:
        seal(one, other)
    async with serving(one) as first, serving(other) as second, fetching(here) as fetcher:
        record = await fetcher.snapshot(*sources(first, second))
    assert record.path.read_bytes() == sent.path.read_bytes()
    assert holdings(here).arena.checksum(record) == combine(
        chunk_crcs(memoryview(sent.path.read_bytes()), CHUNK_BYTES)
    )


@pytest.mark.parametrize("after", [10, 3 * CHUNK_BYTES, 9 * CHUNK_BYTES + 5])
@pytest.mark.parametrize("then_silent", [False, True], ids=["dies", "falls silent"])
@pytest.mark.parametrize("sealed", [False, True], ids=["unsealed", "sealed"])
async def test_parts_that_one_holder_does_not_send_are_fetched_from_another(
    folders: list[Path], after: int, then_silent: bool, sealed: bool
) -> None:
    one, other, here = folders
    sent, _ = made(one), made(other)
    if sealed:
        seal(one, other)
    silence_s = SILENCE_S if sealed else 3.0  # without a seal, it is fetched completely from a single holder
    async with (
        serving(one) as first,
        serving(other) as second,
        cut(first, after, then_silent) as broken,
        fetching(here, silence_s=silence_s) as fetcher,
    ):
        record = await fetcher.snapshot(*sources(broken, second))
    assert record.path.read_bytes() == sent.path.read_bytes()


async def test_a_slow_holder_is_asked_again_before_the_fetch_is_given_up(folders: list[Path]) -> None:
    one, other, here = folders
    sent, _ = made(one), made(other)
    seal(one, other)
    async with (
        serving(one) as first,
        serving(other) as second,
        cut(first, 3 * CHUNK_BYTES, False) as broken,
        deaf_once(second) as slow,
        fetching(here, silence_s=SILENCE_S) as fetcher,
    ):
        record = await fetcher.snapshot(*sources(broken, slow))
    assert record.path.read_bytes() == sent.path.read_bytes()


async def test_without_another_holder_the_fetch_fails_and_the_slot_is_free(folders: list[Path]) -> None:
    one, _, here = folders
    made(one)
    async with serving(one) as url, cut(url, 5 * CHUNK_BYTES, False) as broken, fetching(here) as fetcher:
        with pytest.raises(FetchFailed, match="closed"):
            await fetcher.snapshot(*sources(broken))
    assert holdings(here).slots() == ()
    assert made(here).step == 7


async def test_an_unreachable_holder_is_skipped(folders: list[Path]) -> None:
    one, _, here = folders
    made(one)
    async with serving(one) as url, fetching(here) as fetcher:
        assert (await fetcher.snapshot(*sources("http://127.0.0.1:9", url))).step == 7


@pytest.mark.parametrize("sealed", [False, True])
async def test_holders_with_different_states_are_never_mixed(folders: list[Path], sealed: bool) -> None:
    one, other, here = folders
    contents = [made(one).path.read_bytes(), made(other, seed=1).path.read_bytes()]
    if sealed:
        seal(one, other)
    async with serving(one) as first, serving(other) as second, fetching(here) as fetcher:
        record = await fetcher.snapshot(*sources(first, second))
    assert record.path.read_bytes() in contents


async def test_memory_that_changed_after_the_seal_is_detected(folders: list[Path]) -> None:
    one, _, here = folders
    record = made(one)
    holdings(one).arena.seal(record)
    flip(record)
    async with serving(one) as url, fetching(here) as fetcher:
        with pytest.raises(FetchFailed, match=r"checksum [0-9a-f]{8}, expected"):
            await fetcher.snapshot(*sources(url))
    assert holdings(here).slots() == ()


async def test_a_slot_with_allocated_memory_is_reused(folders: list[Path]) -> None:
    one, _, here = folders
    made(one)
    async with serving(one) as url, fetching(here) as fetcher:
        first = await fetcher.snapshot(*sources(url))
        inode = first.path.stat().st_ino
        assert first.path.stat().st_blocks * 512 >= first.total_bytes
        holdings(here).arena.forget(first)
        assert (await fetcher.snapshot(*sources(url))).path.stat().st_ino == inode


@pytest.mark.parametrize(
    "text", ["", "bytes=", "bytes=5-", "bytes=-5", "bytes=0-5", "bytes=x-", "bytes=0-" + "9" * 99]
)
def test_only_whole_chunks_can_be_requested(text: str) -> None:
    with pytest.raises(UnalignedRange, match="expected"):
        ChunkRange.parse(text, SIZE)


def test_the_last_chunk_may_be_shorter() -> None:
    found = ChunkRange.parse(f"bytes={20 * CHUNK_BYTES}-", SIZE)
    assert (found.begin, found.end, list(found.chunks)) == (20 * CHUNK_BYTES, SIZE, [20])
