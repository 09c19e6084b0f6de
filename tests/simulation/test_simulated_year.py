"""The bench's simulated year, reduced to a month of a small pool."""

from __future__ import annotations

import argparse

import pytest

from bench.quarantine import fault_mixes, quarantine, small_pools
from bench.quarantine.report import judge
from bench.quarantine.simulated_pool import Pool
from bench.text import all_met
from holdfast import node_report
from supervisor.quarantine.model import Hold, NodePolicy
from supervisor.quarantine.storms import StormState


def a_month(**given: object) -> Pool:
    """Simulate a small pool with far too many faulty sensors."""
    options = argparse.Namespace(
        nodes=64, days=30.0, rack=16, mix=sorted(fault_mixes.FLEETS), flapping=250, silences=300,
        no_crowds=False, seed=1,
    )  # fmt: skip
    for name, value in given.items():
        setattr(options, name, value)
    return quarantine.simulate(options, NodePolicy())


def test_a_month_meets_its_targets_and_is_reproducible() -> None:
    pool = a_month()
    assert all_met(judge(pool)), [each.line for each in judge(pool)]
    assert pool.tally.counts["drain"] > 0
    assert pool.tally.counts["false_alarms"] > 100
    assert a_month().tally.counts == pool.tally.counts


def test_a_policy_that_trusts_a_single_sensor_evicts_healthy_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench detects a worse policy, so it does not meet its targets merely because events are missing."""
    monkeypatch.setattr(node_report, "WITNESSES", 1)
    assert a_month().tally.evicted


def test_a_policy_without_storm_detection_evicts_healthy_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.quarantine.storms.detect", lambda *_: StormState())
    assert a_month(flapping=0).tally.evicted


def test_small_pools_meet_their_targets() -> None:
    pools = [small_pools.simulate(size, NodePolicy(), 0) for size in (1, 2, 5)]
    assert all_met(small_pools.judge(pools)), small_pools.judge(pools)
    facts = small_pools.facts(pools)
    assert facts["  taken out"] > 20
    assert facts["  alerts, because the node could not be taken out"] > 5


def test_a_small_pool_whose_full_breaker_is_no_alert_does_not_meet_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "supervisor.quarantine.release.waiting",
        lambda node, why, _age_s, _limit_s, now_s: Hold(node.name, why, now_s + 3600.0),
    )
    assert not all_met(small_pools.judge([small_pools.simulate(1, NodePolicy(), 0)]))
