"""Run a member's sidecar, `python -m sidecar`, configured by HOLDFAST_* variables."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from pathlib import Path

from aiohttp import web

from holdfast.process import event_loop, linux, logs
from holdfast.process.network import SERVER_BACKLOG, Door
from holdfast.protocol import environment
from holdfast.snapshot import member_directory
from sidecar import config
from sidecar.reconciler import Sidecar
from sidecar.state import peers, snapshot_send

log = logging.getLogger("sidecar")

ALIVE_S = 5.0  # the time between two updates of the file that a pod's liveness probe checks
SHUTDOWN_S = 1.0  # how long unfinished requests of peers may still take at shutdown


async def serve(settings: config.Config, terminated: threading.Event, measured: event_loop.Lag) -> None:
    """Run the sidecar's services until SIGTERM or SIGINT.

    If `terminated` is set, a SIGTERM arrived before the event loop could handle it, so stop immediately. If a
    service ends, raise `RuntimeError`; the process then ends, and the backend restarts it.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    if terminated.is_set():
        stop.set()
    member = Sidecar(settings, measured)
    door, host = Door(), settings.address or "127.0.0.1"
    runner = web.AppRunner(
        peers.application(
            member.holdings,
            member.peer_token,
            door,
            pieces=member.pieces,
            may_spare=member.may_spare_snapshots,
        ),
        access_log=None,
        handle_signals=False,
        shutdown_timeout=SHUTDOWN_S,
    )
    await runner.setup()
    server = runner.server
    assert server is not None  # the socket has been bound since `setup`
    listening = await loop.create_server(
        door.guarded(server), sock=snapshot_send.listener(host), backlog=SERVER_BACKLOG
    )
    port = listening.sockets[0].getsockname()[1]
    member.peer_url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    services = [
        asyncio.create_task(work(), name=work.__qualname__)
        for work in (
            member.launcher.run,
            member.supervisor.run,
            member.pursue,
            member.watch,
            member.save,
            member.seal,
            member.list_storage,
            door.watch,
        )
    ]
    if settings.is_pod:
        services.append(asyncio.create_task(show_life(settings.directory / member_directory.ALIVE)))
        services.append(asyncio.create_task(member.copier.run(), name="copy"))
    ending = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait({*services, ending}, return_when=asyncio.FIRST_COMPLETED)
    # If the parent dies, the kernel sends the signal once for each of the parent's threads. Ignore the
    # others, because from here on another signal would kill this process.
    linux.outlive_parent()
    await event_loop.end([*reversed(services), ending])
    with contextlib.suppress(OSError):
        await member.peers.close()
    listening.close()
    await runner.cleanup()
    for task in done - {ending}:
        raise RuntimeError(f"{task.get_name()} ended") from task.exception()


async def show_life(file: Path) -> None:
    """Touch `file` periodically, as proof that the event loop runs. Never returns."""
    while True:
        _touch(file)
        await asyncio.sleep(ALIVE_S)


def _touch(file: Path) -> None:
    with contextlib.suppress(OSError):  # the volume may be full; the probe accepts a missing file
        file.touch()


def main() -> None:
    logs.setup()
    settings = config.from_environment(os.environ)
    keeper = int(os.environ.get(environment.PARENT, "0"))  # 0 in a pod, where no keeper exists
    terminated = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())  # until the event loop has its own handler
    try:
        if keeper:
            linux.end_with_parent(keeper, signal.SIGTERM)
        event_loop.run(lambda measured: serve(settings, terminated, measured))
    except linux.ParentGone:
        pass
    if keeper:
        member_directory.leave_member(settings.directory, keeper)


if __name__ == "__main__":
    main()
    # After SIGTERM, a thread that is still hashing or writing must not keep the process alive.
    limit = threading.Timer(5.0, os._exit, (0,))
    limit.daemon = True
    limit.start()
