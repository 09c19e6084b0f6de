"""Define the messages between a launcher and its sidecar about the ranks' processes.

Like the messages between a member and the supervisor (`holdfast.protocol.member_messages`), each message is a
complete state or a complete order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from holdfast.protocol import defaults
from holdfast.protocol.drills import DrillName

# What a launcher may be ordered to do (`LauncherOrder.do`), and its first signal to ranks that it stops.
LauncherAction: TypeAlias = Literal["run", "stop", "secure", "look", "where", "settle", "drill", "kill"]
FirstSignal: TypeAlias = Literal["", "interrupt", "handled"]
ProcessPhase: TypeAlias = Literal["starting", "running", "failing", "exited"]  # of a rank's process
RestoreSource: TypeAlias = Literal["slot", "checkpoint"]
BadNumberKind: TypeAlias = Literal["nan", "inf", "jump"]  # jump: a loss far above recent losses
NAN: Final = "nan"
INF: Final = "inf"
JUMP: Final = "jump"

# the first words of the message of a process that the kernel killed for lack of memory
OUT_OF_MEMORY = "out of memory"
COLLECTIVE = "collective"  # the activity of a rank that waits for its peers
UNFLUSHED = "unflushed"  # the failure of a rank whose script succeeded but could not write all of its output
NO_ROOM = "no slot is free"  # a whole state could not be secured, because other processes hold the slots


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank's process ended, or a hint that it is about to end.

    `at_ns` and `failed_ns` are CLOCK_MONOTONIC of the member's host; `failed_ns` is 0 if the process could
    not report its failure, for example after a signal. `fail` is one of the kinds of
    `holdfast.protocol.progress.FailKind`, in lower case, or `UNFLUSHED`.
    """

    at_ns: int
    code: int | None = None
    signal: int | None = None
    ours: bool = False  # Holdfast sent the signal
    fail: str = ""
    failed_ns: int = 0
    message: str = ""  # its traceback or the end of its stderr; a long text is shortened in the middle
    # this is only a hint: the script's `finally` blocks are running, and the rank may end this way
    unwinding: bool = False
    overdue: bool = False  # in a hint: the `finally` blocks have used up the time that they may take
    step: int = -1  # in a hint: the steps that the rank had completed; another step makes the hint void
    raised: str = ""  # the exception's type and the first line of its message
    paused: int = -1  # the steps completed when the exception left a declared pause; -1 if it left no pause
    doubtful: bool = False  # the bad input may be due to a lost peer whose exception the script caught

    @property
    def is_good(self) -> bool:
        """True if the script did all its work, so that a restart has nothing left to do."""
        return self.signal is None and (self.code == 0 or self.fail == UNFLUSHED)


@dataclass(frozen=True, slots=True)
class BadNumber:
    """A loss or gradient norm that failed the check at a commit."""

    kind: BadNumberKind
    step: int  # the step that produced it
    loss: str  # as text, because JSON has no NaN
    position: int
    at_ns: int
    why: str = ""  # for a jump: the values with which the loss was compared


@dataclass(frozen=True, slots=True)
class StartTimes:
    """When a rank passed the stages of its start, in CLOCK_MONOTONIC; 0 if it has not done so yet.

    `goal` is the number of steps at which its loop ends, or 0 if it is not known yet.
    """

    started_ns: int = 0
    joined_ns: int = 0
    restored_ns: int = 0
    first_step_ns: int = 0
    goal: int = 0


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank's process, as its launcher sees it."""

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
    # a signal has stopped it for more than a few seconds, and its launcher ran in that time (see
    # `holdfast.inspection.liveness`)
    stopped: bool = False
    left: str = ""  # why, according to the rank, no copy has the script's final state


@dataclass(frozen=True, slots=True)
class SecureAnswer:
    """A rank's answer to the order "secure": its step, and whether its member's arena has that state."""

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
    stack: str  # the Python stack at the end of the window, or the reason why there is none
    number: int = 0  # the number of the inspection within its generation
    window_s: float = 0.0  # the length of the window
    traced: bool = False  # a debugger is attached
    moved: bool = False  # different functions were running at the end of the window than at its beginning
    io_bytes: int = 0  # the bytes that the process and its descendants read and wrote
    calls: tuple[
        str, ...
        # the calls in which its threads wait, each listed once: first the main thread's, then those of other
        # Python threads, then those of native threads
    ] = ()
    children: int = 0  # descendants that compute, read, write, or have a timeout after which they run again
    children_cpu_s: float = 0.0
    at: str = ""  # the innermost function, such as "wait (threading.py:331)"
    where: str = ""  # the innermost line of the script's own code, such as "evaluate (train.py:42)"
    asked: int = 0  # the number of the supervisor's request for this inspection (`MemberOrder.look`)
    # how long it has been in a collective from which only a peer's bytes can wake it; 0 if that is not
    # certain
    rests_s: float = 0.0
    stirs: str = ""  # why that is not certain, such as "thread x waits in: poll"
    mark: int = 0  # equal in two inspections if no thread ran and no byte was sent or received between them
    # a checksum of the connections that its collectives wait for (`holdfast.inspection.blocked_ranks.sum_of`)
    ends: int = 0
    # it may be waiting for other ranks in a way that looks like work, such as on a device or in MPI
    meets_unseen: bool = True


