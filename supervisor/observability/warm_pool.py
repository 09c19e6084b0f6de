"""Find out whether the members have their warm processes, and if not, why. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from supervisor.decision.remedy import GIVE_UP_S, MAX_WARM_FAILURES, needs_processes
from supervisor.identity_cache import by_identity
from supervisor.view import endings, members
from supervisor.view.model import MemberView, View
from supervisor.wording import place


def is_ready(view: View) -> bool:
    """True if all members can start their ranks now, because their ranks start cold or are already warm."""
    parked = [
        m.report is not None
        and m.report.launcher is not None
        and (m.report.launcher.strategy == "cold" or len(m.report.launcher.parked) >= view.memory.nproc)
        for m in view.members
        if m.exists
    ]
    return bool(parked) and all(parked)


@dataclass(frozen=True, slots=True)
class WarmPoolProblem:
    """Says why no warm process can be created for a member. `awaited` is true if the group needs one now."""

    why: str
    awaited: bool

    @property
    def sentence(self) -> str:
        if self.awaited:
            limit = f"the run ends if none can be created within {GIVE_UP_S:g} s"
            return f"{self.why}; the ranks wait for them, and {limit}"
        return f"{self.why}; a fault now requires a cold start; Holdfast retries at intervals"


def problem_of(view: View, member: MemberView) -> WarmPoolProblem | None:
    """Return why no warm process can be created for `member`; None if one can, or if that is unknown."""
    launcher = member.report.launcher if member.report is not None else None
    ending = launcher.warm_ending if launcher is not None else None
    if launcher is None or ending is None or ending.ours or launcher.strategy == "cold":
        return None
    if not members.is_controllable(member):
        return None
    least = 1 if ending.signal is None else MAX_WARM_FAILURES  # one killed process alone proves nothing
    if launcher.warm_failures < least or len(launcher.parked) >= view.memory.nproc:
        return None
    where = place(ending.message) if ending.fail == "exception" else ""
    how = f"{endings.describe(ending)}{where}"
    what = f"warm processes for member {member.name} cannot be created: a process {how}"
    unheard = member.name in view.memory.positions and launcher.generation < view.memory.generation
    return WarmPoolProblem(what, unheard or needs_processes(view, launcher))


@by_identity(1)
def problems(view: View) -> dict[str, WarmPoolProblem]:
    """Return why each member has no warm processes, by member. Empty in phases that need none."""
    if view.memory.phase not in ("running", "securing"):
        return {}
    found = ((m.name, problem_of(view, m)) for m in view.members if m.exists and m.connected)
    return {name: problem for name, problem in found if problem is not None}
