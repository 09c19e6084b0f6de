"""The state of a job at one instant, the user's policy, and the actions of the supervisor. Data only.

`JobState` outlives the supervisor: every line of the journal contains it. `View` adds the members' present
reports. Both are immutable, so a decision can be repeated from its journal line.

A field that is `UNRECORDED` holds parts of a sentence which another field holds whole. Displays take them
instead of parsing the sentence; where they are missing, they show the sentence (docs/adr/0013). The journal
leaves such a field out, and two objects that differ in nothing else are equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from holdfast.protocol.launcher_messages import Launch
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import MemberReport, StateSource

# The phases of a job, with the text that users see. The names are data in journal, status and metrics.
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
UNRECORDED: Mapping[str, bool] = MappingProxyType({"in_journal": False})  # metadata of a field


def is_recorded(declared: Field[Any]) -> bool:
    """True for a field that is in the journal."""
    return bool(declared.metadata.get("in_journal", True))


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure that stops the group. `kind` is one of `fault_kinds.FAULT_KINDS`."""

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
    place: str = ""  # of a hang: the line of the script that the rank is at
    work: str = ""  # of a hang that may have been work: the kind of work
    doubtful: bool = False  # of bad input: any other rank's fault explains it, as for a victim
    # of a hang: what `detail` says after "rank 1 hangs: "
    hung: str = field(default="", compare=False, metadata=UNRECORDED)


@dataclass(frozen=True, slots=True)
class PastFault:
    """A fault from which the group has recovered."""

    kind: str
    rank: int
    member: str
    step: int
    signature: str
    at_ns: int
    generation: int
    worked: bool = False  # the generation had done a step, or had run for a while
    value: str = ""  # the bad number
    place: str = ""
    work: str = ""
    everywhere: bool = False  # all ranks had the same fault


@dataclass(frozen=True, slots=True)
class LearnedStall:
    """A stall of `seconds`, caused by work of this kind, that ended without action."""

    work: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PastWarning:
    """A warning about a place in the script, given before any action is taken on it."""

    place: str
    text: str


@dataclass(frozen=True, slots=True)
class CutOffWork:
    """Work of the script that a fault cut off: work outside of a step, or work that raised an exception."""

    rank: int
    step: int  # the last step that the rank had committed
    at_most: int  # the newest step from which the script does the work again
    after_s: float = 0.0  # how long it had taken; 0: not known
    raised: bool = False  # the script's own exception ended it
    early: bool = False  # before the commit of a step that other ranks have committed


@dataclass(frozen=True, slots=True)
class UndoneWork:
    """Work that was cut off and not done again. `incident` is the number of its incident."""

    incident: int
    rank: int
    step: int
    early: bool = False  # in the step that begins there, not after the commit that ends there


@dataclass(frozen=True, slots=True)
class VoidStep:
    """A step after whose commit a rank changed its private state: no copy has the state of that step."""

    generation: int
    step: int
    rank: int


@dataclass(frozen=True, slots=True)
class SetAsideState:
    """What a run from scratch makes void with its first step, as it was before."""

    lineage: tuple[Lineage, ...] = ()
    missed: tuple[UndoneWork, ...] = ()
    equal: tuple[int, ...] = ()
    saved: int = -1


