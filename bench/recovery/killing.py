"""One turn of the recovery bench: start a launcher, kill ranks, and time each recovery."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bench.harness.launchers import Failed, RunningLauncher, launch
from bench.harness.ticks import Regained, Tick, newest, redone, regained
from bench.recovery.turns import Kill, Turn
from bench.workloads.modes import RANKS, Mode
from supervisor.store.run_directory import RunDir

POLL_S = 0.005
START_S = 120.0  # limit for a launcher's first steps; imports are slow on a busy machine
READY_S = 60.0  # the longest wait for a group to become ready for the next kill
SETTLED_STEPS = 20  # steps of every rank before a kill, so that it does not hit a launcher while it starts
JITTER_S = 0.5
STATUS_S = 1.5  # an older status of a holdfast run may be out of date


@dataclass(frozen=True, slots=True)
class Manner:
    """How ranks are killed."""

    patience_s: float  # after this time without a new step, the group counts as hung
    back_to_back: bool  # kill again without waiting for warm processes
    chance: random.Random
    members: bool = False  # in holdfast runs, kill whole members instead of ranks


def turn(mode: Mode, count: int, manner: Manner, said: Callable[[Kill], None]) -> Turn:
    """Start `mode`, kill `count` of its ranks one after another, and stop it.

    The turn ends early if the group does not train again in time or if the launcher exits; the outcome of the
    last kill shows which. Raises `Failed` if the launcher does not start training.
    """
    running = launch(mode.name, mode.argv, mode.environment)
    done = Turn(mode.name)
    try:
        done.start_s = wait_for_start(running, mode)
        for number in range(count):
            kill = _one(running, mode, number, manner)
            done.kills.append(kill)
            said(kill)
            if kill.outcome != "recovered":
                break
        _finish(running, mode, done)
        return done
    finally:
        running.close()


def wait_for_start(running: RunningLauncher, mode: Mode) -> float:
    for _ in _polls(START_S):
        code = running.ended()
        if code is not None:
            raise Failed(f"{mode.name} ended with exit code {code}\n{running.tail()}")
        first = regained(running.ticks.follow(), -1, RANKS)
        if first is not None:
            return (first.all_ns - running.started_ns) / 1e9
    raise Failed(f"{mode.name}: no step within {START_S:.0f} s\n{running.tail()}")


def _one(running: RunningLauncher, mode: Mode, number: int, manner: Manner) -> Kill:
    began = time.monotonic()
    late = _wait_until_ready(running, mode, manner)
    time.sleep(manner.chance.uniform(0.0, JITTER_S))  # so that kills hit any point of a step
    ticks = running.ticks.follow()
    latest = newest(ticks)
    rank = manner.chance.randrange(RANKS)
    victim = latest[rank]
    kill = Kill(mode.name, number, rank, victim.pid, victim.step, victim.generation)
    kill.ready_s = round(time.monotonic() - began, 3)
    kill.detail = late
    known = len(_incidents(running)) if mode.supervised else 0
    at_ns = time.monotonic_ns()
    os.kill(_launcher_of(running, rank) if mode.supervised and manner.members else victim.pid, signal.SIGKILL)
    found = _wait_for_step(running, victim.generation, manner.patience_s)
    if found is None:
        code = running.ended()
        kill.outcome = "hung" if code is None else "ended"
        kill.detail = running.tail() if code is None else f"exit code {code}\n{running.tail()}"
    else:
        _take(kill, found, running.ticks.ticks, at_ns)
    if mode.supervised:
        kill.incident = _wait_for_incident(running, known)
    return kill


def _take(kill: Kill, found: Regained, ticks: list[Tick], at_ns: int) -> None:
    kill.outcome = "recovered"
    kill.took_s = (found.all_ns - at_ns) / 1e9
    kill.first_s = (found.first_ns - at_ns) / 1e9
    kill.redone = redone(ticks, kill.generation, found)
    before = {tick.pid for tick in ticks if tick.at_ns <= at_ns}
    kill.same_pids = len(before & set(found.pids))


def _wait_until_ready(running: RunningLauncher, mode: Mode, manner: Manner) -> str:
    """Wait for `SETTLED_STEPS` and, under holdfast, for warm processes.

    Return what was not ready in time; "" if everything was.
    """
    why = ""
    for _ in _polls(READY_S):
        if running.ended() is not None:
            return "the launcher has ended"
        why = _not_ready(running, mode, manner)
        if not why:
            return ""
    return why


def _not_ready(running: RunningLauncher, mode: Mode, manner: Manner) -> str:
    ticks = running.ticks.follow()
    latest = newest(ticks)
    generation = max((tick.generation for tick in latest.values()), default=0)
    counts = [0] * RANKS
    for tick in reversed(ticks):
        if tick.generation != generation:
            break
        counts[tick.rank] += 1
        if min(counts) >= SETTLED_STEPS:
            break
    if min(counts) < SETTLED_STEPS:
        return f"fewer than {SETTLED_STEPS} steps"
    if not mode.supervised or manner.back_to_back:
        return ""
    status = RunDir(running.run_dir).status()
    if status is None or time.time() - float(status["updated"]) > STATUS_S:
        return "no status"
    if status["generation"] != generation + 1 or status["open_incident"] is not None:
        return "an incident is open"
    if manner.members and not any(m["role"] == "standby" and m["parked"] for m in status["members"]):
        return "no standby"
    return "" if status["warm_ready"] else "no warm processes"


def _launcher_of(running: RunningLauncher, rank: int) -> int:
    """Return the PID of the launcher of a rank's member; killing it takes the member down."""
    status = RunDir(running.run_dir).status() or {"members": ()}
    return next(int(m["launcher_pid"]) for m in status["members"] if rank in m["ranks"])


