"""Simulated members on real TLS connections, in one process: they report, obey, and fail at random.

The process reads commands from its standard input and answers each with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import ssl
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp

from bench.harness.console import say
from bench.scale import cluster_objects
from bench.scale.simulated_job import START_S, STEP_S, JobProgress, ReportText, SimulatedMember
from holdfast.process import event_loop
from holdfast.protocol import codec
from holdfast.protocol.member_messages import CLUSTER_PING_S, MEMBER_PATH, UPDATES, MemberOrder
from sidecar.clients import BACKOFF_S

CONNECT_S = 10.0
CALM_STEPS = 3  # the minimum number of steps that a job completes between two faults
TRIES = 50  # attempts to find a job that can fail

_Socket: TypeAlias = "aiohttp.ClientWebSocketResponse[bool]"


@dataclass(slots=True)
class SimulatedFault:
    """A fault, with the times of its report, decision and recovery in nanoseconds."""

    job: int
    generation: int
    sent_ns: int
    ordered_ns: dict[int, int] = field(default_factory=dict)  # by member: when it received "secure"
    settled_ns: int = 0

    def figures(self) -> dict[str, Any]:
        received = self.ordered_ns.values()
        return {
            "job": self.job,
            "generation": self.generation,
            "first_s": (min(received) - self.sent_ns) / 1e9 if received else None,
            "last_s": (max(received) - self.sent_ns) / 1e9 if received else None,
            "members": len(self.ordered_ns),
            "settled_s": (self.settled_ns - self.sent_ns) / 1e9 if self.settled_ns else None,
        }


class ConnectedMember:
    """A member and its connection to the supervisor."""

    def __init__(self, member: SimulatedMember) -> None:
        self.member = member
        self.text = ReportText(member)
        self.dirty = asyncio.Event()
        self.connected = False
        self.reports = self.bytes = 0


class MemberFleet:
    """All simulated members, their connections and their faults."""

    def __init__(self, jobs: int, members: int, nproc: int, rate: float, complete: bool) -> None:
        self._protocols = () if complete else (UPDATES,)
        self.jobs: list[list[ConnectedMember]] = []
        self.faults: list[SimulatedFault] = []
        self._open: dict[int, SimulatedFault] = {}  # by job
        self._rate = rate
        self._per_s = 0.0  # faults of all jobs per second
        self._chance = random.Random(0)
        self.sent_late_s = 0.0  # the greatest delay of a report
        for number in range(jobs):
            count = members // jobs + (number < members % jobs)
            progress = JobProgress()
            self.jobs.append(
                [
                    ConnectedMember(SimulatedMember(progress, number, index, count, nproc))
                    for index in range(count)
                ]
            )
        self.all = [each for job in self.jobs for each in job]

    # -- connections

    async def connect(self, one: ConnectedMember, url: str, tls: ssl.SSLContext, session: Any) -> None:
        """Stay connected, as a sidecar does."""
        headers = {"Authorization": f"Bearer {cluster_objects.token_of(one.member.uid)}"}
        failures = 0
        while True:
            try:
                async with session.ws_connect(
                    url + MEMBER_PATH,
                    headers=headers,
                    protocols=self._protocols,
                    heartbeat=CLUSTER_PING_S,
                    max_msg_size=codec.MAX_MESSAGE_BYTES,
                    ssl=tls,
                    server_hostname="127.0.0.1",
                ) as socket:
                    failures, one.connected = 0, True
                    one.text.connect()
                    await self._talk(one, socket)
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
                failures += 1
            one.connected = False
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)] * (0.5 + self._chance.random()))

    async def _talk(self, one: ConnectedMember, socket: _Socket) -> None:
        speaking = asyncio.create_task(self._speak(one, socket))
        try:
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    return
                self._obey(one, codec.decode(MemberOrder, message.data))
        finally:
            await event_loop.end([speaking])

    async def _speak(self, one: ConnectedMember, socket: _Socket) -> None:
        updates = socket.protocol == UPDATES
        try:
            while True:
                one.dirty.clear()
                text = one.text.at(time.monotonic_ns(), updates)
                one.reports += 1
                one.bytes += len(text)
                await socket.send_str(text)
                await one.dirty.wait()
        except (ConnectionError, aiohttp.ClientError):
            await socket.close()

    async def report_in_turn(self) -> None:
        """Have every member report at the bench's rate, evenly spread as on hosts with separate clocks."""
        loop = asyncio.get_running_loop()
        order = list(self.all)
        self._chance.shuffle(order)
        begun_s, turn, gap_s = loop.time(), 0, 1.0 / (self._rate * len(order))
        while True:
            due_s = begun_s + turn * gap_s
            late_s = loop.time() - due_s
            if late_s < 0:
                await asyncio.sleep(min(-late_s, 0.05) if -late_s > 0.002 else 0.002)
                continue
            self.sent_late_s = max(self.sent_late_s, late_s)
            if late_s > 1.0:  # do not catch up in a burst
                begun_s, turn = loop.time(), 0
            order[turn % len(order)].dirty.set()
            turn += 1

    # -- orders and faults

    def _obey(self, one: ConnectedMember, order: MemberOrder) -> None:
        now_ns = time.monotonic_ns()
        member = one.member
        before = member.state.generation
        if member.obey(order, now_ns):
            one.dirty.set()
        if order.do == "run" and member.state.generation > before:
            asyncio.get_running_loop().call_later(START_S + STEP_S + 0.01, one.dirty.set)
        fault = self._open.get(member.number)
        if fault is None:
            return
        if order.do == "secure" and order.generation == fault.generation:
            fault.ordered_ns.setdefault(member.index, now_ns)
            return
        is_newer = order.do == "run" and order.generation > fault.generation
        if is_newer and all(each.member.is_settled for each in self.jobs[member.number]):
            fault.settled_ns = now_ns
            del self._open[member.number]

    async def fail_at_random(self) -> None:
        while True:
            if not self._per_s:
                await asyncio.sleep(0.05)
                continue
            await asyncio.sleep(1.0 / self._per_s)
            for _ in range(TRIES if self._per_s else 0):
                number = self._chance.randrange(len(self.jobs))
                if self._can_fail(number):
                    self._fail(number)
                    break

    def _can_fail(self, number: int) -> bool:
        job = self.jobs[number]
        progress = job[0].member.job
        calm = progress.step(time.monotonic_ns()) >= progress.base + CALM_STEPS
        return calm and number not in self._open and all(each.member.is_settled for each in job)

    def _fail(self, number: int) -> None:
        one = self._chance.choice(self.jobs[number])
        now_ns = time.monotonic_ns()
        fault = SimulatedFault(number, one.member.state.generation, now_ns)
        self.faults.append(fault)
        self._open[number] = fault
        one.member.fail(self._chance.randrange(one.member.nproc), now_ns)
        one.dirty.set()

    # -- commands

    def answer(self, command: dict[str, Any], lag: event_loop.Lag) -> dict[str, Any]:
        """Carry out a command, and return the current figures."""
        if "faults_per_s" in command:
            self._per_s = float(command["faults_per_s"])
        if command.get("forget"):
            self.faults, self._open, self.sent_late_s = [], {}, 0.0
        members = [each.member for each in self.all]
        found: dict[str, Any] = {
            "connected": sum(each.connected for each in self.all),
            "settled": sum(each.is_settled for each in members),
            "by_epoch": _count(each.epoch for each in members),
            "obeying": sum(each.order is not None and each.order.do == "run" for each in members),
            "reports": sum(each.reports for each in self.all),
            "bytes": sum(each.bytes for each in self.all),
            "open": len(self._open),
            "late_s": self.sent_late_s,
            "lag_s": lag.over_last_minute(),
        }
        if command.get("generations"):
            found["generations"] = [job[0].member.job.generation for job in self.jobs]
        if command.get("details"):
            found["faults"] = [each.figures() for each in self.faults]
        return found


