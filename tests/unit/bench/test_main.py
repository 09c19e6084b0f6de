from __future__ import annotations

import importlib.util

import pytest

from bench.__main__ import MODULES, main


def test_help_lists_every_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in MODULES)


def test_an_unknown_bench_is_refused_with_the_list_of_benches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recover"]) == 2
    assert "'recover'" in capsys.readouterr().err


@pytest.mark.parametrize("module", MODULES.values())
def test_the_module_of_every_bench_exists(module: str) -> None:
    assert importlib.util.find_spec(module) is not None
