"""Start one member's sidecar: `python -m sidecar`, configured by HOLDFAST_* variables."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading

from aiohttp import web

from holdfast import lag, leftovers, logs, osproc, tasks
from holdfast.door import BACKLOG, Door
from sidecar import config, peers, sending
from sidecar.member import Member

log = logging.getLogger("sidecar")

SHUTDOWN_S = 1.0  # for peers that are being served


async def serve(settings: config.Config, measured: lag.Lag) -> None:
    """Run until SIGTERM. A service that ends takes the process down: the backend restarts it."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    member = Member(settings, measured)
    door = Door()
    runner = web.AppRunner(
        peers.application(member.holdings, settings.token, door),
        access_log=None,
        handle_signals=False,
        shutdown_timeout=SHUTDOWN_S,
    )
    await runner.setup()
    server = runner.server
    assert server is not None  # since `setup`
    listening = await loop.create_server(
        door.guarded(server), sock=sending.listener("127.0.0.1"), backlog=BACKLOG
    )
    port = listening.sockets[0].getsockname()[1]
    member.peer_url = f"http://127.0.0.1:{port}"
    services = [
        asyncio.create_task(work(), name=work.__qualname__)
        for work in (
            member.launcher.run,
            member.supervisor.run,
            member.pursue,
            member.watch,
            member.save,
            member.seal,
            door.watch,
        )
    ]
    ending = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait({*services, ending}, return_when=asyncio.FIRST_COMPLETED)
    await tasks.end([*reversed(services), ending])
    with contextlib.suppress(OSError):
        await member.fetcher.close()
    listening.close()
    await runner.cleanup()
    for task in done - {ending}:
        raise RuntimeError(f"{task.get_name()} ended") from task.exception()


def main() -> None:
    logs.setup()
    settings = config.from_environment(os.environ)
    try:
        osproc.die_with(int(os.environ["HOLDFAST_PARENT"]), signal.SIGTERM)
        lag.run(lambda measured: serve(settings, measured))
    except osproc.ParentGone:
        pass
    if os.getppid() != int(os.environ["HOLDFAST_PARENT"]):
        leftovers.clear(settings.directory)


if __name__ == "__main__":
    main()
    # A thread that is still hashing or writing must not keep a stopped sidecar alive.
    threading.Timer(5.0, os._exit, (0,)).start() if threading.active_count() > 1 else None
