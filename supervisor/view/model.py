"""What is known about a job at one instant, and what can be done about it. Data only.

`JobState` is what outlives the supervisor: it is in every line of the journal. `View` adds what the members
say now. Both are immutable, so a decision can be taken again from its journal line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from holdfast.protocol.launcher_messages import Launch
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import MemberReport, StateSource

# The phases of a job, and what is shown for each. The names are data: journal, status and metrics have them.
PHASES: Mapping[str, str] = MappingProxyType(
    {
        "forming": "starting",
        "running": "running",
        "looking": "finding out which rank hangs",  # only in journals and status files of older versions
        "securing": "securing the state",
        "saving": "saving a checkpoint",
        "stopping": "stopping",
        "ended": "ended",
    }
)
ROLES = ("active", "standby", "lost", "new", "left")


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that stops the group. `kind` is one of `fault_kinds.FAULT_KINDS`."""

    kind: str
    rank: int
    member: str
    step: int
    at_ns: int  # when it began, on the clock of the supervisor's host
    signature: str
    detail: str
    message: str = ""
    code: int | None = None
    signal: int | None = None
    position: int = -1
    value: str = ""  # of a bad number
    place: str = ""  # of a hang: the line of the script where the rank stands
    work: str = ""  # of a hang that may have been work: of which kind
    doubtful: bool = False  # of bad input: any other rank's fault explains it, as it does a victim


@dataclass(frozen=True, slots=True)
class PastFault:
    """A fault that was recovered from."""

    kind: str
    rank: int
    member: str
    step: int
    signature: str
    at_ns: int
    generation: int
    worked: bool = False  # the generation had gained a step, or a while
    value: str = ""  # the number that was bad
    place: str = ""
    work: str = ""
    everywhere: bool = False  # all ranks had the same


@dataclass(frozen=True, slots=True)
class LearnedStall:
    """Work of this kind once kept the group waiting for `seconds`, and ended by itself."""

    work: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PastWarning:
    """What was said about a place in the script, before anything is done about it."""

    place: str
    text: str


@dataclass(frozen=True, slots=True)
class CutOffWork:
    """Work of the script that a fault cut off: what it did beside a step, or where it raised."""

    rank: int
    step: int  # the last committed
    at_most: int  # steps of a state from which the script comes to it again
    after_s: float = 0.0  # that it had taken; 0: it is not known
    raised: bool = False  # the script's own exception ended it
    early: bool = False  # before a commit: others have committed the step that it came in


@dataclass(frozen=True, slots=True)
class UndoneWork:
    """Work that was cut off and not done again. `incident` is the number of the fault."""

    incident: int
    rank: int
    step: int
    early: bool = False  # in the step that begins there, and not after the commit that ends there


@dataclass(frozen=True, slots=True)
class VoidStep:
    """A step after whose commit a rank changed what only it has: no copy has the state of that step."""

    generation: int
    step: int
    rank: int


@dataclass(frozen=True, slots=True)
class SetAsideState:
    """What a run that was asked to begin from scratch makes void with its first step, as it was before."""

    lineage: tuple[Lineage, ...] = ()
    missed: tuple[UndoneWork, ...] = ()
    equal: tuple[int, ...] = ()
    saved: int = -1


