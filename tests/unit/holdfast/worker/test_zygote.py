"""The zygote imports the script's modules before it forks, and restores the garbage collector's settings."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.worker import zygote
from holdfast.worker.program import Program

WITHIN = "import gc; within = gc.get_threshold()[0]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder to import modules from. Restore the thresholds and the modules afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    thresholds = gc.get_threshold()
    yield tmp_path
    gc.set_threshold(*thresholds)
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def preload(*names: str) -> None:
    zygote.preload(Program("script", "python", (), "train.py", (), (), imports=names))


def test_no_garbage_collection_runs_while_the_zygote_imports_and_the_previous_setting_returns(
    folder: Path,
) -> None:
    (folder / "first_of_two.py").write_text(WITHIN)
    (folder / "second_of_two.py").write_text("raise ValueError('optional')\n")
    before = gc.get_threshold()
    (folder / "that_exits.py").write_text("import sys; sys.exit('only for TPUs')\n")
    preload("that_exits", "first_of_two", "second_of_two", "no_such_module")
    assert "that_exits" not in sys.modules
    assert sys.modules["first_of_two"].within == 0
    assert "second_of_two" not in sys.modules
    assert gc.get_threshold() == before
    assert before[0] > 0


def test_a_module_that_sets_the_collectors_thresholds_keeps_them(folder: Path) -> None:
    (folder / "with_thresholds.py").write_text("import gc; gc.set_threshold(5000, 20, 100)\n")
    preload("with_thresholds")
    assert gc.get_threshold() == (5000, 20, 100)