@dataclass(frozen=True, slots=True)
class PendingStart:
    """What the start of a generation changed, until its group has done a step. `failed`: it was undone."""

    generation: int
    step: int  # from which it resumes
    lineage: tuple[Lineage, ...] = ()  # this and the next two: as before the start
    missed: tuple[UndoneWork, ...] = ()
    equal: tuple[int, ...] = ()
    bound: int | None = None  # the newest step whose state may be good
    cut: tuple[CutOffWork, ...] = ()  # by the fault before the start
    raised: tuple[Fault, ...] = ()  # before the start
    failed: bool = False
    aside: SetAsideState | None = None  # of a run from scratch that has not done a step in any generation


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The newest state that can be restored on all ranks, and the members that hold it."""

    step: int
    generation: int
    source: str  # slot, checkpoint, none (from the beginning)
    path: str = ""
    sources: tuple[StateSource, ...] = ()
    holders: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenIncident:
    """The incident that is not over yet."""

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
    reached: int = -1  # the steps that the group had done
    resume: ResumePoint | None = None
    lost: int | None = None  # steps to do again; None while undecided, or if it is not known
    at_least: bool = False  # `lost` may be more: the member that knew the last steps is gone
    closed_ns: int = 0  # when it ended without a first new step: the run ended
    cut: tuple[CutOffWork, ...] = ()  # work that it cut off; not done again if `resume` is beyond it
    own_state: bool = False  # the script keeps its own state: its steps are counted from its last start
    measure: str = field(default="", compare=False, metadata=UNRECORDED)  # what `why` says after the cause


@dataclass(frozen=True, slots=True)
class JobState:
    """Everything that a supervisor needs to know when it succeeds another one."""

    world_size: int
    nproc: int
    phase: str = "forming"
    since_ns: int = 0
    generation: int = 0
    started_ns: int = 0  # when the present generation was formed
    placement: tuple[str, ...] = ()  # member of ranks [i*nproc, (i+1)*nproc)
    launch: Launch | None = None
    sources: tuple[StateSource, ...] = ()
    peers: tuple[StateSource, ...] = ()  # the address of each rank of the generation
    lineage: tuple[Lineage, ...] = ()
    history: tuple[PastFault, ...] = ()
    skip: tuple[int, ...] = ()
    incident: OpenIncident | None = None
    incidents: int = 0
    looks: int = 0  # at stacks: those of hangs, and of stalls that ended before
    settled: bool = False
    stop: str = ""  # graceful (by a command), interrupt (Ctrl-C), terminate (another signal), now
    first: str = ""  # the request to end that ranks receive before SIGTERM: see `LauncherOrder`
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
    seen: int = 0  # the newest generation that storage or a member reports, if it is beyond `generation`
    saved: int = -1  # the newest step that was on storage and is not void
    held: int = -1  # the newest step whose snapshot a member held, and that the group has passed
    reached: int = -1  # the most steps that a rank of the present generation has done; -1: not known
    equal: tuple[int, ...] = ()  # the last steps at which the replicas were equal on all members
    void: tuple[VoidStep, ...] = ()  # oldest first
    unbegun: PendingStart | None = None  # while the present generation has not done a step
    finished: bool = False  # the script has ended well, and the state to save is its last one
    end: End | None = None  # the end of the run, not requested by a user, once its state is saved
    # `End.completion` of the end that was decided
    completion: Completion | None = field(default=None, compare=False, metadata=UNRECORDED)


@dataclass(frozen=True, slots=True)
class MemberView:
    """A member as the supervisor sees it."""

    name: str
    exists: bool  # according to the backend
    connected: bool
    silent_s: float  # since its last report
    report: MemberReport | None = None
    heard_ns: int = 0  # when this supervisor received its first report
    well_ns: int = 0  # when it last reported with a launcher that answers


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on storage whose manifest is valid and whose files have the right sizes."""

    step: int
    generation: int
    world_size: int
    path: str
    skip: tuple[int, ...] = ()
    verified: bool = False  # its content was read back, or compared by its writer


@dataclass(frozen=True, slots=True)
class UnusableCheckpoint:
    """A directory with the name of a checkpoint that is not one, or is damaged."""

    name: str
    step: int
    why: str

    @property
    def note(self) -> str:
        return f"checkpoint {self.name} is not used: {self.why}"


UNREAD = "it has not been read yet"


@dataclass(frozen=True, slots=True)
class StorageContents:
    """The contents of storage as of the last listing.

    Void checkpoints are included: which ones are void depends on the lineage. `error` is why the last listing
    failed; the contents found by the one before are kept.
    """

    checkpoints: tuple[Checkpoint, ...] = ()  # newest first
    unusable: tuple[UnusableCheckpoint, ...] = ()
    lineage: tuple[Lineage, ...] = ()  # according to the manifests
    generation: int = 0  # the newest in the manifests
    error: str = ""
    failed_ns: int = 0  # since when there is an `error`
    looked_ns: int = 0  # when the listing began; 0: there was none yet
    heard: int = 0  # the last request for a checkpoint that was answered before the listing began
    epoch: int = 0  # the highest in the manifests


@dataclass(frozen=True, slots=True)
class LateRank:
    """A rank that is late: since when, and what inspections of it have shown."""

    rank: int
    step: int
    phase: str  # its name, or `progress.NOT_BEGUN`
    since_ns: int  # when it last made progress
    role: str = ""  # by the newest inspection: one of `supervisor.hangs.evidence`; "" until there is one
    work: str = ""  # the kind of its work
    worked_ns: int = 0  # when a sign of work was last seen; 0 never
    busy: bool = False  # it computes, without visible progress
    look: int = 0  # number of the newest inspection
    phase_seq: int = -1
    at: str = ""  # its innermost function, without the line
    works: tuple[str, ...] = ()  # the kinds of work that were seen
    begun: bool = True  # as in `RankStall`: False, and perhaps Holdfast will never see a step of it
    looks: int = 0  # how many inspections this supervisor has seen: two show whether the rank has moved
    # The newest inspection shows that it waits for no other rank: `evidence.waits_for_no_rank`.
    apart: bool = False
    apart_ns: int = 0  # when an inspection last showed that; 0 never


@dataclass(frozen=True, slots=True)
class RestingRank:
    """A rank that waits in a collective, by its newest inspection, until a peer sends it bytes."""

    rank: int
    step: int
    mark: int  # the same in each inspection for as long as the rank did not move
    since_ns: int  # when the supervisor first received this mark
    look: int  # number of the newest inspection
    asked: int  # the number with which that inspection was requested
    heard_ns: int  # when the supervisor received it
    rests_s: float  # for this long after that, no wait of the rank ends at its own time limit
    ends: int  # a sum of its connections
    place: str  # "barrier, called by evaluate (train.py:42)"