@dataclass(frozen=True, slots=True)
class PendingStart:
    """What the start of a generation changed, until its group has done a step. `failed`: it is taken back."""

    generation: int
    step: int  # where it begins
    lineage: tuple[Lineage, ...] = ()  # this and the next two: from before the start
    missed: tuple[UndoneWork, ...] = ()
    equal: tuple[int, ...] = ()
    bound: int | None = None  # the most steps that a good state may have
    cut: tuple[CutOffWork, ...] = ()  # by the fault before
    raised: tuple[Fault, ...] = ()  # before
    failed: bool = False
    aside: SetAsideState | None = None  # of a run from scratch that has not done a step in any generation


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The newest state that can be made whole, and who has it."""

    step: int
    generation: int
    source: str  # slot, checkpoint, none (from the beginning)
    path: str = ""
    sources: tuple[StateSource, ...] = ()
    holders: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenIncident:
    """The incident that is going on."""

    number: int
    generation: int
    fault_ns: int
    noticed_ns: int
    wall_s: float
    faults: tuple[Fault, ...] = ()
    evidence: tuple[str, ...] = ()
    stacks: tuple[tuple[tuple[int, ...], str], ...] = ()
    looked_ns: int = 0
    secured_ns: int = 0
    decided_ns: int = 0
    cause: Fault | None = None
    remedy: str = ""
    why: str = ""
    reached: int = -1  # steps that the group had done
    resume: ResumePoint | None = None
    lost: int | None = None  # steps to do again; None while undecided, or where nobody knows
    at_least: bool = False  # `lost` may be more: who knew the last steps is gone
    closed_ns: int = 0  # over without a first new step: the run ended
    cut: tuple[CutOffWork, ...] = ()  # work that it cut off; what `resume` is not before is not done again
    own_state: bool = False  # the script keeps its own: its steps are counted from its last start


@dataclass(frozen=True, slots=True)
class JobState:
    """Everything that a supervisor must know again after its death."""

    world_size: int
    nproc: int
    phase: str = "forming"
    since_ns: int = 0
    generation: int = 0
    started_ns: int = 0  # when the present generation was formed
    placement: tuple[str, ...] = ()  # member of ranks [i*nproc, (i+1)*nproc)
    launch: Launch | None = None
    sources: tuple[StateSource, ...] = ()
    peers: tuple[StateSource, ...] = ()  # where each rank of the generation lives
    lineage: tuple[Lineage, ...] = ()
    history: tuple[PastFault, ...] = ()
    skip: tuple[int, ...] = ()
    incident: OpenIncident | None = None
    incidents: int = 0
    looks: int = 0  # at stacks, of hangs that were one and of those that were over before
    settled: bool = False
    stop: str = ""  # graceful (by a command), interrupt (Ctrl-C), terminate (another signal), now
    first: str = ""  # how the ranks are asked to end before they get SIGTERM: see `LauncherOrder`
    save: int = 0
    save_step: int = -1
    save_generation: int = 0
    save_member: str = ""
    exit_code: int | None = None
    why: str = ""
    message: str = ""
    lost: tuple[str, ...] = ()
    missed: tuple[UndoneWork, ...] = ()  # work after commits that was cut off and not done again
    cut: tuple[CutOffWork, ...] = ()  # work that a stop cuts off
    before: int = 0  # incidents of earlier runs in the same directory
    learned: tuple[LearnedStall, ...] = ()
    warned: tuple[PastWarning, ...] = ()
    seen: int = 0  # the newest generation that storage or a member tells of, where that is beyond ours
    saved: int = -1  # the newest step that was on storage and is not void
    held: int = -1  # the newest step whose snapshot some member held, and that the group went beyond
    reached: int = -1  # the most steps that a rank of the present generation has done; -1: not known
    equal: tuple[int, ...] = ()  # the last steps at which the replicas were equal on all members
    void: tuple[VoidStep, ...] = ()  # oldest first
    unbegun: PendingStart | None = None  # while the present generation has not done a step
    finished: bool = False  # the script has ended well; what is saved is its last state
    end: End | None = None  # with which the run ends, though nobody asked for it, once its state is saved


@dataclass(frozen=True, slots=True)
class MemberView:
    """A member as the supervisor sees it."""

    name: str
    exists: bool  # the backend has it
    connected: bool
    silent_s: float  # since its last report
    report: MemberReport | None = None
    heard_ns: int = 0  # when this supervisor heard it for the first time
    well_ns: int = 0  # when it last said something with a launcher that answers


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on storage: its manifest is right and its files have the right sizes."""

    step: int
    generation: int
    world_size: int
    path: str
    skip: tuple[int, ...] = ()
    verified: bool = False  # its content has been read, or its writer has compared it


