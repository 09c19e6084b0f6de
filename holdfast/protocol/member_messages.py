"""Define the messages between a member and the supervisor.

`holdfast.protocol.launcher_messages` defines the launcher's messages.

All links are level-triggered: one side sends its complete state whenever the state changes, and the other
sends its complete order. Lost, late or repeated messages and restarted peers therefore need no special
handling. Every message carries the generation, and a receiver refuses a generation older than the last one
that it acted on. Orders also carry the supervisor's epoch. Receivers compare it first, so no process obeys a
supervisor that has been replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from holdfast.journal_fields import UNRECORDED
from holdfast.protocol import defaults
from holdfast.protocol.codec import MAX_RANKS, added, at_most
from holdfast.protocol.drills import DrillName
from holdfast.protocol.launcher_messages import FirstSignal, Launch, LauncherState, RankInspection, RankStart
from holdfast.protocol.lineage import MOST as MAX_LINEAGE
from holdfast.protocol.lineage import Lineage
from holdfast.protocol.progress import MAX_AMENDED, MAX_VOID

PROTOCOL = 2  # 2: a `StateSource` can be for several ranks
MEMBER_PATH = "/v1/member"  # where a sidecar opens its WebSocket to the supervisor
# A sidecar names in this header, when it connects, the fields of orders that an older one would refuse.
FEATURES = "Holdfast-Features"
NEIGHBOURS = "neighbours"
MUST_REACH = "must-reach"
MUST_CONFIRM = "must-confirm"
# The WebSocket subprotocol in which a report may be followed by updates of it. A sidecar offers it, and an
# older supervisor does not choose it.
UPDATES = "holdfast.report-updates.1"
PING_S = 5.0  # the interval between the pings of either side, which detect a half-open connection
# The same on a cluster, where one event loop serves the members of all jobs. An answer may take half of the
# interval. If the loop is so late that all members reconnect, their TLS handshakes delay it further.
CLUSTER_PING_S = 10.0

# The maximum lengths of the lists in a report. The sender observes each limit.
MAX_SNAPSHOTS = 8  # a member has two
MAX_SEALS = 8
MAX_UNUSABLE = 64
MAX_NOTES = 8
MAX_LISTED = 64  # the newest checkpoints, and as many damaged ones
MAX_NEIGHBOURS = 4  # a member has two
MAX_SKIPPED = 512  # only the highest skipped steps, because no run goes back further

MemberAction: TypeAlias = Literal["idle", "run", "secure", "stop"]  # see `MemberOrder`


@dataclass(frozen=True, slots=True)
class UncommittedWork:
    """Work within a step that other ranks do not need for their commit (`progress.uncommitted_since_ns`)."""

    # Its duration so far. Outside a declared pause, this counts only the time when the process was observed
    # to be alive.
    seconds: float
    usual_s: float = 0.0  # the median duration of such work
    declared: bool = False  # whether the work is in a declared pause
    left_s: float = 0.0  # the time that remains of the pause's declared limit


@dataclass(frozen=True, slots=True)
class RankProgress:
    """The part of one rank's progress page that the supervisor needs."""

    rank: int
    step: int
    phase: str  # the name of the phase
    label: str  # the label of a pause, as declared by the script; only for display
    loss: str  # a number as text, because JSON has no NaN
    grad_norm: str
    samples: int
    tokens: int
    flops: float
    step_s: float  # the median duration of the last steps
    p99_s: float
    snapshot_step: int
    # The mean time, over the last window, that a step takes until it waits for other ranks; 0 if not known.
    own_s: float = 0.0
    own_least_s: float = 0.0  # the same mean over the part of the window where it was lowest
    own_data_s: float = 0.0  # the part of `own_s` before the forward pass
    own_steps: int = 0  # the number of steps in the window
    snapshot_s: float = 0.0  # the time that the next snapshot may take
    state_bytes: int = 0  # the size of the replicated state; 0 if not known yet
    # The duration of the work after the last commit, until now or until the rank ended; 0 if there was none.
    tail_s: float = 0.0
    tail_usual_s: float = 0.0  # the median duration of such work
    pause_left_s: float = 0.0  # the time that remains of the current pause's declared limit
    # The latest steps whose state changed after the commit, if no copy contains the change.
    late: tuple[int, ...] = field(default=(), metadata=at_most(MAX_VOID))
    # The latest steps whose state changed after the commit, if this rank's copies contain the change.
    amended: tuple[int, ...] = field(default=(), metadata=at_most(MAX_AMENDED))
    early: UncommittedWork | None = None
    tail_declared: bool = False  # whether the work after the commit is in a declared pause that is still open


