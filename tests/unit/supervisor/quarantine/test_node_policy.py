from __future__ import annotations

import re
from typing import Any

import pytest

from holdfast.node_report import ACTIONS
from supervisor.quarantine.model import NodePolicy


def test_the_defaults_agree_with_each_other() -> None:
    assert NodePolicy().memory_s == 2400.0


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"max_share.*confirm_s.*max_clean_s.*drain_for"):
        NodePolicy(max_share=1.5, confirm_s=400.0, max_clean_s=1.0, drain_for=frozenset({"explode"}))


def test_a_proof_shorter_than_a_storm_would_turn_a_release_into_one() -> None:
    with pytest.raises(ValueError, match="clean_s: expected at least"):
        NodePolicy(clean_s=2000.0)


SHARES = "storm_share, cohort_share: expected 0 to 1"
CONFIRM = "confirm_s: expected more than 0 and at most confirm_alone_s"
OUT = "min_out, min_serving: expected 0 or more"
NODES = "storm_nodes, rack_nodes: expected 2 or more"
POSITIVE = "stale_s, cooldown_s: expected more than 0"
AGES = "half_life_s: expected more than 0; relapse_s: expected 0 or more"
ALERT = "alert_s: expected at least storm_window_s plus cooldown_s plus confirm_alone_s, and at most repair_s"
CLEAN = "clean_s: expected at least storm_window_s plus cooldown_s"


@pytest.mark.parametrize(
    ("given", "mistakes"),
    [
        ({"max_share": -0.1}, "max_share: expected 0 to 1"),
        ({"max_share": 1.1}, "max_share: expected 0 to 1"),
        ({"min_out": -1}, OUT),
        ({"min_serving": -1}, OUT),
        ({"confirm_s": 0.0}, CONFIRM),
        ({"confirm_s": 300.5}, CONFIRM),
        ({"storm_nodes": 1}, NODES),
        ({"rack_nodes": 1}, NODES),
        ({"storm_share": -0.1}, SHARES),
        ({"storm_share": 1.1}, SHARES),
        ({"cohort_share": -0.1}, SHARES),
        ({"cohort_share": 1.1}, SHARES),
        ({"storm_window_s": 59.0}, "storm_window_s: expected at least confirm_s"),
        ({"stale_s": 0.0}, POSITIVE),
        ({"cooldown_s": 0.0}, POSITIVE),
        ({"clean_s": 2399.0}, CLEAN),
        ({"cohort_nodes": 1}, "cohort_nodes: expected 2 or more"),
        ({"alert_s": 2699.0}, ALERT),
        ({"alert_s": 7201.0, "repair_s": 7200.0}, ALERT),
        ({"waiver_s": 0.0}, "waiver_s: expected more than 0"),
        ({"max_clean_s": 3599.0}, "max_clean_s: expected at least clean_s"),
        ({"unremedied": 0.9}, "unremedied: expected 1 or more"),
        ({"half_life_s": 0.0}, AGES),
        ({"relapse_s": -1.0}, AGES),
        ({"drain_for": frozenset({"explode"})}, f"drain_for: expected some of {', '.join(ACTIONS)}"),
        ({"max_share": 2.0, "unremedied": 0.0}, "max_share: expected 0 to 1; unremedied: expected 1 or more"),
    ],
)
def test_each_mistake_is_one_sentence(given: dict[str, Any], mistakes: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(mistakes)}$"):
        NodePolicy(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"max_share": 0.0, "min_out": 0, "min_serving": 0, "storm_share": 0.0, "cohort_share": 0.0},
        {"max_share": 1.0, "storm_share": 1.0, "cohort_share": 1.0, "storm_nodes": 2, "rack_nodes": 2},
        {"confirm_s": 0.5, "confirm_alone_s": 0.5, "storm_window_s": 0.5, "stale_s": 0.5, "cooldown_s": 0.5},
        {"clean_s": 2400.0, "max_clean_s": 2400.0, "unremedied": 1.0, "half_life_s": 0.5, "relapse_s": 0.0},
        {"drain_for": frozenset(ACTIONS)},
        {"cohort_nodes": 2, "waiver_s": 0.5, "alert_s": 2700.0, "repair_s": 2700.0},
        {"drain_for": frozenset()},
    ],
)
def test_the_smallest_and_largest_allowed_values_are_accepted(given: dict[str, Any]) -> None:
    made = NodePolicy(**given)
    assert {name: getattr(made, name) for name in given} == given
