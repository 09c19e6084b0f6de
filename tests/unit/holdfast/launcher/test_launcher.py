"""The launcher's orders, its port, and how its processes end."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest

from holdfast.inspection.out_of_memory import OutOfMemoryKills
from holdfast.launcher.launcher import Launcher
from holdfast.launcher.sidecar_server import OrderRefused
from holdfast.launcher.workers.warm_pool import MemberSettings
from holdfast.launcher.workers.worker_group import WorkerGroup
from holdfast.launcher.workers.worker_process import Worker, WorkerProcess
from holdfast.launcher.workers.zygote_handle import Zygote
from holdfast.protocol import environment, rank_channel
from holdfast.protocol.launcher_messages import (
    OUT_OF_MEMORY,
    Ending,
    Launch,
    LauncherAction,
    LauncherOrder,
    RankStart,
)
from holdfast.protocol.rank_channel import WorkerMessage, WorkerOrder
from holdfast.worker import program
from holdfast.worker.script_source import ProgramSources


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    """Yield a launcher that does not run its loop, so it starts no process."""
    directory = Path(tempfile.mkdtemp())
    settings = MemberSettings(directory, directory, "m0", 1, directory, os.getppid())
    parsed = program.parse([shutil.which("true") or "true"], Path.cwd())
    made = Launcher(ProgramSources(parsed), settings, "cold")
    yield made
    made.rendezvous.close()
    shutil.rmtree(directory)


@pytest.mark.parametrize("joins", [False, True])
def test_the_port_is_free_before_a_script_that_listens_on_it_itself_is_released(
    launcher: Launcher, joins: bool
) -> None:
    """With torch already imported, the script's first line binds the port before the launcher runs again."""
    ours, theirs = rank_channel.pair()
    pool = launcher.pool
    pool.strategy = "park"
    pool.sources = ProgramSources(replace(pool.program, kind="script", joins=joins))
    port = launcher.rendezvous.getsockname()[1]
    free: list[bool] = []

    class Looks(WorkerGroup):
        def start(self, worker: Worker, process: WorkerProcess, descriptors: tuple[int, ...]) -> bool:
            free.append(_is_free(port))
            return super().start(worker, process, descriptors)

    launcher.group = Looks(pool.settings)
    launcher.group.begin(Launch(1, 1, 1, "", 0, 0, 0.0), (RankStart(0, 0),))
    pool.processes[0] = WorkerProcess(0, ours, pool.settings.logs / "log", os.getpid(), -1, parked=True)
    launcher.assign_processes()
    _, descriptors = rank_channel.receive(theirs, WorkerOrder)
    assert (free, len(descriptors)) == ([not joins], int(joins))
    for each in descriptors:
        os.close(each)
    assert _is_free(port)
    assert not _is_free(launcher.state().port), "a port must be reserved for the next generation"
    launcher.group.workers = ()
    for line in (ours, theirs):
        line.close()


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def test_an_order_of_a_newer_version_is_refused_and_ends_nothing(launcher: Launcher) -> None:
    unknown = LauncherOrder(cast("Any", "rebalance"), 0)
    with pytest.raises(OrderRefused, match="unknown order 'rebalance': expected run, stop, secure"):
        launcher.obey(unknown)
    assert not launcher.stopping


@pytest.mark.parametrize("do", get_args(LauncherAction))
def test_orders_of_a_supervisor_that_was_replaced_are_refused(launcher: Launcher, do: LauncherAction) -> None:
    launcher.obey(LauncherOrder("settle", 0, epoch=3))
    assert launcher.state().epoch == 3
    before = launcher.state()
    late = LauncherOrder(do, 1, Launch(1, 1, 1, "", 0, 0, 0.0), epoch=2)
    with pytest.raises(OrderRefused, match="of epoch 2: a supervisor of epoch 3 has taken over the run"):
        launcher.obey(late)
    assert launcher.state() == before
    launcher.obey(LauncherOrder("stop", epoch=3))
    assert launcher.stopping


@pytest.mark.parametrize("do", [each for each in get_args(LauncherAction) if each not in ("run", "stop")])
def test_an_order_about_other_ranks_than_the_current_ones_has_no_effect(
    launcher: Launcher, do: LauncherAction
) -> None:
    unusable: Any = SimpleNamespace(generation=3)
    launcher.group, launcher.pool = unusable, unusable
    for other in (2, 4):
        launcher.obey(LauncherOrder(do, other))
    with pytest.raises(AttributeError):
        launcher.obey(LauncherOrder(do, 3))


