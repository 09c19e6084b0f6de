"""Measure what an idle node agent uses, compared with a process that only wakes up equally often.

The cost of waking up a process depends on the machine. On virtual machines it is most of the cost of an idle
agent, and can change from microseconds to milliseconds within an hour.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.harness.processes import cpu_s, find_process
from tests.fakenvml.build import build
from tests.fakenvml.state import VARIABLE, Fake

SETTLE_S = 15.0  # time for the agent to open sensors, find out what is not supported, and read the log
_SLEEPER = "import sys, time\nwhile True: time.sleep(float(sys.argv[1]))"


@dataclass(frozen=True, slots=True)
class Rest:
    """The resources that the idle agent used. `cpu` and `sleeper_cpu` are in cores."""

    cpu: float
    sleeper_cpu: float  # of the process that only wakes up
    wakes_per_s: float
    rss_mb: float
    over_s: float


def measure(seconds: float, gpus: int = 8) -> Rest:
    """Return the resources that all threads of an idle `holdfast node serve` used over `seconds`."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-node-") as folder,
        Fake(Path(folder) / "nvml", gpus) as fake,
    ):
        environment = {**os.environ, "LD_LIBRARY_PATH": str(build().parent), VARIABLE: str(fake.path)}
        command = [sys.executable, "-m", "holdfast", "node", "serve", "--listen", "127.0.0.1:0"]
        agent = subprocess.Popen(
            [*command, "--state-dir", folder], env=environment, stdout=subprocess.DEVNULL
        )
        try:
            time.sleep(min(SETTLE_S, 5 * seconds))
            wakes_per_s = _wakes_per_s(agent.pid)
            sleeper = subprocess.Popen([sys.executable, "-c", _SLEEPER, str(1 / wakes_per_s)])
            try:
                return _watched(agent.pid, sleeper.pid, seconds, wakes_per_s)
            finally:
                sleeper.kill()
                sleeper.wait()
        finally:
            agent.terminate()
            agent.wait()


def _wakes_per_s(pid: int, over_s: float = 5.0) -> float:
    before = _switches(pid)
    time.sleep(over_s)
    return max(1.0, (_switches(pid) - before) / over_s)


def _watched(pid: int, sleeper: int, seconds: float, wakes_per_s: float) -> Rest:
    time.sleep(1.0)  # so that the sleeper's start does not count
    before = cpu_s(pid), cpu_s(sleeper), time.monotonic()
    time.sleep(seconds)
    over_s = time.monotonic() - before[2]
    used_s, slept_s, process = cpu_s(pid) - before[0], cpu_s(sleeper) - before[1], find_process(pid)
    assert process is not None, "the agent has ended"
    return Rest(used_s / over_s, slept_s / over_s, wakes_per_s, process.rss_bytes / 1e6, over_s)


def _switches(pid: int) -> int:
    """Return how many times the threads of a process have gone to sleep (see proc(5))."""
    return sum(
        int((thread / "status").read_text().split("voluntary_ctxt_switches:")[1].split()[0])
        for thread in Path(f"/proc/{pid}/task").iterdir()
    )
