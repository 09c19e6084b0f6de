from __future__ import annotations

import pytest

from supervisor.quarantine import evidence
from tests.unit.supervisor.node_views import POLICY, alone, finding, report


@pytest.mark.parametrize(
    ("sources", "verdict_by", "expected"),
    [
        (("kmsg",), "", False),
        (("kmsg", "kmsg"), "", False),
        (("kmsg", "nvml_events"), "", True),
        (("kmsg",), "driver", True),
        (("kmsg",), "operator", False),
        ((), "", False),
    ],
)
def test_two_sensors_or_the_driver_are_two_sources(
    sources: tuple[str, ...], verdict_by: str, expected: bool
) -> None:
    assert evidence.is_corroborated(finding(sources=sources, verdict_by=verdict_by)) is expected


def test_only_a_lasting_finding_that_needs_an_empty_node_may_drain_it() -> None:
    assert evidence.may_drain(finding(), POLICY)
    assert not evidence.may_drain(finding(action="contact_support"), POLICY)
    assert not evidence.may_drain(finding(lasting=False), POLICY)
    assert not evidence.may_drain(finding(level="degraded"), POLICY)
    assert not evidence.may_drain(finding(held_s=59.0), POLICY)
    assert not evidence.may_drain(alone(action="replace", lasting=True), POLICY)


def test_an_unknown_action_counts_as_the_cheapest() -> None:
    found = (finding(action="sing"), finding(action="reset_gpu"))
    assert evidence.costliest_action(found) == "reset_gpu"
    assert evidence.costliest_action(()) == "none"


def test_a_degraded_node_is_not_unhealthy() -> None:
    assert evidence.unhealthy(report(finding(level="degraded"), finding(level="strange"))) == ()
