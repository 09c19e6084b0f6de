"""Ranks that did different numbers of steps: the cause of what their peers report about connections. Pure.

A rank that ended with 0 is no fault, and a rank that still needs it fails in a collective. What the first one
did last then explains why: it had finished its loop, or it left in the middle of a step.
"""

from __future__ import annotations

from holdfast.protocol.launcher_messages import RankState
from holdfast.protocol.member_messages import RankProgress
from supervisor.view import reports
from supervisor.view.model import Fault, View

EXITED_IN_LOOP = "exit 0"  # the signature of a rank that ended well in the middle of its loop
_STEPS = frozenset({"data", "forward", "backward", "optimizer"})


def find_uneven_steps(view: View) -> tuple[Fault, ...]:
    """Return the fault of the first rank that ended well while another was in a step that needs it."""
    launch = view.memory.launch
    began = launch.restore.step if launch is not None and launch.restore is not None else -1
    left: list[tuple[str, RankState, RankProgress]] = []
    in_step: list[RankProgress] = []
    failed: list[int] = []
    for report in reports.reports(view):
        assert report.launcher is not None
        at = {each.rank: each for each in report.progress}
        for rank in report.launcher.ranks:
            here = at.get(rank.rank)
            if rank.generation != view.memory.generation or here is None or not report.launcher.joins:
                continue
            ending = rank.ending
            if rank.state == "exited" and ending is not None and ending.is_good:
                left.append((report.member, rank, here))
            elif _in_step(here, began):
                in_step.append(here)
            if ending is not None and ending.fail == "distributed" and here.step == began:
                failed.append(rank.rank)
    for member, rank, here in sorted(left, key=lambda each: each[1].rank):
        assert rank.ending is not None
        common = (rank.rank, member, here.step, rank.ending.at_ns)
        if _in_step(here, began):
            what = f"rank {rank.rank} exited with code 0 in the middle of its loop, after step {here.step}"
            return (Fault("crash", *common, EXITED_IN_LOOP, what, code=1),)
        waits = next((other for other in in_step if other.step >= here.step > began), None)
        if waits is not None:
            what = (
                f"rank {rank.rank} left its loop at step {here.step} while rank {waits.rank} wants step "
                f"{waits.step + 1}: all ranks must do the same number of steps"
            )
            return (Fault("bad_input", *common, "uneven steps", what, what, 2),)
        if failed and here.step == began:  # in a step, or in what comes after the loop: that is not known
            what = (
                f"rank {rank.rank} exited with code 0 at step {here.step} while rank {failed[0]} waited"
                " for it in a collective"
            )
            return (Fault("crash", *common, EXITED_IN_LOOP, what, code=1),)
    return ()


def _in_step(at: RankProgress, began: int) -> bool:
    """True for a rank that was in a step when it was last seen.

    An exception there ends the loop as well, and its page says idle. So does that of a rank which had nothing
    to do in this generation, that began with `began` steps.
    """
    return at.phase in _STEPS or (at.phase == "idle" and at.tail_s == 0 and at.step > began)
