"""Measure how long several members take to write a checkpoint together, each at the same limited rate.

On a cluster, the network of a node limits how fast a member writes to storage. Here, all members write to one
directory of this machine, and each of them pauses to stay at its rate. The members are parts of one process,
with separate servers, connections and threads, and all hold the same snapshot in memory. With one member, the
checkpoint is written at the same rate, in the way in which a member writes alone. Checkpoints of different
numbers of members are interleaved.

The measured time ends when the checkpoint is durable. Members share the cores and the disk of this machine,
so the disk has to be several times as fast as the rate of one member.

The last row has as many members as the row before, but one is dead, one never answers, and one holds
different bytes, so that the other members have to write everything.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from bench.harness import memory_needs, results
from bench.harness.console import make_parser, say
from bench.harness.launchers import Failed
from bench.harness.memory_needs import MEMORY
from bench.snapshot.transfer_peer import TOKEN, WORLD_SIZE, fill
from bench.text import Verdict, all_met, seconds, size, size_of, table
from holdfast.checkpoint import catalog
from holdfast.checkpoint.directory import DirectoryStorage, StagedDirectory
from holdfast.checkpoint.manifest import REPLICATED
from holdfast.checkpoint.sharing import ShareHelpers
from holdfast.fileio.bulk_copy import DIRECT_PIECE_BYTES, PIECE_BYTES
from holdfast.fileio.range_writer import RangeWriter
from holdfast.process import event_loop
from holdfast.process.network import Door
from holdfast.protocol.member_messages import StateSource
from holdfast.snapshot import member_directory
from holdfast.snapshot.private_store import PrivateStore
from sidecar.fencing import OrderVersion
from sidecar.state import peers, snapshot_send
from sidecar.state.checkpointing import CheckpointSaver
from sidecar.state.holdings import Holdings
from sidecar.state.peers import PeerClient
from sidecar.state.piece_sharing import CheckpointSharing
from sidecar.state.piece_writer import PieceWriter

TARGETS = {2: 1.7, 4: 3.0}  # how many times as fast as one member
SILENT = "4, of which 3 do not help"
LIMIT_S = 2.0  # how much time members that do not help may add to that of one member
BURST_S = 0.2  # the most unused time that a member may catch up on, as its own writes also take time
ORDER = OrderVersion(1, 1)


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    total, rate = size_of(options.state), size_of(options.rate)
    memory_needs.check("--state", total, shared=2, beside=0)
    found = results.begin("sharing")
    with (
        tempfile.TemporaryDirectory(prefix="bench-sharing-", dir=MEMORY) as memory,
        tempfile.TemporaryDirectory(prefix="bench-sharing-", dir=options.directory) as storage,
    ):
        for name in ("equal", "other"):
            fill(Path(memory) / name, total)
            for rank in range(WORLD_SIZE):
                _keep(Path(memory) / name, rank)
        _change(Path(memory) / "other")
        times, lag_s = event_loop.run(
            lambda measured: _rounds(measured, Path(memory), Path(storage), rate, options.rounds)
        )
    return _end(found, times, total, rate, lag_s, options)


class MemberRate:
    """Makes one member's threads wait, so that together they stay at the given rate."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self._free_s = time.monotonic()
        self._one = threading.Lock()

    def take(self, count: int) -> None:
        with self._one:
            self._free_s = max(self._free_s, time.monotonic() - BURST_S) + count / self._bytes_s
            until_s = self._free_s
        time.sleep(max(0.0, until_s - time.monotonic()))


class RatedStorage(DirectoryStorage):
    """A directory that a member writes to at a limited rate."""

    def __init__(self, root: Path, bytes_s: float) -> None:
        rate = MemberRate(bytes_s)

        class Rated(RangeWriter):
            def write(self, content: memoryview, at: int) -> None:
                super().write(content, at)
                rate.take(len(content))

        super().__init__(root, Rated)
        self._rate = rate
        self._piece_bytes = DIRECT_PIECE_BYTES if _writes_directly(root) else PIECE_BYTES

    @contextmanager
    def staged(
        self,
        name: str,
        files: Mapping[str, Path | bytes],
        epoch: int,
        generation: int,
        moved: Callable[[], object],
        helpers: ShareHelpers | None = None,
    ) -> Iterator[StagedDirectory]:
        large = files[REPLICATED]  # all other files have only a few bytes
        assert isinstance(large, Path)
        left = iter(range(0, large.stat().st_size, self._piece_bytes))

        def paced() -> None:  # called after each piece, by a member that writes alone
            if next(left, None) is not None:
                self._rate.take(self._piece_bytes)
            moved()

        called = moved if helpers is not None else paced
        with super().staged(name, files, epoch, generation, called, helpers) as staged:
            yield staged


def _writes_directly(root: Path) -> bool:
    probe = root / "probe"
    probe.touch()
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with RangeWriter(probe.name, folder) as file:
            return file.is_direct
    finally:
        os.close(folder)
        probe.unlink()


def _keep(folder: Path, rank: int) -> None:
    store = PrivateStore(folder / member_directory.ARENA / member_directory.private_name(rank), rank)
    store.put(1, 1, b"own")
    store.close()


def _change(folder: Path) -> None:
    """Make every chunk of a snapshot differ."""
    record = _held(folder).arena.records()[0]
    with record.path.open("r+b") as file:
        for at in range(1 << 20, record.total_bytes, 1 << 20):
            file.seek(at)
            file.write(b"other")


