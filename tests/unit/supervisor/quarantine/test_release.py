from __future__ import annotations

from dataclasses import replace

from supervisor.quarantine.decide import decide
from supervisor.quarantine.model import Hold, Release
from tests.unit.supervisor.node_views import (
    DAY_S,
    NOW_S,
    POLICY,
    alone,
    asked,
    at,
    bad,
    finding,
    node_of,
    pool,
    recovered,
    report,
    settled,
    why,
)

OUT = settled(pool(bad("a")))
NODE = node_of(OUT, "a")


def test_a_node_returns_when_it_has_been_healthy_for_long_enough() -> None:
    assert asked(at(OUT, NOW_S + 9999, recovered(NODE, 3599.0, boot_id="b2"))) == []
    [release] = asked(at(OUT, NOW_S + 9999, recovered(NODE, 3600.0, boot_id="b2")))
    assert isinstance(release, Release)
    assert "lemon score" in release.why


def test_a_reboot_that_was_not_observed_makes_the_proof_longer() -> None:
    seen = at(OUT, NOW_S + DAY_S, recovered(NODE, 2 * 3600.0))
    assert asked(seen) == []
    assert "without a sign of the remedy (reboot_node)" in why(seen, "a")
    assert len(asked(at(OUT, NOW_S + DAY_S, recovered(NODE, 4 * 3600.0)))) == 1


def test_an_agent_that_has_lost_its_state_proves_nothing_about_the_time_before() -> None:
    forgetful = recovered(NODE, 30 * DAY_S, boot_id="b2")
    assert asked(at(OUT, NOW_S + 1800, forgetful)) == []
    assert len(asked(at(OUT, NOW_S + 3600, forgetful))) == 1


def test_a_brief_finding_restarts_the_proof() -> None:
    flap = replace(NODE, report=report(alone(held_s=1.0)))
    assert asked(at(OUT, NOW_S + DAY_S, flap)) == []
    assert asked(at(OUT, NOW_S + DAY_S, recovered(NODE, 60.0, boot_id="b2"))) == []


def test_a_degraded_node_returns_if_others_of_its_kind_serve() -> None:
    said = report(finding(level="degraded"), clean_s=DAY_S, boot_id="b2")
    assert len(asked(at(OUT, NOW_S + DAY_S, replace(NODE, report=said)))) == 1


def test_a_blind_sensor_does_not_prove_health() -> None:
    blind = recovered(NODE, DAY_S, boot_id="b2", blind=("kmsg",))
    assert asked(at(OUT, NOW_S + DAY_S, blind)) == []
    held = "its agent reports no fault, but kmsg cannot measure"
    assert why(at(OUT, NOW_S + 9999, blind), "a") == held
    assert why(at(OUT, NOW_S + DAY_S, blind), "a") == f"{held}; for 24 h"
    other = recovered(NODE, DAY_S, boot_id="b2", blind=("sysfs",))
    assert len(asked(at(OUT, NOW_S + DAY_S, other))) == 1, "a check without findings need not be able to see"


def test_a_hold_contains_the_time_of_the_next_check() -> None:
    seen = at(OUT, NOW_S + 9999, recovered(NODE, 600.0, boot_id="b2"))
    [hold] = [each for each in decide(seen, POLICY) if isinstance(each, Hold) and each.node == "a"]
    assert 2999 <= hold.until_s - seen.now_s <= 3000, "the incident's own weight fades a little"
