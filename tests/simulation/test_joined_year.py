"""The bench's year with real agents, reduced to some weeks of a small pool."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from bench.quarantine import fault_mixes
from bench.quarantine.joined import joined
from bench.quarantine.joined.guesses import ABOUT, Guesses, variations
from bench.quarantine.joined.judge import Year, judge
from bench.text import all_met
from holdfast import node_report
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.evaluation.retention import FORGET_S
from supervisor.quarantine import evidence
from supervisor.quarantine.model import NodePolicy

MORE_OFTEN = 40  # than published, for the faults that need a remedy
TARGETS = {
    "lost": "no report lost a fault before its remedy",
    "drained": "every node with a sure, lasting fault was drained",
    "evicted": "no healthy node evicted unless two witnesses were wrong",
    "reported": "every visible fault was reported",
}


def some_weeks(**given: object) -> Year:
    options = argparse.Namespace(
        nodes=16, days=20.0, rack=8, mix=sorted(fault_mixes.FLEETS), no_crowds=True, seed=3
    )
    for name, value in given.items():
        setattr(options, name, value)
    guesses = Guesses(recurs=0.3, restarts=100.0, false_alarms=20.0, lies=2.0, worn=0.5, unseen=0.5)
    rates = [
        replace(each, per_node_year=each.per_node_year * (MORE_OFTEN if each.kind == "lasting" else 1))
        for each in fault_mixes.load(tuple(fault_mixes.FLEETS))
    ]
    return joined.simulate(options, NodePolicy(max_share=0.3), guesses, rates)


def missed(year: Year) -> set[str]:
    return {each.target for each in judge(year) if each.met is False}


def test_some_weeks_meet_their_targets_and_contain_what_they_are_about() -> None:
    year = some_weeks(no_crowds=False, days=30.0)
    assert all_met(judge(year)), [each.line for each in judge(year)]
    count = year.pool.tally.counts
    assert count["drain"] > 10
    assert count["false_alarms"] > 10
    assert min(count[each] for each in ("came_again", "unseen_resets", "cleared_by_operators")) > 0
    assert year.truth.repeats > 0


def test_a_disk_that_fails_after_quiet_months_is_reported_and_its_node_taken_out() -> None:
    options = argparse.Namespace(nodes=4, days=180.0, rack=8, mix=["byterobust"], no_crowds=True, seed=0)
    rates = [
        replace(each, per_node_year=3.0)
        for each in fault_mixes.load(("byterobust",))
        if each.component == "disk_fault"
    ]
    year = joined.simulate(
        options, NodePolicy(), Guesses(restarts=0.0, false_alarms=0.0, silences=0.0), rates
    )
    assert all_met(judge(year)), [each.line for each in judge(year)]
    assert max(case.reported_s for case in year.pool.tally.cases) > 2 * FORGET_S


def test_an_evaluator_that_forgets_what_stands_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(evaluator: Evaluator, before_s: float) -> None:
        evaluator._evidence.events.clear()
        evaluator._evidence.grown.clear()
        evaluator._evidence.series.clear()
        evaluator._judge.revise()
        evaluator._findings = None

    monkeypatch.setattr(Evaluator, "forget", forget)
    assert TARGETS["lost"] in missed(some_weeks())


def test_an_agent_that_restarts_without_its_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evaluator, "load", lambda *_: None)
    assert TARGETS["lost"] in missed(some_weeks())


def test_a_quarantine_that_drains_no_lasting_fault_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "may_drain", lambda *_: False)
    assert TARGETS["drained"] in missed(some_weeks(days=5.0))


def test_a_quarantine_that_trusts_one_witness_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_report, "WITNESSES", 1)
    assert TARGETS["evicted"] in missed(some_weeks())


def test_each_guess_is_described_and_swept_in_both_directions() -> None:
    base = Guesses()
    swept = [values for _, values in variations(base)]
    for name in ABOUT:
        tried = {getattr(values, name) for values in swept}
        assert min(tried) < getattr(base, name) < max(tried)
        assert ABOUT[name]
