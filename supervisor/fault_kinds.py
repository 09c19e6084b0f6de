"""The kinds of faults: those that the supervisor finds, and those that a drill makes.

Each is one row of a table, from which the decision, the metrics and the wording take what they need. The
names are data: they are in journals, in the records of incidents, in the label `kind` of the metrics and in
the API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

DOUBTFUL = 5  # precedence of bad input that a lost peer may have caused: only victims come after it


@dataclass(frozen=True, slots=True)
class FaultKind:
    """What is known of a kind of fault, whichever rank or member has it.

    Of several faults the one with the lowest `precedence` explains the others: causes come before symptoms.
    `sentence` is what an incident says where the fault has no detail: {rank} and {member} are who had it.
    """

    name: str
    precedence: int
    sentence: str
    is_bad_number: bool = False  # a value that the script computed: the same batch may give it again
    spoils_state: bool = False  # the state of the survivors is as bad: the group rolls back to before it
    needs_stacks: bool = False  # only the stacks of all ranks tell which one it is
    may_be_a_bug: bool = False  # the same again and again at one step, and the run ends


_ROWS = (
    FaultKind("crash", 3, "{rank} crashed", may_be_a_bug=True),
    FaultKind("exception", 3, "{rank} raised an exception", may_be_a_bug=True),
    FaultKind("exit", 3, "{rank} left"),
    FaultKind("victim", 6, "{rank} failed after another rank", may_be_a_bug=True),
    FaultKind("hang", 4, "{rank} hung", needs_stacks=True, may_be_a_bug=True),
    FaultKind("nan", 2, "{rank} computed a NaN", is_bad_number=True, spoils_state=True),
    FaultKind("inf", 2, "{rank} computed an Inf", is_bad_number=True, spoils_state=True),
    FaultKind("loss_jump", 2, "{rank} computed a loss that jumped", is_bad_number=True, spoils_state=True),
    FaultKind("diverged", 2, "the replicas are no longer equal", spoils_state=True),
    FaultKind("member_lost", 1, "{member} was lost"),
    FaultKind("restore", 2, "{member} could not restore the state"),
    FaultKind("bad_input", 0, "{rank} refused its input"),
    FaultKind("lost_track", 3, "the members run a generation that the journal does not have"),
)
FAULT_KINDS: Mapping[str, FaultKind] = MappingProxyType({each.name: each for each in _ROWS})

UNKNOWN = FaultKind("unknown", 3, "{rank} failed")  # in the journal of a version that knows more


def kind_of(name: object) -> FaultKind:
    """Return the row of `name`, that of `UNKNOWN` for one that this version does not know."""
    return FAULT_KINDS.get(str(name), UNKNOWN)


# What `holdfast inject` can do to a rank, to its member or to the supervisor.
DRILLS: Mapping[str, str] = MappingProxyType(
    {
        "kill": "SIGKILL to the rank",
        "stop": "SIGSTOP to the rank",
        "hang": "the rank sleeps forever",
        "spin": "the rank loops forever",
        "nan": "the rank's next loss is NaN",
        "exit": "the rank leaves with exit code 17",
        "member": "all processes and memory of its member",
        "sidecar": "SIGKILL to its member's sidecar",
        "supervisor": "SIGKILL to the supervisor",
    }
)
