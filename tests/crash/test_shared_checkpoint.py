"""A writer and a peer that are killed while they write one checkpoint together."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.checkpoint import directory, sharing, writer
from holdfast.checkpoint.catalog import verify
from holdfast.checkpoint.directory import DirectoryStorage
from holdfast.checkpoint.manifest import REPLICATED
from holdfast.checkpoint.retention import Retention, retain
from holdfast.checkpoint.sharing import SharedFile, SharedPiece, StagingPlace
from holdfast.fileio import durable
from holdfast.protocol.member_messages import StateSource
from tests.crash.killing import killed_at_every_line
from tests.samples.checkpoints import broken, names, newest_whole, save
from tests.unit.sidecar.memory import member
from tests.unit.sidecar.sharing.group import (
    SlowFiles,
    helper,
    hold,
    saved,
    small_states_pay,
    unhurried,
    until,
)
from tests.unit.sidecar.sharing.group import writer as saving

CHUNK = 4096
STATE = random.Random(5).randbytes(5 * CHUNK - 7)
NAME = "step-00000002"
END_S = 60.0


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((sharing, "CHUNK_BYTES"), (directory, "CHUNK_BYTES"), (directory, "PIECE_BYTES")):
        monkeypatch.setattr(module, name, CHUNK)
    monkeypatch.setattr(directory, "THREADS", 1)  # others are not traced


class Helpers:
    """A peer in the same process, which is killed together with the writer."""

    def __init__(self, root: Path) -> None:
        self._storage = DirectoryStorage(root)

    def distrust(self, why: str) -> None:
        raise AssertionError(why)

    @contextmanager
    def helping(self, place: StagingPlace, work: SharedFile) -> Iterator[None]:
        for _ in range(3):
            piece = work.take()
            assert piece is not None
            self._storage.write_piece(NAME, place, work.size, piece, content)
            work.finish(piece, work.checksums(piece))
        yield


def content(begin: int, end: int) -> memoryview:
    return memoryview(bytearray(STATE))[begin:end]


def save_shared(root: Path) -> None:
    source = root.with_name("source")
    source.write_bytes(STATE)
    writer.write(
        root,
        generation=1,
        step=2,
        world_size=2,
        files={REPLICATED: source, "rank-00000.bin": b"private"},
        meta={},
        created_at=1.0,
        helpers=Helpers(root),
    )


def test_a_writer_killed_at_any_line_leaves_a_complete_newest_checkpoint(
    memory: Path, small_chunks: None
) -> None:
    template = memory / "template"
    save(template, 1)

    def check(work: Path, finished: bool) -> None:
        assert broken(work) == ()
        found, notes = newest_whole(work)
        assert found is not None
        assert notes == ()
        assert found.step == 2 if finished else found.step in (1, 2)
        if found.step == 2:
            assert (found.path / REPLICATED).read_bytes() == STATE
            assert names(found.path) == {REPLICATED, "rank-00000.bin", "manifest.json"}
        save_shared(work)
        save(work, 3)
        retain(work, Retention(3))
        assert names(work) == {"latest", "step-00000001", NAME, "step-00000003"}
        assert all(verify(found) is None for found in (newest_whole(work)[0],) if found)

    assert killed_at_every_line(template, lambda work: work, save_shared, check) >= 15


def test_a_peer_killed_at_any_line_leaves_nothing_but_the_right_bytes(
    memory: Path, small_chunks: None
) -> None:
    template = memory / "template"
    with subprocess.Popen(["/bin/true"]) as dead:
        dead.wait()
    folder = f".tmp-{durable._HOST}-{dead.pid}-0-{NAME}"
    (template / folder).mkdir(parents=True)
    place = StagingPlace(folder, sharing.new_token())
    (template / folder / sharing.TOKEN).write_text(place.token)
    (template / folder / REPLICATED).write_bytes(bytes(len(STATE)))
    piece = SharedPiece(CHUNK, 3 * CHUNK)

    def act(work: Path) -> None:
        DirectoryStorage(work).write_piece(NAME, place, len(STATE), piece, content)

    def check(work: Path, finished: bool) -> None:
        assert names(work) == {folder}
        assert names(work / folder) == {sharing.TOKEN, REPLICATED}
        found = (work / folder / REPLICATED).read_bytes()
        assert len(found) == len(STATE)
        for at in range(0, len(STATE), CHUNK):
            chunk = found[at : at + CHUNK]
            is_written = piece.begin <= at < piece.end
            assert chunk == STATE[at : at + CHUNK] if finished and is_written else True
            assert chunk in (STATE[at : at + CHUNK], bytes(len(chunk))) if is_written else not any(chunk)
        DirectoryStorage(work).remove_leftovers(0)
        assert names(work) == set()

    assert killed_at_every_line(template, lambda work: work, act, check) >= 2


_PEER = """
import asyncio, sys
from pathlib import Path
from tests.unit.sidecar.sharing.group import helper, unhurried

async def main():
    async with helper(unhurried(Path(sys.argv[1])), path=Path(sys.argv[2])) as peer:
        print(peer.url, flush=True)
        while not peer.pieces.asked:
            await asyncio.sleep(0.001)
        print("asked", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""
_SAVER = """
import asyncio, sys
from pathlib import Path
import pytest
from tests.unit.sidecar.sharing.group import saved, small_states_pay, unhurried

small_states_pay(pytest.MonkeyPatch())
asyncio.run(saved(Path(sys.argv[1]), unhurried(Path(sys.argv[2])), sys.argv[3]))
"""


def started(program: str, *arguments: str | Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_peer_that_is_killed_or_stopped_while_it_writes_delays_nothing_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    small_states_pay(monkeypatch)
    monkeypatch.setattr(sharing, "LATE_S", 0.5)
    with member() as here, member() as there:
        record = hold(here)
        hold(there)
        with started(_PEER, tmp_path, there) as peer:
            try:
                assert peer.stdout is not None
                url = (await asyncio.to_thread(peer.stdout.readline)).strip()
                async with saving(here, unhurried(tmp_path)) as saver:
                    work = asyncio.create_task(
                        saver.save(record, [StateSource(url, rank) for rank in (0, 1)], {}, asked=1)
                    )
                    assert await asyncio.to_thread(peer.stdout.readline) == "asked\n"
                    peer.send_signal(signum)
                    await asyncio.wait_for(work, END_S)
                    assert saver.durable.error == ""
            finally:
                peer.kill()
        found, notes = newest_whole(tmp_path)
        assert found is not None
        assert notes == ()
        assert (found.path / REPLICATED).read_bytes() == record.path.read_bytes()
        assert names(tmp_path) == {"latest", found.path.name}


async def test_a_peer_survives_a_writer_that_is_killed_and_writes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_states_pay(monkeypatch)
    with member() as here:
        hold(here)
        slow = DirectoryStorage(tmp_path, SlowFiles())
        async with helper(slow, path=here) as peer:
            with started(_SAVER, here, tmp_path, peer.url) as dying:
                await until(lambda: peer.pieces.asked)
                dying.kill()
                await asyncio.to_thread(dying.wait, END_S)
            asked = peer.pieces.asked
            await until(lambda: not peer.pieces._active)
            assert peer.pieces.asked == asked
            (left,) = tmp_path.iterdir()
            assert left.name.startswith(".tmp-")
            saver = await saved(here, unhurried(tmp_path), peer.url)
            assert saver.durable.error == ""
            assert peer.pieces.asked > asked
        assert names(tmp_path) == {"latest", "step-00000007"}
    shutil.rmtree(tmp_path / "step-00000007")
