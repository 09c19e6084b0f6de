"""The state of a job at one instant, the user's policy, and the actions of the supervisor. Data only.

`JobState` outlives the supervisor, because every line of the journal contains it. `View` adds the members'
current reports. Both are immutable, so a decision can be repeated from its line in the journal.

The journal omits the `UNRECORDED` fields (`holdfast.journal_fields`). Some of them hold a part of a sentence
that another field contains in full: displays use the part instead of parsing the sentence, and show the whole
sentence if the part is missing (docs/adr/0013). The other fields are times for an incident's timeline, or are
used only on a cluster, where there is no journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

from holdfast.journal_fields import UNRECORDED
from holdfast.protocol import defaults
from holdfast.protocol.codec import added
from holdfast.protocol.launcher_messages import FirstSignal, Launch, RestoreSource
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.member_messages import MemberReport, StateSource
from supervisor.fault_kinds import FaultName
from supervisor.identity_cache import by_identity

SECOND_NS = 1_000_000_000

JobPhase: TypeAlias = Literal["forming", "running", "looking", "securing", "saving", "stopping", "ended"]
# The names of a job's phases and the text that users see. The journal, status and metrics contain the names.
PHASES: Mapping[str, str] = MappingProxyType(
    {
        "forming": "forming",
        "running": "running",
        "looking": "finding out which rank hangs",  # only in journals and status files from before 0.1.0
        "securing": "securing the state",
        "saving": "saving a checkpoint",
        "stopping": "stopping",
        "ended": "ended",
    }
)
ENDING_PHASES = frozenset({"saving", "stopping", "ended"})  # the run is ending or has ended
ROLES = ("active", "standby", "lost", "new", "left")
# How a user stops the run: not at all, by a command, with Ctrl-C, by another signal, or without delay.
StopRequest: TypeAlias = Literal["", "graceful", "interrupt", "terminate", "now"]


@dataclass(frozen=True, slots=True)
class Fault:
    """A reason to stop the group: a failure, or a planned change of its members.

    The journal of a newer version may contain other kinds.
    """

    kind: FaultName
    rank: int
    member: str
    step: int
    at_ns: int  # when the fault began, on the clock of the supervisor's host
    signature: str
    detail: str
    message: str = ""
    code: int | None = None
    signal: int | None = None
    position: int = -1
    value: str = ""  # the bad number
    place: str = ""  # the line of the script where a rank hangs
    work: str = ""  # the kind of work, for a hang that may have been work
    doubtful: bool = False  # the fault of another rank may have caused this bad input
    # the part of a hang's `detail` that follows "rank 1 hangs: "
    hung: str = field(default="", compare=False, metadata=UNRECORDED)
    # for a member that is cut off: the peers that do not reach it, and that it does not reach
    peers: tuple[str, ...] = field(default=(), metadata=added())


@dataclass(frozen=True, slots=True)
class PastFault:
    """A fault that the group has recovered from."""

    kind: FaultName
    rank: int
    member: str
    step: int
    signature: str
    at_ns: int
    generation: int
    worked: bool = False  # before the fault, the generation had completed a step or run for a while
    value: str = ""  # the bad number
    place: str = ""
    work: str = ""
    everywhere: bool = False  # all ranks had the same fault
    # see `Fault`; () after the group has completed a step
    peers: tuple[str, ...] = field(default=(), metadata=added())


@dataclass(frozen=True, slots=True)
class LearnedStall:
    """A stall of `seconds` that work of this kind caused and that ended without intervention."""

    work: str
    seconds: float


@dataclass(frozen=True, slots=True)
class PastWarning:
    """A warning about a place in the script, issued before the supervisor acts on it."""

    place: str
    text: str


@dataclass(frozen=True, slots=True)
class UnconfirmedReport:
    """Member `one` reports that it does not reach its neighbour `other`, which does not report the same."""

    one: str
    other: str
    generation: int  # in which `other` was asked to confirm the report
    step: int  # the most steps that a rank had completed then; -1 if unknown


@dataclass(frozen=True, slots=True)
class InterruptedWork:
    """The script's work that a fault interrupted: work outside a step, or work that raised an exception."""

    rank: int
    step: int  # the last step that the rank had committed
    at_most: int  # the newest step from which the script can repeat the work
    after_s: float = 0.0  # how long the work had taken; 0 if unknown
    raised: bool = False  # the work ended with an exception of the script
    early: bool = False  # the work precedes the commit of a step that other ranks have committed


