from __future__ import annotations

import csv

import pytest

from bench.quarantine import fault_mixes, quarantine
from bench.quarantine.simulated_node import Node, Sign


def test_the_fault_mixes_equal_the_published_ones() -> None:
    with fault_mixes.FILE.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    total = {mix: sum(int(row["count"]) for row in rows if row["mix"] == mix) for mix in fault_mixes.FLEETS}
    assert total == {"llama3": 419, "byterobust": 55_365 - 9_582}, "manual restarts are excluded"


def test_a_rate_is_per_node_and_year() -> None:
    [gpu] = [each for each in fault_mixes.load(("llama3",)) if each.component == "faulty_gpu"]
    assert gpu.per_node_year == pytest.approx(148 / 2048 * 365 / 54)
    assert (gpu.sources, gpu.driver, gpu.kind) == (("kmsg", "nvml_events"), True, "lasting")


def test_a_view_of_a_node_does_not_contain_its_real_faults() -> None:
    node = Node("a", "r", 0.0, lemon=True)
    before = node.view(1000.0)
    node.truths.add("a fault that no agent has seen")
    assert node.view(1000.0) == before


def test_a_silent_agent_shows_its_last_report() -> None:
    node = Node("a", "r", 10.0, lemon=False)
    node.hush(100.0)
    node.found(Sign("k", "unhealthy", "replace", ("kmsg",), 120.0), 120.0)
    seen = node.view(200.0)
    assert seen.report is not None
    assert (seen.report.findings, seen.silent_s) == ((), 100.0)
    node.speak(300.0)
    assert node.view(305.0).report.findings[0].held_s == 180.0  # type: ignore[union-attr]


def test_contradictory_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for given in (["--nodes", "0"], ["--days", "0"], ["--max-share", "2"]):
        with pytest.raises(SystemExit):
            quarantine.main(given)
    assert "expected" in capsys.readouterr().err
