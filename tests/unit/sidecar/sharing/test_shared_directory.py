from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from holdfast.checkpoint import catalog, sharing
from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.fileio.checksum import CHUNK_BYTES
from holdfast.fileio.range_writer import RangeWriter
from holdfast.protocol import codec
from holdfast.protocol.member_messages import StateSource
from sidecar.fencing import OrderVersion
from sidecar.state import piece_writer
from sidecar.state.piece_writer import WrittenPiece
from tests.samples.checkpoints import names
from tests.unit.sidecar.fake_peer import TOKEN, answering
from tests.unit.sidecar.memory import holdings, member
from tests.unit.sidecar.sharing.group import (
    GENERATION,
    NAME,
    NEWEST,
    SIZE,
    STEP,
    SlowFiles,
    Staged,
    assert_saved,
    helper,
    hold,
    post,
    saved,
    small_states_pay,
    unhurried,
    until,
    writer,
)

HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    small_states_pay(monkeypatch)
    with member() as path:
        hold(path)
        yield path


async def test_several_members_write_the_checkpoint_that_one_writes(here: Path, tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    assert_saved(await saved(here, DirectoryStorage(alone)), here, alone)
    storage = unhurried(together)
    async with helper(storage) as one, helper(storage, "n2") as other:
        assert_saved(await saved(here, storage, one.url, other.url, "http://own", ""), here, together)
        assert one.pieces.written > 0
        assert other.pieces.written > 0
        assert one.pieces.asked + other.pieces.asked <= 6
    entries = [catalog.load(root / NAME).files for root in (alone, together)]
    assert entries[0] == entries[1]


async def test_a_small_state_is_written_by_one_member(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    storage = DirectoryStorage(tmp_path)
    async with helper(storage) as peer:
        assert_saved(await saved(here, storage, peer.url), here, tmp_path)
        assert peer.pieces.asked == 0


@pytest.mark.parametrize("flipped", [0, SIZE - 1], ids=["first byte", "last byte"])
async def test_a_replica_that_differs_never_gets_into_a_checkpoint(
    here: Path, tmp_path: Path, flipped: int
) -> None:
    storage = unhurried(tmp_path)
    async with helper(storage, flipped=flipped) as one, helper(storage, "n2", flipped=flipped) as other:
        assert_saved(await saved(here, storage, one.url, other.url), here, tmp_path)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",  # of an older version
        b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n",
        b'HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n{"crc32":[1,2,3]}',
        b'HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"crc32":[]}',
        b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n" + b" " * 9000,
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]HTTP/1.1 200 OK\r\n",  # twice
    ],
    ids=["dies", "unknown", "fails", "lies", "without checksums", "endless", "twice"],
)
async def test_a_peer_that_answers_anything_else_is_not_used(
    here: Path, tmp_path: Path, answer: bytes
) -> None:
    async with answering(answer) as url:
        assert_saved(await saved(here, unhurried(tmp_path), url, "http://127.0.0.1:9"), here, tmp_path)


async def test_a_peer_that_never_answers_delays_a_checkpoint_for_a_bounded_time(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "LATE_S", 0.3)
    began_s = time.monotonic()
    async with answering(then="silence") as one, answering(b"HTTP/1.1 200 OK\r\n", then="silence") as other:
        assert_saved(await saved(here, unhurried(tmp_path), one, other), here, tmp_path)
    assert time.monotonic() - began_s < 15.0


