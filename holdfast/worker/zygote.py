"""The zygote: imports what the script imports, once, and forks the warm processes from there.

A fork costs milliseconds where importing torch costs seconds. It is safe only while one thread exists
and no accelerator is open, so the zygote imports and does nothing else, and says so when an import broke
that: then every warm process is a new interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.process import fork_server, linux, title
from holdfast.protocol import codec, environment, rank_channel
from holdfast.protocol.rank_channel import WorkerMessage, WorkerOrder
from holdfast.state import random_state
from holdfast.worker import launcher_channel, nested_scripts, script, script_source
from holdfast.worker.program import Program


def boot_code(module: str) -> str:
    """Return what runs `module` by `python -c CODE first-of-path import-root`.

    On its path is nothing but what the script would see.
    """
    return (
        "import sys; sys.path[0] = sys.argv.pop(1); root = sys.argv.pop(1); "
        f"sys.path += [] if root in sys.path else [root]; from {module} import main; main()"
    )


BOOT_CODE = boot_code("holdfast.worker.zygote")


def zygote_spec(program: Program, **more: Any) -> str:
    """Return the settings of a process that runs `BOOT_CODE`. `kept`: descriptor of its sources, or -1."""
    return json.dumps({"program": asdict(replace(program, own=())), **more})


def main() -> None:
    """Be a zygote (serve forks until the launcher is gone) or, with `single`, one warm process."""
    given = json.loads(os.environ.pop(environment.WARM))
    program = codec.from_json(Program, given["program"])
    linux.end_with_parent(given["parent"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not given["single"]:
        title.take(title.RANKS_FORK_SERVER)
    source = script_source.load_main(given["kept"])
    preload(program)
    if given["single"]:
        control, log = socket.socket(fileno=given["control"]), given["log"]
        sys.exit(_run_as_worker(program, source, given, given["local_rank"], control, log))
    _serve(program, source, given, socket.socket(fileno=given["control"]))


def _serve(program: Program, source: bytes | None, given: dict[str, Any], control: socket.socket) -> None:
    for order, line, log, _ in fork_server.forks(control, "fork", given["parent"]):
        sys.exit(_run_as_worker(program, source, given, order.local_rank, line, log))


def fork_zygote(
    kept: script_source.ProgramSources, tracer: int, directory: str, nproc: int, *not_its_own: socket.socket
) -> Zygote:
    """Return a zygote of this process, which has imported what the script does and becomes a launcher.

    In the zygote itself it does not return.
    """
    ours, theirs = rank_channel.pair()
    launcher = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return Zygote(pid, ours)
    for each in (ours, *not_its_own):
        each.close()
    if kept.descriptor >= 0:
        os.close(kept.descriptor)  # the launcher's, for zygotes to come
    linux.end_with_parent(launcher)
    title.take(title.RANKS_FORK_SERVER)
    given = {"parent": launcher, "tracer": tracer, "directory": directory, "nproc": nproc}
    _serve(kept.program, kept.main, given, theirs)
    os._exit(0)


def _run_as_worker(
    program: Program,
    source: bytes | None,
    given: dict[str, Any],
    local_rank: int,
    control: socket.socket,
    log: int,
) -> int:
    """Turn this process into the warm process of one slot, and run the script in it."""
    os.setsid()
    linux.end_with_parent(given["parent"])
    linux.allow_tracing_by(given["tracer"])
    fork_server.redirect(log)
    script.install_tolerant_output()
    _reseed()
    os.environ.update(
        nested_scripts.rank_variables(Path(given["directory"]), local_rank), LOCAL_RANK=str(local_rank)
    )
    linux.set_name("warm")
    if "setproctitle" in sys.modules:
        title.give_back()
    else:
        title.take(f"warm process {local_rank}")
    mine = launcher_channel.LauncherChannel(
        control, Path(given["directory"]), local_rank, given["nproc"], script=Path(program.target).name
    )
    launcher_channel.set_current(mine)
    mine.say(WorkerMessage("born", os.getpid()))
    if not program.joins:
        from holdfast.worker import unmodified

        unmodified.wait_for_start(mine)
    return script.run(program, mine, source)


def _reseed() -> None:
    """Forks share the zygote's random state; a process of its own would have had fresh seeds."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        random_state.reseed_numpy(numpy)


def preload(program: Program) -> None:
    """Import what the script imports from elsewhere, also what only a branch imports that is never taken.

    What fails here is left to the script: it fails there as well, and is told, or is never imported.

    What an import makes, stays. To look for garbage in it again and again is a fifth of torch's import.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    _import_all(program)
    if gc.get_threshold()[0] == 0:  # unless a module has set its own
        gc.set_threshold(*thresholds)


def _import_all(program: Program) -> None:
    for name in program.imports:
        try:
            importlib.import_module(name)
        except BaseException:
            # An import may raise anything, and optional ones often do: sys.exit() and pytest.skip() included.
            # The script decides, not we. A signal raises nothing here: those that end us have no handler.
            sys.modules.pop(name, None)
    if "torch" in sys.modules:
        importlib.import_module("torch.distributed")
        importlib.import_module("torch.nn.parallel.distributed")
        importlib.import_module("torch._dynamo")  # the first optimizer imports it: 1 to 2 s
    if program.joins:  # what `join` and `protect` will need: 15 to 70 ms of a recovery otherwise
        importlib.import_module("holdfast.training.session")
        importlib.import_module("holdfast.training.protection.rank_protection")


# A launcher's end of its zygote, from which the warm processes are forked.


ENDING_S = 0.5  # for one that has closed its line to be gone: the kernel does both at a process's end
END_S = 2.0  # after SIGKILL; one that the kernel holds for longer is collected by a sweep


@dataclass(slots=True, eq=False)
class Zygote:
    """A child of ours. It is `ready` once it has said so; its exit status is ours to collect."""

    pid: int
    line: socket.socket
    ready: bool = False
    log: Path | None = None  # what it prints to; None where that is the launcher's own
    killed: bool = False  # by us

    def fork(self, local_rank: int, control: int, log: int) -> bool:
        """Ask for a process with these descriptors; False when nobody is there to ask."""
        try:
            rank_channel.send(self.line, WorkerOrder("fork", local_rank=local_rank), (control, log))
        except rank_channel.Closed:
            return False
        return True

    def kill(self) -> None:
        self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill it and collect it. The line is closed."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        linux.collect_killed(self.pid, END_S)
        self.line.close()

    def lost(self) -> int | None:
        """Return how one ended that closed its line, as its wait status, and end it.

        None when nobody can tell: it was we who killed it.
        """
        status = None if self.killed else self._ended()
        self.end()
        return status

    def _ended(self) -> int | None:
        with contextlib.suppress(OSError):  # nobody's any more
            pidfd = os.pidfd_open(self.pid)
            try:
                select.select([pidfd], [], [], ENDING_S)
            finally:
                os.close(pidfd)
        return linux.collected(self.pid)
