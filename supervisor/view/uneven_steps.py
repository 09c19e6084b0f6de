"""Find a rank that did fewer steps than its peers, which caused their connection errors. Pure.

A rank that exits with code 0 is not a fault in itself, but if its peers still need it, they fail in a
collective. The rank's last progress then explains the failure: it had either finished its loop or exited in
the middle of a step.
"""

from __future__ import annotations

from holdfast.protocol.launcher_messages import DISTRIBUTED, RankState
from holdfast.protocol.member_messages import RankProgress
from holdfast.protocol.progress import Phase, PhaseKind, name_of, names_of_kinds
from supervisor.view import reports
from supervisor.view.model import Fault, View

EXITED_IN_LOOP = "exit 0"  # the signature if a rank exited with code 0 in the middle of its loop
_IDLE = name_of(Phase.IDLE)
_STEPS = names_of_kinds(PhaseKind.STEP)


def find_uneven_steps(view: View) -> tuple[Fault, ...]:
    """Return the fault of the lowest rank that exited with code 0 while a peer still needed it for a step."""
    launch = view.memory.launch
    began = launch.restore.step if launch is not None and launch.restore is not None else -1
    exited: list[tuple[str, RankState, RankProgress]] = []
    in_step: list[RankProgress] = []
    failed: list[int] = []
    for report in reports.reports(view):
        assert report.launcher is not None
        at = {each.rank: each for each in report.progress}
        for rank in report.launcher.ranks:
            last = at.get(rank.rank)
            if rank.generation != view.memory.generation or last is None or not report.launcher.joins:
                continue
            ending = rank.ending
            if rank.state == "exited" and ending is not None and ending.is_good:
                exited.append((report.member, rank, last))
            elif _in_step(last, began):
                in_step.append(last)
            if ending is not None and ending.fail == DISTRIBUTED and last.step == began:
                failed.append(rank.rank)
    for member, rank, last in sorted(exited, key=lambda each: each[1].rank):
        assert rank.ending is not None
        common = (rank.rank, member, last.step, rank.ending.at_ns)
        if _in_step(last, began):
            what = f"rank {rank.rank} exited with code 0 in the middle of its loop, after step {last.step}"
            return (Fault("crash", *common, EXITED_IN_LOOP, what, code=1),)
        waits = next((other for other in in_step if other.step >= last.step > began), None)
        if waits is not None:
            what = (
                f"rank {rank.rank} left its loop at step {last.step} while rank {waits.rank} was in step "
                f"{waits.step + 1}: all ranks must do the same number of steps"
            )
            return (Fault("bad_input", *common, "uneven steps", what, what, 2),)
        # Here the report does not show whether the rank was in a step or had finished its loop.
        if failed and last.step == began:
            what = (
                f"rank {rank.rank} exited with code 0 at step {last.step} while rank {failed[0]} waited"
                " for it in a collective"
            )
            return (Fault("crash", *common, EXITED_IN_LOOP, what, code=1),)
    return ()


def _in_step(at: RankProgress, began: int) -> bool:
    """True if the rank was in a step at its last report.

    If an exception in a step ends the loop, the rank's progress page shows idle afterwards. The page also
    shows idle if the rank had no step to do in this generation, which resumed from step `began`.
    """
    return at.phase in _STEPS or (at.phase == _IDLE and at.tail_s == 0 and at.step > began)
