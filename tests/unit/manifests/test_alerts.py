"""The alerts use metrics that exist, and each has a section in the runbooks."""

from __future__ import annotations

import re
from typing import Any

import pytest

from supervisor.nodes import announcements
from supervisor.observability import cluster_metrics
from tests.unit.literals import ROOT
from tests.unit.manifests.kubernetes_files import OVERLAYS, load

PLAIN = ROOT / "manifests" / "rules.yaml"
TESTS = ROOT / "manifests" / "rules_test.yaml"
BOOK = ROOT / "docs" / "runbooks" / "cluster.md"
GROUPS: list[dict[str, Any]] = load(PLAIN)[0]["groups"]
RULES = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
METRICS = {each._name: each for each in (*announcements.METRICS, *cluster_metrics.METRICS)}
_USED = re.compile(r"\b(holdfast_\w+)(?:\{(\w+)=\"(\w+)\"\})?")


def test_the_operator_gets_the_same_alerts() -> None:
    [rule] = load(OVERLAYS / "monitoring" / "rules.yaml")
    assert rule["kind"] == "PrometheusRule"
    assert rule["spec"]["groups"] == GROUPS


@pytest.mark.parametrize("name", RULES)
def test_an_alert_reads_metrics_that_the_supervisor_exports(name: str) -> None:
    used = _USED.findall(RULES[name]["expr"])
    assert used
    for metric, label, value in used:
        labels = METRICS[metric]._labelnames
        assert labels == ((label,) if label else ())
        if label == "state":
            assert value in announcements.STATES
        elif label == "result":
            assert value in announcements.RESULTS


def test_every_alert_has_a_section_with_all_parts_and_a_test() -> None:
    found = re.findall(r"^## (\w+)\n((?:(?!^## ).*\n?)+)", BOOK.read_text(), re.MULTILINE)
    assert [name for name, _ in found] == list(RULES)
    for name, text in found:
        places = [text.find(part) for part in ("**Means**", "**Look**", "**Do**")]
        assert -1 not in places, name
        assert places == sorted(places), name
        assert RULES[name]["annotations"]["runbook"] == f"docs/runbooks/cluster.md#{name.lower()}"
    tried = {
        each["alertname"]
        for test in load(TESTS)[0]["tests"]
        for each in test["alert_rule_test"]
        if each["exp_alerts"]
    }
    assert tried == {*RULES}
