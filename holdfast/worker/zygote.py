"""The zygote: a process that imports the script's modules once, and forks the warm processes.

A fork takes milliseconds, whereas importing torch takes seconds. A fork is safe only while the process has a
single thread and no open accelerator, so the zygote does nothing but import. If an import breaks one of these
conditions, the zygote reports this, and every warm process is started as a new interpreter instead.
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


def boot_code(module: str, function: str = "main") -> str:
    """Return code that calls a function of `module`, for `python -c CODE first-of-path import-root`.

    `sys.path` is that of the script, with `import-root` appended.
    """
    return (
        "import sys; sys.path[0] = sys.argv.pop(1); root = sys.argv.pop(1); "
        f"sys.path += [] if root in sys.path else [root]; from {module} import {function}; {function}()"
    )


BOOT_CODE = boot_code("holdfast.worker.zygote")
COLD_BOOT_CODE = boot_code("holdfast.worker.zygote", "run_cold")


def zygote_spec(program: Program, **more: Any) -> str:
    """Return the settings of a process that runs `BOOT_CODE`. `kept`: descriptor of its sources, or -1."""
    return json.dumps({"program": asdict(replace(program, own=())), **more})


def main() -> None:
    """Run as a zygote, which serves forks until the launcher ends; with `single`, as one warm process."""
    given = json.loads(os.environ.pop(environment.WARM))
    program = codec.from_json(Program, given["program"])
    linux.end_with_parent(given["parent"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not given["single"]:
        title.set_title(title.RANKS_FORK_SERVER)
    source = script_source.load_main(given["kept"])
    preload(program)
    if given["single"]:
        control, log = socket.socket(fileno=given["control"]), given["log"]
        sys.exit(_run_as_worker(program, source, given, given["local_rank"], control, log))
    _serve(program, source, given, socket.socket(fileno=given["control"]))


def run_cold() -> None:
    """Run as a rank without a warm process, because a file of the script has changed since the run began.

    The script runs in the version with which the run began. The interpreter prints its exceptions.
    """
    descriptor = int(os.environ.pop(environment.SOURCES))
    sources = script_source.load(descriptor)
    os.close(descriptor)
    script.run_unsupervised(sources.program, sources.main)


def _serve(program: Program, source: bytes | None, given: dict[str, Any], control: socket.socket) -> None:
    for order, line, log, _ in fork_server.forks(control, "fork", given["parent"]):
        sys.exit(_run_as_worker(program, source, given, order.local_rank, line, log))


def fork_zygote(
    kept: script_source.ProgramSources, tracer: int, directory: str, nproc: int, *not_its_own: socket.socket
) -> Zygote:
    """Fork a zygote from this process, and return its handle. Does not return in the zygote itself.

    This process has already imported what the script imports, and then becomes a launcher.
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
        os.close(kept.descriptor)  # only the launcher needs this descriptor, for later zygotes
    linux.end_with_parent(launcher)
    title.set_title(title.RANKS_FORK_SERVER)
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
    """Turn this process into the warm process of one local rank, and run the script in it."""
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
        title.set_title(f"warm process {local_rank}")
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
    """Seed the random generators, because forks inherit the zygote's state, unlike new interpreters."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        random_state.reseed_numpy(numpy)


def preload(program: Program) -> None:
    """Import the installed modules that the script imports, including imports in branches that may never run.

    Failures are ignored: if the script imports the module, the import fails there too and is reported.

    The garbage collector is off during the imports, because the objects that they create stay alive and
    collections would take a fifth of torch's import time.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    _import_all(program)
    if gc.get_threshold()[0] == 0:  # keep a threshold that a module has set
        gc.set_threshold(*thresholds)


def _import_all(program: Program) -> None:
    for name in program.imports:
        try:
            importlib.import_module(name)
        except BaseException:
            # An import may raise anything, including the exceptions of sys.exit() and pytest.skip(), and
            # optional imports often do. Only the script can decide whether a failure matters. No signal
            # handler raises here, because the signals that end this process have no handlers.
            sys.modules.pop(name, None)
    if "torch" in sys.modules:
        importlib.import_module("torch.distributed")
        importlib.import_module("torch.nn.parallel.distributed")
        importlib.import_module("torch._dynamo")  # the first optimizer imports it: 1 to 2 s
    if program.joins:  # `join` and `protect` need these; importing them later costs a recovery 15 to 70 ms
        importlib.import_module("holdfast.training.session")
        importlib.import_module("holdfast.training.protection.rank_protection")


# The launcher's handle to its zygote.


# How long a zygote may take to end after its connection has closed, as it does when a process ends.
ENDING_S = 0.5
END_S = 2.0  # how long a zygote may take to end after SIGKILL; if it takes longer, a sweep reaps it later


@dataclass(slots=True, eq=False)
class Zygote:
    """A zygote, a child of this process. `ready` is set once the zygote has reported that it is ready."""

    pid: int
    line: socket.socket
    ready: bool = False
    log: Path | None = None  # its log file; None if it writes to the log of the launcher
    killed: bool = False  # whether this process has killed it

    def fork(self, local_rank: int, control: int, log: int) -> bool:
        """Request a process with these descriptors; return False if the zygote has ended."""
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
        """Kill the zygote, collect its exit status, and close the connection."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        linux.collect_killed(self.pid, END_S)
        self.line.close()

    def lost(self) -> int | None:
        """End a zygote that has closed its connection, and return its wait status.

        Returns None if this process killed it, or if the status cannot be determined.
        """
        status = None if self.killed else self._ended()
        self.end()
        return status

    def _ended(self) -> int | None:
        with contextlib.suppress(OSError):  # the process no longer exists
            pidfd = os.pidfd_open(self.pid)
            try:
                select.select([pidfd], [], [], ENDING_S)
            finally:
                os.close(pidfd)
        return linux.collected(self.pid)
