from __future__ import annotations

import json
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.agent import recent_faults
from nodeagent.agent.recent_faults import FADES_S, MAX_OCCASION_S, RecentFaults, load_recent_faults
from nodeagent.model import Action, HealthFinding, Level

CYCLE_S = 10.0
HOUR_S = 3600.0


def finding(entity: str = "gpu/0", level: Level = Level.UNHEALTHY) -> HealthFinding:
    return HealthFinding(entity, "xid", 79, level, Action.REBOOT_NODE, 0.0, 0.0, "it", (), "", ("kmsg",))


FOUND = finding()


def flapping(bad_s: float, well_s: float, hours: float, entities: int = 1) -> tuple[RecentFaults, float]:
    """Return the sums, and the time, after hours of faults that came and went, each on the next entity."""
    found, now_s = RecentFaults(), 0.0
    while now_s < hours * HOUR_S:
        phase_s = now_s % (bad_s + well_s)
        at = int(now_s // (bad_s + well_s)) % entities
        found = found.after(now_s, [finding(f"gpu/{at}")] if phase_s < bad_s else [])
        now_s += CYCLE_S
    return found, now_s


def test_a_fault_that_is_present_for_most_of_the_time_has_a_large_sum_although_it_never_lasts() -> None:
    found, now_s = flapping(290.0, 91.0, 3.0)
    assert found.of_finding_s(FOUND, now_s) > 0.5 * FADES_S
    assert found.of_node_s(now_s) > HOUR_S


def test_a_rare_short_fault_leaves_a_small_sum() -> None:
    found, now_s = flapping(420.0, 4 * HOUR_S - 420.0, 72.0)
    assert found.of_finding_s(FOUND, now_s) < 100.0
    assert found.of_node_s(now_s) < HOUR_S


def test_a_single_long_fault_makes_no_node_unsteady() -> None:
    found, now_s = flapping(1e9, 0.0, 48.0)
    assert found.of_finding_s(FOUND, now_s) == pytest.approx(FADES_S, rel=0.01)
    assert found.of_node_s(now_s) <= MAX_OCCASION_S


def test_many_faults_of_a_node_that_take_turns_make_it_unsteady() -> None:
    found, now_s = flapping(250.0, 600.0, 24.0, entities=50)
    assert found.of_finding_s(FOUND, now_s) < 300.0
    assert found.of_node_s(now_s) > HOUR_S


def test_more_findings_than_are_kept_do_not_hide_that_the_node_is_unsteady() -> None:
    found, now_s = flapping(20.0, 20.0, 8.0, entities=10 * recent_faults.MAX_FINDINGS)
    assert len(found.findings) <= recent_faults.MAX_FINDINGS
    assert found.of_node_s(now_s) > HOUR_S


def test_degraded_findings_do_not_count() -> None:
    found = RecentFaults().after(0.0, [finding(level=Level.DEGRADED)])
    assert found.after(100.0, [finding(level=Level.DEGRADED)]).of_node_s(100.0) == 0.0


def test_time_without_an_agent_does_not_count_and_the_sums_survive_a_restart() -> None:
    before = RecentFaults().after(0.0, [FOUND]).after(100.0, [FOUND])
    saved = load_recent_faults(json.loads(json.dumps(before.dump())))
    assert saved.findings == before.findings
    later = saved.after(1100.0, [FOUND])
    assert later.of_finding_s(FOUND, 1100.0) == pytest.approx(
        before.of_finding_s(FOUND, 100.0) * exp(-1000.0 / FADES_S)
    )
    assert later.after(1110.0, [FOUND]).of_finding_s(FOUND, 1110.0) > later.of_finding_s(FOUND, 1110.0)


def test_the_state_of_an_earlier_agent_has_no_sums() -> None:
    assert load_recent_faults(None) == RecentFaults()


@given(st.lists(st.tuples(st.floats(0.1, 1000.0), st.booleans()), max_size=60))
def test_a_sum_never_exceeds_the_time_that_the_fault_was_present(steps: list[tuple[float, bool]]) -> None:
    found, now_s, present_s, before = RecentFaults(), 0.0, 0.0, False
    for lasted_s, is_bad in [(0.0, False), *steps]:
        now_s += lasted_s
        present_s += lasted_s if is_bad and before else 0.0
        found, before = found.after(now_s, [FOUND] if is_bad else []), is_bad
        assert 0.0 <= found.of_finding_s(FOUND, now_s) <= min(present_s, FADES_S) + 1e-6
        assert 0.0 <= found.of_node_s(now_s) <= present_s + 1e-6
