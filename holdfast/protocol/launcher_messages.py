"""Define the messages between a launcher and its sidecar about the ranks' processes.

Like the messages between a member and the supervisor (`holdfast.protocol.member_messages`), each message is a
complete state or a complete order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from holdfast.journal_fields import UNRECORDED
from holdfast.protocol import defaults
from holdfast.protocol.codec import MAX_RANKS, added, at_most
from holdfast.protocol.drills import DrillName

# The orders that a launcher carries out (`LauncherOrder.do`), and the first signals that it sends to stop
# ranks.
LauncherAction: TypeAlias = Literal["run", "stop", "secure", "look", "where", "settle", "drill", "kill"]
FirstSignal: TypeAlias = Literal["", "interrupt", "handled"]
ProcessPhase: TypeAlias = Literal["starting", "running", "failing", "exited"]  # of a rank's process
RestoreSource: TypeAlias = Literal["slot", "checkpoint"]
BadNumberKind: TypeAlias = Literal["nan", "inf", "jump"]  # "jump" is a loss far above recent losses
NAN: Final = "nan"
INF: Final = "inf"
JUMP: Final = "jump"

# The message about a process that the kernel killed for lack of memory begins with these words. They are also
# the signature of this failure.
OUT_OF_MEMORY = "out of memory"
COLLECTIVE = "collective"  # the activity of a rank that waits for its peers
DISTRIBUTED = "distributed"  # the failure of a rank that lost its peers
UNFLUSHED = "unflushed"  # the failure of a rank whose script succeeded but could not write all of its output
MAX_CALLS = 64  # how many different waits of one rank's threads an inspection lists
MAX_CHANGED = 8  # how many changed files are reported, because a whole source tree would be noise
NO_ROOM = "no slot is free"  # why a rank could not copy the whole state: other processes hold the slots


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank's process ended, or a hint that it is about to end.

    `at_ns` and `failed_ns` are times on CLOCK_MONOTONIC of the member's host. `failed_ns` is 0 if the process
    could not report its failure, for example because a signal killed it. `fail` is the name of a
    `holdfast.protocol.progress.FailKind` in lower case, or `UNFLUSHED`.
    """

    at_ns: int
    code: int | None = None
    signal: int | None = None
    ours: bool = False  # Holdfast sent the signal
    fail: str = ""
    failed_ns: int = 0
    message: str = ""  # its traceback or the end of its stderr; a long text is shortened in the middle
    # True for a hint: the script's `finally` blocks are still running, and the rank may then end this way.
    unwinding: bool = False
    overdue: bool = False  # in a hint: the `finally` blocks have used up the time that they may take
    step: int = -1  # in a hint: the steps that the rank had completed; another step makes the hint void
    raised: str = ""  # the exception's type and the first line of its message
    paused: int = -1  # the steps completed when the exception left a declared pause; -1 if it left no pause
    # Whether the loss of a peer may have caused the bad input, because the script caught that exception.
    doubtful: bool = False
    out_of_memory: bool = field(default=False, metadata=added())  # the kernel killed it for lack of memory

    @property
    def is_good(self) -> bool:
        """True if the script has completed all its work, which leaves nothing for a restart to do."""
        return self.signal is None and (self.code == 0 or self.fail == UNFLUSHED)

    @property
    def blame_order(self) -> tuple[bool, int]:
        """A sort key that puts the ending that explains the others first.

        Causes come first. Then follow victims, ranks that Holdfast ended, and ranks that succeeded. Both are
        sorted by time.
        """
        is_cause = not (self.fail == DISTRIBUTED or self.ours or self.is_good)
        return not is_cause, self.failed_ns or self.at_ns


@dataclass(frozen=True, slots=True)
class BadNumber:
    """A loss or gradient norm that failed the check at a commit."""

    kind: BadNumberKind
    step: int  # the step that produced it
    loss: str  # as text, because JSON has no NaN
    position: int
    at_ns: int
    why: str = ""  # for a jump: what the loss was compared with


