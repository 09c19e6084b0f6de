"""A real agent with nothing going on: what it uses."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.processes import look
from tests.fakenvml.build import build
from tests.fakenvml.state import VARIABLE, Fake

SETTLE_S = 15.0  # sensors are opened, what is not supported is found out, the log is read
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Rest:
    """`cpu` in cores."""

    cpu: float
    rss_mb: float
    over_s: float


def measure(seconds: float, gpus: int = 8) -> Rest:
    """Return what `holdfast node serve` used over so many seconds, all its threads together."""
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
            time.sleep(SETTLE_S)
            before, began = _cpu_s(agent.pid), time.monotonic()
            time.sleep(seconds)
            over_s = time.monotonic() - began
            used_s, process = _cpu_s(agent.pid) - before, look(agent.pid)
        finally:
            agent.terminate()
            agent.wait()
    assert process is not None, "the agent has ended by itself"
    return Rest(used_s / over_s, process.rss_bytes / 1e6, over_s)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS  # utime, stime: proc(5)
