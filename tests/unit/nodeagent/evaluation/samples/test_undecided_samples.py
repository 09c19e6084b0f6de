from __future__ import annotations

import pytest

from nodeagent.cli.assembly import policy_for_short_look
from nodeagent.evaluation import samples
from nodeagent.evaluation import samples as judging
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.host.stuck_threads import StuckThreads
from nodeagent.model import Level, Observation
from nodeagent.policy import loading
from nodeagent.policy.rules import RuleKind

RULES = loading.load().rules


def why(check: str, *given: tuple[float, float]) -> str:
    return samples.why_undecided(RULES[check], list(given))


@pytest.mark.parametrize("check", ["gpu_count", "nvlink_down", "memory_used", "load", "gpu_throttled"])
def test_a_sample_within_the_limit_is_decided_and_one_beyond_is_undecided_until_it_is_a_fault(
    check: str,
) -> None:
    rule = RULES[check]
    bound = rule.degraded or rule.unhealthy
    assert bound is not None
    assert why(check, (0.0, bound.at - 1)) == ""
    assert rule.what in why(check, (0.0, bound.at))
    long = [(rule.period_s * n, bound.at) for n in range(150)]
    level = Level.DEGRADED if rule.degraded else Level.UNHEALTHY
    assert judging.reached(rule, level, long, 149)
    assert samples.why_undecided(rule, long) == ""


def test_a_lower_limit_is_undecided_on_its_other_side() -> None:
    assert why("pcie_link", (0.0, 1.0)) == ""
    assert "in 3 of 3 samples, one every 30 s" in why("pcie_link", (0.0, 0.5))


def test_a_state_with_a_duration_is_undecided_until_it_has_lasted_that_long() -> None:
    assert why("nvml", (0.0, 0.0)) == ""
    assert why("nvml", (0.0, 1.0), (30.0, 1.0), (59.0, 1.0)).endswith("(a fault after 60 s)")
    assert why("nvml", (0.0, 1.0), (30.0, 1.0), (60.0, 1.0)) == ""
    assert why("nvml", (0.0, 1.0), (59.0, 0.0)) == "", "the driver is healthy again"
    assert why("gpu_state", (0.0, 1.0)) == "", "the state is a fault immediately"


def test_a_counter_needs_two_readings_and_is_undecided_if_it_grows_too_fast() -> None:
    assert "one reading" in why("pcie_replay", (0.0, 1000.0))
    assert why("pcie_replay", (0.0, 1000.0), (2.0, 1000.0)) == ""
    assert why("pcie_replay", (0.0, 1000.0), (2.0, 1001.0)) == ""
    assert (
        why("pcie_replay", (0.0, 1000.0), (2.0, 1005.0)) == "5 PCIe replays in 2 s (a fault above 50 in 60 s)"
    )
    assert why("ecc_dbe", (0.0, 7.0), (2.0, 8.0)) == "", "it is a fault"
    assert why("observations_dropped", (0.0, 1.0)) == "", "each sensor reports 0 first, at its start"


def test_checks_not_sampled_in_this_run_are_not_undecided() -> None:
    evaluator = Evaluator(loading.load())
    evaluator.add(Observation(10.0, "gpu_count", "node", "nvml-polling", 1.0))
    assert [each[:2] for each in evaluator.undecided(10.0)] == [("node", "gpu_count")]
    assert list(evaluator.undecided(10.5)) == []


def test_a_short_run_reads_counters_and_stuck_threads_sooner_and_keeps_every_limit() -> None:
    usual, quick = loading.load().rules, policy_for_short_look(loading.load(), 2.0, promised=()).rules
    for name, rule in usual.items():
        if rule.period_s and (rule.kind is RuleKind.RATE or name in StuckThreads.checks):
            assert quick[name].period_s < 1.0
        else:
            assert quick[name] == rule
        assert (quick[name].degraded, quick[name].unhealthy) == (rule.degraded, rule.unhealthy)


@pytest.mark.parametrize("check", ["gpu_count", "ib_port_count"])
def test_only_what_is_promised_is_missing_at_the_first_sample(check: str) -> None:
    promised = policy_for_short_look(loading.load(), 2.0, promised={check}).rules
    assert judging.reached(promised[check], Level.UNHEALTHY, [(0.0, 1.0)], 0)
    assert not judging.reached(RULES[check], Level.UNHEALTHY, [(0.0, 1.0)], 0)
    assert promised["ib_port"] == RULES["ib_port"]