@dataclass(frozen=True, slots=True)
class RankStall:
    """A rank that has gone without progress for longer than its steps take.

    `phase_name` is the name of `phase`, or `progress.NOT_BEGUN`; the label of a pause is in `RankProgress`.
    `limited` is True if the phase has its own limit and has exceeded it: a first step, a pause or an end.
    `begun` is False if the script does not call `holdfast.join` and Holdfast has observed none of its steps.
    The steps of a script that does not call `holdfast.join` may not be observable.
    `early_s` is above 0 if the step is within `limit_s`, but much longer than most steps. It is the shorter
    limit that the step has exceeded. The rank is then inspected, and only a certain hang counts.
    `first_step` is True if the rank is in the first step of its generation.
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
    early_s: float = field(default=0.0, metadata=added())
    first_step: bool = field(default=False, metadata=added())


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """A complete snapshot in a member's arena."""

    generation: int
    step: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class HeldChecksum:
    """The checksum of a member's copy of the replicated state of one step."""

    generation: int
    step: int
    total_bytes: int  # only states of the same size can be compared, because their document may be padded
    crc: int


@dataclass(frozen=True, slots=True)
class HeldPrivateState:
    """A rank's private state in a member's arena. `final` is True if it can no longer change."""

    rank: int
    generation: int
    step: int
    final: bool


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """A checkpoint on storage that this member can read, or the reason why the last save failed."""

    step: int = -1
    generation: int = 0
    path: str = ""
    seconds: float = 0.0
    error: str = ""
    asked: int = 0  # the number of the save order that this answers


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A checkpoint on storage whose manifest is valid and whose files have the right sizes."""

    name: str  # the name of its directory; each member has its own path to the storage
    step: int
    generation: int
    world_size: int
    created: float  # seconds since 1970, on the clock of the writer's host
    skip: tuple[int, ...] = field(default=(), metadata=at_most(MAX_SKIPPED))


@dataclass(frozen=True, slots=True)
class RefusedCheckpoint:
    """A directory that has the name of a checkpoint, but is damaged or is not a checkpoint."""

    name: str
    step: int
    why: str


@dataclass(frozen=True, slots=True)
class StorageListing:
    """The checkpoints that a member found on storage, newest first.

    `lineage`, `generation` and `epoch` are the newest values in the checkpoints' manifests. `number` counts
    the listings of one sidecar. If this listing failed, `error` is the reason, and the other fields have the
    values of the previous listing.
    """

    number: int = 0
    checkpoints: tuple[ListedCheckpoint, ...] = field(default=(), metadata=at_most(MAX_LISTED))
    refused: tuple[RefusedCheckpoint, ...] = field(default=(), metadata=at_most(MAX_LISTED))
    lineage: tuple[Lineage, ...] = field(default=(), metadata=at_most(MAX_LINEAGE))
    generation: int = 0
    epoch: int = 0
    error: str = ""
    asked: int = 0  # the number of the newest save order that the member had answered when this listing began


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory that a member's snapshots and private states use, and the free memory of their volume."""

    volume: str = ""  # the same value for members that share a volume; "" if not known
    state_bytes: int = 0  # the size of the replicated state; 0 if not known yet
    slots_bytes: int = 0
    private_bytes: int = 0
    free_bytes: int = 0  # the free space of the volume
    available_bytes: int = 0  # the memory available on the host, or within the cgroup's limit if that is less
    limit_bytes: int = 0  # the cgroup's limit if it is below the host's memory; otherwise 0


@dataclass(frozen=True, slots=True)
class KnownHistory:
    """The run's history up to a member's last order, for a supervisor that has no journal of it."""

    generation: int = 0  # the generation of that order; 0 if there was none
    lineage: tuple[Lineage, ...] = field(default=(), metadata=at_most(MAX_LINEAGE))
    skip: tuple[int, ...] = field(default=(), metadata=at_most(MAX_SKIPPED))


