"""The zygote: imports what the script imports, once, and forks the warm processes from there.

A fork costs milliseconds where importing torch costs seconds. It is safe only while one thread exists
and no accelerator is open, so the zygote imports and does nothing else, and says so when an import broke
that: then every warm process is a new interpreter.
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
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast import channel, ending, numpy_random, osproc, output, runtime, wire
from holdfast.channel import Do, Say
from holdfast.command import Program

BOOT = (
    "import sys; sys.path[0] = sys.argv.pop(1); root = sys.argv.pop(1); "
    "sys.path += [] if root in sys.path else [root]; "
    "from holdfast.warm import main; main()"
)
"""Run with `python -c BOOT first-of-path import-root`: nothing but what the script would see."""

SPEC = "HOLDFAST_WARM"  # the variable with the JSON that `spec` gives
GONE_S = 0.1  # for threads that have ended to be gone


def spec(program: Program, **more: Any) -> str:
    return json.dumps({"program": asdict(program), **more})


def main() -> None:
    """Be a zygote (serve forks until the launcher is gone) or, with `single`, one warm process."""
    given = json.loads(os.environ.pop(SPEC))
    program = wire.from_json(Program, given["program"])
    osproc.die_with(given["parent"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _preload(program)
    if given["single"]:
        control, log = socket.socket(fileno=given["control"]), given["log"]
        sys.exit(_become(program, given, given["local_rank"], control, log))
    _serve(program, given, socket.socket(fileno=given["control"]))


def _serve(program: Program, given: dict[str, Any], control: socket.socket) -> None:
    alone = _forkable()
    gc.collect()
    gc.freeze()  # the collector's marks would otherwise unshare every page after the fork
    channel.send(control, Say("ready" if alone else "unforkable", os.getpid()))
    while True:
        try:
            order, descriptors = channel.receive(control, Do)
        except channel.Closed:
            return
        if order.what != "fork" or len(descriptors) != 2:
            continue
        if _fork_twice() == 0:
            control.close()
            rank = socket.socket(fileno=descriptors[0])
            sys.exit(_become(program, given, order.local_rank, rank, descriptors[1]))
        for each in descriptors:
            os.close(each)


def _forkable() -> bool:
    """Tell whether one thread exists, once those that know of forks have been put away.

    OpenBLAS, which NumPy brings, has a thread for each core from its import on. It ends them before a fork
    and starts them at the next use (pthread_atfork), so the first fork tells, and those that follow are safe.
    """
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    deadline = time.monotonic() + GONE_S  # a thread that was joined may still be listed for a moment
    while len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - a count, not paths
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _fork_twice() -> int:
    """Return 0 in a grandchild that the launcher, a subreaper, will inherit and reap; else a pid."""
    middle = os.fork()
    if middle == 0:
        if os.fork() != 0:
            os._exit(0)
        return 0
    os.waitpid(middle, 0)
    return middle


def _become(
    program: Program, given: dict[str, Any], local_rank: int, control: socket.socket, log: int
) -> int:
    """Turn this process into the warm process of one slot, and run the script in it."""
    os.setsid()
    parent = given["parent"]
    while os.getppid() != parent:  # until the middle process has gone and the launcher has us
        if os.getppid() == 1:
            os._exit(1)
        os.sched_yield()
    osproc.die_with(parent)
    osproc.allow_tracing_by(given["tracer"])
    _redirect(log)
    _reseed()
    os.environ["LOCAL_RANK"] = str(local_rank)
    mine = runtime.Runtime(control, Path(given["directory"]), local_rank, given["nproc"])
    runtime.install(mine)
    mine.say(Say("born", os.getpid()))
    if not program.joins:
        from holdfast import unmodified

        unmodified.park(mine)
    return ending.run(program, mine)


def _redirect(log: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(nothing)
    os.close(log)
    output.install()


def _reseed() -> None:
    """Forks share the zygote's random state; a process of its own would have had fresh seeds."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy_random.reseed(numpy)


def _preload(program: Program) -> None:
    """Import what the script imports from elsewhere. What fails here will fail there, and be told.

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
        except Exception:
            # An import may raise anything, and optional ones often do: the script decides, not we.
            sys.modules.pop(name, None)
    if "torch" in sys.modules:
        importlib.import_module("torch.distributed")
        importlib.import_module("torch.nn.parallel.distributed")
        importlib.import_module("torch._dynamo")  # the first optimizer imports it: 1 to 2 s
    if program.joins:  # what `join` and `protect` will need: 15 to 70 ms of a recovery otherwise
        importlib.import_module("holdfast.session")
        importlib.import_module("holdfast.keeping")
