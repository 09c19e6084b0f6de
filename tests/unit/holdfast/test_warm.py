"""What the zygote imports before it forks, and what it leaves as it was."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import warm
from holdfast.command import Program

WITHIN = "import gc; within = gc.get_threshold()[0]\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that modules are imported from; thresholds and modules are put back."""
    monkeypatch.syspath_prepend(str(tmp_path))
    known, thresholds = set(sys.modules), gc.get_threshold()
    yield tmp_path
    gc.set_threshold(*thresholds)
    for name in set(sys.modules) - known:
        del sys.modules[name]


def preload(*names: str) -> None:
    warm._preload(Program("script", "python", (), "train.py", (), (), imports=names))


def test_nobody_looks_for_garbage_while_the_zygote_imports_and_afterwards_as_before(folder: Path) -> None:
    (folder / "first_of_two.py").write_text(WITHIN)
    (folder / "second_of_two.py").write_text("raise ValueError('optional')\n")
    before = gc.get_threshold()
    preload("first_of_two", "second_of_two", "no_such_module")
    assert sys.modules["first_of_two"].within == 0
    assert "second_of_two" not in sys.modules
    assert gc.get_threshold() == before
    assert before[0] > 0


def test_a_module_that_sets_the_collector_s_thresholds_has_its_own(folder: Path) -> None:
    (folder / "with_thresholds.py").write_text("import gc; gc.set_threshold(5000, 20, 100)\n")
    preload("with_thresholds")
    assert gc.get_threshold() == (5000, 20, 100)


THREADS = """
import os, threading
{first}
from holdfast import warm
print(len(os.listdir("/proc/self/task")), warm._forkable())
os._exit(0)
"""


def threads_and_forkable(first: str) -> list[str]:
    """Return how many threads a process has after `first`, and whether it may be forked."""
    return subprocess.run(
        [sys.executable, "-c", THREADS.format(first=first)],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()


def test_threads_that_a_fork_puts_away_do_not_keep_a_zygote_from_forking() -> None:
    """A rank alone on its member has OpenBLAS's threads: its warm processes took seconds each."""
    assert threads_and_forkable("import numpy") == ["2", "True"]


def test_a_thread_that_stays_does() -> None:
    assert threads_and_forkable("threading.Thread(target=threading.Event().wait).start()") == ["2", "False"]