@dataclass(frozen=True, slots=True)
class MissedWork:
    """Work that was interrupted and not repeated. `incident` is the number of the incident that did so."""

    incident: int
    rank: int
    step: int
    early: bool = False  # the work belongs to the next step, not to the tail after the commit of `step`


@dataclass(frozen=True, slots=True)
class VoidStep:
    """A step whose private state a rank changed after the commit, so no copy contains the change."""

    generation: int
    step: int
    rank: int


@dataclass(frozen=True, slots=True)
class SetAsideState:
    """The old values of the `JobState` fields that the first step of a run from scratch overwrites."""

    lineage: tuple[Lineage, ...] = ()
    missed: tuple[MissedWork, ...] = ()
    equal: tuple[int, ...] = ()
    saved: int = -1


@dataclass(frozen=True, slots=True)
class PendingStart:
    """What the start of a generation changed, to be undone if it fails before its first step."""

    generation: int
    step: int  # the step that the generation resumes from
    lineage: tuple[Lineage, ...] = ()  # this field and the next two hold the values from before the start
    missed: tuple[MissedWork, ...] = ()
    equal: tuple[int, ...] = ()
    bound: int | None = None  # the newest step whose state may be good
    cut: tuple[InterruptedWork, ...] = ()  # the work that the fault before the start interrupted
    raised: tuple[Fault, ...] = ()  # the exceptions before the start
    failed: bool = False  # the start failed, and its changes were undone
    aside: SetAsideState | None = None  # set in a run from scratch that has not completed a step yet


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The newest state that can be restored on all ranks, and the members that hold it."""

    step: int
    generation: int
    source: Literal[RestoreSource, "none"]  # "none": start from the beginning
    path: str = ""
    sources: tuple[StateSource, ...] = ()
    holders: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    # the number of ranks that saved the state, if the group has another number now; 0 if not
    world_size: int = field(default=0, metadata=added())


@dataclass(frozen=True, slots=True)
class GroupSize:
    """The size of the group from one generation on, until the next entry.

    Ranks are numbered without gaps, so a rank of another size can have another number. Element i of `carried`
    is a position in the previous size: the i-th member continued with the private states of the ranks that
    were there. It is -1 if the member was new.
    """

    generation: int
    members: int
    carried: tuple[int, ...]
    at_ns: int  # when the group was resized


@dataclass(frozen=True, slots=True)
class OpenIncident:
    """The incident that is still open."""

    number: int
    generation: int
    fault_ns: int
    noticed_ns: int
    wall_s: float
    faults: tuple[Fault, ...] = ()
    evidence: tuple[str, ...] = ()
    stacks: tuple[tuple[tuple[int, ...], str], ...] = ()
    looked_ns: int = 0
    secured_ns: int = 0  # when the next decision used the secured state; see `survived_ns`
    decided_ns: int = 0
    cause: Fault | None = None
    remedy: str = ""
    why: str = ""
    reached: int = -1  # how many steps the group had completed
    resume: ResumePoint | None = None
    lost: int | None = None  # how many steps are repeated; None if undecided or unknown
    at_least: bool = False  # `lost` is a lower bound, because the member that knew the last steps is lost
    closed_ns: int = 0  # when the run ended, if it ended before the incident's first new step
    # the work that the incident interrupted; a piece is lost if the run resumes after its `at_most` step
    cut: tuple[InterruptedWork, ...] = ()
    own_state: bool = False  # the script keeps its own state, so steps are counted from its last start
    measure: str = field(default="", compare=False, metadata=UNRECORDED)  # the part of `why` after the cause
    # the number of the last request to save the state while the group lacks a member (`Preserve`)
    preserved: int = field(default=0, compare=False, metadata=UNRECORDED)
    # when all survivors had reported that their state is secured, which can be long before the next decision
    survived_ns: int = field(default=0, compare=False, metadata=UNRECORDED)
    # when there were enough members again, if the group waited for one to connect; 0 if it did not wait
    manned_ns: int = field(default=0, compare=False, metadata=UNRECORDED)
    # the number of ranks before and after the incident, if it changed; () if it did not
    resized: tuple[int, ...] = field(default=(), metadata=added())
    skipped: tuple[int, ...] = field(default=(), metadata=added())  # the steps that are skipped from now on


@dataclass(frozen=True, slots=True)
class JobState:
    """Everything that a supervisor must know to take over from its predecessor.

    It belongs to the job: the next run begins with the parts of it that outlive a run.
    """

    world_size: int  # of the current generation
    nproc: int
    phase: JobPhase = "forming"
    since_ns: int = 0
    generation: int = 0
    started_ns: int = 0  # when the current generation was formed
    placement: tuple[str, ...] = ()  # element i: the member of ranks [i*nproc, (i+1)*nproc)
    launch: Launch | None = None
    sources: tuple[StateSource, ...] = ()
    peers: tuple[StateSource, ...] = ()  # the address of each rank of the generation
    lineage: tuple[Lineage, ...] = ()
    history: tuple[PastFault, ...] = ()
    skip: tuple[int, ...] = ()
    incident: OpenIncident | None = None
    incidents: int = 0
    looks: int = 0  # inspections of stacks, including inspections for stalls that did not become hangs
    settled: bool = False
    stop: StopRequest = ""
    first: FirstSignal = ""  # the signal or request that ranks receive before SIGTERM: see `LauncherOrder`
    save: int = 0
    save_step: int = -1
    save_generation: int = 0
    save_member: str = ""
    exit_code: int | None = None
    why: str = ""
    message: str = ""
    lost: tuple[str, ...] = ()
    missed: tuple[MissedWork, ...] = ()  # work around commits that was interrupted and not repeated
    cut: tuple[InterruptedWork, ...] = ()  # work that a stop interrupts
    before: int = 0  # the number of incidents of earlier runs in the same directory
    learned: tuple[LearnedStall, ...] = ()
    warned: tuple[PastWarning, ...] = ()
    seen: int = 0  # the newest generation that storage or a member reports, if newer than `generation`
    saved: int = -1  # the newest step that was on storage and is not void
    held: int = -1  # the newest step that the group has passed and whose snapshot a member held
    reached: int = -1  # the most steps that any rank of the current generation has completed; -1 if unknown
    equal: tuple[int, ...] = ()  # the last steps where the replicas matched on all members
    void: tuple[VoidStep, ...] = ()  # oldest first
    unbegun: PendingStart | None = None  # set until the current generation completes a step
    finished: bool = False  # the script ran to its end, and the state to save is its last one
    end: End | None = None  # an end that no user requested; the run ends after any state has been saved
    # the members without ranks that existed when the run's end was decided, and were ordered to end too; used
    # only on a cluster, where the Supervision contains them
    bystanders: tuple[str, ...] = field(default=(), metadata=UNRECORDED)
    # `End.completion` of the end that was decided
    completion: Completion | None = field(default=None, compare=False, metadata=UNRECORDED)
    # how often the last checkpoint was ordered again, because a member had not saved it
    save_tries: int = field(default=0, metadata=added())
    # how many members the group lacks compared with the run's full size (`Policy.min_members`)
    reduced_by: int = field(default=0, metadata=added())
    # the changes of the size, oldest first
    sizes: tuple[GroupSize, ...] = field(default=(), metadata=added())
    # True after all ranks have reported that the script can run with another number of ranks
    resizable: bool = field(default=False, metadata=added())
    # the members that have made the group larger, until it completes a step
    joined: tuple[str, ...] = field(default=(), metadata=added())
    # members that failed when they joined and have not joined again since
    dropped: tuple[str, ...] = field(default=(), metadata=added())
    # On a cluster: the members that got ranks after the first start, until the group completes a step.
    # Perhaps no peer has ever reached them.
    untried: tuple[str, ...] = field(default=(), metadata=added())
    # on a cluster: the unconfirmed reports that members must confirm, until the group completes a step
    asked: tuple[UnconfirmedReport, ...] = field(default=(), metadata=added())

    @property
    def full_members(self) -> int:
        """The number of members of the run's full size."""
        return self.world_size // max(1, self.nproc) + self.reduced_by

    @property
    def positions(self) -> Mapping[str, int]:
        """The position of each member in `placement`. Use it in loops over many members."""
        return _positions(self.placement)


