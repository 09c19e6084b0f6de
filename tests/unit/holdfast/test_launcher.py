from __future__ import annotations

import os
import selectors
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import command
from holdfast.crew import Crew
from holdfast.launcher import Launcher
from holdfast.launcher_messages import Launch, LauncherOrder
from holdfast.listeners import Refused
from holdfast.nest import Home, Nest


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    """One that is not served: it starts nothing."""
    directory = Path(tempfile.mkdtemp())
    home = Home(directory, directory, "m0", 1, directory, os.getppid())
    program = command.parse([shutil.which("true") or "true"], Path.cwd())
    nest = Nest(program, home, selectors.DefaultSelector(), lambda *_: None, lambda *_: None, "cold")
    made = Launcher(Crew(home), nest, directory)
    yield made
    made.offer.close()
    shutil.rmtree(directory)


@pytest.mark.parametrize("do", ["stop", "run", "secure", "kill", "settle", "look", "where", "drill"])
def test_a_supervisor_that_was_replaced_has_nothing_done(launcher: Launcher, do: str) -> None:
    launcher.obey(LauncherOrder("settle", 0, epoch=3))
    assert launcher.state().epoch == 3
    before = launcher.state()
    late = LauncherOrder(do, 1, Launch(1, 1, 1, "", 0, 0, 0.0), epoch=2)
    with pytest.raises(Refused, match="of epoch 2: a supervisor of epoch 3 has taken the run over"):
        launcher.obey(late)
    assert launcher.state() == before
    launcher.obey(LauncherOrder("stop", epoch=3))
    assert launcher.stopping