@dataclass(frozen=True, slots=True)
class StartTimes:
    """When a rank passed the stages of its start, on CLOCK_MONOTONIC; 0 for stages that are still to come.

    `goal` is how many steps are completed when its loop ends, or 0 if it is not known yet.
    """

    started_ns: int = 0
    joined_ns: int = 0
    restored_ns: int = 0
    first_step_ns: int = 0
    goal: int = 0
    resizes: bool = field(default=False, metadata=added())  # the script accepts other numbers of ranks
    fixed_by: str = field(default="", metadata=added())  # if it does not: why, as a clause


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of one rank's process, as its launcher sees it."""

    rank: int
    local_rank: int
    pid: int
    generation: int
    state: ProcessPhase
    ending: Ending | None = None
    flag: BadNumber | None = None
    marks: StartTimes = field(default_factory=StartTimes)
    note: str = ""  # its last warning, for display
    where: str = ""  # its main thread's activity (`holdfast.worker.thread_frames`) when last requested
    # Whether a signal stopped it seconds ago and has not continued it, while its launcher kept running (see
    # `holdfast.inspection.liveness`).
    stopped: bool = False
    left: str = ""  # why no copy has the script's final state, as reported by the rank


@dataclass(frozen=True, slots=True)
class SecureAnswer:
    """A rank's answer to the order "secure": its step, and whether its member's arena holds that state."""

    rank: int
    step: int
    whole: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class RankInspection:
    """What a rank's process and its descendants did in a short window, as observed by the launcher.

    The waits and the CPU time of Holdfast's own threads are not included.
    """

    rank: int
    step: int
    phase: int
    phase_seq: int
    process_state: str  # as in /proc/PID/stat; T only if it was stopped for the whole window
    cpu_s: float
    stack: str  # the Python stack at the end of the window, or the reason why it is missing
    number: int = 0  # the number of the inspection within its generation
    window_s: float = 0.0  # the length of the window
    traced: bool = False  # whether a debugger is attached
    moved: bool = False  # whether other functions were running at the end of the window than at its beginning
    io_bytes: int = 0  # the bytes that the process and its descendants read and wrote
    # How the threads wait, without duplicates. The main thread's wait comes first, followed by the waits of
    # the other Python threads and the native threads.
    calls: tuple[str, ...] = field(default=(), metadata=at_most(MAX_CALLS))
    children: int = 0  # the number of descendants that compute, read, write, or wait with a timeout
    children_cpu_s: float = 0.0
    at: str = ""  # the innermost function, such as "wait (threading.py:331)"
    where: str = ""  # the innermost line of the script's own code, such as "evaluate (train.py:42)"
    # the supervisor's `inspection_id` (see `MemberOrder.look`); the field's name is on the wire
    asked: int = 0
    # How long the rank will wait, unless a peer sends it bytes; 0 if other events might wake it.
    rests_s: float = 0.0
    stirs: str = ""  # why `rests_s` is 0, such as "thread x waits in: poll"
    # the same in two inspections if no thread ran and no byte was sent or received between them
    mark: int = 0
    # A checksum of the connections that its collectives wait on
    # (`holdfast.inspection.blocked_ranks.sum_of`).
    ends: int = 0
    # Whether it may be waiting for other ranks in a way that looks like work, for example on a device or in
    # MPI.
    meets_unseen: bool = True
    # How many of `children` have only slept since the last inspection: they may poll, and work or not.
    sleeping: int = field(default=0, metadata=added())


@dataclass(frozen=True, slots=True)
class LauncherState:
    """A launcher's complete state, sent to its sidecar after each change."""

    pid: int
    generation: int  # the newest generation that the launcher was ordered to run
    ranks: tuple[RankState, ...] = field(metadata=at_most(MAX_RANKS))
    # the local ranks that have a waiting warm process
    parked: tuple[int, ...] = field(metadata=at_most(MAX_RANKS))
    port: int  # the port that a listening socket reserves for the next rendezvous
    secure_asked: int = 0  # the generation of the newest order "secure" that it has carried out
    secured: tuple[SecureAnswer, ...] = field(default=(), metadata=at_most(MAX_RANKS))
    warm_failures: int = 0  # the number of consecutive warm processes that died before they were parked
    warm_ending: Ending | None = None
    warm_tries: int = 0  # the number of such failures since the generation began
    strategy: str = "park"
    # Whether the script calls `holdfast.join`. If so, it can declare pauses, which are not hangs.
    joins: bool = True
    stopped: bool = False
    # the newest inspection of each rank of the generation
    looks: tuple[RankInspection, ...] = field(default=(), metadata=at_most(MAX_RANKS))
    looked: int = 0  # the number of the newest complete inspection
    epoch: int = 0  # the highest epoch of any order it has received
    # messages about the script's files that have changed since the run began
    changed: tuple[str, ...] = field(default=(), metadata=at_most(MAX_CHANGED))