@by_identity(8)
def _positions(placement: tuple[str, ...]) -> Mapping[str, int]:
    return {name: len(placement) - 1 - back for back, name in enumerate(reversed(placement))}


@dataclass(frozen=True, slots=True)
class Departure:
    """The announcement that a member is about to end. `why` is a clause, such as "node n1 is drained"."""

    why: str
    ends_ns: int = 0  # the latest time at which the member ends; 0: unknown
    # Its processes have already been asked to end. If there is no standby, the member is therefore considered
    # lost.
    has_begun: bool = False
    # Its node is only suspected to be faulty. If the member has no ranks, it can still get some as a last
    # resort.
    may_stay: bool = False


@dataclass(frozen=True, slots=True)
class MemberView:
    """A member as the supervisor sees it."""

    name: str
    exists: bool  # according to the backend
    connected: bool
    silent_s: float  # the time since its last report
    report: MemberReport | None = None
    heard_ns: int = 0  # when this supervisor received the member's first report
    well_ns: int = 0  # when the member last reported that its launcher responds
    # True while the backend lists the member, even if it is considered lost and `exists` is therefore False
    is_listed: bool = field(default=False, metadata=UNRECORDED)
    # On a cluster: when the supervisor last received a new step of one of its ranks; 0 for never
    stepped_ns: int = field(default=0, metadata=UNRECORDED)
    # On a cluster: how long its host has not answered probes, although it answered earlier ones; 0.0 if it
    # answers, or if nothing is known
    unanswered_s: float = field(default=0.0, metadata=UNRECORDED)
    # On a cluster: how long this supervisor has waited for its first report; 0.0 after it has arrived
    awaited_s: float = field(default=0.0, metadata=UNRECORDED)
    # set if the member is about to end; used only on a cluster
    departure: Departure | None = field(default=None, metadata=UNRECORDED)
    rack: str = field(default="", metadata=UNRECORDED)  # of its node; "" if it is unknown
    # when it last reported again after its connection had ended; 0 if that has not happened
    back_ns: int = field(default=0, metadata=added())
    # the time since which its reports have named each unreached neighbour, by URL
    unreached_ns: tuple[tuple[str, int], ...] = field(default=(), metadata=UNRECORDED)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on storage whose manifest is valid and whose files have the right sizes."""

    step: int
    generation: int
    world_size: int
    path: str
    skip: tuple[int, ...] = ()
    verified: bool = False  # it was read back, or its writer compared it


@dataclass(frozen=True, slots=True)
class UnusableCheckpoint:
    """A directory that is named like a checkpoint but is damaged or not a checkpoint."""

    name: str
    step: int
    why: str

    @property
    def note(self) -> str:
        return f"checkpoint {self.name} is not used: {self.why}"


UNREAD = "it has not been read yet"


@dataclass(frozen=True, slots=True)
class StorageContents:
    """The contents of storage as of the last successful listing.

    The list includes void checkpoints, because only the lineage shows which checkpoints are void. `error`
    says why the latest listing failed; "" if it succeeded.
    """

    checkpoints: tuple[Checkpoint, ...] = ()  # newest first
    unusable: tuple[UnusableCheckpoint, ...] = ()
    lineage: tuple[Lineage, ...] = ()  # according to the manifests
    generation: int = 0  # the newest in the manifests
    error: str = ""
    failed_ns: int = 0  # when listings began to fail
    # When the listing began; 0: none so far. The field's name, which is in the journal, does not refer to an
    # inspection of ranks.
    looked_ns: int = 0
    heard: int = 0  # the last request for a checkpoint that was answered before the listing began
    epoch: int = 0  # the highest in the manifests


@dataclass(frozen=True, slots=True)
class LateRank:
    """A rank that is late, and what its inspections have shown."""

    rank: int
    step: int
    phase: str  # the name of its phase, or `progress.NOT_BEGUN`
    since_ns: int  # when it last made progress
    # The conclusion of its newest inspection, one of `supervisor.hangs.evidence`; "" before the first one.
    role: str = ""
    work: str = ""  # the kind of its work
    worked_ns: int = 0  # when a sign of work was last seen; 0: never
    busy: bool = False  # whether it computes without visible progress
    look: int = 0  # number of the newest inspection
    phase_seq: int = -1
    at: str = ""  # its innermost function, without the line number
    works: tuple[str, ...] = ()  # the kinds of work seen so far
    begun: bool = True  # see `RankStall`; if False, Holdfast may never see a step of this rank
    looks: int = 0  # how many inspections this supervisor has seen; it takes two to show movement
    # The newest inspection shows that it does not wait for another rank (`evidence.waits_for_no_rank`).
    apart: bool = False
    apart_ns: int = 0  # when an inspection last showed this; 0: never
    # whether it was in the first step of its generation, whose duration says nothing about others
    first_step: bool = field(default=False, metadata=added())


@dataclass(frozen=True, slots=True)
class RankAtRest:
    """A rank that, according to its newest inspection, waits in a collective until a peer sends it bytes."""

    rank: int
    step: int
    mark: int  # stays the same in successive inspections while the rank does not move
    since_ns: int  # when the supervisor first received this mark
    look: int  # number of the newest inspection
    asked: int  # the `inspection_id` in the request for it; the field's name is in the journal
    heard_ns: int  # when the supervisor received that inspection
    rests_s: float  # how long after that inspection none of the rank's waits can time out
    ends: int  # checksum of its connections; the XOR over all ranks is 0 if they wait only for each other
    place: str  # where it waits, for example "barrier, called by evaluate (train.py:42)"


@dataclass(frozen=True, slots=True)
class PendingException:
    """An exception that may be about to end its rank."""

    rank: int
    failed_ns: int  # when it was raised, on the clock of the rank's host; this identifies the exception
    since_ns: int  # when the supervisor first received it


@dataclass(frozen=True, slots=True)
class StallWatch:
    """What the supervisor has observed about a group that completes no steps. Each view updates it."""

    generation: int = 0
    ranks: tuple[LateRank, ...] = ()  # ranks that are late, or watched for another reason
    # what was learned from the last stall of this generation that ended without a restart
    passed: tuple[LearnedStall, ...] = ()
    hints: tuple[PendingException, ...] = ()
    rests: tuple[RankAtRest, ...] = ()  # all ranks at rest, even if not late; () while no rank is late
    untold_ns: int = 0  # when a member's report about its ranks was first found missing; 0 if none is missing

    @property
    def since_ns(self) -> int:
        """The time of the most recent progress of any of `ranks`; 0 if there are none."""
        return max((each.since_ns for each in self.ranks), default=0)


@dataclass(frozen=True, slots=True)
class View:
    """Everything that is known at `now_ns`, a CLOCK_MONOTONIC time of the supervisor's host."""

    now_ns: int
    wall_s: float  # the same time on the wall clock, for people
    memory: JobState  # the job's state after the last decision, which the journal calls its memory
    members: tuple[MemberView, ...] = ()
    stored: StorageContents = StorageContents()
    watch: StallWatch = field(default_factory=StallWatch)
    # True if the newest decision could not be recorded, so that the next supervisor would not know it
    unrecorded: bool = field(default=False, metadata=added())

    def member(self, name: str) -> MemberView | None:
        return _by_name(self.members).get(name)