def _wait_for_step(running: RunningLauncher, generation: int, patience_s: float) -> Regained | None:
    for _ in _polls(patience_s):
        found = regained(running.ticks.follow(), generation, RANKS)
        if found is not None:
            return found
        if running.ended() is not None:
            return None
    return None


def _incidents(running: RunningLauncher) -> list[dict[str, Any]]:
    return RunDir(running.run_dir).incidents()


def _wait_for_incident(running: RunningLauncher, known: int) -> dict[str, Any] | None:
    """Return the first incident after the `known` ones, once it is closed or after 3 s.

    Returns None if there is none by then.
    """
    found: dict[str, Any] | None = None
    for _ in _polls(3.0):
        new = _incidents(running)[known:]
        found = new[0] if new else None
        if found is not None and not found["open"]:
            break
    if found is None:
        return None
    kept = ("id", "kind", "rank", "detected_s", "recovered_s", "lost_steps", "resume", "timeline")
    return {key: found[key] for key in kept}


def _finish(running: RunningLauncher, mode: Mode, done: Turn) -> None:
    if done.kills and done.kills[-1].outcome != "recovered":
        return  # `close` kills the launcher
    done.stopped = running.stop()
    done.strays = running.strays
    if mode.supervised:
        status = RunDir(running.run_dir).status() or {}
        kept = ("ettr", "buckets_s", "pending_s", "total_s", "incidents", "generation", "step")
        done.status = {key: status.get(key) for key in kept}


def _polls(limit_s: float) -> Iterator[None]:
    """Yield every `POLL_S` until `limit_s` has passed. Polling does not affect the measured times."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        yield
        time.sleep(POLL_S)


def problem(found: Turn) -> str:
    """Return a message on what went wrong at the end of a turn; "" if nothing did."""
    if not found.stopped:
        return f"{found.mode}: did not end in time after SIGTERM, and was killed"
    if found.strays:
        return f"{found.mode}: left {len(found.strays)} processes: {json.dumps(found.strays)}"
    return ""
