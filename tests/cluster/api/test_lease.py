"""Two processes and one lease on a real server."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator

import pytest

from supervisor.kubernetes.client import ApiServer
from supervisor.kubernetes.leadership import Leadership, lead
from supervisor.kubernetes.lease import LEASES, HeldByAnother, LeaseLock
from tests.cluster.api.leader import TERMS
from tests.unit.literals import ROOT

pytestmark = pytest.mark.cluster
LIMIT_S = 30.0


class Contender:
    """A process of `tests.cluster.api.leader`."""

    def __init__(self, namespace: str, identity: str) -> None:
        self._arguments = (namespace, identity)

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.cluster.api.leader", *self._arguments),
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), LIMIT_S)).decode().strip()

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@pytest.fixture
async def contenders(api: ApiServer, namespace: str) -> AsyncIterator[list[Contender]]:
    made = [Contender(namespace, name) for name in ("one", "two")]
    yield made
    for each in made:
        await each.end()


async def test_a_leader_that_is_stopped_is_replaced_and_knows_it_when_it_runs_again(
    api: ApiServer, namespace: str, contenders: list[Contender]
) -> None:
    one, two = contenders
    await one.start()
    assert await one.line() == "leads 1"
    await two.start()
    watching = LeaseLock(api, namespace, "leader", "watching")
    with pytest.raises(HeldByAnother, match="one_"):
        await watching.try_hold()
    loop = asyncio.get_running_loop()
    one.process.send_signal(signal.SIGSTOP)
    stopped_s = loop.time()
    assert await two.line() == "leads 2"
    took_s = loop.time() - stopped_s
    assert took_s >= TERMS.duration_s - TERMS.retry_s
    one.process.send_signal(signal.SIGCONT)
    said = [await one.line()]
    while not said[-1].startswith("lost"):
        said.append(await one.line())
    assert said[-2:] == ["ends", "lost: not renewed within 2.5 s"]
    with pytest.raises(HeldByAnother, match="two_"):
        await watching.try_hold()


async def test_a_leader_that_exits_cleanly_is_replaced_immediately(api: ApiServer, namespace: str) -> None:
    """The successor does not wait for the end of the term, even if others have left an unusual lease."""
    epochs = []

    async def body(term: Leadership) -> None:
        epochs.append(term.epoch)

    for name in ("a", "b", "b"):
        await asyncio.wait_for(lead(LeaseLock(api, namespace, "leader", name), body), LIMIT_S)
    lease = await api.get(LEASES, "leader", namespace)
    assert "holderIdentity" not in lease["spec"]
    await api.replace(LEASES, {**lease, "spec": {}})
    await lead(LeaseLock(api, namespace, "leader", "c"), body)
    assert epochs == [1, 2, 3, 2]  # an emptied lease has lost its count, so `raise_above` is needed


async def test_a_term_takes_an_epoch_above_one_that_members_know(api: ApiServer, namespace: str) -> None:
    async def body(term: Leadership) -> None:
        await term.raise_above(41)
        assert term.epoch == 42

    await lead(LeaseLock(api, namespace, "leader", "a"), body)
    assert (await api.get(LEASES, "leader", namespace))["spec"]["leaseTransitions"] == 41


async def test_of_ten_racing_contenders_one_leads_at_a_time(api: ApiServer, namespace: str) -> None:
    leading: set[str] = set()
    epochs = []

    async def contend(name: str) -> None:
        async def body(term: Leadership) -> None:
            assert not leading
            leading.add(name)
            await asyncio.sleep(0.05)
            leading.remove(name)
            epochs.append(term.epoch)

        await lead(LeaseLock(api, namespace, "leader", name, TERMS), body)

    await asyncio.wait_for(asyncio.gather(*(contend(f"pod-{n}") for n in range(10))), LIMIT_S)
    assert epochs == list(range(1, 11))
