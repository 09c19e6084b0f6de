"""Counters that start at 0 with each boot: what links count while they come up is no fault."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import Level, Observation
from nodeagent.policy.loading import shipped
from nodeagent.policy.rules import RuleKind
from tests.unit.nodeagent.evaluation.world import GPU, POLICY, mark, sample

SHIPPED = shipped()
RESTARTED = sorted(name for name, rule in SHIPPED.rules.items() if rule.restarts_at_boot)
ENTITY = {"net_carrier": "net/eth0", "pcie_replay": GPU}
MANY = 500.0
BOOT_S = 1000.0


def read(check: str, at_s: float, value: float) -> Observation:
    return Observation(at_s, check, ENTITY.get(check, "device/0000:5c:00.0"), "sysfs", value)


def levels(made: Evaluator, now_s: float) -> list[tuple[str, Level]]:
    return [(each.check, each.level) for each in made.findings(now_s)]


def rebooted(check: str, before: float, after: float) -> Evaluator:
    """Return an evaluator that has seen a boot, with the memory of the agent before it."""
    earlier = Evaluator(SHIPPED)
    for n in range(4):
        earlier.add(read(check, BOOT_S - 40.0 + 10.0 * n, before))
    made = Evaluator(SHIPPED)
    made.load(json.loads(json.dumps(earlier.dump())))
    made.add(mark("boot", BOOT_S))
    made.add(read(check, BOOT_S + 10.0, after))
    return made


def test_the_raw_counters_of_links_and_pci_devices_restart_at_a_boot() -> None:
    assert RESTARTED == ["aer_correctable", "aer_fatal", "aer_nonfatal", "net_carrier", "pcie_replay"]
    assert all(SHIPPED.rules[each].kind is RuleKind.RATE for each in RESTARTED)


@pytest.mark.parametrize("check", RESTARTED)
@pytest.mark.parametrize(("before", "after"), [(0.0, MANY), (3 * MANY, MANY), (MANY, 0.0)])
def test_what_a_counter_shows_first_after_a_boot_is_no_growth(
    check: str, before: float, after: float
) -> None:
    made = rebooted(check, before, after)
    assert levels(made, BOOT_S + 10.0) == []
    made.add(read(check, BOOT_S + 40.0, after + 3 * MANY))
    assert [name for name, _ in levels(made, BOOT_S + 40.0)] == [check], "growth after that counts"


@pytest.mark.parametrize("check", RESTARTED)
def test_a_counter_that_falls_without_a_boot_counts_what_it_shows(check: str) -> None:
    made = Evaluator(SHIPPED)
    for at_s, value in ((0.0, 3 * MANY), (30.0, MANY)):
        made.add(read(check, at_s, value))
    assert [name for name, _ in levels(made, 30.0)] == [check]


def test_uncorrected_errors_that_the_driver_has_counted_since_the_boot_do_count() -> None:
    made = Evaluator(SHIPPED)
    made.add(sample("ecc_dbe", BOOT_S - 10.0, 0.0))
    made.add(mark("boot", BOOT_S))
    made.add(sample("ecc_dbe", BOOT_S + 20.0, 1.0))
    assert levels(made, BOOT_S + 20.0) == [("ecc_dbe", Level.UNHEALTHY)]


def test_a_boot_ends_no_finding_by_itself() -> None:
    made = Evaluator(SHIPPED)
    for at_s, value in ((BOOT_S - 60.0, 0.0), (BOOT_S - 30.0, 1.0)):
        made.add(read("aer_fatal", at_s, value))
    for seen in (mark("boot", BOOT_S), read("aer_fatal", BOOT_S + 30.0, 0.0)):
        made.add(seen)
        assert levels(made, BOOT_S + 30.0) == [("aer_fatal", Level.UNHEALTHY)]
    for n in range(2, 30):
        made.add(read("aer_fatal", BOOT_S + 30.0 * n, 0.0))
    assert levels(made, BOOT_S + 900.0) == []


WITH_BOOTS = replace(
    POLICY, rules={**POLICY.rules, "errors": replace(POLICY.rules["errors"], restarts_at_boot=True)}
)
READINGS = st.lists(
    st.builds(
        sample,
        st.just("errors"),
        st.integers(0, 29).map(lambda n: 10.0 * n),
        st.sampled_from([0.0, 60.0, 300.0]),
    ),
    max_size=30,
    unique_by=lambda seen: seen.at_s,
)


@given(READINGS, st.integers(0, 289).map(lambda n: n + 0.5), st.randoms(use_true_random=False))
def test_a_boot_may_be_reported_after_readings_that_followed_it(
    seen: list[Observation], boot_s: float, chance: object
) -> None:
    before = [each for each in seen if each.at_s < boot_s]
    rest = [*(each for each in seen if each.at_s > boot_s), mark("boot", boot_s)]
    one, other = Evaluator(WITH_BOOTS), Evaluator(WITH_BOOTS)
    for each in (*before, *rest):
        one.add(each)
    chance.shuffle(rest)  # type: ignore[attr-defined]
    for each in (*before, *rest):
        other.add(each)
    assert one.findings(300.0) == other.findings(300.0)
