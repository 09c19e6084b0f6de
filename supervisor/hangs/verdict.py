"""Define the verdict about a group that completes no steps, and the fault of a rank that hangs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from supervisor.hangs import group_reports
from supervisor.view.model import Fault, LateRank, View

# These replace the position in the script, so the user is warned only once and not at each position.
APART = "no rank waits for another"
UNBEGUN = "before the first step"


@dataclass(frozen=True, slots=True)
class StallVerdict:
    """What holds up a group that completes no steps, and when the supervisor warns the user and acts."""

    why: str  # for example "rank 0 is in evaluate (train.py:42), waiting for a file system"
    rank: int = -1  # the rank that holds up the others; -1 if it is unknown
    place: str = ""
    work: str = ""  # the kind of work; "" for a certain hang
    limit_s: float | None = None  # counted from `StallWatch.since_ns`; None: never treated as a hang
    act_ns: int | None = None  # when the supervisor acts on `fault`; None: never
    warn_ns: int | None = None  # when it warns the user; None: never
    fault: Fault | None = None
    # Signs of work have extended `limit_s`, and may extend it up to this; None if there were none.
    latest_s: float | None = None
    first_step: bool = False  # True if the first step of a generation takes long, but is within its limit


def hang_fault(view: View, named: LateRank, detail: str, signature: str, work: str) -> Fault:
    """Return the fault of `named`, or of the whole group if its rank is -1."""
    member = view.memory.placement[named.rank // view.memory.nproc] if named.rank >= 0 else ""
    since_ns = view.watch.since_ns or named.since_ns
    place = group_reports.place(view, named)
    return Fault("hang", named.rank, member, named.step, since_ns, signature, detail, place=place, work=work)
