"""A replica knows at once that the leader's process has ended, and never that it is merely silent."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from supervisor.kubernetes import replicas
from supervisor.kubernetes.certificates import AuthoritySecret, ServerCertificate, new_leaf, signer
from supervisor.kubernetes.client import ApiServer
from supervisor.kubernetes.own_pod import OwnPod, certificate_for, is_gone, service_names
from supervisor.kubernetes.replicas import Replicas
from tests.unit.literals import ROOT
from tests.unit.supervisor.cluster.api_server import ServedObjects
from tests.unit.supervisor.kubernetes.object_store import Line, ObjectStore

NAMES = service_names("holdfast-supervisor", "holdfast-system")
OWN, LEADER, THIRD = "127.0.0.1", "127.0.0.2", "127.0.0.3"
LIMIT_S = 30.0
PROGRAM = "tests.unit.supervisor.kubernetes.leaders.replica"


class Place:
    """Replicas as processes, on addresses of this machine."""

    def __init__(self, certificate: ServerCertificate, chain: Path, port: int) -> None:
        self.chain, self.port = chain, port
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.gone: set[str] = set()
        self.looks = asyncio.Semaphore(0)  # released at each look for the pod of a holder
        self.replicas = Replicas(NAMES[0], port, OWN, certificate, self._addresses, self._is_gone)

    async def _addresses(self, _service: str) -> list[str]:
        return [OWN, LEADER, THIRD]

    async def _is_gone(self, holder: str) -> bool:
        self.looks.release()
        return holder in self.gone

    async def start(self, address: str, holder: str, epoch: int) -> None:
        words = (str(self.chain), address, str(self.port), holder, str(epoch))
        made = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", PROGRAM, *words), stdout=asyncio.subprocess.PIPE, cwd=ROOT
        )
        self.processes[address] = made
        assert made.stdout is not None
        assert await asyncio.wait_for(made.stdout.readline(), LIMIT_S) == b"listens\n"

    async def kill(self, address: str) -> None:
        process = self.processes.pop(address)
        process.send_signal(signal.SIGKILL)
        await process.wait()

    async def follow(self, holder: str) -> asyncio.Future[str]:
        """Begin to wait for the end of `holder`, and return once its process is found and watched."""
        asked = self.replicas._until_closed
        watched = asyncio.Event()

        async def until_closed(address: str) -> None:
            asyncio.get_running_loop().call_later(0.1, watched.set)
            await asked(address)

        self.replicas._until_closed = until_closed  # type: ignore[method-assign]
        waiting = asyncio.ensure_future(self.replicas.end_of(holder))
        await asyncio.wait_for(watched.wait(), LIMIT_S)
        return waiting


@asynccontextmanager
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with ServedObjects().serving() as server:
        certificate = await certificate_for(server, OwnPod("s-1", "holdfast-system", "10.0.0.9"), NAMES)
        chain = tmp_path / "chain.pem"
        chain.write_bytes(await a_chain(server))
    with socket.socket() as found:
        found.bind((LEADER, 0))
        port = found.getsockname()[1]
    there = Place(certificate, chain, port)
    try:
        yield there
    finally:
        for address in tuple(there.processes):
            await there.kill(address)


async def a_chain(server: ApiServer) -> bytes:
    secret = AuthoritySecret(server, "holdfast-system")
    return new_leaf(signer(await secret.load(), secret.now()), NAMES, (LEADER,), secret.now()).chain


async def test_a_killed_leader_is_known_to_have_ended(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        await there.start(LEADER, "a_1", 7)
        await there.start(THIRD, "", 0)
        waiting = await there.follow("a_1")
        there.replicas._pod_is_gone = None  # the API server is not needed
        await there.kill(LEADER)
        assert await asyncio.wait_for(waiting, LIMIT_S) == f"nothing listens on {LEADER}"


async def test_a_leader_whose_container_has_restarted_is_known_to_have_ended(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        await there.start(LEADER, "a_1", 7)
        waiting = await there.follow("a_1")
        there.processes[LEADER].send_signal(signal.SIGSTOP)  # the next one answers first
        process = there.processes.pop(LEADER)
        process.send_signal(signal.SIGKILL)
        await process.wait()
        await there.start(LEADER, "", 0)
        found = await asyncio.wait_for(waiting, LIMIT_S)
        assert found in (
            f"nothing listens on {LEADER}",
            f"the process on {LEADER} does not hold the lease",
        )


async def test_another_process_on_the_leaders_address_is_its_end(tmp_path: Path) -> None:
    async with place(tmp_path) as there:
        await there.start(LEADER, "b_1", 9)
        assert await there.replicas._why_ended_now(LEADER, "a_1") == (
            f"the process on {LEADER} does not hold the lease"
        )
        assert await there.replicas._why_ended_now(LEADER, "b_1") == ""


async def test_a_frozen_leader_has_not_ended_unless_its_pod_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel still accepts connections. Only the lease says when it may be replaced."""
    monkeypatch.setattr(replicas, "ASK_S", 0.2)
    monkeypatch.setattr(replicas, "AGAIN_S", 0.01)
    monkeypatch.setattr(replicas, "MAX_OPEN_S", 0.2)
    async with place(tmp_path) as there:
        await there.start(LEADER, "a_1", 7)
        waiting = await there.follow("a_1")
        there.processes[LEADER].send_signal(signal.SIGSTOP)
        for _ in range(3):
            await asyncio.wait_for(there.looks.acquire(), LIMIT_S)
        assert not waiting.done()
        there.gone.add("a_1")
        assert await asyncio.wait_for(waiting, LIMIT_S) == "its pod has ended"


async def test_a_leader_that_was_never_found_has_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing listens on one address, and on the other is a leader of a version that does not name itself."""
    monkeypatch.setattr(replicas, "AGAIN_S", 0.01)
    async with place(tmp_path) as there:
        await there.start(LEADER, "old", 7)
        waiting = asyncio.ensure_future(there.replicas.end_of("a_1"))
        for _ in range(5):
            await asyncio.wait_for(there.looks.acquire(), LIMIT_S)
        assert not waiting.done()
        assert await there.replicas.rival(6) == LEADER
        waiting.cancel()


async def test_a_pod_is_gone_once_it_has_ended_or_another_has_its_name() -> None:
    served = ServedObjects()
    pod = {"metadata": {"namespace": "ns", "name": "s-1", "uid": "u"}, "status": {"phase": "Running"}}
    async with served.serving() as server:
        assert await is_gone(server, "ns", "s-1", "u")
        served.put("pods", pod)
        assert not await is_gone(server, "ns", "s-1", "u")
        assert await is_gone(server, "ns", "s-1", "another")
        assert not await is_gone(server, "ns", "", "u"), "this is the path of a list, and no pod"
        assert not await is_gone(server, "ns", "s-1", "")
        served.put("pods", {**pod, "status": {"phase": "Failed"}})
        assert await is_gone(server, "ns", "s-1", "u")
    away: Any = Line(ObjectStore())
    away.cut = True
    assert not await is_gone(away, "ns", "s-1", "u"), "the API server has not said so"
