"""Messages between a member and the supervisor. Those of the launcher: `holdfast.protocol.launcher_messages`.

All links are level-triggered: one side sends its whole state whenever it changes, the other its whole
wish. A message that is lost, late or repeated, and a peer that restarts, then need no case of their own.
Everything carries the generation; a receiver refuses a message that is older than what it has acted on.
Orders carry the epoch of the supervisor too, which counts first: no part obeys one that was replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.protocol.launcher_messages import Launch, LauncherState, RankInspection, RankStart
from holdfast.protocol.lineage import Lineage

PROTOCOL = 1


@dataclass(frozen=True, slots=True)
class UncommittedWork:
    """Work in a step that other ranks may have committed without it: see `progress.uncommitted_since_ns`."""

    seconds: float  # it has taken; where it is not declared, only those in which the process was seen to live
    usual_s: float = 0.0  # median of such work
    declared: bool = False  # in a pause
    left_s: float = 0.0  # of the limit that the pause declared


@dataclass(frozen=True, slots=True)
class RankProgress:
    """One rank's progress page, as far as the supervisor needs it."""

    rank: int
    step: int
    phase: str  # its name
    label: str  # of a pause, as the script gave it: only for people
    loss: str
    grad_norm: str
    samples: int
    tokens: int
    flops: float
    step_s: float  # median of the last steps
    p99_s: float
    snapshot_step: int
    own_s: float = 0.0  # of a step, before it waits for other ranks: mean of the last window; 0 not known
    own_least_s: float = 0.0  # that of the part of the window in which it was shortest
    own_data_s: float = 0.0  # the part of `own_s` that comes before the forward pass
    own_steps: int = 0  # of the window
    snapshot_s: float = 0.0  # that the next one may take
    state_bytes: int = 0  # of the replicated state; 0: not known yet
    tail_s: float = 0.0  # of work after its last commit, until now or to the rank's end; 0: there was none
    tail_usual_s: float = 0.0  # median of such work
    pause_left_s: float = 0.0  # of the limit that the present pause declared
    late: tuple[int, ...] = ()  # the last steps whose state changed after the commit: no copy has the change
    amended: tuple[int, ...] = ()  # the same, where this rank's copies have it
    early: UncommittedWork | None = None
    tail_declared: bool = False  # that work is in a pause, which the rank has not left


@dataclass(frozen=True, slots=True)
class RankStall:
    """A rank without progress for longer than its steps take.

    `phase_name` is the name of `phase`, or `progress.NOT_BEGUN`; the label of a pause is in `RankProgress`.
    `limited` is True where the phase has a limit of its own, which has passed: a first step, a pause, an end.
    `begun` is False for a script that does not join and has done no step: perhaps Holdfast will never see any
    of its steps.
    """

    rank: int
    generation: int
    step: int
    phase: int
    phase_seq: int
    phase_name: str
    stalled_s: float
    limit_s: float
    limited: bool = False
    begun: bool = True


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """A complete snapshot that a member holds."""

    generation: int
    step: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class HeldChecksum:
    """The checksum of the replicated state of one step, as this member has it."""

    generation: int
    step: int
    total_bytes: int  # only states of one size can be compared: the document in them may be padded
    crc: int


@dataclass(frozen=True, slots=True)
class HeldPrivateState:
    """A rank's private state that a member holds. `final`: it did not change after it was written."""

    rank: int
    generation: int
    step: int
    final: bool


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """A checkpoint on storage that this member sees, or why the last one could not be written."""

    step: int = -1
    generation: int = 0
    path: str = ""
    seconds: float = 0.0
    error: str = ""
    asked: int = 0  # number of the save order that this answers


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a member's snapshots and private states take, and what the memory volume they are in can give."""

    volume: str = ""  # members that name the same one share it; "" is not known
    state_bytes: int = 0  # of the replicated state; 0 is not known yet
    slots_bytes: int = 0
    private_bytes: int = 0
    free_bytes: int = 0  # of the volume
    available_bytes: int = 0  # of the host's memory, or of what the limit of a cgroup leaves
    limit_bytes: int = 0  # of the cgroup, where that is less than the host has; 0 where it is not