@dataclass(frozen=True, slots=True)
class LauncherState:
    """The complete state of a launcher, which it sends to its sidecar after each change."""

    pid: int
    generation: int  # the newest generation that it was ordered to run
    ranks: tuple[RankState, ...]
    parked: tuple[int, ...]  # the local ranks for which a warm process waits
    port: int  # reserved, with a listening socket, for the next rendezvous
    secure_asked: int = 0  # the generation of the newest order "secure" that it has carried out
    secured: tuple[SecureAnswer, ...] = ()
    warm_failures: int = 0  # consecutive warm processes that died before they were parked
    warm_ending: Ending | None = None
    warm_tries: int = 0  # the number of such failures since the generation began
    strategy: str = "park"
    # the script calls `holdfast.join`, so a pause that it declares is known not to be a hang
    joins: bool = True
    stopped: bool = False
    looks: tuple[RankInspection, ...] = ()  # the newest inspection of each rank of the generation
    looked: int = 0  # the number of the newest complete inspection
    epoch: int = 0  # the highest epoch of any order it has received
    changed: tuple[str, ...] = ()  # messages about files of the script that have changed since the run began


@dataclass(frozen=True, slots=True)
class RankStart:
    """The settings of one rank when its generation starts."""

    rank: int
    local_rank: int
    private: str = ""  # the file with the rank's private state; "" if there is none
    devices: str = ""  # the rank's CUDA_VISIBLE_DEVICES; "" for the value of the launcher


@dataclass(frozen=True, slots=True)
class Restore:
    """The source from which a generation restores its state. `step` is the number of steps in that state."""

    step: int
    generation: int
    source: RestoreSource
    path: str = ""
    # The generation and step of the member's other snapshot, if that is valid too.
    other: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LossJump:
    """A jump of the loss that caused a rollback. If it recurs unchanged, the data caused it, not a fault."""

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
    # how long to wait for a live peer; longer than any limit after which a peer counts as late
    patience_s: float = defaults.PATIENCE_S
    restore: Restore | None = None
    grace_s: float = defaults.GRACE_S  # how long the finalizers of a script that has ended may take


def stop_delays_s(grace_s: float, first: FirstSignal, ending_only: bool = False) -> tuple[float, float]:
    """Return the seconds from an order to stop until ranks receive SIGTERM, and until they receive SIGKILL.

    Ranks that are first asked to end in another way have `grace_s` twice: see `LauncherOrder`.
    """
    term_s = grace_s if first and not ending_only else 0.0
    return term_s, term_s + grace_s


@dataclass(frozen=True, slots=True)
class LauncherOrder:
    """An order from a sidecar to its launcher.

    All except "run" and "stop" apply only to the ranks of `generation`; "kill" sends SIGKILL to each of them.

    `first`, for "stop", selects the signal that the launcher sends to ranks first, `grace_s` before SIGTERM:
    "interrupt" sends SIGINT; "handled" sends SIGTERM to ranks that have a handler for it and SIGINT to the
    others; "" sends nothing first.
    """

    do: LauncherAction
    generation: int = 0
    launch: Launch | None = None
    ranks: tuple[RankStart, ...] = ()
    local_rank: int = -1
    what: Literal[DrillName, ""] = ""
    grace_s: float = 0.0
    asked: int = 0  # for "look": the number of the supervisor's request for it
    # For "stop": only ranks that are already ending have `grace_s`; all others are killed.
    ending_only: bool = False
    first: FirstSignal = ""
    suspects: tuple[
        int, ...
    ] = ()  # ranks that hang; the launcher waits less time for them to secure their state
    look: int = 0  # for "look": the number of the inspection
    epoch: int = 0  # the epoch of the supervisor that issued the order
    copy: bool = True  # for "secure": the ranks copy their state; if False, they are only frozen
    exit_code: int = 0  # for "stop": the exit code of a launcher without a keeper on its machine