@by_identity(1)
def _by_name(members: tuple[MemberView, ...]) -> Mapping[str, MemberView]:
    return {each.name: each for each in reversed(members)}


@dataclass(frozen=True, slots=True)
class Policy:
    """The user's settings for a run."""

    members: int = 1
    standby: int = 0
    nproc: int = 1
    snapshot_every: int = defaults.SNAPSHOT_EVERY
    snapshot_budget: float = defaults.SNAPSHOT_BUDGET
    checkpoint_every_s: float = defaults.CHECKPOINT_EVERY_S
    keep: int = defaults.KEEP_CHECKPOINTS
    max_restarts: int = defaults.MAX_RESTARTS
    restart_window_s: float = 3600.0
    identical_failures: int = 3
    identical_crashes: int = 5
    skip_bad_batches: bool = False
    loss_jump: float = defaults.LOSS_JUMP
    loss_jump_fault: bool = False  # True: a jump of the loss is a fault; False: only a warning
    patience_s: float = defaults.PATIENCE_S  # how long a rank waits for its peers
    member_timeout_s: float = defaults.MEMBER_TIMEOUT_S
    hang_floor_s: float = 0.0  # the user's limit after which a late rank is treated as hung; 0: not given
    # how long a rank may go without a step and without a sign of work
    stall_limit_s: float = defaults.STALL_LIMIT_S
    look_s: float = 4.0  # limit for the inspection of a late rank
    # limit for joining, restoring and the first step of a rank that is not stopped
    first_step_s: float = defaults.FIRST_STEP_S
    secure_s: float = 2.0
    victim_s: float = 0.3
    form_s: float = 600.0
    save_s: float = 120.0  # after this time without progress, the last checkpoint is abandoned
    tail_s: float = 60.0  # time for a survivor to finish its tail, the work after a commit
    unwind_s: float = 30.0  # time for the `finally` blocks of a script that ends because of an exception
    grace_s: float = defaults.GRACE_S
    storage_s: float = 60.0  # time for storage to respond or recover if no member holds a state
    from_scratch: bool = False  # begin at step 0, regardless of what is on storage
    # a controller outside Holdfast creates the members, so replacing a lost member can take minutes
    members_created_externally: bool = field(default=False, metadata=UNRECORDED)
    # False: a checkpoint would be lost with the pod that wrote it, so none is written or announced
    has_storage: bool = field(default=True, metadata=UNRECORDED)
    # if no standby can replace a lost member, the group continues with at least this many members; 0: it
    # waits
    min_members: int = field(default=0, metadata=added())


