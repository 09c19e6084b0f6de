"""The options of `holdfast run`. Options that set a policy are also annotations of pods. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.protocol import defaults
from supervisor.options.value_types import (
    ValueType,
    choice,
    directory,
    duration,
    nodes,
    number,
    ranks,
    share,
    span,
    whole_number,
)


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        names: Its spellings. The help shows the first one. Dashes and underscores are equivalent.
        field: The field of the command's dataclass that receives the value.
        value: The type of its value; None for a flag.
        metavar: The name of the value in the help; "" for a flag.
        group: The heading under which the help lists it.
        help: What it does. Begins with a verb or a noun.
        default: The default value as on the command line, or a description if there is no such value.
        unit: The unit of a number, as a word that `help` contains; "" for durations, whose text has a unit.
        required: True if the command cannot do without it. `default` is then not shown.
        launchers_own: True if scripts hardly ever define an option of this name; false for --port or --grace.
    """

    names: tuple[str, ...]
    field: str
    value: ValueType | None
    metavar: str
    group: str
    help: str
    default: str = "off"
    unit: str = ""
    launchers_own: bool = False
    required: bool = False


@dataclass(frozen=True, slots=True)
class TorchrunOption:
    """An option of torchrun that is accepted but has no effect.

    `note` tells the user why. `check` returns "" for a value that can be ignored. Any other value is refused,
    and `check` returns what is expected instead.
    """

    names: tuple[str, ...]
    takes_value: bool
    note: str
    check: Callable[[str], str] = lambda _: ""


_ONE_MACHINE = "(a run is on one machine, where each member acts as one node: use --members N)"


def _local(text: str) -> str:
    host = text.rpartition(":")[0] if text.count(":") == 1 else text
    is_local = host in ("localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0")
    return "" if is_local else f"localhost {_ONE_MACHINE}"


def _first_node(text: str) -> str:
    return "" if text == "0" else f"0 {_ONE_MACHINE}"


_GROUP = "holdfast forms the process group and chooses the address and port"
_OUTPUT = "the output of all ranks is shown, prefixed with the rank, and kept in the run directory"
TORCHRUN_OPTIONS = (
    TorchrunOption(("--standalone",), False, ""),
    TorchrunOption(("--no-python",), False, ""),  # any program that is not Python is started unchanged
    TorchrunOption(("--rdzv-backend",), True, _GROUP),
    TorchrunOption(("--rdzv-endpoint",), True, _GROUP, _local),
    TorchrunOption(("--rdzv-id",), True, _GROUP),
    TorchrunOption(("--rdzv-conf",), True, _GROUP),
    TorchrunOption(("--node-rank",), True, _GROUP, _first_node),
    TorchrunOption(("--master-addr",), True, _GROUP, _local),
    TorchrunOption(("--master-port",), True, _GROUP),
    TorchrunOption(("--local-addr",), True, _GROUP, _local),
    TorchrunOption(("--log-dir",), True, "logs are in the run directory (--run-dir)"),
    TorchrunOption(("--redirects", "-r"), True, _OUTPUT),
    TorchrunOption(("--tee", "-t"), True, _OUTPUT),
    TorchrunOption(("--local-ranks-filter",), True, _OUTPUT),
    TorchrunOption(("--log-line-prefix-template",), True, _OUTPUT),
    TorchrunOption(("--logs-specs",), True, _OUTPUT),
    TorchrunOption(("--run-path",), False, "a script is always run as __main__"),
    TorchrunOption(("--monitor-interval",), True, "an exit is noticed immediately, without polling"),
    TorchrunOption(("--start-method",), True, "--warm selects how processes are started"),
    TorchrunOption(("--role",), True, "holdfast has no roles"),
    TorchrunOption(("--event-log-handler",), True, "events are in the journal in the run directory"),
    TorchrunOption(("--signals-to-handle",), True, "SIGINT and SIGTERM always end the run cleanly"),
    TorchrunOption(("--shutdown-timeout",), True, "--grace limits how long ranks take to end"),
)

