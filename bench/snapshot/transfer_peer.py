"""The holder's side of the transfer bench: a separate process that serves until its standard input closes.

`python -m bench.snapshot.transfer_peer FOLDER` prints three ports: one for a sidecar's peers, and two for the
plain copy, with the system's pacing and without. Before it exits, it prints the lag of its event loop.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from pathlib import Path

from aiohttp import web

from bench.harness.console import say
from holdfast.fileio.safetensors import plan
from holdfast.process import event_loop
from holdfast.process.network import Door
from holdfast.snapshot import member_directory
from holdfast.snapshot.arena import Arena
from sidecar.state import peers, snapshot_send
from sidecar.state.holdings import Holdings

TOKEN = "bench"
WORLD_SIZE = 2
FILLER = os.urandom(1 << 20)


def fill(folder: Path, total: int) -> None:
    """Create a snapshot of about `total` bytes in `folder`."""
    arena = Arena(folder / member_directory.ARENA)
    draft = arena.begin(plan([("w", "U8", (total,))], {}), 1, 1, WORLD_SIZE)
    assert draft is not None
    with draft:
        for at in range(0, total, len(FILLER)):
            piece = FILLER[: total - at]
            draft.data[at : at + len(piece)] = piece
        draft.commit()
    arena.close()


def main(folder: Path) -> None:
    path = Arena(folder / member_directory.ARENA).records()[0].path
    plain = [socket.create_server(("127.0.0.1", 0)), snapshot_send.listener("127.0.0.1")]
    for each in plain:
        threading.Thread(target=_give_plainly, args=(each, path), daemon=True).start()
    ports = [each.getsockname()[1] for each in plain]
    event_loop.run(lambda measured: _serve(measured, folder, ports))


def _give_plainly(listener: socket.socket, path: Path) -> None:
    while True:
        line, _ = listener.accept()
        with line, path.open("rb") as file:
            line.sendall(path.stat().st_size.to_bytes(8, "little"))
            line.sendfile(file)


async def _serve(measured: event_loop.Lag, folder: Path, plain: list[int]) -> None:
    held = Holdings(folder / member_directory.ARENA, folder / member_directory.RESTORED)
    runner = web.AppRunner(
        peers.application(held, lambda: TOKEN, Door()), access_log=None, handle_signals=False
    )
    await runner.setup()
    await web.SockSite(runner, snapshot_send.listener("127.0.0.1")).start()
    say(" ".join(map(str, [runner.addresses[0][1], *plain])))
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    say(f"{measured.over_last_minute()[0]:.6f}")
    await runner.cleanup()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
