"""Measure the cost of one sweep of the polling sensor without the driver's: the fake library is instant.

Run it: `python -m tests.fakenvml.costs`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from nodeagent.nvml.driver import NvmlDriver
from nodeagent.nvml.polling import CHECKS, NvmlPolling
from tests.fakenvml.inprocess import SetClock, faked

SWEEPS = 50


EVERY_SWEEP_S = 0.001  # a period with which a check is always due; with 0 it never would be


def sweep_cpu_s(gpus: int = 8, period_s: float = EVERY_SWEEP_S, sweeps: int = SWEEPS) -> float:
    """Return the processor time of one sweep in seconds, the mean of `sweeps`.

    Args:
        gpus: Number of GPUs.
        period_s: Period of every check; by default all are due at every sweep, which costs most.
    """
    with tempfile.TemporaryDirectory() as folder, faked(Path(folder) / "nvml", gpus):
        clock = SetClock()
        sensor = NvmlPolling(NvmlDriver(Path(folder)), clock, dict.fromkeys(CHECKS, period_s))
        sensor.open()
        sensor.read()  # the first sweep finds out which queries are not supported
        began_s = time.thread_time()
        for _ in range(sweeps):
            clock.at_s += NvmlPolling.period_s
            sensor.read()
        spent_s = time.thread_time() - began_s
        sensor.close()
    return spent_s / sweeps


def main() -> None:
    all_due, mean = sweep_cpu_s(), sweep_cpu_s(period_s=30.0)
    sys.stdout.write(f"8 GPUs, every check due:       {all_due * 1e3:.2f} ms a sweep\n")
    sys.stdout.write(f"8 GPUs, each check every 30 s: {mean * 1e3:.2f} ms a sweep\n")


if __name__ == "__main__":
    main()
