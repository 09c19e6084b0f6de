"""Which mutants are drawn, and which results count as noticed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.harness.launchers import Failed
from bench.mutation import mutation
from bench.mutation.mutation import Mutant, chosen, noticed, read, report

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RESULTS = """
    supervisor.view.members.x_is_there__mutmut_1: killed
    supervisor.view.members.x_is_there__mutmut_2: survived
    holdfast.snapshot.private_store.xǁPrivateStoreǁput__mutmut_7: no tests
    holdfast.snapshot.private_store.xǁPrivateStoreǁput__mutmut_8: timeout
    holdfast.protocol.lineage.x_since__mutmut_3: not checked
"""


def test_results_are_read_with_the_module_of_functions_and_methods() -> None:
    found = read(RESULTS)
    assert [each.module for each in found] == [
        *["supervisor.view.members"] * 2,
        *["holdfast.snapshot.private_store"] * 2,
        "holdfast.protocol.lineage",
    ]
    assert found[1] == Mutant("supervisor.view.members.x_is_there__mutmut_2", "survived")


def test_only_checked_mutants_count_and_a_timeout_counts_as_noticed() -> None:
    assert noticed(read(RESULTS)) == (2, 4)


def test_the_report_names_each_survivor_and_the_number_of_unchecked_mutants() -> None:
    text = report(read(RESULTS))
    assert "x_is_there__mutmut_2" in text
    assert "x_is_there__mutmut_1" not in text
    assert "put__mutmut_7" in text
    assert "50.0%" in text
    assert "1 mutants are not checked" in text
    assert report([]) == "no mutant has been checked"


def test_a_sample_depends_on_the_seed_and_the_named_modules_only() -> None:
    mutants = [Mutant(f"a.{module}.x_f__mutmut_{at}", "not checked") for module in "bc" for at in range(50)]
    drawn = chosen(mutants, ["a.b.*"], 10, 1)
    assert len(set(drawn)) == 10
    assert all(name.startswith("a.b.") for name in drawn)
    assert drawn == chosen(mutants, ["a.b.*"], 10, 1)
    assert drawn != chosen(mutants, ["a.b.*"], 10, 2)
    assert len(chosen(mutants, [], 0, 1)) == len(chosen(mutants, [], 1000, 1)) == 100


def test_without_mutmut_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutation, "MUTMUT", mutation.MUTMUT.with_name("no-mutmut"))
    with pytest.raises(Failed, match="make mutate"):
        mutation.main([])


def test_a_sample_below_zero_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mutation.main(["--sample", "-1"])
    assert (
        "invalid value '-1' for --sample: expected a number of mutants, 0 or more" in capsys.readouterr().err
    )


def test_all_modules_and_tests_that_the_settings_name_exist() -> None:
    root = Path(__file__).parents[4]
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["mutmut"]
    modules, tests = settings["only_mutate"], settings["pytest_add_cli_args_test_selection"]
    assert [pattern for pattern in modules if not list(root.glob(pattern))] == []
    assert [path for path in tests if not (root / path).exists()] == []