@dataclass(frozen=True, slots=True)
class KnownHistory:
    """The run's history as the last order to a member had it: for a supervisor whose journal lacks that."""

    generation: int = 0  # of that order; 0: there was none
    lineage: tuple[Lineage, ...] = ()
    skip: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemberReport:
    """Everything a member knows, sent to the supervisor when it changes and once a second."""

    protocol: int
    member: str
    node: str
    sidecar_pid: int
    sequence: int
    now_ns: int  # CLOCK_MONOTONIC of the member, as are all times in its launcher's state
    nproc: int
    launcher: LauncherState | None  # None: the sidecar has lost its launcher
    peer_url: str
    progress: tuple[RankProgress, ...] = ()
    stalls: tuple[RankStall, ...] = ()
    looks: tuple[RankInspection, ...] = ()  # the newest, while a rank is late
    looked_for: int = 0  # generation whose evidence `looks` is
    look: int = 0  # number of the newest look
    slots: tuple[HeldSnapshot, ...] = ()
    seals: tuple[HeldChecksum, ...] = ()  # the last of the present generation
    privates: tuple[HeldPrivateState, ...] = ()
    secured_for: int = 0  # generation up to which this member's state is secured and listed here
    unusable: tuple[HeldSnapshot, ...] = ()  # failed their checksum when they were to be restored
    prepare_error: str = ""
    prepare_generation: int = 0  # whose start `prepare_error` prevented
    prepare_occupied: bool = False  # the state may be good all the same: no slot was free, or
    prepare_volume: bool = False  # the memory volume had no room for it
    durable: CheckpointReport = field(default_factory=CheckpointReport)
    unmoved_s: float = -1.0  # since storage took bytes of a checkpoint, or it started; -1: not known
    publishing: int = -1  # step of the present generation of which it would write a checkpoint; -1: none
    notes: tuple[str, ...] = ()
    room: MemoryUse = field(default_factory=MemoryUse)
    lag_s: float = 0.0  # the longest time in the last minute in which its event loop looked at nothing
    lag_p99_s: float = 0.0
    launcher_silent: str = ""  # why its launcher is given up: it exists and does nothing
    epoch: int = 0  # the highest of which it has had an order
    clock: str = ""  # whose clock that is (`holdfast.process.clock`)
    drilled: int = 0  # number of the newest drill that it, or the sidecar before it, has carried out
    told: KnownHistory = field(default_factory=KnownHistory)


@dataclass(frozen=True, slots=True)
class StateSource:
    """A peer that holds something a member needs."""

    url: str
    rank: int = -1  # whose private state; -1 for the snapshot
    generation: int = 0
    step: int = 0


@dataclass(frozen=True, slots=True)
class MemberOrder:
    """What the supervisor wants of a member. It holds until a newer one replaces it.

    do: "idle" (stay warm), "run" (`launch` and `ranks`), "secure" (see below), "stop" (end everything within
    `grace_s`; with `ending_only` that time is for ranks that are ending already, and all others are killed at
    once; with `first` they are asked before that, and have `grace_s` twice: see `LauncherOrder`).
    On "secure" the member lists what it holds. With `just_in_time` its ranks of `generation` are frozen
    first, so that none of them overwrites any of it, and with `copy` they copy their state too.
    `save` counts the requests for a checkpoint of the newest snapshot at or below `save_step`.
    """

    do: str
    generation: int
    launch: Launch | None = None
    ranks: tuple[RankStart, ...] = ()
    sources: tuple[StateSource, ...] = ()
    just_in_time: bool = True
    copy: bool = True  # false where the state of all ranks is as bad as the one that was found bad
    settled: bool = False
    grace_s: float = 0.0
    ending_only: bool = False
    first: str = ""
    checkpoint_every_s: float = 0.0
    keep: int = 3
    save: int = 0
    save_step: int = -1
    save_generation: int = 0
    drill: DrillOrder | None = None
    suspects: tuple[int, ...] = ()  # of "secure": ranks that hang
    look: int = 0  # of "run": above 0 while some rank is late, so that all are inspected; looks return it
    # Of "idle": size of the snapshot that the member may have to fetch, so that it makes room for it ahead.
    room_bytes: int = 0
    lineage: tuple[Lineage, ...] = ()  # separates the checkpoints that count from those that are void
    proven: int = -1  # the last step at which the replicas are known to have been equal; 0: none yet, -1: one
    epoch: int = 0  # of the supervisor that sends it; a supervisor with a higher one replaces it
    # Steps of `generation` whose state some rank changed after their commit: no copy has the change.
    void: tuple[int, ...] = ()
    good: int = -1  # the step of `publishing`, once no rank can make it void any more, and none has


@dataclass(frozen=True, slots=True)
class DrillOrder:
    """A fault on purpose. `number` makes a repeated message harmless."""

    number: int
    what: str
    rank: int