@dataclass(frozen=True, slots=True)
class MemberReport:
    """A member's complete state, sent to the supervisor after changes and twice a second."""

    protocol: int
    member: str
    node: str
    sidecar_pid: int
    sequence: int
    now_ns: int  # CLOCK_MONOTONIC of the member, which all times in its launcher's state use as well
    nproc: int
    launcher: LauncherState | None  # None if the sidecar has lost its launcher
    peer_url: str
    progress: tuple[RankProgress, ...] = field(default=(), metadata=at_most(MAX_RANKS))
    stalls: tuple[RankStall, ...] = field(default=(), metadata=at_most(MAX_RANKS))
    # the newest inspections, while a rank is late
    looks: tuple[RankInspection, ...] = field(default=(), metadata=at_most(MAX_RANKS))
    looked_for: int = 0  # the generation of the ranks in `looks`
    look: int = 0  # the number of the newest inspection
    # the snapshots in the member's arena
    slots: tuple[HeldSnapshot, ...] = field(default=(), metadata=at_most(MAX_SNAPSHOTS))
    # the last checksums of the current generation
    seals: tuple[HeldChecksum, ...] = field(default=(), metadata=at_most(MAX_SEALS))
    privates: tuple[HeldPrivateState, ...] = ()
    secured_for: int = 0  # the newest generation whose state is secured on this member and listed here
    # the last snapshots that a restore read and whose checksum was wrong
    unusable: tuple[HeldSnapshot, ...] = field(default=(), metadata=at_most(MAX_UNUSABLE))
    prepare_error: str = ""
    prepare_generation: int = 0  # the generation whose start `prepare_error` prevented
    # Whether the cause was that no slot was free or that there was no room. The state itself may be intact.
    prepare_occupied: bool = False
    prepare_volume: bool = False  # whether the memory volume had no room for the state
    durable: CheckpointReport = field(default_factory=CheckpointReport)
    # The time since storage last accepted bytes of a checkpoint, or since the sidecar last began to save one;
    # -1 if it never has.
    unmoved_s: float = -1.0
    # While the member reads a checkpoint for a restore: the time since it last received a part; otherwise -1.
    # Not in the journal: only object storage delivers parts, and a job that uses it has no journal.
    reading_s: float = field(default=-1.0, metadata=UNRECORDED)
    # The step of the current generation whose state the member would write as a checkpoint; -1 if none.
    publishing: int = -1
    notes: tuple[str, ...] = field(default=(), metadata=at_most(MAX_NOTES))
    room: MemoryUse = field(default_factory=MemoryUse)
    lag_s: float = 0.0  # the longest time in the last minute that its event loop did not poll
    lag_p99_s: float = 0.0
    launcher_silent: str = ""  # why the member has given up on its launcher, if the launcher is unresponsive
    epoch: int = 0  # the highest epoch of any order it has received
    clock: str = ""  # the identity of the clock of `now_ns` (`holdfast.process.clock`)
    drilled: int = 0  # the number of the newest drill that this sidecar or its predecessor has carried out
    told: KnownHistory = field(default_factory=KnownHistory)
    # Why the member has not been able to connect to its launcher; "" if it is connected, or if the launcher
    # has not been started yet. Only for display.
    launcher_unreachable: str = field(default="", metadata=UNRECORDED)
    # None if the supervisor reads the storage itself. Not in the journal, because decisions use the
    # supervisor's index of checkpoints.
    storage: StorageListing | None = field(default=None, metadata=UNRECORDED)
    # While this member's ranks are held up: the order's `neighbours` that the member reached before but
    # cannot reach now, and for how long it has reached none of them. Not in the journal: only members on a
    # cluster have neighbours. These fields are only sent to a supervisor that has named neighbours on the
    # same connection.
    unreached: tuple[str, ...] = field(
        default=(), metadata={**UNRECORDED, **added(), **at_most(MAX_NEIGHBOURS)}
    )
    unreached_s: float = field(default=0.0, metadata={**UNRECORDED, **added()})


# The values that change from report to report while a group trains: those of the report itself, of its
# `room`, and of each rank's progress. A change of anything else may need a decision. An update contains these
# values in this order, so a change of these lists needs another name of `UPDATES`.
PASSING = ("sequence", "now_ns", "lag_s", "lag_p99_s", "unmoved_s")
PASSING_ROOM = (
    "state_bytes",
    "slots_bytes",
    "private_bytes",
    "free_bytes",
    "available_bytes",
    "limit_bytes",
)
PASSING_PROGRESS = (
    "step",
    "phase",
    "loss",
    "grad_norm",
    "samples",
    "tokens",
    "flops",
    "step_s",
    "p99_s",
    "own_s",
    "own_least_s",
    "own_data_s",
    "own_steps",
    "snapshot_s",
    "tail_s",
    "tail_usual_s",
)
MAX_PASSING_TEXT = 32  # ASCII characters of a text among these values in an update, such as a phase's name


@dataclass(frozen=True, slots=True)
class ReportUpdate:
    """A report that differs from the previous one, which it names, only in passing values.

    `report`, `room` and `progress` contain the values in the order of `PASSING`, `PASSING_ROOM` and
    `PASSING_PROGRESS`, the last one a list for each rank. `room` and `progress` are empty if none of their
    values has changed. An update is valid only on the connection of the previous report.
    """

    update_of: int  # the sequence number of the previous report; as the first field, it marks an update
    report: Any
    room: Any
    progress: Any