@dataclass(frozen=True, slots=True)
class UnusableCheckpoint:
    """A directory that is named as a checkpoint and is none, or is damaged."""

    name: str
    step: int
    why: str

    @property
    def note(self) -> str:
        return f"checkpoint {self.name} is not used: {self.why}"


UNREAD = "it has not been read yet"


@dataclass(frozen=True, slots=True)
class StorageContents:
    """What storage was found to hold when it was last looked through.

    Void checkpoints are in it as well: which ones those are depends on the lineage. `error` is why the last
    look failed; what the one before it found is kept.
    """

    checkpoints: tuple[Checkpoint, ...] = ()  # newest first
    unusable: tuple[UnusableCheckpoint, ...] = ()
    lineage: tuple[Lineage, ...] = ()  # that the manifests tell of
    generation: int = 0  # the newest that the manifests tell of
    error: str = ""
    failed_ns: int = 0  # since when there is an `error`
    looked_ns: int = 0  # when the look began; 0: there was none yet
    heard: int = 0  # the last request for a checkpoint whose answer was known when the look began
    epoch: int = 0  # the highest that the manifests tell of


@dataclass(frozen=True, slots=True)
class LateRank:
    """A rank that is late: since when, and what the looks at it have shown."""

    rank: int
    step: int
    phase: str
    since_ns: int  # when its progress ended
    role: str = ""  # what it does, by the newest look: `supervisor.hangs.evidence`; "" until there is one
    work: str = ""  # of which kind that is
    worked_ns: int = 0  # when work was seen last; 0 never
    busy: bool = False  # it computes, without getting anywhere that can be seen
    look: int = 0  # number of the newest look
    phase_seq: int = -1
    at: str = ""
    works: tuple[str, ...] = ()  # the kinds of work that were seen
    begun: bool = True  # as in `Stall`: False, and perhaps no step of it will ever be seen
    looks: int = 0  # of this supervisor: two tell whether it has moved
    # the newest look shows that it waits for no other rank: `supervisor.hangs.evidence.waits_for_no_rank`
    apart: bool = False
    apart_ns: int = 0  # when a look last showed that; 0 never


@dataclass(frozen=True, slots=True)
class RestingRank:
    """A rank that waits in a collective, and that only a peer's bytes will move: by its newest look."""

    rank: int
    step: int
    mark: int  # the same in each look for as long as it did not move
    since_ns: int  # when the supervisor first heard of this mark
    look: int  # number of the newest look
    asked: int  # what that look was asked for with
    heard_ns: int  # when it came
    rests_s: float  # for so long, from then on, no wait of it ends by its own time limit
    ends: int  # a sum of its connections
    place: str  # "barrier, called by evaluate (train.py:42)"


@dataclass(frozen=True, slots=True)
class PendingException:
    """An exception that is perhaps on its way out of a rank."""

    rank: int
    failed_ns: int  # of the rank's own clock: tells one from another
    since_ns: int  # when the supervisor first heard of it


@dataclass(frozen=True, slots=True)
class StallWatch:
    """What the supervisor has seen of a group in which no step ends. Folded from view to view."""

    generation: int = 0
    ranks: tuple[LateRank, ...] = ()  # those that are late
    passed: tuple[LearnedStall, ...] = ()  # of the last stall that ended by itself, in this generation
    hints: tuple[PendingException, ...] = ()  # those that stand
    rests: tuple[RestingRank, ...] = ()  # ranks that are at rest, late or not, while any is late
    untold_ns: int = 0  # since when a member has not said what its ranks do; 0 when all have

    @property
    def since_ns(self) -> int:
        """When the last of them made its last progress; 0 while nobody is late."""
        return max((each.since_ns for each in self.ranks), default=0)


@dataclass(frozen=True, slots=True)
class View:
    """Everything known at `now_ns` (CLOCK_MONOTONIC of the supervisor's host)."""

    now_ns: int
    wall_s: float
    memory: JobState
    members: tuple[MemberView, ...] = ()
    stored: StorageContents = StorageContents()
    watch: StallWatch = field(default_factory=StallWatch)

    def member(self, name: str) -> MemberView | None:
        return next((each for each in self.members if each.name == name), None)


