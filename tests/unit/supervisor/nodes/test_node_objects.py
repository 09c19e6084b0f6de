from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.node_report import REPORT
from supervisor.nodes.names import RECORD, REQUEST, TAINT
from supervisor.nodes.node_objects import (
    MAX_RECORD,
    OperatorRequest,
    parsed_report,
    prune,
    read,
    read_request,
    request_text,
)
from supervisor.quarantine.model import NodeView, Quarantine
from tests.unit.supervisor.nodes.node_samples import FOREIGN, node_object


def test_pruning_keeps_all_that_is_read_and_drops_what_is_large() -> None:
    found = node_object(
        labels={"topology.kubernetes.io/rack": "r7", "other": "x"},
        annotations={RECORD: "{}", REPORT: "{}", "other": "x" * 1000},
        managedFields=[{"manager": "kubelet"}],
    )
    found["status"]["images"] = [{"names": ["x" * 1000]}]
    found["status"]["conditions"].append({"type": "MemoryPressure", "status": "False"})
    assert read(prune(found)) == read(found)
    assert len(json.dumps(prune(found))) < 700
    assert prune(prune(found)) == prune(found)


def test_the_kubelets_word_the_cordon_and_the_rack_are_read() -> None:
    found = node_object(labels={"topology.kubernetes.io/rack": "r7"})
    assert read(found).view == NodeView("a", rack="r7", version="1")
    found["spec"]["unschedulable"] = True
    found["status"]["conditions"][0]["status"] = "Unknown"
    view = read(found).view
    assert (view.cordoned, view.ready) == (True, False)
    assert not read({"metadata": {"name": "a"}}).view.ready
    assert read(found).taints == tuple(FOREIGN)


def test_a_foreign_taint_is_no_cordon_and_ours_is_none_either() -> None:
    found = node_object()
    assert not read(found).is_tainted
    found["spec"]["taints"].append({"key": TAINT, "value": "replace", "effect": "NoSchedule"})
    known = read(found)
    assert known.is_tainted
    assert not known.view.cordoned


def test_the_record_is_read_with_what_people_read() -> None:
    held = {"evidence": ["k"], "action": "replace", "sources": [], "boot_id": "b", "at_s": 1.0}
    record = {"quarantine": held, "by": "holdfast", "why": "x", "at": "t", "new": 1}
    known = read(node_object(annotations={RECORD: json.dumps(record)}))
    assert known.view.quarantine == Quarantine(("k",), "replace", (), "b", 1.0)
    assert known.last_decision == {"by": "holdfast", "why": "x", "at": "t"}


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{", "[" * 100_000, '{"history": 1}', '{"waiver": []}', " " * (MAX_RECORD + 1)),
        *(f'{{"released_at_s": {number}}}' for number in ("9" * 400, "9" * 5000, "1e300", "NaN")),
    ],
)
def test_an_unreadable_record_refuses_the_node_and_counts_as_out_if_it_is_tainted(text: str) -> None:
    found = node_object(annotations={RECORD: text})
    known = read(found)
    assert known.view.refused.startswith(f"annotation {RECORD} is unreadable: ")
    assert len(known.view.refused) < 300
    assert not known.view.cordoned
    found["spec"]["taints"].append({"key": TAINT, "effect": "NoSchedule"})
    assert read(found).view.cordoned


def test_a_node_that_cannot_be_read_is_refused_and_counts_as_out() -> None:
    known = read({**node_object(), "status": {"conditions": ["no object"]}})
    assert (known.name, known.uid, known.is_ours, known.view.cordoned) == ("a", "uid-a", True, True)
    assert known.view.refused.startswith("the Node is unreadable: ")


@pytest.mark.parametrize(
    ("annotations", "is_ours"),
    [
        ({}, False),
        ({RECORD: '{"history": [{"at_s": 1, "action": "none"}]}'}, False),
        ({REPORT: "{}"}, True),
        ({REQUEST: "release"}, True),
        ({RECORD: "{"}, True),
    ],
)
def test_a_node_without_an_agent_belongs_to_the_pool_only_if_something_is_to_be_done(
    annotations: dict[str, str], is_ours: bool
) -> None:
    assert read(node_object(annotations=annotations)).is_ours == is_ours


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("release", OperatorRequest("release")),
        (" release ", OperatorRequest("release")),
        ("quarantine: loud  fan\n", OperatorRequest("quarantine", "loud fan")),
        ("quarantine+drain: it: smells", OperatorRequest("quarantine", "it: smells", True)),
    ],
)
def test_a_request_is_read(text: str, expected: OperatorRequest) -> None:
    assert read_request(text) == expected
    assert read_request(request_text(expected)) == expected


@pytest.mark.parametrize("text", ["", "release: now", "quarantine", "quarantine:", "drain: x", "x" * 10_000])
def test_a_request_that_is_not_understood_is_refused_with_what_is_expected(text: str) -> None:
    refused = read_request(text).refused
    assert "expected 'release', 'quarantine: WHY' or 'quarantine+drain: WHY'" in refused
    assert len(refused) < 300


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=10,
)


@given(
    st.dictionaries(st.sampled_from([RECORD, REQUEST, REPORT]), _JSON.map(json.dumps) | st.text(max_size=20))
)
def test_any_annotation_is_read_without_an_exception(annotations: dict[str, Any]) -> None:
    known = read(node_object(annotations=annotations))
    assert known.name == "a"
    assert known.view.report is None


def test_a_report_that_is_not_json_is_refused() -> None:
    assert parsed_report('{"schema": 1}') == {"schema": 1}
    for text in ("", "5", "{", "x" * (200 << 10)):
        with pytest.raises(ValueError, match=r"JSON|characters"):
            parsed_report(text)


@pytest.mark.parametrize(
    ("conditions", "verdict"),
    [
        ([], None),
        ([{"type": "Ready", "status": "False", "message": "no"}], None),
        ([{"type": "GpuHealthy", "status": "Unknown", "message": "silent"}], ""),
        ([{"type": "GpuHealthy", "status": "True"}, {"type": "TrainingNodeHealthy", "status": "True"}], ""),
        (
            [{"type": "GpuHealthy", "status": "True"}, {"type": "TrainingNodeHealthy", "status": "False"}],
            "a fault",
        ),
        (
            [{"type": "GpuHealthy", "status": "False", "reason": "Xid79", "message": "GPU 3: lost."}],
            "GPU 3: lost",
        ),
    ],
)
def test_the_agents_verdict_is_a_clause(conditions: list[Any], verdict: str | None) -> None:
    found = node_object()
    found["status"]["conditions"] = conditions
    assert read(prune(found)).verdict == verdict


def test_the_times_of_a_verdict_are_those_of_its_faults() -> None:
    found = node_object()
    found["status"]["conditions"] = [
        {"type": "Ready", "status": "False", "lastTransitionTime": "1970-01-01T00:00:00Z"},
        {"type": "GpuHealthy", "status": "False", "lastTransitionTime": "1970-01-01T00:16:40Z"},
        {"type": "TrainingNodeHealthy", "status": "False"},
    ]
    assert read(prune(found)).verdict_times == ("1970-01-01T00:16:40Z", "")
    found["status"]["conditions"][1]["status"] = "True"
    assert read(prune(found)).verdict_times == ("",)
