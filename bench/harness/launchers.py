"""Start and stop launchers of any kind, and leave none of their processes or files behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness import processes
from bench.harness.results import ROOT
from bench.harness.ticks import VARIABLE, TickFile
from holdfast.process import linux
from holdfast.snapshot import member_directory
from supervisor.local.volume import memory_volume
from supervisor.store.run_directory import RunDir

STOP_S = 15.0  # how long a launcher may take to exit after SIGTERM before it is killed
SWEEPS = 50
TAIL_BYTES = 3000


class Failed(Exception):
    """A launcher did not start training. The message contains the last lines of its output."""


@dataclass(slots=True)
class RunningLauncher:
    """A launcher and all processes that it started. Callers must always call `close`."""

    name: str
    process: subprocess.Popen[bytes]
    folder: Path
    ticks: TickFile
    started_ns: int
    strays: list[str] = field(default_factory=list)  # command lines of processes that outlived a clean exit

    @property
    def run_dir(self) -> Path:
        """The run directory, if the launcher is a `holdfast run`."""
        return self.folder / "run"

    @property
    def log(self) -> Path:
        return self.folder / "output.log"

    def ended(self) -> int | None:
        """Return the launcher's exit code; None while it is running."""
        return self.process.poll()

    def tail(self) -> str:
        """Return the last lines that the launcher and its ranks printed."""
        with self.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            return file.read().decode(errors="replace")

    def stop(self, limit_s: float = STOP_S) -> bool:
        """Send SIGTERM to the launcher. Return True if it ends within `limit_s`; otherwise kill it."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        self.strays = _sweep()
        return True

    def kill(self) -> None:
        """Kill the launcher and all of its descendants."""
        below = processes.below(self.process.pid, processes.snapshot())
        self.process.kill()
        for each in below:
            linux.kill_group(each.pid)
        self.process.wait()
        _sweep()

    def leftovers(self) -> list[str]:
        """Kill the processes that outlived the launcher, and return their command lines."""
        return _sweep()

    def close(self) -> None:
        """Kill all processes that are still running, and remove the files."""
        if self.process.poll() is None:
            self.kill()
        memory = memory_volume.of_run((RunDir(self.folder / "run").run() or {}).get("runtime"))
        if memory is not None and member_directory.is_abandoned(memory, without_owner=True):
            shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def launch(name: str, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> RunningLauncher:
    """Start `argv` in a new session and a new working directory, with its output in a file.

    The checkout's `bench` and `trainer` can be imported there. `close` removes the directory with everything
    in it. `{run_dir}` in an argument is replaced by the run directory.
    """
    linux.adopt_orphans()  # processes that outlive a launcher become our children, which `_sweep` kills
    folder = Path(tempfile.mkdtemp(prefix=f"bench-{name}-"))
    for package in ("bench", "trainer"):
        (folder / package).symlink_to(ROOT / package)
    ticks = folder / "ticks"
    run_dir = str(folder / "run")
    parent = os.getpid()
    with (folder / "output.log").open("wb") as log:
        process = subprocess.Popen(
            [word.replace("{run_dir}", run_dir) for word in argv],
            cwd=folder,
            env={**os.environ, **(environment or {}), VARIABLE: str(ticks)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            # Ends the launcher even if this process is killed.
            preexec_fn=lambda: linux.end_with_parent(parent, signal.SIGTERM),
        )
    return RunningLauncher(name, process, folder, TickFile(ticks), time.monotonic_ns())


def holdfast_run(options: Sequence[str], script: Sequence[str]) -> list[str]:
    """Return the command line of a `holdfast run` of a Python script that needs no terminal."""
    python = sys.executable
    return [
        *(python, "-m", "holdfast", "run", "--plain", "--run-dir", "{run_dir}"),
        *options,
        *("--", python, *script),
    ]


def torchrun(options: Sequence[str], script: Sequence[str]) -> list[str]:
    """Return torchrun's command line for one machine, as in its documentation."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", *options, *script]


def _sweep() -> list[str]:
    """Kill and reap the processes that a launcher left behind; return the command lines of the live ones."""
    found: list[str] = []
    for _ in range(SWEEPS):
        strays = linux.children()
        if not strays:
            break
        for pid in strays:
            process = processes.find_process(pid)
            if process is not None and process.state != "Z":
                found.append(" ".join(process.argv)[:200])
            linux.kill_group(pid)
            try:
                os.waitpid(pid, 0)
            except ChildProcessError:
                continue
    return found