@dataclass(frozen=True, slots=True)
class Policy:
    """What the user asked for."""

    members: int = 1
    standby: int = 0
    nproc: int = 1
    snapshot_every: int = -1
    snapshot_budget: float = 0.01
    checkpoint_every_s: float = 60.0
    keep: int = 3
    max_restarts: int = 100
    restart_window_s: float = 3600.0
    identical_failures: int = 3
    identical_crashes: int = 5
    skip_bad_batches: bool = False
    loss_jump: float = 10.0
    loss_jump_fault: bool = False  # else it is only warned of
    patience_s: float = 86_400.0  # of a rank for its peers
    member_timeout_s: float = 5.0
    hang_floor_s: float = 0.0  # as the user gave it: whoever is late by then hangs; 0: not given
    stall_limit_s: float = 60.0  # without a step, and without a sign of work
    look_s: float = 4.0  # for a look at a rank that is late
    first_step_s: float = 600.0  # for joining, restoring and a first step, of a rank that is not stopped
    secure_s: float = 2.0
    victim_s: float = 0.3
    form_s: float = 600.0
    save_s: float = 120.0  # in which storage takes nothing of the last checkpoint, and it is given up
    tail_s: float = 60.0  # for a survivor to finish what it does after a commit
    unwind_s: float = 30.0  # for the `finally` blocks of a script that an exception ends
    grace_s: float = 30.0
    storage_s: float = 60.0  # that storage may take to answer, or be away, where nothing else has a state
    from_scratch: bool = False  # begin at step 0, whatever is on storage


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do; look again at `until_ns` at the latest."""

    until_ns: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """Gather evidence about a hang before anything is stopped. Only in journals of older versions."""

    faults: tuple[Fault, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Dismiss:
    """The hang that was looked at is over by itself. Only in journals of older versions."""

    why: str


@dataclass(frozen=True, slots=True)
class Warn:
    """Say of a rank that holds up the others where it is, and what the script can do about it."""

    place: str
    why: str


@dataclass(frozen=True, slots=True)
class Learn:
    """Remember how long a stall lasted that ended by itself."""

    learned: tuple[LearnedStall, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Secure:
    """Freeze the group and secure what the survivors hold."""

    faults: tuple[Fault, ...]
    just_in_time: bool
    why: str
    end: End | None = None  # with which the run ends once what is secured is on storage


@dataclass(frozen=True, slots=True)
class Start:
    """Form the next generation."""

    placement: tuple[str, ...]
    resume: ResumePoint
    skip: tuple[int, ...]
    master_addr: str
    master_port: int
    cause: Fault | None
    remedy: str
    evidence: tuple[str, ...]
    why: str
    cut: tuple[CutOffWork, ...] = ()


@dataclass(frozen=True, slots=True)
class Settle:
    """The generation has done its first step: the incident, if there was one, is over."""

    first_step_ns: int
    why: str


@dataclass(frozen=True, slots=True)
class Save:
    """Write the state that was secured to storage before the end."""

    member: str
    resume: ResumePoint
    why: str
    cut: tuple[CutOffWork, ...] = ()  # work that the stop cuts off
    finished: bool = False  # no stop: all ranks have finished


@dataclass(frozen=True, slots=True)
class Replace:
    """Give up a lost member and ask for another."""

    member: str
    why: str


@dataclass(frozen=True, slots=True)
class End:
    """Stop everything and leave with this exit code."""

    exit_code: int
    why: str
    message: str = ""
    cause: Fault | None = None
    cut: tuple[CutOffWork, ...] = ()  # work that the stop cuts off
    back: int | None = None  # what is beyond this step becomes void: a checkpoint of it is on storage
    warning: str = ""  # for the status


@dataclass(frozen=True, slots=True)
class Done:
    """All members are gone: leave."""

    why: str


Action: TypeAlias = (
    Wait | Look | Dismiss | Warn | Learn | Secure | Start | Settle | Save | Replace | End | Done
)
