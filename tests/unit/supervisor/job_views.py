"""Builders for the views of a job that decisions are based on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.protocol.launcher_messages import Ending, Launch, LauncherState, ProcessPhase, RankState
from holdfast.protocol.member_messages import (
    PROTOCOL,
    HeldPrivateState,
    HeldSnapshot,
    MemberReport,
    RankProgress,
)
from supervisor.fault_kinds import FaultName
from supervisor.view.model import Fault, JobState, MemberView, View

S = 1_000_000_000
LAUNCH = Launch(1, 2, 1, "127.0.0.1", 4000, -1, 0.01)


def rank(number: int, ending: Ending | None = None, generation: int = 1, **given: Any) -> RankState:
    state: ProcessPhase = "running" if ending is None else "exited"
    return replace(RankState(number, 0, 100 + number, generation, state, ending), **given)


def launcher(*ranks: RankState, generation: int = 1, **given: Any) -> LauncherState:
    return replace(LauncherState(9, generation, ranks, (0,), 4000), **given)


def progress(number: int, step: int, snapshot_step: int = 0) -> RankProgress:
    return RankProgress(number, step, "forward", "", "0.5", "nan", 1, 1, 1.0, 0.05, 0.06, snapshot_step)


def report(name: str, state: LauncherState | None, **given: Any) -> MemberReport:
    made = MemberReport(PROTOCOL, name, name, 7, 1, 0, 1, state, f"http://{name}:1")
    return replace(made, **given)


def member(name: str, told: MemberReport | None = None, **given: Any) -> MemberView:
    return replace(MemberView(name, True, told is not None, 0.0, told), **given)


def memory(**given: Any) -> JobState:
    """Return the memory of a job of two members with one rank each, in its first generation."""
    made = JobState(2, 1, "running", 0, 1, placement=("m0", "m1"), launch=LAUNCH)
    return replace(made, **given)


def view(*members: MemberView, now_s: float = 100.0, **given: Any) -> View:
    return View(int(now_s * S), 0.0, memory(**given), members)


def fault(kind: FaultName, number: int = 1, step: int = 5, **given: Any) -> Fault:
    made = Fault(kind, number, f"m{number}", step, 90 * S, f"{kind} somewhere", f"rank {number} failed")
    return replace(made, **given)


def holding(
    name: str, slots: tuple[tuple[int, int], ...], privates: tuple[tuple[int, int, int], ...], **given: Any
) -> MemberView:
    """Return a member with snapshots (generation, step) and private states (rank, generation, step)."""
    told = report(
        name,
        launcher(),
        slots=tuple(HeldSnapshot(generation, step, 8) for generation, step in slots),
        privates=tuple(
            HeldPrivateState(number, generation, step, True) for number, generation, step in privates
        ),
    )
    return member(name, replace(told, **given))
