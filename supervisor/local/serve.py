"""A local supervisor's process (`supervisor serve`), started and restarted by the keeper."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from holdfast.process import event_loop, linux, logs
from holdfast.process.clock import seconds_to_next_tick
from holdfast.process.network import SERVER_BACKLOG, Door
from holdfast.protocol import codec, environment
from supervisor.controller.api import application
from supervisor.controller.member_server import MemberServer
from supervisor.controller.records import RunDirectoryRecords
from supervisor.controller.reports import routine_reports
from supervisor.controller.supervised_run import SupervisedRun
from supervisor.local.backend import LocalBackend
from supervisor.observability.publisher import StatusPublisher
from supervisor.store import journal, run_lead
from supervisor.store.run_directory import RunDir
from supervisor.view.model import Policy

log = logging.getLogger("supervisor")

STATUS_S = 0.5
# Thousands of members can connect at a start, and each status lists all of them. Between two statuses, this
# process therefore does other work for at least this many times as long as the last status took.
STATUS_REST = 4.0
BRIEF_S = 0.02  # a shorter rest is left out, because it would wake this process up once more
SHUTDOWN_S = 1.0  # the time to disconnect the members, which then connect to the next supervisor
KEEPER_S = 30.0  # the time limit for receiving the keeper's first state


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration of this process, from the run directory's `run.json`."""

    run_dir: Path
    policy: Policy
    started_ns: int  # the start of the run, on CLOCK_MONOTONIC
    drills: bool  # whether drills are allowed
    journal_bytes: int  # the size of the journal when the run began; earlier runs wrote these lines


def load(run_dir: Path) -> Settings:
    """Read the settings that `holdfast run` wrote. Raises `OSError` or `ValueError`."""
    found = json.loads(RunDir(run_dir).run_file.read_text())
    policy = codec.from_json(Policy, found["policy"])
    drills = found.get("drills") is not False
    return Settings(run_dir, policy, int(found["started_ns"]), drills, int(found["journal_bytes"]))


async def serve(
    settings: Settings, api: socket.socket, keeper: socket.socket, measured: event_loop.Lag
) -> None:
    """Supervise until the run has ended or this process receives SIGTERM or SIGINT."""
    stop = _stop_on_signals()
    runs: list[SupervisedRun] = []  # empty until the run is created

    def changed() -> None:
        for each in runs:
            each.wake.set()

    def is_calm() -> bool:
        return all(routine_reports.is_calm(each.memory, each.watch) for each in runs)

    backend = LocalBackend(keeper, changed)
    connections = MemberServer(time.monotonic_ns, changed, is_calm=is_calm, has_frequent_rounds=True)
    keeper_task = asyncio.create_task(backend.run(), name="keeper")
    await asyncio.wait_for(backend.known.wait(), KEEPER_S)
    run = _make_run(settings, backend, connections, measured)
    runs.append(run)
    run.publish()  # to let the first query find a status
    door = Door()
    runner, listening = await _listen(settings, run, connections, door, api)
    services = {
        keeper_task,
        asyncio.create_task(run.supervise(), name="run"),
        asyncio.create_task(_publish(run), name="status"),
        asyncio.create_task(run.checkpoints.run(), name="storage"),
        asyncio.create_task(backend.report_alive(), name="heartbeats"),
        asyncio.create_task(door.watch(), name="door"),
        asyncio.create_task(stop.wait(), name="signal"),
    }
    done, _ = await asyncio.wait(services, return_when=asyncio.FIRST_COMPLETED)
    if not run.ended.is_set() and stop.is_set():
        log.info("ended by a signal", extra={"phase": run.memory.phase})
    await event_loop.end(services - done)
    listening.close()
    await runner.cleanup()
    _raise_failure(done)


def _stop_on_signals() -> asyncio.Event:
    """Return an event that SIGTERM or SIGINT sets."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    return stop


def _make_run(
    settings: Settings, backend: LocalBackend, connections: MemberServer, measured: event_loop.Lag
) -> SupervisedRun:
    """Take over leadership of the run and return it."""
    directory = RunDir(settings.run_dir)
    lead = run_lead.take_over(directory.path / run_lead.FILE)
    fresh = not journal.has_lines_since(directory.journal, settings.journal_bytes)
    publisher = StatusPublisher(directory, measured.over_last_minute, settings.policy, lead)
    records = RunDirectoryRecords(directory.path, lead)
    return SupervisedRun(
        settings.policy,
        publisher,
        backend,
        connections,
        records,
        fresh=fresh,
        started_ns=settings.started_ns,
    )


async def _listen(
    settings: Settings, run: SupervisedRun, connections: MemberServer, door: Door, api: socket.socket
) -> tuple[web.AppRunner, asyncio.Server]:
    """Start serving requests on the socket `api`. The caller must close both returned objects at the end."""
    runner = web.AppRunner(
        application(run, connections, RunDir(settings.run_dir).token(), door, drills=settings.drills),
        access_log=None,
        handle_signals=False,
        shutdown_timeout=SHUTDOWN_S,
    )
    await runner.setup()
    server = runner.server
    assert server is not None  # `setup` sets it
    listening = await asyncio.get_running_loop().create_server(
        door.guarded(server), sock=api, backlog=SERVER_BACKLOG
    )
    return runner, listening


def _raise_failure(done: Iterable[asyncio.Task[Any]]) -> None:
    """Raise the exception that ended a service.

    `Deposed` is only logged, because this process is about to end.
    """
    try:
        for task in done:
            task.result()
    except run_lead.Deposed as error:
        log.warning("another supervisor leads the run: this one ends", extra={"why": str(error)})


async def _publish(run: SupervisedRun) -> None:
    """Publish the status at every tick, and as soon as a sidecar has connected or disconnected.

    Raises `Deposed` when another supervisor leads the run.
    """
    while run.publisher.deposed is None:
        await event_loop.set_within(run.members_changed, seconds_to_next_tick(STATUS_S))
        run.members_changed.clear()
        run.publish_next()
        if (rest_s := STATUS_REST * run.status_took_s) > BRIEF_S:
            await asyncio.sleep(rest_s)
    raise run.publisher.deposed


def main(argv: Sequence[str]) -> int:
    logs.setup()
    settings = load(Path(argv[0]))
    api = socket.socket(fileno=int(os.environ[environment.API_FD]))
    keeper = socket.socket(fileno=int(os.environ[environment.KEEPER_FD]))
    try:
        linux.end_with_parent(int(os.environ[environment.PARENT]), signal.SIGTERM)
    except linux.ParentGone:
        return 1
    event_loop.run(lambda measured: serve(settings, api, keeper, measured))
    return 0
