"""Represent each command of `holdfast` as a dataclass with the values of its options."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from holdfast.protocol import defaults
from supervisor.cli.option_table import IMAGE
from supervisor.options.plan_options import AUTO, SEED
from supervisor.planning.model import SizingInputs


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`holdfast run`. `notes` are messages to show before the run starts."""

    command: tuple[str, ...]
    nproc_per_node: int = 1
    members: int = 1
    standby: int = 0
    min_members: int = 0  # 0 if not given, which selects all
    run_dir: Path | None = None
    resume: bool = False  # refuse to start unless the run directory contains a run
    from_scratch: bool = False  # start from step 0, regardless of checkpoints on storage
    snapshot_every: int = defaults.SNAPSHOT_EVERY  # in steps; 0 makes only the first snapshot
    snapshot_budget: float = defaults.SNAPSHOT_BUDGET  # share of the step time
    checkpoint_every_s: float = defaults.CHECKPOINT_EVERY_S  # 0 for no checkpoints
    keep_checkpoints: int = defaults.KEEP_CHECKPOINTS
    max_restarts: int = defaults.MAX_RESTARTS  # per hour
    skip_bad_batches: bool = False
    loss_jump: float | None = None  # 0 to disable; None for only a warning, at `defaults.LOSS_JUMP`
    hang_factor: float = defaults.HANG_FACTOR
    hang_floor_s: float = 0.0  # 0 if not given
    stall_limit_s: float = defaults.STALL_LIMIT_S
    first_step_timeout_s: float = defaults.FIRST_STEP_S
    pause_timeout_s: float = defaults.PAUSE_S
    member_timeout_s: float = defaults.MEMBER_TIMEOUT_S
    warm: str = defaults.WARM_STRATEGIES[0]
    port: int = 0
    quiet: bool = False
    no_drills: bool = False
    plain: bool = False
    grace_s: float = defaults.GRACE_S
    notes: tuple[str, ...] = ()
    given: tuple[str, ...] = field(default=(), compare=False)  # the command line without the run directory


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The cluster and namespace that a command accesses; "" for kubectl's default."""

    context: str = ""
    namespace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions(ClusterOptions):
    """The job on a cluster, as NAME or NAMESPACE/NAME; "" for a run on this machine."""

    job: str = ""


@dataclass(frozen=True, slots=True)
class Status(JobOptions):
    """`holdfast status`. In every command, a `run_dir` of None means the newest run."""

    run_dir: Path | None = None
    json: bool = False


@dataclass(frozen=True, slots=True)
class Incidents(JobOptions):
    run_dir: Path | None = None
    json: bool = False


@dataclass(frozen=True, slots=True)
class Explain(JobOptions):
    incident: str
    run_dir: Path | None = None
    json: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoints(JobOptions):
    verify: bool = False
    run_dir: Path | None = None
    json: bool = False


@dataclass(frozen=True, slots=True)
class Stop(JobOptions):
    now: bool = False
    run_dir: Path | None = None
    json: bool = False


@dataclass(frozen=True, slots=True)
class Inject(JobOptions):
    kind: str  # one of `holdfast.protocol.drills.DRILLS`
    rank: int = 0
    run_dir: Path | None = None
    json: bool = False


@dataclass(frozen=True, slots=True)
class Jobs(ClusterOptions):
    all_namespaces: bool = False
    json: bool = False


@dataclass(frozen=True, slots=True)
class Doctor(ClusterOptions):
    """`holdfast doctor`. `pod` is NAME or NAMESPACE/NAME; "" for all pods of the namespace."""

    pod: str = ""
    json: bool = False


@dataclass(frozen=True, slots=True)
class Nodes(ClusterOptions):
    """`holdfast nodes`. `action` is explain, release or quarantine, of `node`; "" to list all nodes."""

    action: str = ""
    node: str = ""
    why: str = ""
    drain: bool = False
    output: str = "table"
    json: bool = False


@dataclass(frozen=True, slots=True)
class InjectManifest:
    """`holdfast inject-manifest`. `file` is "-" for standard input."""

    file: str
    image: str = IMAGE


@dataclass(frozen=True, slots=True)
class PlanOptions(SizingInputs):
    """`holdfast plan`."""

    standbys: int = AUTO
    simulate: bool = False
    seed: int = SEED
    json: bool = False


@dataclass(frozen=True, slots=True)
class Demo(ClusterOptions):
    run_dir: Path | None = None
    keep: bool = False
    quick: bool = False
    cluster: bool = False


@dataclass(frozen=True, slots=True)
class Show:
    """Print the help or the version."""

    text: str


ReadCommand: TypeAlias = "Status | Incidents | Explain | Checkpoints"
ClusterCommand: TypeAlias = "Jobs | Doctor | Nodes | InjectManifest"
Command: TypeAlias = "RunOptions | Demo | ReadCommand | Stop | Inject | ClusterCommand | PlanOptions | Show"
