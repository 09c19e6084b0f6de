"""The connections of a job's members to a leader that is new."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from holdfast.protocol.member_messages import HeldChecksum, HeldSnapshot, MemberReport
from supervisor.cluster import pod_server
from supervisor.cluster.pod_server import COME_S, PodServer
from supervisor.controller import member_server
from tests.unit.supervisor.job_views import launcher, progress, rank, report

S = 1_000_000_000


def test_a_new_leader_waits_for_each_member_since_its_own_start_whenever_it_first_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ns = 100 * S
    monkeypatch.setattr(pod_server, "time", SimpleNamespace(monotonic_ns=lambda: now_ns))
    made = PodServer(lambda: None, "secret")
    now_ns = 105 * S
    line = made.connection("m0")
    assert line.since_ns == 100 * S, "what the others took is counted since then, too"
    assert line.heard_ns == (100 + COME_S) * S
    made.discount_own_pause(2 * S)
    assert line.heard_ns == (102 + COME_S) * S
    assert line.since_ns == 102 * S
    assert made.connection("m0") is line


MEMBERS = ("m0", "m1")
STATES = (HeldSnapshot(1, 4, 8),)
FIRST = {
    name: replace(
        report(name, launcher(rank(0)), progress=(replace(progress(0, 7), snapshot_step=4),)), slots=STATES
    )
    for name in MEMBERS
}


class Calm:
    """A job of two members that trains well, and counts the rounds that its server asks for."""

    def __init__(self, calm: bool = True) -> None:
        self.asked, self.is_asked = 0, asyncio.Event()
        self.server = PodServer(self._ask, "secret", lambda: calm)
        for each in FIRST.values():
            self.receive(each)

    def _ask(self) -> None:
        self.asked += 1
        self.is_asked.set()

    def receive(self, sent: MemberReport) -> int:
        """Return for how many rounds this report asks at once."""
        before = self.asked
        self.server._receive(self.server.connection(sent.member), sent, False)
        return self.asked - before

    async def next_round(self) -> int:
        """Wait for the next round, and return how many there have been since the one before."""
        self.asked = 0
        self.is_asked.clear()
        await asyncio.wait_for(self.is_asked.wait(), 60)
        return self.asked


def with_snapshot(member: str, step: int, crc: int = 0) -> MemberReport:
    seals = (HeldChecksum(1, step, 8, crc),) if crc else ()
    return replace(FIRST[member], slots=(HeldSnapshot(1, step, 8), *STATES), seals=seals)


def test_the_wait_for_other_snapshots_is_short() -> None:
    """A sidecar reports twice a second, and a job may take a snapshot each second."""
    assert member_server.SOON_S <= 0.5


async def test_one_round_considers_the_snapshots_that_members_report_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member_server, "SOON_S", 0.001)
    job = Calm()
    for step in (8, 12, 16):
        assert [job.receive(with_snapshot(each, step, crc=step)) for each in MEMBERS] == [0, 0]
        assert await job.next_round() == 1


async def test_a_report_that_needs_a_decision_does_not_wait_for_other_snapshots() -> None:
    job = Calm()
    assert job.receive(with_snapshot("m0", 8)) == 0
    assert job.receive(replace(with_snapshot("m1", 8), launcher=None)) == 1
    assert Calm(calm=False).receive(with_snapshot("m0", 8)) == 1


async def test_checksums_that_differ_do_not_wait_because_a_good_snapshot_may_soon_be_overwritten() -> None:
    job = Calm()
    assert job.receive(with_snapshot("m0", 8, crc=1)) == 0
    assert job.receive(with_snapshot("m1", 8, crc=2)) == 1


async def test_a_closed_server_asks_for_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_server, "SOON_S", 0.001)
    job = Calm()
    before = job.asked
    assert job.receive(with_snapshot("m0", 8)) == 0
    job.server.close()
    later: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_later(0.002, later.set_result, None)  # after the timer, if it runs
    await later
    assert job.asked == before