async def test_what_a_peer_writes_after_the_checkpoint_was_published_changes_nothing(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its storage hangs, and it still answers others."""
    monkeypatch.setattr(sharing, "LATE_S", 0.2)
    go_on, begun, ended = threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(30.0)
        ended.set()

    slow = DirectoryStorage(tmp_path, SlowFiles(wait))
    async with helper(slow) as peer, aiohttp.ClientSession(headers=HEADERS) as session:
        saver = await saved(here, unhurried(tmp_path), peer.url)
        assert_saved(saver, here, tmp_path)
        assert begun.is_set()
        assert peer.pieces.written == 0
        async with session.get(f"{peer.url}/v1/private/0/{GENERATION}/{STEP}") as answer:
            assert await answer.read() == b"rank 0"
        go_on.set()
        assert await asyncio.to_thread(ended.wait, 10.0)
    assert_saved(saver, here, tmp_path)


class LosingFiles:
    """As of a file system on a bucket, where what the last one closes takes the place of all others'."""

    def __call__(self, name: str, folder: int) -> RangeWriter:
        class Losing(RangeWriter):
            def write(self, content: memoryview, at: int) -> None:
                pass

        return Losing(name, folder)


async def test_what_storage_loses_of_a_peer_is_written_again_and_no_other_checkpoint_is_shared(
    here: Path, tmp_path: Path
) -> None:
    """The peer has answered that it has written it."""
    async with (
        helper(DirectoryStorage(tmp_path, LosingFiles())) as peer,
        helper(unhurried(tmp_path)) as other,
        writer(here, unhurried(tmp_path)) as saver,
    ):
        (record,) = holdings(here).arena.records()
        sources = [StateSource(peer.url, 0), StateSource(other.url, 1)]
        await saver.save(record, sources, {}, asked=1)
        assert_saved(saver, here, tmp_path)
        asked = peer.pieces.asked
        assert peer.pieces.written == asked > 0
        shutil.rmtree(saver.durable.path)
        await saver.save(record, sources, {}, asked=2)
        assert_saved(saver, here, tmp_path)
        assert peer.pieces.asked == asked


async def test_a_slow_peer_writes_fewer_pieces_and_is_waited_for(here: Path, tmp_path: Path) -> None:
    slow = DirectoryStorage(tmp_path, SlowFiles(lambda: time.sleep(0.2)))
    async with helper(slow) as one, helper(DirectoryStorage(tmp_path), "n2") as other:
        assert_saved(await saved(here, unhurried(tmp_path), one.url, other.url), here, tmp_path)
        assert one.pieces.written == one.pieces.asked


async def test_a_peer_whose_storage_is_another_one_is_not_used(here: Path, tmp_path: Path) -> None:
    """Such as a directory of its own node."""
    storage = unhurried(tmp_path / "here")
    (tmp_path / "there").mkdir()
    missing, other = DirectoryStorage(tmp_path / "missing"), DirectoryStorage(tmp_path / "there")
    async with helper(missing) as one, helper(other, "n2") as two:
        assert_saved(await saved(here, storage, one.url, two.url), here, tmp_path / "here")
        assert (one.pieces.asked > 0, two.pieces.asked > 0) == (True, True)
        assert one.pieces.written + two.pieces.written == 0
    assert names(tmp_path / "there") == set()
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    ("node", "version"),
    [("n0", NEWEST), ("n1", OrderVersion(4, 0)), ("n1", OrderVersion(3, GENERATION + 1))],
    ids=["on the same node", "later epoch", "later generation"],
)
async def test_a_peer_refuses_to_help(here: Path, tmp_path: Path, node: str, version: OrderVersion) -> None:
    storage = unhurried(tmp_path)
    async with helper(storage, node) as peer:
        peer.version[0] = version
        assert_saved(await saved(here, storage, peer.url), here, tmp_path)
        assert peer.pieces.asked > 0
        assert peer.pieces.written == 0


async def test_a_peer_that_obeys_an_older_order_helps(here: Path, tmp_path: Path) -> None:
    storage = unhurried(tmp_path)
    async with helper(storage) as peer:
        peer.version[0] = OrderVersion(2, 9)
        assert_saved(await saved(here, storage, peer.url), here, tmp_path)
        assert peer.pieces.written > 0


