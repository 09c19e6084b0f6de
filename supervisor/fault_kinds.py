"""The kinds of faults that the supervisor detects.

Decisions, metrics and texts read the properties of each kind from one table. The names are part of the
formats of the journal, incident records and the API, and are values of the metrics' label `kind`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

FaultName: TypeAlias = Literal[
    "crash",
    "exception",
    "exit",
    "victim",
    "hang",
    "nan",
    "inf",
    "loss_jump",
    "diverged",
    "member_lost",
    "restore",
    "bad_input",
    "lost_track",
    "departure",
    "growth",
]
DOUBTFUL = 5  # the precedence of bad input that a lost peer may have caused; only victims come after it


@dataclass(frozen=True, slots=True)
class FaultKind:
    """The properties of a kind of fault.

    The fault with the lowest `precedence` explains the others, because causes precede symptoms.
    `sentence` describes a fault that has no detail. It may contain {rank} and {member}, the rank and the
    member that have the fault.
    """

    name: Literal[FaultName, "unknown"]
    precedence: int
    sentence: str
    is_bad_number: bool = False  # the script computed a bad value, perhaps because of the batch
    spoils_state: bool = False  # the survivors' state is spoiled too, so the group rolls back
    needs_stacks: bool = False  # only the stacks of all ranks show which rank has the fault
    may_be_a_bug: bool = False  # the run ends if the fault recurs at the same step
    quotes_script: bool = False  # its detail quotes the script, for example the message of an exception
    is_planned: bool = False  # not a failure: it does not count against --max-restarts


_ROWS = (
    FaultKind("crash", 3, "{rank} crashed", may_be_a_bug=True),
    FaultKind("exception", 3, "{rank} raised an exception", may_be_a_bug=True, quotes_script=True),
    FaultKind("exit", 3, "{rank} exited", quotes_script=True),
    FaultKind("victim", 6, "{rank} failed after another rank", may_be_a_bug=True, quotes_script=True),
    FaultKind("hang", 4, "{rank} hung", needs_stacks=True, may_be_a_bug=True),
    FaultKind("nan", 2, "{rank} computed a NaN", is_bad_number=True, spoils_state=True),
    FaultKind("inf", 2, "{rank} computed an Inf", is_bad_number=True, spoils_state=True),
    FaultKind("loss_jump", 2, "{rank} computed a loss that jumped", is_bad_number=True, spoils_state=True),
    FaultKind("diverged", 2, "the replicas no longer match", spoils_state=True),
    FaultKind("member_lost", 1, "{member} was lost"),
    FaultKind("restore", 2, "{member} could not restore the state"),
    FaultKind("bad_input", 0, "{rank} rejected its input"),
    FaultKind("lost_track", 3, "the members run a generation that is not in the journal"),
    FaultKind("departure", 5, "{member} was about to end", is_planned=True),
    FaultKind("growth", 5, "{member} was ready to join the group", is_planned=True),
)
FAULT_KINDS: Mapping[str, FaultKind] = MappingProxyType({each.name: each for each in _ROWS})

UNKNOWN = FaultKind("unknown", 3, "{rank} failed")  # a kind from the journal of a newer version


def kind_of(name: object) -> FaultKind:
    """Return the kind with this name; `UNKNOWN` if this version does not define it."""
    return FAULT_KINDS.get(str(name), UNKNOWN)
