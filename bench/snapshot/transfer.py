"""Measure how fast a snapshot is sent from one member to another, compared with a plain socket copy.

A second process holds a generated snapshot and serves it as a sidecar does. This process receives it as a
sidecar does: into a fresh slot, whose memory is not allocated yet, and into an existing slot, as in a member
that has had ranks before. The time ends when the checksums have been compared and the snapshot is committed.

The plain copy uses one connection over loopback, sendfile of the same file, and recv_into a fresh file in
shared memory, without checking the received bytes. It is measured with the system's congestion control (BBR
paces the connection with timers that take longer than the copy) and without pacing, as between members on one
host. All copies are interleaved. Sender and receiver share the cores of this machine, unlike two hosts.

Lag is the longest time during which an event loop on either side processed no events.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.harness import memory_needs, results
from bench.harness.console import make_parser, say
from bench.harness.launchers import Failed
from bench.harness.memory_needs import MEMORY
from bench.snapshot.transfer_peer import TOKEN, WORLD_SIZE, fill
from bench.text import Verdict, all_met, seconds, size, size_of, table
from holdfast.process import event_loop
from holdfast.protocol.member_messages import StateSource
from holdfast.snapshot import member_directory
from sidecar.state.holdings import Holdings
from sidecar.state.peers import PeerClient

PLAIN, UNPACED = "plain socket copy", "the same, unpaced"
FRESH, READY = "into a fresh slot", "into an existing slot"
TARGET = 0.8
LAG_S = 0.05
PIECE_BYTES = 1 << 20
START_S = 60.0


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    total = size_of(options.state)
    memory_needs.check("--state", total, shared=options.holders + 1, beside=0)  # one slot or plain copy each
    found = results.begin("transfer")
    with tempfile.TemporaryDirectory(prefix=f"bench-transfer-{os.getpid()}-", dir=MEMORY) as name:
        folder = Path(name)
        for number in range(options.holders):
            fill(folder / f"holder-{number}", total)
        servers: list[_Server] = []
        try:
            servers.extend(_serve(folder / f"holder-{number}") for number in range(options.holders))
            times, here_s = _rounds(folder, servers, options.rounds)
        finally:
            lags_s = [_lag_of(server[0]) for server in servers]
        there_s = max(lags_s)
    return _end(found, times, total, here_s, there_s, options)


def plain_copies(total: int, rounds: int) -> list[float]:
    """Return the seconds that plain socket copies of a state of `total` bytes take."""
    with tempfile.TemporaryDirectory(prefix="bench-transfer-", dir=MEMORY) as name:
        folder = Path(name)
        fill(folder / "holder", total)
        server = _serve(folder / "holder")
        try:
            return [_plain(folder / "plain", server[2]) for _ in range(rounds)]
        finally:
            _lag_of(server[0])


# A holder's process and its ports: for members, for plain copies, and for plain copies without pacing.
_Server = tuple["subprocess.Popen[str]", int, int, int]


def _serve(folder: Path) -> _Server:
    words = [sys.executable, "-m", "bench.snapshot.transfer_peer", str(folder)]
    server = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=results.ROOT
    )
    assert server.stdout is not None
    ports = server.stdout.readline().split()
    if len(ports) != 3:
        _lag_of(server)
        raise Failed("the holder did not start")
    return server, int(ports[0]), int(ports[1]), int(ports[2])


def _lag_of(server: subprocess.Popen[str]) -> float:
    """Stop a holder, and return the lag of its event loop in seconds."""
    try:
        told, _ = server.communicate("", START_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.communicate()
        return float("nan")
    return float(told.split()[-1]) if told.split() else float("nan")


def _rounds(folder: Path, servers: list[_Server], rounds: int) -> tuple[dict[str, list[float]], float]:
    times: dict[str, list[float]] = {PLAIN: [], UNPACED: [], FRESH: [], READY: []}
    urls = [f"http://127.0.0.1:{port}" for _, port, _, _ in servers]
    worst_s = 0.0
    for number in range(rounds):
        order: list[tuple[str, Callable[[], tuple[float, float]]]] = [
            (PLAIN, lambda: (_plain(folder / "plain", servers[0][2]), 0.0)),
            (UNPACED, lambda: (_plain(folder / "plain", servers[0][3]), 0.0)),
            (FRESH, lambda: _fetched(folder / "taken", urls, 1)),
            (READY, lambda: _fetched(folder / "taken", urls, 2)),
        ]
        if number % 2:
            order = [order[2], order[3], order[1], order[0]]
        for name, copy in order:
            took_s, lag_s = copy()
            worst_s = max(worst_s, lag_s)
            times[name].append(took_s)
            say(f"  {name:<28}{seconds(took_s)}")
            if name == READY:
                shutil.rmtree(folder / "taken")
    return times, worst_s


def _plain(path: Path, port: int) -> float:
    began = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as line, path.open("w+b") as file:
        total = int.from_bytes(line.recv(8, socket.MSG_WAITALL), "little")
        file.truncate(total)
        with mmap.mmap(file.fileno(), total) as memory, memoryview(memory) as content:
            at = 0
            while at < total:
                with content[at : at + PIECE_BYTES] as piece:
                    count = line.recv_into(piece)
                if not count:
                    raise Failed("the plain copy was interrupted")
                at += count
    took_s = time.perf_counter() - began
    path.unlink()
    return took_s


def _fetched(folder: Path, urls: list[str], step: int) -> tuple[float, float]:
    """Fetch the snapshot; return the seconds it took and the longest lag of this event loop.

    Any snapshot that an earlier fetch left in `folder` is dropped first, so a second fetch uses its slot.
    """
    (folder / member_directory.ARENA).mkdir(parents=True, exist_ok=True)
    held = Holdings(folder / member_directory.ARENA, folder / member_directory.RESTORED)
    for record in held.arena.records():
        held.arena.forget(record)

    async def fetch(measured: event_loop.Lag) -> tuple[float, float]:
        fetcher = PeerClient(held, lambda: TOKEN)
        began = time.perf_counter()
        record = await fetcher.snapshot(*[StateSource(url, -1, 1, 1) for url in urls])
        took_s = time.perf_counter() - began
        assert (record.step, record.world_size) == (1, WORLD_SIZE), step
        await fetcher.close()
        return took_s, measured.over_last_minute()[0]

    found = event_loop.run(fetch)
    held.arena.close()
    return found


def _end(
    found: dict[str, Any],
    times: dict[str, list[float]],
    total: int,
    here_s: float,
    there_s: float,
    options: argparse.Namespace,
) -> int:
    plain_s, unpaced_s = statistics.median(times[PLAIN]), statistics.median(times[UNPACED])
    rows = []
    for name, taken in times.items():
        middle_s = statistics.median(taken)
        rate = f"{total / middle_s / 1e9:.2f} GB/s"
        ratios = [f"{each / middle_s:.2f}" for each in (plain_s, unpaced_s)]
        rows.append([name, seconds(middle_s), seconds(max(taken)), rate, *ratios])
    say()
    say(table([size(total), "median", "worst", "rate", "of plain", "of unpaced"], rows))
    say()
    against = {name: plain_s / statistics.median(times[name]) for name in (FRESH, READY)}
    verdicts = [
        Verdict(f"{name}: at least {TARGET} of a plain copy", f"{ratio:.2f}", ratio >= TARGET)
        for name, ratio in against.items()
    ]
    for who, lag_s in (("receiver", here_s), ("holder", there_s)):
        shown = seconds(lag_s)
        verdicts.append(Verdict(f"lag of the {who}'s loop at most {seconds(LAG_S)}", shown, lag_s <= LAG_S))
    for verdict in verdicts:
        say(verdict.line)
    found["options"], found["times_s"], found["ratios"] = vars(options), times, against
    found["lag_s"] = {"receiver": here_s, "holder": there_s}
    results.write(found)
    return 1 if options.strict and not all_met(verdicts) else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("transfer", __doc__ or "")
    add = parser.add_argument
    add("--state", default="1.5G", metavar="SIZE", help="size of the snapshot")
    add("--rounds", type=int, default=5, metavar="N", help="number of copies of each kind, interleaved")
    add("--holders", type=int, default=1, metavar="N", help="number of members that hold the snapshot")
    add("--strict", action="store_true", help="exit with code 1 if a target is missed")
    options = parser.parse_args(argv)
    try:
        size_of(options.state)
    except ValueError as error:
        parser.error(f"--state: {error}")
    for name in ("rounds", "holders"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: {getattr(options, name)}; expected 1 or more")
    return options
