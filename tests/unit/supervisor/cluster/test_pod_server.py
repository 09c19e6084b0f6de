"""The connections of a job's members to a leader that is new."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from holdfast.protocol.member_messages import HeldSnapshot, MemberReport
from supervisor.cluster import pod_server
from supervisor.cluster.pod_server import COME_S, PodServer
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


FIRST = replace(report("m0", launcher(rank(0)), progress=(progress(0, 7),)), slots=(HeldSnapshot(1, 4, 8),))


def rounds(monkeypatch: pytest.MonkeyPatch, *reports: MemberReport, calm: bool = True) -> list[int]:
    """Return the number of rounds that the job was asked for, after each report and at the end."""

    async def receive() -> list[int]:
        asked, is_asked = [0], asyncio.Event()

        def ask() -> None:
            asked[0] += 1
            is_asked.set()

        made = PodServer(ask, "secret", lambda: calm)
        line = made.connection("m0")
        made._receive(line, FIRST, False)
        asked[0] = 0
        is_asked.clear()
        found = []
        for each in reports:
            made._receive(line, each, False)
            found.append(asked[0])
        await asyncio.wait_for(is_asked.wait(), 60)
        return [*found, asked[0]]

    monkeypatch.setattr(pod_server, "SOON_S", 0.001)
    return asyncio.run(receive())


def with_snapshot(step: int) -> MemberReport:
    return replace(FIRST, slots=(HeldSnapshot(1, step, 8), *FIRST.slots))


def test_one_round_considers_the_snapshots_that_are_reported_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert rounds(monkeypatch, with_snapshot(8), with_snapshot(9)) == [0, 0, 1]


def test_a_report_that_needs_a_decision_does_not_wait_for_other_snapshots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert rounds(monkeypatch, with_snapshot(8), replace(with_snapshot(8), launcher=None)) == [0, 1, 1]
    assert rounds(monkeypatch, with_snapshot(8), calm=False) == [1, 1]


def test_a_closed_server_asks_for_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    async def close() -> int:
        asked = [0]
        made = PodServer(lambda: asked.__setitem__(0, asked[0] + 1), "secret", lambda: True)
        line = made.connection("m0")
        made._receive(line, FIRST, False)
        made._receive(line, with_snapshot(8), False)
        made.close()
        later: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.002, later.set_result, None)  # after the timer, if it runs
        await later
        return asked[0]

    monkeypatch.setattr(pod_server, "SOON_S", 0.001)
    assert asyncio.run(close()) == 1
