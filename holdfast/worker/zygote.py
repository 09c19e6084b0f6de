"""The zygote: a process that imports the script's modules once, and then forks the warm processes.

A fork takes milliseconds; importing torch takes seconds. Forking is safe only while the process has a single
thread and no open accelerator, so the zygote only imports modules. If an import breaks one of these
conditions, the zygote reports it, and every warm process starts as a new interpreter instead.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import signal
import socket
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from holdfast.process import fork_server, gpu_assignment, linux, title
from holdfast.protocol import codec, environment
from holdfast.protocol.rank_channel import WorkerMessage
from holdfast.state import random_state
from holdfast.worker import launcher_channel, nested_scripts, script, script_source
from holdfast.worker.program import Program


def boot_code(module: str, function: str = "main") -> str:
    """Return code that calls a function of `module`, for `python -c CODE first-of-path import-root`.

    The code sets `sys.path` as the script expects it, with `import-root` appended.
    """
    return (
        "import sys; sys.path[0] = sys.argv.pop(1); root = sys.argv.pop(1); "
        f"sys.path += [] if root in sys.path else [root]; from {module} import {function}; {function}()"
    )


BOOT_CODE = boot_code("holdfast.worker.zygote")
COLD_BOOT_CODE = boot_code("holdfast.worker.zygote", "run_cold")
MEMBERS_BOOT_CODE = boot_code("holdfast.launcher.member_template")  # of the fork server for members


def zygote_spec(program: Program, **more: Any) -> str:
    """Return the settings for a process that runs `BOOT_CODE`.

    The setting `kept` is the descriptor of the sources, or -1.
    """
    return json.dumps({"program": asdict(replace(program, own=())), **more})


def main() -> None:
    """Run as a zygote, and serve forks until the launcher exits. With `single`, run as one warm process."""
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
    gpu_assignment.before_forks()
    serve(program, source, given, socket.socket(fileno=given["control"]))


def run_cold() -> None:
    """Run as a rank without a warm process, using the version of the script that the run began with.

    This is needed if the script's file has changed since then. The interpreter prints the exceptions.
    """
    descriptor = int(os.environ.pop(environment.SOURCES))
    sources = script_source.load(descriptor)
    os.close(descriptor)
    script.run_unsupervised(sources.program, sources.main)


def serve(program: Program, source: bytes | None, given: dict[str, Any], control: socket.socket) -> None:
    """Fork a warm process for each order on `control`, until the launcher exits."""
    for order, line, log, _ in fork_server.forks(control, "fork", given["parent"]):
        sys.exit(_run_as_worker(program, source, given, order.local_rank, line, log))


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
    """Import the installed modules that the script imports, even if only in branches that may never run.

    Failures are ignored: if the script imports the module, the import fails there too and is reported.

    The garbage collector is disabled during the imports, because the objects that they create stay alive and
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
        importlib.import_module("torch._dynamo")  # takes 1 to 2 s; the first optimizer would import it
    if program.joins:  # `join` and `protect` need these; importing them later costs a recovery 15 to 70 ms
        importlib.import_module("holdfast.training.session")
        importlib.import_module("holdfast.training.protection.rank_protection")
