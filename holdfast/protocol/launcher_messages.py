"""Messages between a launcher and its sidecar: how processes start, where they are, how they ended.

As between a member and the supervisor (`holdfast.protocol.member_messages`), each is a whole state or a whole
wish.
"""

from __future__ import annotations

from dataclasses import dataclass, field

OUT_OF_MEMORY = "out of memory"  # begins the message of a process that the kernel killed for that
COLLECTIVE = "collective"  # where a rank is that waits for its peers
UNFLUSHED = "unflushed"  # how a rank failed whose script ended well, and could not write all of its output
NO_ROOM = "no slot is free"  # why a state that is whole could not be secured: another process holds its slot


@dataclass(frozen=True, slots=True)
class Ending:
    """How a rank's process ended, or that it is about to.

    `at_ns` and `failed_ns` are CLOCK_MONOTONIC of the member's host; `failed_ns` is 0 when the process
    itself could not report (a signal). `fail` is one of the kinds of `holdfast.protocol.progress.FailKind`,
    in lower case, or `UNFLUSHED`.
    """

    at_ns: int
    code: int | None = None
    signal: int | None = None
    ours: bool = False  # Holdfast sent the signal
    fail: str = ""
    failed_ns: int = 0
    message: str = ""  # its traceback or the end of its stderr, in a middle part shortened if that is long
    unwinding: bool = False  # a hint: the script's `finally` blocks run, and perhaps it will end so
    overdue: bool = False  # of a hint: it is as old as such blocks may take
    step: int = -1  # of a hint: the steps that the rank had done; one more, and it is void
    raised: str = ""  # the exception's type and the first line of its message
    paused: int = -1  # the steps done when the exception left a declared pause; -1: it left none
    doubtful: bool = False  # of bad input: it may come of a lost peer, whose exception the script has caught

    @property
    def is_good(self) -> bool:
        """True when the script did all its work: no other start of it could do more."""
        return self.signal is None and (self.code == 0 or self.fail == UNFLUSHED)


@dataclass(frozen=True, slots=True)
class BadNumber:
    """A bad number that a rank found at commit."""

    kind: str  # nan, inf, jump
    step: int  # the step that produced it
    loss: str  # as text: JSON has no NaN
    position: int
    at_ns: int
    why: str = ""  # of a jump: what the loss was compared with


@dataclass(frozen=True, slots=True)
class StartTimes:
    """When a rank passed the stations of a start (CLOCK_MONOTONIC); 0 is not yet.

    `goal` is the number of steps that its loop ends with, 0 while that is not known.
    """

    started_ns: int = 0
    joined_ns: int = 0
    restored_ns: int = 0
    first_step_ns: int = 0
    goal: int = 0


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank's process, as its launcher knows it."""

    rank: int
    local_rank: int
    pid: int
    generation: int
    state: str  # starting, running, failing, exited
    ending: Ending | None = None
    flag: BadNumber | None = None
    marks: StartTimes = field(default_factory=StartTimes)
    note: str = ""  # its last warning, for people
    where: str = ""  # what its main thread does (`holdfast.worker.thread_frames`), when it was last asked
    # by a signal, for seconds in which its launcher ran: see `holdfast.inspection.liveness`
    stopped: bool = False
    left: str = ""  # why no copy has the state that its script ended with, in its own words


@dataclass(frozen=True, slots=True)
class SecureAnswer:
    """A rank's answer to the order "secure": its step, and whether its member's arena holds that state."""

    rank: int
    step: int
    whole: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class RankInspection:
    """What a rank's process and its descendants did within a moment, as their launcher saw it from outside.

    Holdfast's own threads do not count: neither what they wait in nor the CPU time that they use.
    """

    rank: int
    step: int
    phase: int
    phase_seq: int
    process_state: str  # as in /proc/PID/stat; T only if it was stopped for the whole moment
    cpu_s: float
    stack: str  # Python's, of the end of the moment, or why there is none
    number: int = 0  # of the looks at one generation
    window_s: float = 0.0  # how long the moment was
    traced: bool = False  # a debugger is attached
    moved: bool = False  # other functions ran at its end than at its beginning
    io_bytes: int = 0  # read and written, by the process and its descendants
    calls: tuple[
        str, ...
    ] = ()  # what its threads wait in, each once: the main thread first, then Python's, then native ones
    children: int = 0  # descendants that compute, read, write, or will run again after a time
    children_cpu_s: float = 0.0
    at: str = ""  # the innermost function, "wait (threading.py:331)"
    where: str = ""  # the innermost line of the script's own code, "evaluate (train.py:42)"
    asked: int = 0  # the number of the supervisor's request for a look (`MemberOrder.look`)
    rests_s: float = 0.0  # in a collective, for so long only a peer's bytes can move it; 0: not shown
    stirs: str = ""  # why that is not shown: "thread x waits in: poll"
    mark: int = 0  # the same in two looks: no thread ran between them, and no byte came or went
    # a sum of the connections that its collectives wait for (`holdfast.inspection.blocked_ranks.sum_of`)
    ends: int = 0
    meets_unseen: bool = True  # it may wait for others in ways that look like work: on a device, through MPI


