"""The page for operators: its table of disasters is complete, and names tests and events that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.chaos.fault_table import CHAOS_FAULTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operating.md").read_text()
DISASTERS = PAGE.partition("<!-- disasters")[2].partition("\n\n[Failure modes]")[0]
ROWS = {found[1]: found[0] for found in re.finditer(r"^\| \*\*(.+?)\*\* .*\|$", DISASTERS, re.MULTILINE)}
TESTS = sorted(set(re.findall(r"`(tests/[^`]+)`", DISASTERS)))
CODE = [path.read_text() for path in (ROOT / "supervisor").rglob("*.py")]


@pytest.mark.parametrize(
    "disaster",
    [
        *(
            "crash",
            "hang",
            "deleted",
            "killed",
            "loses its network",
            "drained",
            "spot notice",
            "node agent is down",
        ),
        *("supervisor is down", "no supervisor", "API server is down", "webhook is down", "etcd", "clock"),
        *("storage", "all nodes reboot", "wrong policy", "storm"),
    ],
)
def test_each_disaster_has_a_row(disaster: str) -> None:
    assert [name for name in ROWS if disaster in name]


def test_each_row_fills_every_column() -> None:
    for name, row in ROWS.items():
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 6, name
        assert all(cells), name


def test_each_row_names_a_test() -> None:
    assert [name for name, row in ROWS.items() if "`tests/" not in row] == []


@pytest.mark.parametrize("test", TESTS)
def test_each_test_that_the_table_names_exists(test: str) -> None:
    path, _, name = test.partition("::")
    text = (ROOT / path).read_text()
    assert not name or re.search(rf"^(async )?def {name}\(", text, re.MULTILINE)


@pytest.mark.parametrize("event", sorted(set(re.findall(r"`([A-Z][a-z]+[A-Z]\w+)`", PAGE))))
def test_each_event_and_condition_that_the_page_names_exists(event: str) -> None:
    standard = {"Unknown"}
    assert event in standard or any(f'"{event}"' in text for text in CODE)


@pytest.mark.parametrize("metric", sorted(set(re.findall(r"`(holdfast_\w+)", PAGE))))
def test_each_metric_that_the_page_names_exists(metric: str) -> None:
    assert any(f'"{metric}"' in text for text in CODE)


@pytest.mark.parametrize("variable", sorted({need for each in CHAOS_FAULTS.values() for need in each.needs}))
def test_the_page_names_each_command_that_chaos_needs(variable: str) -> None:
    assert f"{variable}=" in PAGE
