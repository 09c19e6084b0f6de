"""Inject faults into a run, and record how it recovers from each."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.harness import processes
from bench.harness.watch import RunWatch
from holdfast.protocol.drills import DRILLS
from supervisor.cli.api_client import RequestRefused, Unreachable, api_of

NAMES_RANK = tuple(name for name, each in DRILLS.items() if each.executor in ("launcher", "rank"))
# Recovering from these kinds of faults costs no step and opens no incident.
COSTLESS = tuple(name for name, each in DRILLS.items() if each.executor in ("sidecar", "supervisor"))
KINDS = (*NAMES_RANK, "member", "launcher", *COSTLESS)
SECOND = ("kill", "sidecar", "supervisor")  # kinds of the second fault, which may occur during a recovery
RECOVERY_S = 60.0


@dataclass(slots=True)
class InjectedFault:
    """A fault, possibly with a second one soon after it, and the incidents that they caused."""

    kind: str
    rank: int
    step: int
    at_s: float  # since the run's start
    second: str = ""
    second_after_s: float = 0.0
    outcome: str = ""  # recovered, costless, unnoticed, stuck, ended, refused or over (the run had finished)
    calm_s: float | None = None  # time until the run was calm again, with warm processes
    named: bool | None = None  # whether the incident names the right rank
    incidents: list[dict[str, Any]] = field(default_factory=list)
    detail: str = ""


def bag(chance: random.Random, kinds: tuple[str, ...]) -> Iterator[str]:
    """Yield kinds endlessly, each equally often, in random order."""
    while True:
        yield from chance.sample(kinds, len(kinds))


def strike(watch: RunWatch, fault: InjectedFault, chance: random.Random) -> None:
    """Inject `fault`, wait until the run is calm again, and store the outcome in `fault`."""
    before = {each["id"] for each in watch.run.incidents()}
    pids = _pids_of(watch, fault.kind)
    began = time.monotonic()
    fault.detail = _hit(watch, fault.kind, fault.rank)
    if fault.detail:
        fault.outcome = "refused"
        return
    if fault.second:
        fault.second_after_s = round(chance.uniform(0.0, 0.5), 3)
        watch.until(began + fault.second_after_s)
        _hit_from_outside(watch, fault.second, chance.randrange(len(_ranks(watch)) or 1))
    noticed = _until_seen(watch, fault, before, pids)
    calm = watch.until_calm(time.time(), RECOVERY_S)  # an older status may not show the fault yet
    fault.calm_s = round(time.monotonic() - began, 3) if calm else None
    fault.incidents = [_brief(each) for each in watch.run.incidents() if each["id"] not in before]
    fault.outcome = _outcome(watch, fault, noticed, calm)
    if fault.kind in NAMES_RANK and fault.incidents and not fault.second:
        fault.named = fault.incidents[0]["rank"] == fault.rank


def _outcome(watch: RunWatch, fault: InjectedFault, noticed: bool, calm: bool) -> str:
    code = watch.running.ended()
    if code is not None:
        return "ended" if code else "over"
    if not calm:
        return "stuck"
    if not noticed:
        return "unnoticed"
    return "recovered" if fault.incidents else "costless"


def _until_seen(watch: RunWatch, fault: InjectedFault, before: set[str], pids: set[int]) -> bool:
    """Wait for an incident, or until a sidecar or supervisor is replaced; return False if neither happens."""
    deadline = time.monotonic() + RECOVERY_S
    while time.monotonic() < deadline:
        if fault.kind in COSTLESS:
            now = _pids_of(watch, fault.kind)
            if now and now != pids and len(now) == len(pids):
                return True
        elif any(each["id"] not in before for each in watch.run.incidents()):
            return True
        if not watch.poll():
            return False
    return False


def _pids_of(watch: RunWatch, kind: str) -> set[int]:
    """Return the PIDs of the supervisor or of all sidecars, from the run's status."""
    status = watch.status()
    if kind == "supervisor":
        return {status["supervisor_pid"]} if status.get("supervisor_pid") else set()
    members = status.get("members") or []
    return {each["sidecar_pid"] for each in members if each.get("sidecar_pid")}


def _hit(watch: RunWatch, kind: str, rank: int) -> str:
    """Inject one fault; return why that failed, or "" if it succeeded."""
    if kind == "launcher":
        return _hit_from_outside(watch, kind, rank)
    api = api_of(watch.run)
    if api is None:
        return "the run has no API"
    try:
        api.post("/v1/inject", {"what": kind, "rank": rank})
    except RequestRefused as error:
        return str(error)
    except Unreachable as error:
        return "" if error.sent else str(error)
    return ""


def _hit_from_outside(watch: RunWatch, kind: str, rank: int) -> str:
    """Kill one process with SIGKILL, without the API; return why that failed, or "" if it succeeded."""
    pid = _pid_of(watch, kind, rank)
    if pid is None:
        return f"no process for {kind}"
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return f"the {kind} had already died"
    return ""


def _pid_of(watch: RunWatch, kind: str, rank: int) -> int | None:
    if kind == "supervisor":
        return next(iter(_pids_of(watch, kind)), None)
    if kind == "sidecar":
        return next(iter(sorted(_pids_of(watch, kind))), None)
    pid = next((each["pid"] for each in _ranks(watch) if each["rank"] == rank), None)
    if kind == "kill" or not pid:
        return pid
    found = processes.find_process(pid)
    return found.parent if found is not None else None  # a rank's parent is its launcher, which adopts it


def _ranks(watch: RunWatch) -> list[dict[str, Any]]:
    return list(watch.status().get("ranks") or [])


def _brief(incident: dict[str, Any]) -> dict[str, Any]:
    kept = ("id", "kind", "rank", "step", "detected_s", "recovered_s", "lost_steps", "remedy")
    return {key: incident[key] for key in kept} | {"timeline": incident["timeline"]}
