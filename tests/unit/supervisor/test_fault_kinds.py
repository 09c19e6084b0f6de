from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import supervisor
from supervisor import wording
from supervisor.decision.decide import RULES
from supervisor.decision.transition import TRANSITIONS
from supervisor.fault_kinds import FAULT_KINDS, UNKNOWN, FaultName, kind_of
from supervisor.observability.metrics import Metrics
from supervisor.view import replica_divergence
from supervisor.view.model import PHASES, JobPhase

SOURCES = sorted(Path(supervisor.__file__).parent.rglob("*.py"))


def made() -> Iterator[str]:
    """Yield every kind that the supervisor's code gives to a `Fault` as a literal."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Fault" and node.args:
                yield from _literals(node.args[0])


def compared() -> Iterator[str]:
    """Yield every literal that the supervisor's code compares a fault's kind with."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and getattr(node.left, "attr", "") == "kind":
                yield from (each for right in node.comparators for each in _literals(right))


def _literals(node: ast.expr) -> list[str]:
    return [
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value.isidentifier()
    ]


def test_the_types_list_the_words_of_the_tables() -> None:
    assert list(get_args(FaultName)) == list(FAULT_KINDS)
    assert list(get_args(JobPhase)) == list(PHASES)


def test_the_table_has_all_kinds_that_the_code_creates() -> None:
    found = {*made(), replica_divergence.KIND}
    assert found >= {"lost_track", "hang", "restore", "diverged"}
    assert found <= set(FAULT_KINDS)


@pytest.mark.parametrize("name", FAULT_KINDS)
def test_each_kind_has_a_sentence_that_names_the_affected_rank_or_member(name: str) -> None:
    said = wording.what({"kind": name, "rank": 3, "member": "m1", "step": 7})
    assert said.endswith(" at step 7")
    assert name in ("diverged", "lost_track") or said.startswith(("rank 3 ", "member m1 "))
    assert "{" not in wording.what({"kind": name, "rank": -1, "member": ""})


def test_a_kind_of_a_later_version_is_named_in_the_sentence() -> None:
    assert kind_of("melted") is UNKNOWN
    assert wording.what({"kind": "melted", "rank": 0}) == "rank 0 failed (melted)"
    assert wording.what({}) == "a rank failed"


@pytest.mark.parametrize("name", FAULT_KINDS)
def test_each_kind_is_a_label_of_the_metric_from_the_beginning(name: str) -> None:
    metrics = Metrics()
    assert metrics.registry.get_sample_value("holdfast_incidents_total", {"kind": name}) == 0.0


def test_causes_are_listed_before_the_symptoms_that_they_explain() -> None:
    def order(*names: str) -> bool:
        found = [FAULT_KINDS[name].precedence for name in names]
        return found == sorted(found)

    assert order("bad_input", "member_lost", "nan", "crash", "hang", "victim")
    assert FAULT_KINDS["victim"].precedence == max(each.precedence for each in FAULT_KINDS.values())


def test_every_bad_number_spoils_the_state() -> None:
    assert all(each.spoils_state for each in FAULT_KINDS.values() if each.is_bad_number)


def test_every_phase_has_a_rule_and_a_row_of_transitions() -> None:
    assert list(RULES) == list(PHASES) == list(TRANSITIONS)