@dataclass(frozen=True, slots=True)
class StateSource:
    """A peer that has a state for a member to fetch."""

    url: str
    rank: int = -1  # the rank whose private state the member needs; -1 for the snapshot
    generation: int = 0
    step: int = 0
    # The number of ranks, from `rank` on, whose private states the peer has. Not in the journal, which lists
    # each rank separately.
    count: int = field(default=1, metadata=UNRECORDED)

    def has(self, rank: int) -> bool:
        """True if this is a source of the private state of `rank`."""
        return self.rank <= rank < self.rank + self.count


@dataclass(frozen=True, slots=True)
class MemberOrder:
    """An order from the supervisor to a member. It remains in force until a newer order replaces it.

    `do` is one of:

    * "idle": stay warm.
    * "run": start `ranks` with the settings of `launch`.
    * "secure": list the states in the arena. With `just_in_time`, the ranks of `generation` are frozen first,
      to keep them from overwriting these states. With `copy`, they also copy their state.
    * "stop": end all processes within `grace_s`. With `ending_only`, only ranks that are already ending have
      that time, and all others are killed immediately. With `first`, ranks receive another signal before
      SIGTERM, and `grace_s` applies twice (see `LauncherOrder`).

    `save` is the number of requests so far for a checkpoint of the newest snapshot at or below `save_step`.
    `sources` contains what the member needs for its own ranks. For a member that may write a checkpoint, it
    contains the private states of all ranks. For "idle", it contains the members whose state a standby copies
    while the group trains: first one for the snapshot, then one for each rank's private state.
    """

    do: MemberAction
    generation: int
    launch: Launch | None = None
    ranks: tuple[RankStart, ...] = ()
    sources: tuple[StateSource, ...] = ()
    just_in_time: bool = True
    # False if the fault is in the state itself, which would make any rank's copy bad too.
    copy: bool = True
    settled: bool = False
    grace_s: float = 0.0
    ending_only: bool = False
    first: FirstSignal = ""
    checkpoint_every_s: float = 0.0
    keep: int = defaults.KEEP_CHECKPOINTS  # the number of checkpoints to keep
    save: int = 0
    save_step: int = -1
    save_generation: int = 0
    drill: DrillOrder | None = None
    suspects: tuple[int, ...] = ()  # for "secure": ranks that hang
    # For "run": the id of the inspection that the member must make of all ranks, because a rank is late; 0 if
    # none is late. The code calls it `inspection_id`. This field and `RankInspection.asked`, in which each
    # inspection reports it, have other names, because these are on the wire.
    look: int = 0
    # For "idle": the size of the snapshot that the member may have to fetch, to let it make room early.
    room_bytes: int = 0
    lineage: tuple[Lineage, ...] = ()  # distinguishes valid from void checkpoints
    # The last step where the replicas are known to have matched; 0 if none yet, -1 for a single replica.
    proven: int = -1
    epoch: int = 0  # the epoch of the sender; a supervisor with a higher epoch replaces it
    # Steps of `generation` whose state a rank changed after their commit, if no copy contains the change.
    void: tuple[int, ...] = ()
    # The step of `MemberReport.publishing`, once it is certain that no rank has made it void or can still
    # make it void.
    good: int = -1
    exit_code: int = 0  # for "stop": the exit code of a pod's training container
    # The secret that the members of the job present to each other; "" if they use the run's token.
    secret: str = field(default="", repr=False)
    # For "run" on a cluster: the `peer_url` of the members with the ranks before and after the member's own.
    # Only sent to a sidecar whose connection has the feature `NEIGHBOURS`.
    neighbours: tuple[str, ...] = field(default=(), metadata={**added(), **at_most(MAX_NEIGHBOURS)})
    # The `neighbours` that can be considered out of reach even if the member has never reached them. Only
    # sent to a sidecar whose connection has the feature `MUST_REACH`.
    must_reach: tuple[str, ...] = field(default=(), metadata={**added(), **at_most(MAX_NEIGHBOURS)})
    # Those of `must_reach` that have reported this member as out of reach. Its sidecar can therefore consider
    # them out of reach even if it has never reached any neighbour. Only sent to a sidecar whose connection
    # has the feature `MUST_CONFIRM`.
    must_confirm: tuple[str, ...] = field(default=(), metadata={**added(), **at_most(MAX_NEIGHBOURS)})


@dataclass(frozen=True, slots=True)
class DrillOrder:
    """An order to cause a fault deliberately. Because of `number`, a repeated message has no effect."""

    number: int
    what: DrillName
    rank: int
