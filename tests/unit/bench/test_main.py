from __future__ import annotations

import pytest

from bench.__main__ import NAMES, main


def test_help_lists_every_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in NAMES)


def test_an_unknown_bench_is_named_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recover"]) == 2
    assert "'recover'" in capsys.readouterr().err
