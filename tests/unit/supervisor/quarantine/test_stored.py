from __future__ import annotations

import json
from typing import Any

import pytest

from supervisor.quarantine.model import (
    MAX_RUNS,
    PREFER_NOT,
    NodeView,
    PastQuarantine,
    Quarantine,
    RunFault,
    Waiver,
)
from supervisor.quarantine.stored import BadState, from_json, to_json

# The data as the version of commit 628c3a2 had it: no GPUs to replace, and no boot in a waiver.
OLD = """{
  "quarantine": {"evidence": ["gpu/0 xid 79"], "action": "reboot_node", "sources": ["kmsg"], "boot_id": "b1",
                 "at_s": 1800000000, "effect": "NoSchedule", "drain_at_s": null},
  "waiver": {"evidence": ["port/0 down"], "at_s": 1790000000.5},
  "history": [{"at_s": 1.0, "action": "replace", "relapse": true}, {"at_s": 2.0, "action": "none"}],
  "released_at_s": 1780000000.0
}"""


def test_the_data_of_an_older_version_is_read() -> None:
    assert from_json(NodeView("a"), json.loads(OLD)) == NodeView(
        "a",
        quarantine=Quarantine(("gpu/0 xid 79",), "reboot_node", ("kmsg",), "b1", 1.8e9),
        waiver=Waiver(("port/0 down",), 1790000000.5),
        history=(PastQuarantine(1.0, "replace", True), PastQuarantine(2.0, "none")),
        released_at_s=1.78e9,
    )
    assert from_json(NodeView("a"), {}) == NodeView("a")


def test_all_that_is_stored_is_read_again() -> None:
    held = Quarantine(("k",), "replace", ("kmsg",), "b1", 5.0, PREFER_NOT, 6.0, ("GPU-1",), 8, 7.0, 9.5)
    for node in (
        NodeView("a", quarantine=held, waiver=Waiver(("x",), 4.0, "b0"), released_at_s=3.0),
        NodeView("a", history=(PastQuarantine(1.0, "none", True),)),
        NodeView("a", runs=(RunFault(1.0), RunFault(2.0, "GPU-1"))),
        NodeView("a"),
    ):
        assert from_json(NodeView("a"), json.loads(json.dumps(to_json(node)))) == node


def test_the_fields_of_a_newer_version_are_ignored() -> None:
    new = {"waiver": {"evidence": [], "at_s": 1.0, "by": "someone"}, "more": 3}
    assert from_json(NodeView("a"), new).waiver == Waiver((), 1.0)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"quarantine": 5}, "quarantine is 5; expected an object"),
        ({"waiver": {"evidence": []}}, "waiver.at_s is missing"),
        ({"waiver": {"evidence": "k", "at_s": 1.0}}, "waiver.evidence is 'k'; expected tuple"),
        ({"waiver": {"evidence": [1], "at_s": 1.0}}, r"waiver.evidence is \[1\]; expected tuple"),
        ({"waiver": {"evidence": [], "at_s": True}}, "waiver.at_s is True; expected float"),
        ({"released_at_s": float("nan")}, "released_at_s is nan; expected float"),
        ({"history": {"a": 1}}, "history is {'a': 1}; expected a list"),
        ({"runs": 7}, "runs is 7; expected a list"),
        ({"runs": [{"device": "GPU-1"}]}, "runs.at_s is missing"),
        ({"history": [{"at_s": 1.0, "action": 3}]}, "history.action is 3; expected str"),
    ],
)
def test_malformed_data_is_refused_with_the_field_and_its_value(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(BadState, match=f"^{message}"):
        from_json(NodeView("a"), raw)


def test_only_the_newest_faults_that_runs_have_seen_are_stored() -> None:
    node = NodeView("a", runs=tuple(RunFault(float(at)) for at in range(2 * MAX_RUNS)))
    assert from_json(NodeView("a"), to_json(node)).runs == node.runs[-MAX_RUNS:]