async def test_if_storage_fails_everything_is_removed(here: Path, tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    async with helper(DirectoryStorage(tmp_path)) as peer:
        saver = await saved(here, DirectoryStorage(tmp_path, SlowFiles(fail)), peer.url)
    assert "Input/output error" in saver.durable.error
    assert names(tmp_path) == set()


# -- single requests


def is_empty(path: Path) -> bool:
    return path.read_bytes().strip(b"\0") == b""


async def test_a_request_is_carried_out_once_or_twice(here: Path, tmp_path: Path) -> None:
    staged = Staged(tmp_path, here)
    async with helper(DirectoryStorage(tmp_path), path=here) as peer:
        for _ in range(2):
            status, text = await post(peer.url, staged.right)
            assert (status, codec.decode(WrittenPiece, text)) == (200, WrittenPiece(staged.right.crc32))
    content = staged.file.read_bytes()
    expected = staged.record.path.read_bytes()
    assert content[: 2 * CHUNK_BYTES] == expected[: 2 * CHUNK_BYTES]
    assert content[2 * CHUNK_BYTES :].strip(b"\0") == b""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"epoch": 2}, "a newer order than the writer's"),
        ({"generation": 1}, "a newer order than the writer's"),
        ({"node": "n1"}, "on the same node"),
        ({"total_bytes": SIZE}, "the snapshot has"),
        ({"begin": 4096}, "are not a piece"),
        ({"begin": -CHUNK_BYTES}, "are not a piece"),
        ({"end": 4096}, "are not a piece"),
        ({"end": 0}, "are not a piece"),
        ({"end": 4 * CHUNK_BYTES}, "are not a piece"),
        ({"begin": 1 << 40, "end": (1 << 40) + CHUNK_BYTES}, "are not a piece"),
        ({"crc32": (1,)}, "1 checksums"),
        ({"crc32": (1, 2)}, "this member's copy differs starting at byte 0"),
        ({"token": "0" * 64}, "another writer's"),
        ({"token": ""}, "another writer's"),
        ({"token": "\u00e9"}, "another writer's"),
        ({"folder": ".."}, "does not have the name of a writer's"),
        ({"folder": "."}, "does not have the name of a writer's"),
        ({"folder": ""}, "does not have the name of a writer's"),
        ({"folder": NAME}, "does not have the name of a writer's"),
        ({"folder": f"/tmp/.tmp-a-1-0-{NAME}"}, "does not have the name of a writer's"),
        ({"folder": f".tmp-a-1-0-../{NAME}"}, "does not have the name of a writer's"),
        ({"folder": f"../.tmp-a-1-0-{NAME}"}, "does not have the name of a writer's"),
        ({"folder": f".tmp-a-1-0-{NAME}\n"}, "does not have the name of a writer's"),
        ({"folder": f".tmp-a-1-0-{NAME}"}, "does not see the writer's folder"),
        ({"folder": ".tmp-a-1-0-step-00000008"}, "does not have the name of a writer's"),
    ],
)
async def test_a_request_that_is_not_right_in_any_point_is_refused(
    here: Path, tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    staged = Staged(tmp_path, here)
    async with helper(DirectoryStorage(tmp_path), path=here) as peer:
        status, text = await post(peer.url, replace(staged.right, **change))
    assert (status, why in text) == (409, True), text
    assert is_empty(staged.file)


async def test_other_requests_are_refused(here: Path, tmp_path: Path) -> None:
    staged = Staged(tmp_path, here)
    async with helper(DirectoryStorage(tmp_path), path=here) as peer:
        assert (await post(peer.url, staged.right, token="wrong"))[0] == 401
        assert (await post(peer.url, b"{}"))[0] == 400
        assert (await post(peer.url, b" " * 2000))[0] == 413
        assert (await post(peer.url, staged.right, step=8))[0] == 410
    assert is_empty(staged.file)


@pytest.mark.parametrize("kind", ["link to a folder", "link", "pipe", "other size", "no file", "no token"])
async def test_nothing_is_written_beside_the_writers_file(here: Path, tmp_path: Path, kind: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    staged = Staged(root, here)
    outside.write_bytes(bytes(staged.record.total_bytes))
    if kind == "link to a folder":
        staged.folder.rename(tmp_path / "moved")
        staged.folder.symlink_to(tmp_path / "moved")
    elif kind == "other size":
        os.truncate(staged.file, 10)
    elif kind == "no token":
        (staged.folder / sharing.TOKEN).unlink()
    else:
        staged.file.unlink()
    if kind == "link":
        staged.file.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(staged.file)
    async with helper(DirectoryStorage(root), path=here) as peer:
        status, _ = await post(peer.url, staged.right)
    assert status in (409, 503)
    assert is_empty(outside)
    assert names(tmp_path) <= {"root", "outside", "moved"}


async def test_a_peer_helps_one_writer_at_a_time(here: Path, tmp_path: Path) -> None:
    one, other = Staged(tmp_path, here), Staged(tmp_path, here)
    go_on, begun = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(30.0)

    async with helper(DirectoryStorage(tmp_path, SlowFiles(wait)), path=here) as peer:
        first = [asyncio.create_task(post(peer.url, one.right)) for _ in range(piece_writer.THREADS)]
        assert await asyncio.to_thread(begun.wait, 10.0)
        await until(lambda: peer.pieces._active == piece_writer.THREADS)
        assert await post(peer.url, other.right) == (409, "this member is helping another writer")
        assert await post(peer.url, one.right) == (409, "this member is already writing 4 pieces")
        go_on.set()
        assert [status for status, _ in await asyncio.gather(*first)] == [200] * piece_writer.THREADS
        assert (await post(peer.url, other.right))[0] == 200


async def test_the_snapshot_stays_while_it_is_needed_and_not_longer(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piece_writer, "HOLD_S", 0.5)
    staged = Staged(tmp_path, here)
    async with helper(DirectoryStorage(tmp_path), path=here) as peer:
        (record,) = holdings(peer.path).arena.records()
        assert (await post(peer.url, staged.right))[0] == 200
        slot = holdings(peer.path).arena._slots[record.slot]
        assert not slot.acquire()
        await until(slot.acquire)
        slot.release()
        assert (await post(peer.url, staged.right))[0] == 200


async def test_a_peer_stops_when_nobody_waits_any_more(here: Path, tmp_path: Path) -> None:
    staged = Staged(tmp_path, here)
    go_on, begun = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(30.0)

    async with helper(DirectoryStorage(tmp_path, SlowFiles(wait)), path=here) as peer:
        asking = asyncio.create_task(post(peer.url, staged.right))
        assert await asyncio.to_thread(begun.wait, 10.0)
        asking.cancel()
        await asyncio.sleep(4 * piece_writer.POLL_S)
        go_on.set()
        await until(lambda: not peer.pieces._active)
    content = staged.file.read_bytes()
    assert content[:CHUNK_BYTES].strip(b"\0") != b""
    assert content[CHUNK_BYTES:].strip(b"\0") == b""


async def test_private_states_are_fetched_from_the_same_peers(here: Path, tmp_path: Path) -> None:
    (here / "arena" / "private-00001.bin").unlink()
    storage = unhurried(tmp_path)
    async with helper(storage) as peer:
        saver = await saved(here, storage, "", peer.url)
    assert_saved(saver, here, tmp_path)