@dataclass(frozen=True, slots=True)
class RankStart:
    """The settings of one rank when its generation starts."""

    rank: int
    local_rank: int
    private: str = ""  # the file with the rank's private state; "" if there is none
    devices: str = ""  # the rank's CUDA_VISIBLE_DEVICES; "" for the value of the launcher
    # the rank, in the group that saved the state, whose private state it starts from; -1: the same number
    state_of: int = field(default=-1, metadata=added())
    # Another rank also continues from this private state, so this rank needs its own random numbers.
    is_shared: bool = field(default=False, metadata=added())

    @property
    def source(self) -> int:
        """The number of the rank whose private state this rank starts from."""
        return self.rank if self.state_of < 0 else self.state_of


@dataclass(frozen=True, slots=True)
class Restore:
    """Where a generation restores its state from. `step` is the number of steps completed in that state."""

    step: int
    generation: int
    source: RestoreSource
    path: str = ""
    # The generation and step of the member's other snapshot, if that is valid too.
    other: tuple[int, ...] = ()
    # the number of ranks that saved the state, if the group has another number now; otherwise 0
    world_size: int = field(default=0, metadata=added())


@dataclass(frozen=True, slots=True)
class LossJump:
    """A jump of the loss that caused a rollback. If the same jump recurs, the data caused it, not a fault."""

    step: int
    loss: str  # as in `BadNumber`


@dataclass(frozen=True, slots=True)
class Launch:
    """The settings that all ranks of a generation on one member share."""

    generation: int
    world_size: int
    nproc: int
    master_addr: str
    master_port: int
    snapshot_every: int  # 0: only the first snapshot; -1: automatic
    snapshot_budget: float
    skip: tuple[int, ...] = ()
    loss_jump: float = defaults.LOSS_JUMP  # 0 if jumps are not detected
    loss_jump_fault: bool = False  # whether a jump is a fault; otherwise it only causes a warning
    jumped: tuple[LossJump, ...] = ()
    # How long to wait for a live peer. This exceeds every limit after which a peer is considered late.
    patience_s: float = defaults.PATIENCE_S
    restore: Restore | None = None
    grace_s: float = defaults.GRACE_S  # the time limit for the finalizers of a script that has ended
    # Element i is the position of the i-th member's backup: the member that also keeps the private states of
    # its ranks. () if that is the next member for each. Not in the journal: only members that share a node or
    # a rack need it, and only on a cluster, where the Supervision contains it.
    backups: tuple[int, ...] = field(default=(), metadata={**UNRECORDED, **added()})
    # If the group that saved the state had another size, element i is the position, in that group, of the
    # member whose ranks' private states the i-th member continues from; -1 if the i-th member is new. () if
    # each member keeps its position.
    states_of: tuple[int, ...] = field(default=(), metadata=added())
    # whether the user allows other numbers of ranks; if so, the ranks report whether the script does too
    may_resize: bool = field(default=False, metadata=added())


def stop_delays_s(grace_s: float, first: FirstSignal, ending_only: bool = False) -> tuple[float, float]:
    """Return how many seconds after a stop order the ranks receive SIGTERM, and how many after it SIGKILL.

    If `first` names another signal that precedes SIGTERM, the grace period applies twice (see
    `LauncherOrder`).
    """
    term_s = grace_s if first and not ending_only else 0.0
    return term_s, term_s + grace_s


@dataclass(frozen=True, slots=True)
class LauncherOrder:
    """An order from a sidecar to its launcher.

    All orders except "run" and "stop" apply only to the ranks of `generation`. "kill" sends SIGKILL to each
    of them.

    For "stop", `first` selects a signal that the launcher sends to the ranks `grace_s` before SIGTERM.
    "interrupt" sends SIGINT. "handled" sends SIGTERM to ranks that have a handler for it, and SIGINT to the
    others. "" sends no earlier signal.
    """

    do: LauncherAction
    generation: int = 0
    launch: Launch | None = None
    ranks: tuple[RankStart, ...] = ()
    local_rank: int = -1
    what: Literal[DrillName, ""] = ""
    grace_s: float = 0.0
    asked: int = 0  # for "look": the supervisor's `inspection_id`; the field's name is on the wire
    # For "stop": only ranks that are already ending get `grace_s`; all others are killed.
    ending_only: bool = False
    first: FirstSignal = ""
    suspects: tuple[int, ...] = ()  # ranks that hang: the launcher gives them less time to secure their state
    look: int = 0  # for "look": the inspection's number within its generation
    epoch: int = 0  # the epoch of the supervisor that issued the order
    copy: bool = True  # for "secure": whether the ranks copy their state or are only frozen
    exit_code: int = 0  # for "stop": the exit code for a launcher that has no keeper on its machine
