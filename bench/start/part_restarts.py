"""Kill the supervisor and the sidecars of a run alternately, and measure how soon each is replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from bench.harness.launchers import Failed, RunningLauncher
from bench.harness.watch import RunWatch
from bench.text import seconds
from supervisor.cli.api_client import Unreachable, api_of

PARTS = ("supervisor", "sidecar")
FORKED, COLD = "forked", "new interpreter"
CALM_S = 60.0  # the longest wait until the run is calm again
BACK_S = 60.0
LIVED_S = 1.2  # a part that dies within a second of its start is restarted only after another second
POLL_S = 0.002


def measure(
    running: RunningLauncher, kills: int, said: Callable[[str], object]
) -> dict[str, dict[str, list[float]]]:
    """Return the seconds from each kill to the replacement, by the way the replacement started and by part.

    Raises:
        Failed: A part was not replaced in time, or the run has ended.
    """
    watch = RunWatch(running, 3600.0)
    found: dict[str, dict[str, list[float]]] = {}
    for how in (FORKED, COLD):
        if how == COLD:
            [template] = [pid for pid, part in watch.pids().items() if part == "parts"]
            os.kill(template, signal.SIGKILL)
        found[how] = {part: [] for part in PARTS}
        for _ in range(kills):
            for part in PARTS:
                found[how][part].append(_one(watch, part))
                said(f"{part} {how}: back after {seconds(found[how][part][-1])}")
    return found


def _one(watch: RunWatch, part: str) -> float:
    time.sleep(LIVED_S)
    if not watch.until_calm(time.time(), CALM_S):
        raise Failed(f"the run is not calm\n{watch.running.tail()}")
    victim = min(pid for pid, what in watch.pids().items() if what == part)
    at_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    while time.monotonic() < at_s + BACK_S:
        status = _asked(watch) if _is_gone(victim) else None  # the killed process must no longer answer
        if status is not None and _is_back(status, part, victim):
            return time.monotonic() - at_s
        time.sleep(POLL_S)
    raise Failed(f"no {part} for {BACK_S:.0f} s\n{watch.running.tail()}")


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _asked(watch: RunWatch) -> dict[str, Any] | None:
    """Return the status from the supervisor's API; None if it does not answer."""
    api = api_of(watch.run)
    try:
        return None if api is None else api.get("/v1/status")
    except Unreachable:
        return None


def _is_back(status: dict[str, Any], part: str, victim: int) -> bool:
    if part == "supervisor":
        return True
    sidecars = [each["sidecar_pid"] for each in status["members"] if each["connected"]]
    return victim not in sidecars and len(sidecars) == len(status["members"])