def ended_rank(launcher: Launcher, code: int, said: Ending) -> Ending:
    """Return the launcher's record of a rank that reported `said` and then exited with `code`."""
    ours, theirs = rank_channel.pair()
    child = os.fork()
    if child == 0:
        os._exit(code)
    process = WorkerProcess(0, ours, launcher.pool.settings.logs / "log")
    launcher.group.begin(Launch(1, 1, 1, "", 0, 0, 0.0), (RankStart(0, 0),))
    launcher.group.workers[0].process = process
    launcher.watch.add(process)
    launcher.watch.born(process, child)
    rank_channel.send(theirs, WorkerMessage("failing", pid=child, ending=said))
    theirs.close()
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    launcher.watch.ended(process)
    ended = launcher.group.workers[0].ending
    assert ended is not None
    return ended


UNWINDING = Ending(5, 1, fail="exception", message="ValueError: a word", unwinding=True, overdue=True)


def test_a_rank_whose_finally_block_exits_with_0_has_not_failed(launcher: Launcher) -> None:
    ended = ended_rank(launcher, 0, UNWINDING)
    assert (ended.code, ended.fail, ended.is_good) == (0, "", True)


def test_a_rank_whose_exception_unwound_has_failed_with_its_exit_code(launcher: Launcher) -> None:
    assert ended_rank(launcher, 3, UNWINDING) == replace(UNWINDING, code=3, unwinding=False, overdue=False)


@pytest.mark.parametrize("printed", ["", "importing torch\n"])
def test_a_warm_process_that_the_kernel_kills_at_the_memory_limit_is_explained(
    launcher: Launcher, printed: str
) -> None:
    """Whatever it has printed before: otherwise the run would end with a mere SIGKILL."""
    group = CountedKills(launcher)
    ours, theirs = rank_channel.pair()
    process = WorkerProcess(0, ours, launcher.pool.settings.logs / "log")
    process.log.write_text(printed)
    launcher.pool.processes[0] = process
    launcher.watch.add(process)
    launcher.watch.born(process, killed_child())
    theirs.close()
    group.kills(1)
    launcher.watch.ended(process)
    ended = launcher.pool.last_ending
    assert ended is not None
    assert ended.message == f"{CountedKills.WHY}\n{printed}"


def test_a_zygote_that_the_kernel_kills_at_the_memory_limit_is_explained(launcher: Launcher) -> None:
    """It imports torch, so it is the first to reach a low limit."""
    group = CountedKills(launcher)
    ours, theirs = rank_channel.pair()
    launcher.pool.zygote = Zygote(killed_child(), ours)
    launcher.selector.register(ours, selectors.EVENT_READ)
    theirs.close()
    group.kills(1)
    launcher.pool._on_zygote()
    ended = launcher.pool.last_ending
    assert ended is not None
    assert ended.message.startswith(f"{CountedKills.WHY}\nthe process that imports the script's modules was")


class CountedKills:
    """The memory cgroup of a launcher, in a folder."""

    WHY = f"{OUT_OF_MEMORY}: the kernel killed it at the memory limit of 150 MiB of its cgroup"

    def __init__(self, launcher: Launcher) -> None:
        self._folder = launcher.pool.settings.directory / "cgroup"
        self._folder.mkdir()
        (self._folder / "membership").write_text("0::/\n")
        (self._folder / "memory.max").write_text(f"{150 << 20}\n")
        self.kills(0)
        vars(launcher.memory_kills).update(vars(OutOfMemoryKills(self._folder / "membership", self._folder)))

    def kills(self, count: int) -> None:
        (self._folder / "memory.events").write_text(f"oom_kill {count}\n")


def killed_child() -> int:
    """Return the pid of a child that SIGKILL has ended, and that nobody has reaped."""
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    return child


def test_a_signal_that_is_repeated_in_a_pod_does_not_kill_the_ranks_before_their_state_is_saved(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when `timeout` runs torchrun, or when the kubelet is restarted while the pod ends."""
    waits: list[tuple[float, Callable[[], object]]] = []
    monkeypatch.setenv(environment.LEAVE_S, "20")
    monkeypatch.setattr(type(launcher.sidecar), "is_connected", True)
    monkeypatch.setattr(launcher.group, "alive", lambda: True)
    monkeypatch.setattr(launcher, "after", lambda wait_s, then: waits.append((wait_s, then)))
    for _ in range(3):
        launcher._on_wake(bytes([signal.SIGTERM]))
    assert not launcher.stopping
    [(wait_s, then)] = waits
    assert wait_s == 20
    then()
    assert launcher.stopping