@dataclass(frozen=True, slots=True)
class LauncherState:
    """Everything a launcher knows, sent to its sidecar whenever it changes."""

    pid: int
    generation: int  # the newest that it had an order to run
    ranks: tuple[RankState, ...]
    parked: tuple[int, ...]  # local ranks that have a warm process waiting
    port: int  # a listening socket is held open on it for the next rendezvous
    secure_asked: int = 0  # generation of the newest order "secure" that was carried out
    secured: tuple[SecureAnswer, ...] = ()
    warm_failures: int = 0  # warm processes that died before they were parked, in a row
    warm_ending: Ending | None = None
    warm_tries: int = 0  # of those failures, how many since the generation was begun
    strategy: str = "park"
    joins: bool = True  # the script calls `holdfast.join`, so what it declares is known not to be a hang
    stopped: bool = False
    looks: tuple[RankInspection, ...] = ()  # the newest at each rank of the generation
    looked: int = 0  # the number of the newest look that is complete
    epoch: int = 0  # the highest of which it has had an order
    changed: tuple[str, ...] = ()  # sentences: which of the script's files have changed since the run began


@dataclass(frozen=True, slots=True)
class RankStart:
    """What one rank gets when its generation starts."""

    rank: int
    local_rank: int
    private: str = ""  # file with the rank's private state, "" when there is none
    devices: str = ""  # the rank's CUDA_VISIBLE_DEVICES, "" for the launcher's


@dataclass(frozen=True, slots=True)
class Restore:
    """Where the state of a generation comes from. `step` is the number of steps that it contains."""

    step: int
    generation: int
    source: str  # slot, checkpoint
    path: str = ""
    other: tuple[int, ...] = ()  # generation and step of the member's other snapshot, if that counts as well


@dataclass(frozen=True, slots=True)
class LossJump:
    """A loss that jumped and caused a rollback. The same jump again comes from the data, not from a fault."""

    step: int
    loss: str  # as in `BadNumber`


@dataclass(frozen=True, slots=True)
class Launch:
    """What all ranks of a generation on one member have in common."""

    generation: int
    world_size: int
    nproc: int
    master_addr: str
    master_port: int
    snapshot_every: int  # 0: only the first; -1: automatic
    snapshot_budget: float
    skip: tuple[int, ...] = ()
    loss_jump: float = 10.0  # 0: jumps are not looked for
    loss_jump_fault: bool = False  # a jump is a fault; else it only causes a warning
    jumped: tuple[LossJump, ...] = ()
    patience_s: float = 86_400.0  # for a peer that lives: longer than any limit within which it may be late
    restore: Restore | None = None
    grace_s: float = 30.0  # for the finalizers of a script that has ended


@dataclass(frozen=True, slots=True)
class LauncherOrder:
    """What a sidecar orders of its launcher.

    `do` is "run" or "stop" or, for the ranks of `generation` alone, "secure", "look", "where", "settle",
    "drill" or "kill" (SIGKILL to each of them).

    `first`, of "stop", is how ranks are asked to end, with `grace_s` for it, before they get SIGTERM:
    "interrupt" by SIGINT, "handled" by SIGTERM where they have a handler for it and by SIGINT where not; ""
    not at all.
    """

    do: str
    generation: int = 0
    launch: Launch | None = None
    ranks: tuple[RankStart, ...] = ()
    local_rank: int = -1
    what: str = ""
    grace_s: float = 0.0
    asked: int = 0  # of "look": the number of the supervisor's request
    ending_only: bool = False  # of "stop": the grace is for ranks that are ending; others are killed at once
    first: str = ""
    suspects: tuple[int, ...] = ()  # ranks that hang: not waited for as long as the others when they secure
    look: int = 0  # of "look": its number
    epoch: int = 0  # of the supervisor that the order comes from
    copy: bool = True  # of "secure": the ranks copy their state; if false, they are only frozen