_LONG = duration(1, 7 * 86_400)
_FLOOR = f"{defaults.HANG_FLOOR_S:g}s"
_PROCESSES, _STATE, _FAULTS, _PLACE = (
    "Processes",
    "State: snapshots in memory, checkpoints on storage",
    "Faults",
    "Run directory and output",
)
RUN = (
    Option(("--nproc-per-node",), "nproc_per_node", ranks, "N", _PROCESSES,
           "ranks per member; gpu: one per GPU, cpu: one per core, auto: gpu if there are GPUs, else cpu",
           "1", "ranks", launchers_own=True),
    Option(("--members", "--nnodes"), "members", nodes, "M", _PROCESSES,
           "members, each acting as one node; accepts torchrun's M:M, but no range", "1", "members",
           launchers_own=True),
    Option(("--standby",), "standby", whole_number(0, 64), "S", _PROCESSES,
           "standbys: warm members without ranks, ready to replace a lost member", "0", "members",
           launchers_own=True),
    Option(("--min-members",), "min_members", whole_number(1, 100_000, {"all": 0}), "M", _PROCESSES,
           "minimum number of members to train with while a lost member has no replacement; the script must"
           " support it", "all", "members", launchers_own=True),
    Option(("--warm",), "warm", choice(*defaults.WARM_STRATEGIES), "HOW", _PROCESSES,
           "strategy for keeping replacement processes ready", defaults.WARM_STRATEGIES[0]),
    Option(("--snapshot-every",), "snapshot_every",
           whole_number(0, 1_000_000_000, dict.fromkeys(("auto", "-1"), defaults.AUTOMATIC)), "K", _STATE,
           "steps between snapshots; auto: as often as --snapshot-budget allows, 0: only the first",
           "auto", "steps", launchers_own=True),
    Option(("--snapshot-budget",), "snapshot_budget", share, "SHARE", _STATE,
           "share of the step time that Holdfast may use while the snapshot interval is automatic,"
           " such as 0.01 or 1%",
           f"{defaults.SNAPSHOT_BUDGET:.0%}", "share", launchers_own=True),
    Option(("--checkpoint-every",), "checkpoint_every_s", duration(1, 30 * 86_400, "none"),
           "TIME", _STATE, "time between checkpoints; a run that ends successfully writes one more",
           f"{defaults.CHECKPOINT_EVERY_S:g}s", launchers_own=True),
    Option(("--keep-checkpoints", "--keep"), "keep_checkpoints", whole_number(1, 100_000), "N",
           _STATE, "checkpoints to keep", str(defaults.KEEP_CHECKPOINTS), "checkpoints", launchers_own=True),
    Option(("--max-restarts",), "max_restarts", whole_number(0, 1_000_000), "N", _FAULTS,
           "stop the run after this many restarts within an hour", str(defaults.MAX_RESTARTS),
           "restarts", launchers_own=True),
    Option(("--skip-bad-batches",), "skip_bad_batches", None, "", _FAULTS,
           "skip a batch that produces NaN, Inf or a loss jump twice", launchers_own=True),
    Option(("--loss-jump",), "loss_jump", number(1.5, 1e12, "never"), "X", _FAULTS,
           "roll back once if a loss exceeds the usual loss by X times the usual spread",
           f"only a warning, at {defaults.LOSS_JUMP:g}", "times"),
    Option(("--hang-factor",), "hang_factor", number(1.5, 1000), "X", _FAULTS,
           f"inspect the ranks if a step takes longer than X times the p99 of the other steps, plus {_FLOOR}",
           f"{defaults.HANG_FACTOR:g}", "times", launchers_own=True),
    Option(("--hang-floor",), "hang_floor_s", duration(0.05, 86_400), "TIME", _FAULTS,
           f"replaces the {_FLOOR} of --hang-factor; a step this late is treated as a hang without"
           " an inspection",
           "not given", launchers_own=True),
    Option(("--stall-limit",), "stall_limit_s", duration(1, 7 * 86_400), "TIME", _FAULTS,
           "limit for a late rank that may still be working: time without a step or any other sign of work",
           f"{defaults.STALL_LIMIT_S:g}s"),
    Option(("--first-step-timeout",), "first_step_timeout_s", _LONG, "TIME",
           _FAULTS, "limit for joining, restoring and the first step, including compilation",
           span(defaults.FIRST_STEP_S), launchers_own=True),
    Option(("--pause-timeout",), "pause_timeout_s", _LONG, "TIME", _FAULTS,
           "limit for a declared pause without its own limit", span(defaults.PAUSE_S),
           launchers_own=True),
    Option(("--member-timeout",), "member_timeout_s", duration(0.5, 3600), "TIME", _FAULTS,
           "silence after which a member is considered lost", span(defaults.MEMBER_TIMEOUT_S),
           launchers_own=True),
    Option(("--grace",), "grace_s", duration(0, 86_400), "TIME", _FAULTS,
           "time for a script to finish on its own before it is killed", span(defaults.GRACE_S)),
    Option(("--run-dir",), "run_dir", directory, "DIR", _PLACE,
           "directory of this run: a new or empty directory, or the directory of an earlier run to resume",
           "holdfast-runs/DATE-TIME", launchers_own=True),
    Option(("--resume",), "resume", None, "", _PLACE,
           "refuse to start unless --run-dir holds a run to resume"),
    Option(("--from-scratch",), "from_scratch", None, "", _PLACE,
           "start from step 0; existing checkpoints in --run-dir become void"),
    Option(("--port",), "port", whole_number(0, 65_535), "P", _PLACE,
           "port of the HTTP API on 127.0.0.1; 0: any free port", "0", "port"),
    Option(("--no-drills",), "no_drills", None, "", _PLACE, "refuse `holdfast inject` in this run"),
    Option(("--plain",), "plain", None, "", _PLACE, "print plain lines instead of the live display"),
    Option(("--quiet",), "quiet", None, "", _PLACE,
           "print only the ranks' output and how the run ended"),
)  # fmt: skip
