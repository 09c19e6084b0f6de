"""A leader that is cut off from the API server finds a replica that was elected in its place."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from aiohttp import web

from supervisor.kubernetes import replicas
from supervisor.kubernetes.certificates import ServerCertificate
from supervisor.kubernetes.own_pod import OwnPod, certificate_for, service_names
from supervisor.kubernetes.replicas import PATH, Replicas, _answers
from tests.unit.dropped_packets import drop_all
from tests.unit.supervisor.cluster.api_server import ServedObjects

NAMES = service_names("holdfast-supervisor", "holdfast-system")
OWN, OTHER, THIRD = "127.0.0.1", "127.0.0.2", "127.0.0.3"
LONG_S = 10.0


class Place:
    """Replicas on addresses of this machine, with their `answers`."""

    def __init__(self, certificate: ServerCertificate, port: int) -> None:
        self.certificate, self.port = certificate, port
        self.unused_port = 1  # nothing listens there
        self.answers: dict[str, Any] = {}
        self.listed: Sequence[str] | Exception = (OWN, OTHER, THIRD)
        self.asked: list[str] = []
        self.replicas = Replicas(NAMES[0], port, OWN, certificate, self._addresses)

    async def _addresses(self, service: str) -> Sequence[str]:
        assert service == NAMES[0]
        if isinstance(self.listed, Exception):
            raise self.listed
        return self.listed

    async def answer(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        address = transport.get_extra_info("sockname")[0]
        self.asked.append(address)
        said = self.answers.get(address, {"epoch": 0})
        if said is None:
            await asyncio.sleep(3600)
        if isinstance(said, bytes):
            return web.Response(body=said)
        return web.json_response(said)


@asynccontextmanager
async def place() -> AsyncIterator[Place]:
    async with ServedObjects().serving() as server:
        certificate = await certificate_for(server, OwnPod("s-1", "holdfast-system", "10.0.0.9"), NAMES)
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        there = Place(certificate, port)
        app = web.Application()
        app.router.add_get(PATH, there.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        for address in (OTHER, THIRD):
            await web.TCPSite(runner, address, port, ssl_context=certificate.context).start()
        try:
            yield there
        finally:
            await runner.cleanup()


async def test_a_replica_with_a_higher_epoch_is_a_rival() -> None:
    async with place() as there:
        there.answers = {OTHER: {"epoch": 7}, THIRD: {"epoch": 8}}
        assert await there.replicas.rival(7) == THIRD
        assert await there.replicas.rival(8) == ""
        assert sorted(there.asked) == [OTHER, OTHER, THIRD, THIRD], "this process does not ask itself"


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"{}", b"\xff", b'{"epoch": "9"}', b'{"epoch": true}', b" " * 4096 + b'{"epoch": 9}'],
    ids=["empty", "a list", "no epoch", "no text", "a word", "a truth value", "too long"],
)
async def test_an_answer_that_makes_no_sense_is_no_rival(answer: bytes) -> None:
    async with place() as there:
        there.answers = {OTHER: answer}
        assert await there.replicas.rival(7) == ""


async def test_a_replica_that_never_answers_does_not_hide_the_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "ASK_S", 0.3)
    async with place() as there:
        there.answers = {OTHER: None, THIRD: {"epoch": 8}}
        assert await there.replicas.rival(7) == THIRD


async def test_without_another_replica_or_a_name_there_is_no_rival() -> None:
    async with place() as there:
        there.answers = {OTHER: {"epoch": 9}}
        there.listed = (OWN,)
        assert await there.replicas.rival(7) == ""
        there.listed = OSError("no such name")
        assert await there.replicas.rival(7) == ""
        there.listed = ("127.0.0.4",)  # nothing listens there
        assert await there.replicas.rival(7) == ""


async def test_a_server_without_our_certificate_is_no_rival() -> None:
    """Another pod may have the former address of a supervisor."""
    async with place() as there, place() as stranger:
        stranger.answers = {OTHER: {"epoch": 9}}
        asking = Replicas(NAMES[0], stranger.port, OWN, there.certificate, there._addresses)
        assert await asking.rival(7) == ""
        assert stranger.asked == []


# -- whether the leader's host answers


async def found(there: Place) -> Replicas:
    """Return replicas that have found the leader `s-2_1` at `OTHER`."""
    there.answers = {OTHER: {"epoch": 7, "holder": "s-2_1"}}
    waiting = asyncio.ensure_future(there.replicas.end_of("s-2_1"))
    while not there.replicas._leader[1]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    waiting.cancel()
    return there.replicas


@contextmanager
def dropping() -> Iterator[int]:
    """Yield a port of `OTHER` to which all packets are dropped."""
    with socket.create_server((OTHER, 0)) as listener:
        drop_all(listener)
        yield listener.getsockname()[1]


async def test_the_host_of_a_leader_answers_even_if_nothing_listens_there() -> None:
    async with place() as there:
        asking = await found(there)
        assert await asking.answers("s-2_1", LONG_S) is True
        asking._port = 1
        assert await asking.answers("s-2_1", LONG_S) is True


async def test_a_host_that_drops_all_packets_does_not_answer() -> None:
    async with place() as there:
        asking = await found(there)
        with dropping() as first, dropping() as second:
            asking._port, asking._unused_port = first, second
            assert await asking.answers("s-2_1", 0.1) is False


async def test_a_probe_that_is_cancelled_as_it_fails_leaves_no_unread_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = asyncio.Event()

    async def refused(*_: object) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionRefusedError from None

    monkeypatch.setattr(asyncio, "open_connection", refused)
    unread: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))
    probing = asyncio.create_task(_answers("10.0.0.1", 9, time.monotonic() + 60.0))
    await begun.wait()
    probing.cancel()
    await asyncio.wait({probing})
    assert probing.cancelled()
    del probing
    gc.collect()
    assert unread == []


async def test_a_stopped_process_whose_queue_is_full_still_has_a_host_that_answers() -> None:
    """The kernel drops connections to the full queue, and refuses those to a port without a listener."""
    async with place() as there:
        asking = await found(there)
        with socket.create_server((OTHER, 0), backlog=0) as listener:
            asking._port = listener.getsockname()[1]
            with socket.create_connection(listener.getsockname()):
                assert await _answers(OTHER, asking._port, time.monotonic() + 0.1) is False, (
                    "the queue is full"
                )
                asking._unused_port = there.unused_port
                assert await asking.answers("s-2_1", 0.3) is True


async def test_a_refusal_by_the_unused_port_alone_is_an_answer_and_a_dropped_probe_is_none() -> None:
    async with place() as there:
        asking = await found(there)
        with dropping() as silent, dropping() as other:
            asking._port, asking._unused_port = silent, there.unused_port
            assert await asking.answers("s-2_1", 0.3) is True
            asking._unused_port = other
            assert await asking.answers("s-2_1", 0.1) is False
            asking._port = there.port  # a network that drops only the probes of the unused port
            assert await asking.answers("s-2_1", 0.3) is True


async def test_a_late_supervisor_does_not_know_whether_a_host_has_answered() -> None:
    async with place() as there:
        asking = await found(there)
        with dropping() as first, dropping() as second:
            asking._port, asking._unused_port = first, second
            probing = asyncio.ensure_future(asking.answers("s-2_1", 0.1))
            await asyncio.sleep(0)
            time.sleep(0.1 + 1.5 * replicas.LATE_S)  # noqa: ASYNC251 - this process is stopped
            assert await probing is None


async def test_nothing_is_known_about_the_host_of_a_leader_that_was_not_found() -> None:
    async with place() as there:
        assert await there.replicas.answers("s-2_1", LONG_S) is None
        asking = await found(there)
        assert await asking.answers("s-3_1", LONG_S) is None