def _held(folder: Path) -> Holdings:
    return Holdings(folder / member_directory.ARENA, folder / member_directory.RESTORED)


@asynccontextmanager
async def _peer(folder: Path, storage: DirectoryStorage, number: int) -> AsyncIterator[str]:
    """Serve a member that helps others; yield its address."""
    held = _held(folder)
    pieces = PieceWriter(held, storage, f"node-{number}", lambda: ORDER)
    app = peers.application(held, lambda: TOKEN, Door(), pieces=pieces)
    runner = web.AppRunner(app, access_log=None, handle_signals=False)
    await runner.setup()
    try:
        await web.SockSite(runner, snapshot_send.listener("127.0.0.1")).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _silent() -> AsyncIterator[str]:
    """Serve a peer that never answers."""
    over = asyncio.Event()

    async def answer(_: asyncio.StreamReader, line: asyncio.StreamWriter) -> None:
        await over.wait()
        line.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        over.set()
        server.close()


async def _rounds(
    measured: event_loop.Lag, memory: Path, root: Path, rate: float, rounds: int
) -> tuple[dict[str, list[float]], float]:
    times: dict[str, list[float]] = {"1": [], "2": [], "4": [], SILENT: []}
    for number in range(rounds):
        for name in list(times)[:: -1 if number % 2 else 1]:
            took_s = await _saved(name, memory, root, rate)
            times[name].append(took_s)
            say(f"  {name:<28}{seconds(took_s)}")
    return times, measured.over_last_minute()[0]


async def _saved(name: str, memory: Path, root: Path, rate: float) -> float:
    """Return the seconds that a checkpoint takes with as many members as `name` says."""
    async with AsyncExitStack() as stack:
        urls = list[str]()
        if name == SILENT:
            urls = ["http://127.0.0.1:9", await stack.enter_async_context(_silent())]
            urls.append(await stack.enter_async_context(_peer(memory / "other", RatedStorage(root, rate), 3)))
        else:
            for number in range(1, int(name)):
                peer = _peer(memory / "equal", RatedStorage(root, rate), number)
                urls.append(await stack.enter_async_context(peer))
        held = _held(memory / "equal")
        client = PeerClient(held, lambda: TOKEN)
        stack.push_async_callback(client.close)
        sharing = CheckpointSharing(client, "node-0", lambda: "", lambda: ORDER)
        saver = CheckpointSaver(held, client, RatedStorage(root, rate), sharing)
        sources = [StateSource(url, rank) for rank, url in enumerate(urls)]
        record = held.arena.records()[0]
        began = time.perf_counter()
        await saver.save(record, sources, {}, asked=1)
        took_s = time.perf_counter() - began
        if saver.durable.error:
            raise Failed(f"no checkpoint: {saver.durable.error}")
        wrong = await asyncio.to_thread(catalog.verify, catalog.load(saver.durable.path))
        if wrong is not None:
            raise Failed(f"the checkpoint is wrong: {wrong}")
        shutil.rmtree(saver.durable.path)
    return took_s


def _end(
    found: dict[str, Any],
    times: dict[str, list[float]],
    total: int,
    rate: int,
    lag_s: float,
    options: argparse.Namespace,
) -> int:
    middle_s = {name: statistics.median(taken) for name, taken in times.items()}
    rows = [
        [
            name,
            seconds(middle_s[name]),
            seconds(max(taken)),
            f"{total / middle_s[name] / 1e6:.0f} MB/s",
            f"{middle_s['1'] / middle_s[name]:.2f}",
        ]
        for name, taken in times.items()
    ]
    say()
    say(table([f"members, {size(total)}, {size(rate)}/s each", "median", "worst", "rate", "speed"], rows))
    say()
    verdicts = [
        Verdict(
            f"{count} members: at least {target} times as fast",
            f"{middle_s['1'] / middle_s[str(count)]:.2f}",
            middle_s["1"] >= target * middle_s[str(count)],
        )
        for count, target in TARGETS.items()
    ]
    later_s = middle_s[SILENT] - middle_s["1"]
    verdicts.append(
        Verdict(f"members that do not help add at most {LIMIT_S:g} s", f"{later_s:.2f} s", later_s <= LIMIT_S)
    )
    for verdict in verdicts:
        say(verdict.line)
    found["options"], found["times_s"], found["lag_s"] = vars(options), times, lag_s
    results.write(found)
    return 1 if options.strict and not all_met(verdicts) else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("sharing", __doc__ or "")
    add = parser.add_argument
    add("--state", default="1G", metavar="SIZE", help="size of the snapshot; at least 256M for four members")
    add("--rate", default="100M", metavar="SIZE", help="bytes that each member writes per second")
    add("--rounds", type=int, default=3, metavar="N", help="number of checkpoints of each kind, interleaved")
    add("--directory", type=Path, default=None, metavar="DIR", help="directory on the storage to write to")
    add("--strict", action="store_true", help="exit with code 1 if a target is missed")
    options = parser.parse_args(argv)
    for name in ("state", "rate"):
        try:
            size_of(getattr(options, name))
        except ValueError as error:
            parser.error(f"--{name}: {error}")
    if options.rounds < 1:
        parser.error(f"--rounds: {options.rounds}; expected 1 or more")
    return options
