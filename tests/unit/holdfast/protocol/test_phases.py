"""Only the table of phases contains the meaning and the spelling of a phase."""

from __future__ import annotations

import ast

import pytest

from holdfast.protocol.progress import (
    NOT_BEGUN,
    PHASES,
    Phase,
    PhaseKind,
    meaning_of,
    name_of,
    names_of_kinds,
    of_kinds,
    pause_phase,
    words_of,
)
from tests.unit.literals import ROOT, string_literals

PROGRAMS = ("holdfast", "supervisor", "sidecar", "nodeagent")
TABLE = "holdfast/protocol/progress.py"
WORDS = {name_of(phase) for phase in Phase} | {meaning.words for meaning in PHASES.values()}
# These words have other meanings too: orders, accounts, parts and sources of a state, a keyword of the shell.
AMBIGUOUS = {
    "data",
    "optimizer",
    "checkpoint",
    "paused",
    "idle",
    "snapshot",
    "done",
}  # "done" ends a loop of the shell


def test_each_phase_has_a_meaning_and_a_kind() -> None:
    assert set(PHASES) == set(Phase)
    kinds = [of_kinds(kind) for kind in PhaseKind]
    assert all(kinds), "a kind has no phase"
    assert sum(map(len, kinds)) == len(Phase)
    assert of_kinds(*PhaseKind) == set(Phase)


def test_the_kinds_are_those_of_a_training_loop() -> None:
    assert {kind: names_of_kinds(kind) for kind in PhaseKind} == {
        PhaseKind.START: {"joining", "restoring"},
        PhaseKind.STEP: {"data", "forward", "backward", "optimizer"},
        PhaseKind.TAIL: {"tail"},
        PhaseKind.PAUSE: {"eval", "checkpoint", "paused"},
        PhaseKind.COPY: {"snapshot"},
        PhaseKind.END: {"idle", "done"},
    }


@pytest.mark.parametrize("phase", Phase)
def test_each_phase_is_found_by_its_name(phase: Phase) -> None:
    assert meaning_of(name_of(phase)) is PHASES[phase]
    assert words_of(name_of(phase)) == PHASES[phase].words


@pytest.mark.parametrize("name", [NOT_BEGUN, "", "validation", "Phase.DATA"])
def test_an_unknown_phase_name_has_no_meaning_and_is_shown_unchanged(name: str) -> None:
    assert meaning_of(name) is None
    assert words_of(name) == name


def test_a_pause_has_the_phase_of_its_label_and_any_other_label_is_not_a_phase() -> None:
    assert pause_phase("eval") is Phase.EVAL
    assert pause_phase("checkpoint") is Phase.CHECKPOINT
    for label in (*WORDS - {"eval", "checkpoint"}, NOT_BEGUN, "validation", ""):
        assert pause_phase(label) is Phase.PAUSED, label
    labels = {phase: meaning.label for phase, meaning in PHASES.items() if meaning.label}
    assert {phase: pause_phase(label) for phase, label in labels.items()} == {each: each for each in labels}
    assert labels.keys() < of_kinds(PhaseKind.PAUSE)


@pytest.mark.parametrize("phase", Phase)
def test_each_phase_has_the_words_that_sentences_need(phase: Phase) -> None:
    needed = PHASES[phase].kind in (PhaseKind.START, PhaseKind.PAUSE)
    assert bool(PHASES[phase].doing) is needed


def test_no_other_module_spells_a_phase() -> None:
    spelled = string_literals(*PROGRAMS, but=TABLE)
    assert [each for each in spelled if each.text in WORDS - AMBIGUOUS] == []


def test_no_other_module_compares_a_phase_with_a_string_or_lists_phases() -> None:
    found: list[str] = []
    for path in sorted(each for program in PROGRAMS for each in (ROOT / program).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if name != TABLE:
            found += [f"{name}:{line}" for line in _lines_that_spell(ast.parse(path.read_bytes()))]
    assert found == []


@pytest.mark.parametrize(
    ("source", "spells"),
    [
        ('at.phase == "idle"', True),
        ('"data" != stall.phase_name', True),
        ('phase in ("data", other)', True),
        ('_STEPS = frozenset({"data", "optimizer"})', True),
        ('_STEPS = ["data", "optimizer"]', True),
        ('at.phase == _IDLE or order.do == "idle"', False),
        ('memory.phase == "running"', False),
    ],
)
def test_comparisons_with_phase_names_are_detected(source: str, spells: bool) -> None:
    assert bool(_lines_that_spell(ast.parse(source))) is spells


def _lines_that_spell(tree: ast.Module) -> list[int]:
    lines: list[int] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            about_phase = "phase" in ast.unparse(node)
            if about_phase and any(_words(each) for each in (node.left, *node.comparators)):
                lines.append(node.lineno)
        elif isinstance(node, (ast.Set, ast.Tuple, ast.List)) and len(_words(node)) > 1:
            lines.append(node.lineno)
    return lines


def _words(node: ast.AST) -> set[str]:
    return {
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value in WORDS
    }
