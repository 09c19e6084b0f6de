"""The verdict about a group in which no step ends, and the fault of a rank that hangs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from supervisor.hangs import group_reports
from supervisor.view.model import Fault, LateRank, View

# In place of a place of the script: wherever ranks are in it, this is warned of once.
APART = "no rank waits for another"
UNBEGUN = "before the first step"


@dataclass(frozen=True, slots=True)
class StallVerdict:
    """What holds up a group in which no step ends, and when something is done about it."""

    why: str  # in words: "rank 0 is in evaluate (train.py:42), waiting for a file system"
    rank: int = -1  # the one that holds up the others; -1 when that is not known
    place: str = ""
    work: str = ""  # the kind, "" for a certain hang
    limit_s: float | None = None  # counted from `StallWatch.since_ns`; None: no time makes it a hang
    act_ns: int | None = None
    warn_ns: int | None = None
    fault: Fault | None = None  # to be acted on at `act_ns`


def hang_fault(view: View, named: LateRank, detail: str, signature: str, work: str) -> Fault:
    """Return the fault of `named`, or of the whole group where its rank is -1."""
    member = view.memory.placement[named.rank // view.memory.nproc] if named.rank >= 0 else ""
    since_ns = view.watch.since_ns or named.since_ns
    place = group_reports.place(view, named)
    return Fault("hang", named.rank, member, named.step, since_ns, signature, detail, place=place, work=work)