@dataclass(frozen=True, slots=True)
class Wait:
    """Take no action, and decide again by `until_ns`."""

    until_ns: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """Gather evidence about a hang before stopping anything. Only in journals from before 0.1.0."""

    faults: tuple[Fault, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Drop a suspected hang that ended without intervention. Only in journals from before 0.1.0."""

    why: str


@dataclass(frozen=True, slots=True)
class Warn:
    """Warn the user once about `place`, such as the line of the script where a rank holds up the others."""

    place: str
    why: str


@dataclass(frozen=True, slots=True)
class Learn:
    """Remember the duration of a stall that ended without intervention."""

    learned: tuple[LearnedStall, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Secure:
    """Freeze the group and secure the survivors' state."""

    faults: tuple[Fault, ...]
    just_in_time: bool  # replaced by `MemberOrder.just_in_time`; kept because journals contain it
    why: str
    end: End | None = None  # how the run ends when the secured state is on storage


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
    cut: tuple[InterruptedWork, ...] = ()
    measure: str = field(default="", compare=False, metadata=UNRECORDED)  # the part of `why` after the cause


@dataclass(frozen=True, slots=True)
class Settle:
    """Record the first step of the generation. This closes the open incident, if there is one."""

    first_step_ns: int
    why: str


@dataclass(frozen=True, slots=True)
class Save:
    """Write the secured state to storage before the run ends."""

    member: str
    resume: ResumePoint
    why: str
    cut: tuple[InterruptedWork, ...] = ()  # work that the stop interrupts
    finished: bool = False  # all ranks have finished; False: the run was stopped, or a fault ends it
    # how the run ends when the state is on storage or cannot be saved; None: as `JobState` says
    end: End | None = field(default=None, metadata=added())


@dataclass(frozen=True, slots=True)
class Preserve:
    """Write the secured state to storage while the group waits for a member."""

    member: str
    resume: ResumePoint
    why: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Give up on a lost member and request a new one."""

    member: str
    why: str


@dataclass(frozen=True, slots=True)
class Completion:
    """The parts of the last sentence of a run whose script has finished (`wording.finish`)."""

    missing: str = ""  # why the last state has no checkpoint; "" if it has one
    notes: tuple[str, ...] = ()  # what else the user should know
    incidents: int = 0  # the number in this run, as counted by `closing.completion_of`


@dataclass(frozen=True, slots=True)
class End:
    """Stop all processes and end the run with this exit code."""

    exit_code: int
    why: str
    message: str = ""
    cause: Fault | None = None
    cut: tuple[InterruptedWork, ...] = ()  # work that the stop interrupts
    back: int | None = None  # states after this step become void; storage has a checkpoint of it
    warning: str = ""  # a warning that the status shows
    # the parts of `why` if the script has finished
    completion: Completion | None = field(default=None, compare=False, metadata=UNRECORDED)


@dataclass(frozen=True, slots=True)
class Done:
    """End the supervisor, because all members are gone or did not stop in time."""

    why: str


RunAction: TypeAlias = (
    Wait | Look | Dismiss | Warn | Learn | Secure | Start | Settle | Save | Preserve | Replace | End | Done
)
