"""The connections of a job's members to a leader that is new."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from supervisor.cluster import pod_server
from supervisor.cluster.pod_server import COME_S, PodServer

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