def _count(values: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in values:
        found[str(each)] = found.get(str(each), 0) + 1
    return found


async def _answer_commands(fleet: MemberFleet, lag: event_loop.Lag) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        say(json.dumps(fleet.answer(json.loads(line), lag)))


async def _run(options: argparse.Namespace, lag: event_loop.Lag) -> None:
    fleet = MemberFleet(options.jobs, options.members, options.nproc, options.rate, options.complete)
    tls = ssl.create_default_context(cafile=options.ca)
    connector = aiohttp.TCPConnector(limit=0, use_dns_cache=False)
    limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=limits) as session:
        connections = [
            asyncio.create_task(fleet.connect(each, options.url, tls, session)) for each in fleet.all
        ]
        try:
            await event_loop.until_one_ends(
                fleet.report_in_turn(), fleet.fail_at_random(), _answer_commands(fleet, lag)
            )
        finally:
            await event_loop.end(connections)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("jobs", "members", "nproc"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--rate", type=float, required=True, help="reports of each member per second")
    parser.add_argument("--complete", action="store_true", help="send no updates of reports")
    parser.add_argument("--url", required=True)
    parser.add_argument("--ca", type=Path, required=True)
    options = parser.parse_args(sys.argv[1:])
    gc.disable()  # collections, which take 0.2 s for all members, would count as the supervisor's time
    event_loop.run(lambda lag: _run(options, lag))


if __name__ == "__main__":
    main()