@dataclass(frozen=True, slots=True)
class PendingException:
    """An exception that may be about to end its rank."""

    rank: int
    failed_ns: int  # by the clock of the rank's host: distinguishes exceptions
    since_ns: int  # when the supervisor first received it


@dataclass(frozen=True, slots=True)
class StallWatch:
    """What the supervisor has observed of a group in which no step ends. Each view updates it."""

    generation: int = 0
    ranks: tuple[LateRank, ...] = ()  # ranks that are late, or watched for another reason
    passed: tuple[
        LearnedStall, ...
    ] = ()  # from the last stall of this generation that ended without a restart
    hints: tuple[PendingException, ...] = ()
    rests: tuple[RestingRank, ...] = ()  # ranks that are at rest, late or not, while any rank is late
    untold_ns: int = 0  # since when a member has not reported what its ranks do; 0 when all have

    @property
    def since_ns(self) -> int:
        """When the last of `ranks` last made progress; 0 while there are none."""
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
    """The user's settings for a run."""

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
    loss_jump_fault: bool = False  # else it is only a warning
    patience_s: float = 86_400.0  # how long a rank waits for its peers
    member_timeout_s: float = 5.0
    hang_floor_s: float = 0.0  # the user's limit after which a late rank hangs; 0: not given
    stall_limit_s: float = 60.0  # without a step and without a sign of work
    look_s: float = 4.0  # for the inspection of a rank that is late
    first_step_s: float = 600.0  # for joining, restoring and the first step of a rank that is not stopped
    secure_s: float = 2.0
    victim_s: float = 0.3
    form_s: float = 600.0
    save_s: float = 120.0  # without progress of the last checkpoint's write, after which it is given up
    tail_s: float = 60.0  # for a survivor to finish its tail: the work after a commit
    unwind_s: float = 30.0  # for the `finally` blocks of a script that an exception ends
    grace_s: float = 30.0
    storage_s: float = 60.0  # for storage to answer, or to come back, if no member has a state
    from_scratch: bool = False  # begin at step 0, whatever is on storage


@dataclass(frozen=True, slots=True)
class Wait:
    """Take no action; decide again at `until_ns` at the latest."""

    until_ns: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """Gather evidence about a hang before stopping anything. Only in journals of older versions."""

    faults: tuple[Fault, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Drop a suspected hang that ended without action. Only in journals of older versions."""

    why: str


@dataclass(frozen=True, slots=True)
class Warn:
    """Warn where a rank is that holds up the others, and what the script can do about it."""

    place: str
    why: str


@dataclass(frozen=True, slots=True)
class Learn:
    """Remember how long a stall lasted that ended without action."""

    learned: tuple[LearnedStall, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Secure:
    """Freeze the group and secure the state that the survivors hold."""

    faults: tuple[Fault, ...]
    just_in_time: bool
    why: str
    end: End | None = None  # the end of the run, once the secured state is on storage


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
    measure: str = field(default="", compare=False, metadata=UNRECORDED)  # what `why` says after the cause


@dataclass(frozen=True, slots=True)
class Settle:
    """Record the first step of the generation: the incident, if there was one, is over."""

    first_step_ns: int
    why: str


@dataclass(frozen=True, slots=True)
class Save:
    """Write the secured state to storage before the run ends."""

    member: str
    resume: ResumePoint
    why: str
    cut: tuple[CutOffWork, ...] = ()  # work that the stop cuts off
    finished: bool = False  # not a stop: all ranks have finished


@dataclass(frozen=True, slots=True)
class Replace:
    """Give up a lost member and request another one."""

    member: str
    why: str


@dataclass(frozen=True, slots=True)
class Completion:
    """What the last sentence of a run says whose script has finished (`wording.finish`), part by part."""

    missing: str = ""  # that there is no checkpoint of the last state, and why
    notes: tuple[str, ...] = ()  # what else the user should know
    incidents: int = 0  # of this run; `closing.completion_of` counts them


@dataclass(frozen=True, slots=True)
class End:
    """Stop all processes and end the run with this exit code."""

    exit_code: int
    why: str
    message: str = ""
    cause: Fault | None = None
    cut: tuple[CutOffWork, ...] = ()  # work that the stop cuts off
    back: int | None = None  # steps beyond this one become void; a checkpoint of it is on storage
    warning: str = ""  # for the status
    # the parts of `why` where the script has finished
    completion: Completion | None = field(default=None, compare=False, metadata=UNRECORDED)


@dataclass(frozen=True, slots=True)
class Done:
    """End the supervisor: all members are gone."""

    why: str


Action: TypeAlias = (
    Wait | Look | Dismiss | Warn | Learn | Secure | Start | Settle | Save | Replace | End | Done
)
