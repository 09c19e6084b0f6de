from __future__ import annotations

import os
import selectors
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import channel, command
from holdfast.channel import Say
from holdfast.crew import Crew
from holdfast.launcher import Launcher
from holdfast.launcher_messages import Ending, Launch, LauncherOrder, RankStart
from holdfast.listeners import Refused
from holdfast.nest import Home, Nest, Process


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


def test_what_a_process_said_last_is_heard_though_its_end_is_told_first(launcher: Launcher) -> None:
    """As where a loader worker holds the line open: no end of it tells of the process's."""
    ours, theirs = channel.pair()
    child = os.fork()
    if child == 0:
        os._exit(1)
    process = Process(0, ours, launcher.nest.home.logs / "log", child, os.pidfd_open(child))
    ranks = (RankStart(0, 0),)
    launcher.crew.begin(Launch(1, 1, 1, "", 0, 0, 0.0), ranks)
    launcher.crew.take(launcher.crew.seats[0], process)
    for each in (ours, process.pidfd):
        launcher.selector.register(each, selectors.EVENT_READ)
    said = Ending(0, 1, message="ValueError: a word")
    channel.send(theirs, Say("failing", pid=child, ending=said))
    theirs_too = theirs.dup()
    theirs.close()
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    launcher.on_gone(process)
    ended = launcher.crew.seats[0].ending
    assert ended is not None
    assert "a word" in ended.message
    theirs_too.close()
