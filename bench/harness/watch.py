"""Watch a holdfast run from outside: its status, its processes, and its use of memory and files."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import processes
from bench.harness.launchers import RunningLauncher
from supervisor.store.run_directory import RunDir

POLL_S = 0.05
STATUS_S = 2.0  # an older status may be out of date


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """The resources of one process or folder at one time.

    `what` is its kind, such as "sidecar"; `key` is its PID or path.
    """

    what: str
    key: str
    step: int
    rss_bytes: int
    descriptors: int


class RunWatch:
    """Polls the run on request, and every `every_s` seconds records a reading of each process."""

    def __init__(self, running: RunningLauncher, every_s: float) -> None:
        self.running = running
        self.run = RunDir(running.run_dir)
        self.readings: list[ProcessReading] = []
        self._every_s = every_s
        self._next_s = 0.0

    def poll(self) -> bool:
        """Sleep for `POLL_S`, take readings if they are due, and return False once the run has ended."""
        time.sleep(POLL_S)
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._every_s
            self._read()
        return self.running.ended() is None

    def status(self) -> dict[str, Any]:
        return self.run.status() or {}

    def calm(self, since: float) -> bool:
        """True if a status newer than `since` (wall clock) shows the run as calm: see `is_calm`."""
        return is_calm(self.status(), since, time.time())

    def until_calm(self, since: float, limit_s: float) -> bool:
        """Wait until the run is calm. Return False if it ends first or is not calm within `limit_s`."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self.calm(since):
                return True
            if not self.poll():
                return False
        return False

    def until(self, moment_s: float) -> bool:
        """Poll until `moment_s` (monotonic). Return False if the run ends first."""
        while time.monotonic() < moment_s:
            if not self.poll():
                return False
        return True

    def pids(self) -> dict[int, str]:
        """Return which part of the run each of its processes is, by PID: see `processes.parts`."""
        return self._named(processes.snapshot())

    def _named(self, alive: Mapping[int, processes.Process]) -> dict[int, str]:
        ranks = {each["pid"] for each in self.status().get("ranks") or []}
        return processes.zygotes(processes.parts(self.running.process.pid, alive, ranks), alive)

    def _read(self) -> None:
        status = self.status()
        step = status.get("step")
        if step is None:
            return
        alive = processes.snapshot()
        for pid, what in self._named(alive).items():
            if pid in alive and what != "other" and alive[pid].state != "Z":
                rss_bytes, descriptors = alive[pid].rss_bytes, alive[pid].descriptors
                self.readings.append(ProcessReading(what, str(pid), step, rss_bytes, descriptors))
        runtime = (self.run.run() or {}).get("runtime")
        for what, folder in (("shared memory", runtime), ("run directory", self.run.path)):
            if folder is not None:
                used = _bytes_in(Path(folder))
                self.readings.append(ProcessReading(what, str(folder), step, used, 0))


def is_calm(status: Mapping[str, Any], since: float, now: float) -> bool:
    """True if a status newer than `since` shows training, no open incident, and warm processes everywhere."""
    updated = status.get("updated") or 0.0
    return (
        updated > since
        and now - updated < STATUS_S
        and status.get("phase") == "running"
        and status.get("open_incident") is None
        and bool(status.get("warm_ready"))
    )


def _bytes_in(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(Path(where) / name).st_blocks * 512
            except FileNotFoundError:  # the file was replaced during the walk
                continue
    return total
