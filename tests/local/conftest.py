"""Fixtures of the tests that start real processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.local.running import SCRIPTS, Run

Start = Callable[..., Run]

# A shell makes its background processes ignore some signals, and a run keeps them ignored, as after nohup.
for _ignored in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_ignored) is signal.SIG_IGN:
        signal.signal(_ignored, signal.SIG_DFL)


@pytest.fixture(scope="module")
def start_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start runs that the tests of a module share."""
    yield from _starter(lambda: tmp_path_factory.mktemp("shared"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start runs, and kill those that the test leaves behind."""
    yield from _starter(lambda: tmp_path)


def _starter(folder: Callable[[], Path]) -> Iterator[Start]:
    runs: list[Run] = []

    def start(options: str, script: str, *args: object, into: str = "", **environment: str) -> Run:
        """Run one of the scripts here, or `script` unchanged: a path, a name in the folder, or `-m`."""
        ours = SCRIPTS / script
        command = [str(ours) if ours.is_file() else script, *map(str, args)]
        runs.append(Run(folder() / into, options, command, **environment))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()
