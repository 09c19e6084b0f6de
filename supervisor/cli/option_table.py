"""Read the value of one option. Pure.

A reader raises `ValueError` that says what is expected.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from holdfast.protocol import codec
from supervisor.cli.commands import AUTOMATIC, WARM
from supervisor.fault_kinds import DRILLS

Reader = Callable[[str], object]

_DURATION = re.compile(r"(?P<count>\d+(?:\.\d+)?|\.\d+)\s?(?P<unit>ms|s|sec|m|min|h|d)?", re.ASCII)
_SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_WHOLE = re.compile(r"[+-]?\d{1,18}", re.ASCII)


def count(low: int, high: int, words: dict[str, int] | None = None) -> Reader:
    """Accept a whole number, or one of `words`."""
    named = words or {}

    def read(text: str) -> int:
        if text in named:
            return named[text]
        if not _WHOLE.fullmatch(text) or not low <= int(text) <= high:
            also = "".join(f", or {word!r}" for word in named)
            raise ValueError(f"a whole number from {low} to {high}{also}")
        return int(text)

    return read


def number(low: float, high: float, zero: str = "") -> Reader:
    """Accept a number; with `zero`, also 0, which means that."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if zero and value == 0:
            return 0.0
        if not low <= value <= high:
            raise ValueError(f"a number from {low:g} to {high:g}" + (f", or 0: {zero}" * bool(zero)))
        return value

    return read


def share(text: str) -> float:
    """Accept a share of the whole: 0.01 or 1%."""
    percent = text.endswith("%")
    try:
        value = float(text.removesuffix("%")) / (100 if percent else 1)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise ValueError("a share above 0 and up to 1, such as 0.01 or 1%")
    return value


def duration(low_s: float, high_s: float, zero: str = "") -> Reader:
    """Accept 30s, 5m, 250ms or plain seconds; with `zero`, also 0, which means that."""

    def read(text: str) -> float:
        match = _DURATION.fullmatch(text)
        seconds = float(match["count"]) * _SECONDS[match["unit"] or "s"] if match else math.nan
        if zero and seconds == 0:
            return 0.0
        if not low_s <= seconds <= high_s:
            also = f", or 0: {zero}" if zero else ""
            raise ValueError(f"a duration such as 30s or 5m, from {_span(low_s)} to {_span(high_s)}{also}")
        return seconds

    return read


def _span(spent_s: float) -> str:
    """Return a bound the way that one would write it: 1s, 30m, 7d."""
    for unit in ("d", "h", "m", "s"):
        if spent_s >= _SECONDS[unit] and spent_s % _SECONDS[unit] == 0:
            return f"{spent_s / _SECONDS[unit]:g}{unit}"
    return f"{spent_s * 1000:g}ms" if spent_s else "0s"


def choice(*accepted: str) -> Reader:
    def read(text: str) -> str:
        if text not in accepted:
            raise ValueError(f"one of {', '.join(accepted)}")
        return text

    return read


def directory(text: str) -> Path:
    if not text or text.startswith("--") or "\0" in text:
        raise ValueError("the path of a directory")
    return Path(text).expanduser()


def ranks(text: str) -> int | str:
    """Accept a number of ranks, or torchrun's words for as many as there are devices."""
    if text in ("auto", "cpu", "gpu"):
        return text
    return whole(text, 1, codec.MAX_RANKS, ", or auto, cpu or gpu")


def nodes(text: str) -> int:
    """Accept torchrun's N or N:N. A range that leaves a choice is not supported."""
    low, colon, high = text.partition(":")
    members = whole(low, 1, 4096, " (or N:N)")
    if colon and whole(high, 1, 4096, " (or N:N)") != members:
        raise ValueError(f"one number: growing and shrinking is not supported yet, so {low} or {high}")
    return members


def whole(text: str, low: int, high: int, also: str) -> int:
    if not _WHOLE.fullmatch(text) or not low <= int(text) <= high:
        raise ValueError(f"a whole number from {low} to {high}{also}")
    return int(text)


# Every option of every command, as a table. Parsing and help are made from it.


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `read` is None for a flag. `field` is that of the command's dataclass."""

    names: tuple[str, ...]  # the first is the one that help shows; dashes and underscores are equal
    field: str
    read: Reader | None
    metavar: str
    group: str
    help: str


@dataclass(frozen=True, slots=True)
class TorchrunOption:
    """An option of others that has no effect here. `check` may refuse a value, with a reason."""

    names: tuple[str, ...]
    takes_value: bool
    note: str
    check: Callable[[str], str] = lambda _: ""


_ON = "one machine: each member acts as one node; run holdfast once, with --members N"


def _by_rank(_: str) -> str:
    return "names a member by a rank on it: `holdfast inject member --rank R`"


def _local(text: str) -> str:
    host = text.rpartition(":")[0] if text.count(":") == 1 else text
    return "" if host in ("localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0") else f"runs on {_ON}"


def _first_node(text: str) -> str:
    return "" if text == "0" else f"runs on {_ON}"


_GROUP = "holdfast forms the group and picks address and port itself"
_OUTPUT = "all output is in files under the run directory and, prefixed with its rank, shown"
TORCHRUN_OPTIONS = (
    TorchrunOption(("--standalone",), False, ""),
    TorchrunOption(("--no-python",), False, ""),  # a program that is not Python is started as it stands
    TorchrunOption(("--rdzv-backend",), True, _GROUP),
    TorchrunOption(("--rdzv-endpoint",), True, _GROUP, _local),
    TorchrunOption(("--rdzv-id",), True, _GROUP),
    TorchrunOption(("--rdzv-conf",), True, _GROUP),
    TorchrunOption(("--node-rank",), True, _GROUP, _first_node),
    TorchrunOption(("--master-addr",), True, _GROUP, _local),
    TorchrunOption(("--master-port",), True, _GROUP),
    TorchrunOption(("--local-addr",), True, _GROUP, _local),
    TorchrunOption(("--log-dir",), True, "logs are in the run directory: choose it with --run-dir"),
    TorchrunOption(("--redirects", "-r"), True, _OUTPUT),
    TorchrunOption(("--tee", "-t"), True, _OUTPUT),
    TorchrunOption(("--local-ranks-filter",), True, _OUTPUT),
    TorchrunOption(("--log-line-prefix-template",), True, _OUTPUT),
    TorchrunOption(("--logs-specs",), True, _OUTPUT),
    TorchrunOption(("--run-path",), False, "a script is always run as __main__"),
    TorchrunOption(("--monitor-interval",), True, "an exit is seen at once, not at an interval"),
    TorchrunOption(("--start-method",), True, "holdfast starts warm processes: see --warm"),
    TorchrunOption(("--role",), True, "roles have no meaning here"),
    TorchrunOption(("--event-log-handler",), True, "events are in the run directory's journal"),
    TorchrunOption(("--signals-to-handle",), True, "SIGINT and SIGTERM end the run cleanly"),
    TorchrunOption(("--shutdown-timeout",), True, "how long the end may take is --grace"),
)

_LONG = duration(1, 7 * 86_400)
_WHO, _STATE, _FAULTS, _SHOWN = (
    "Processes",
    "State: snapshots in memory, checkpoints on storage",
    "Faults",
    "Where it runs and what it shows",
)
RUN = (
    Option(("--nproc-per-node",), "nproc_per_node", ranks, "N", _WHO,
           "ranks of each member: a number, or auto, cpu or gpu (default 1)"),
    Option(("--members", "--nnodes"), "members", nodes, "M", _WHO,
           "members, each acting as one node (default 1)"),
    Option(("--standby",), "standby", count(0, 64), "S", _WHO,
           "hot spares: warm members that take the place of a lost one (default 0)"),
    Option(("--warm",), "warm", choice(*WARM), "HOW", _WHO,
           "how processes are kept ready: auto, park, spawn or cold (default auto)"),
    Option(("--snapshot-every",), "snapshot_every",
           count(0, 1_000_000_000, {"auto": AUTOMATIC, "-1": AUTOMATIC}), "K", _STATE,
           "steps between snapshots; auto keeps to the budget, 0 is only the first (default auto)"),
    Option(("--snapshot-budget",), "snapshot_budget", share, "SHARE", _STATE,
           "share of the step time that Holdfast may cost when it chooses K (default 1%)"),
    Option(("--checkpoint-every",), "checkpoint_every_s", duration(1, 30 * 86_400, "none"),
           "TIME", _STATE, "time between checkpoints, and one at the end; 0 for none (default 60s)"),
    Option(("--keep-checkpoints", "--keep"), "keep_checkpoints", count(1, 100_000), "N",
           _STATE, "checkpoints to keep (default 3)"),
    Option(("--max-restarts",), "max_restarts", count(0, 1_000_000), "N", _FAULTS,
           "restarts in an hour after which the run stops (default 100)"),
    Option(("--skip-bad-batches",), "skip_bad_batches", None, "", _FAULTS,
           "pass over a batch that gives NaN, Inf or a loss jump twice"),
    Option(("--loss-jump",), "loss_jump", number(1.5, 1e12, "off"), "X", _FAULTS,
           "roll back a loss X times its spread above the usual, 0 for never (default: warn at 10)"),
    Option(("--hang-factor",), "hang_factor", number(1.5, 1000), "X", _FAULTS,
           "a step that takes X times the p99 of the others is examined as late (default 3)"),
    Option(("--hang-floor",), "hang_floor_s", duration(0.05, 86_400), "TIME", _FAULTS,
           "a step that is this much later hangs, whatever it does (default: it is examined)"),
    Option(("--stall-limit",), "stall_limit_s", duration(1, 7 * 86_400), "TIME", _FAULTS,
           "time without a sign of work for a rank that may be working (default 60s)"),
    Option(("--first-step-timeout",), "first_step_timeout_s", _LONG, "TIME",
           _FAULTS, "how long the first step may take, compiling included (default 10m)"),
    Option(("--pause-timeout",), "pause_timeout_s", _LONG, "TIME", _FAULTS,
           "how long a pause without a limit of its own may take (default 30m)"),
    Option(("--member-timeout",), "member_timeout_s", duration(0.5, 3600), "TIME", _FAULTS,
           "silence after which a member is lost (default 5s)"),
    Option(("--grace",), "grace_s", duration(0, 86_400), "TIME", _FAULTS,
           "for what is left at the end of a run, or at work after a commit at a stop (default 30s)"),
    Option(("--run-dir",), "run_dir", directory, "DIR", _SHOWN,
           "directory of this run; a run in it is resumed (default holdfast-runs/TIME)"),
    Option(("--resume",), "resume", None, "", _SHOWN,
           "refuse to start unless --run-dir holds a run to resume"),
    Option(("--from-scratch",), "from_scratch", None, "", _SHOWN,
           "begin at step 0, whatever checkpoints --run-dir has; they are void then"),
    Option(("--port",), "port", count(0, 65_535), "P", _SHOWN,
           "port of the HTTP API on the loopback address, 0 for any (default 0)"),
    Option(("--no-drills",), "no_drills", None, "", _SHOWN, "refuse `holdfast inject` in this run"),
    Option(("--plain",), "plain", None, "", _SHOWN, "disable the live display"),
    Option(("--quiet",), "quiet", None, "", _SHOWN, "show only what the ranks print, and how the run ended"),
)  # fmt: skip

_DIR = Option(("--run-dir",), "run_dir", directory, "DIR", "Options",
              "the run to look at (default: the newest)")  # fmt: skip
_JSON = Option(("--json",), "json", None, "", "Options", "print JSON")
_RANK = Option(("--rank",), "rank", count(0, 1_000_000), "R", "Options",
               "the rank, or one on the member, that it hits (default 0)")  # fmt: skip
_VERIFY = Option(("--verify",), "verify", None, "", "Options",
                 "read them whole and compare checksums")  # fmt: skip
_NOW = Option(("--now",), "now", None, "", "Options", "stop immediately, without a last checkpoint")
_KEEP = Option(("--keep",), "keep", None, "", "Options", "keep the run directories")
_QUICK = Option(("--quick",), "quick", None, "", "Options", "a smaller model and three faults: half a minute")
_WHERE = Option(("--run-dir",), "run_dir", directory, "DIR", "Options",
                "where to put the runs (default: a temporary directory)")  # fmt: skip


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """One command: its options, its arguments as (name, dataclass field, reader), and its help."""

    summary: str
    options: tuple[Option, ...]
    examples: tuple[tuple[str, str], ...]  # command line, what it does
    arguments: tuple[tuple[str, str, Reader], ...] = ()
    about: str = ""
    foreign: tuple[TorchrunOption, ...] = ()


_RUN_ABOUT = """\
COMMAND is what you would give torchrun: `python train.py ARGS`, `train.py ARGS`,
`-m MODULE ARGS`, or any other program. Options before it belong to holdfast, arguments after
the script to the script. Options that torchrun has too may be spelled its way, and torchrun's
PET_ variables are read. The exit code is the script's.

Ctrl-C saves a checkpoint and stops the run; a second one stops it immediately."""


def _in_two_columns(rows: Mapping[str, str]) -> str:
    cells = [f"{name:<12}{text}" for name, text in rows.items()]
    half = (len(cells) + 1) // 2
    pairs = itertools.zip_longest(cells[:half], cells[half:], fillvalue="")
    return "\n".join(f"  {left:<48}{right}".rstrip() for left, right in pairs)


_DRILLS = f"KIND is one of {', '.join(DRILLS)}:\n{_in_two_columns(DRILLS)}"

# Commands of another part, which `holdfast` hands over before we see them.
NEIGHBOURS: Mapping[str, str] = MappingProxyType(
    {"node": "watch this node's GPUs and host, and say what to do about what goes bad"}
)

COMMANDS: Mapping[str, CommandSpec] = MappingProxyType(
    {
        "run": CommandSpec(
            "train under supervision: like torchrun, but it survives faults",
            RUN,
            (
                ("holdfast run --nproc-per-node 2 -- python train.py --lr 0.1", "two ranks"),
                ("holdfast run --nproc_per_node=2 train.py --lr 0.1", "the same, as with torchrun"),
                ("holdfast run --nproc-per-node gpu --members 2 --standby 1 -m pkg.train",
                 "two nodes' worth, and one in reserve"),
                ("holdfast run --run-dir runs/a -- python train.py", "resumes the run in runs/a, if any"),
            ),
            (),
            _RUN_ABOUT,
            TORCHRUN_OPTIONS,
        ),
        "status": CommandSpec(
            "what the run is doing now", (_DIR, _JSON), (("holdfast status", "the newest run"),)
        ),
        "incidents": CommandSpec(
            "the faults so far, one line each",
            (_DIR, _JSON),
            (("holdfast incidents --json | jq '.[].recovered_s'", "the time each recovery took"),),
        ),
        "explain": CommandSpec(
            "one fault in full: evidence, decision, timeline, stacks",
            (_DIR, _JSON),
            (("holdfast explain i-0003", "an incident by its id"),
             ("holdfast explain last", "the newest")),
            (("ID", "incident", str),),
        ),
        "checkpoints": CommandSpec(
            "the checkpoints on storage, and whether they are whole",
            (_VERIFY, _DIR, _JSON),
            (("holdfast checkpoints --verify", "reads every byte"),),
            (),
            "The exit code is 1 when one of them is damaged.",
        ),
        "stop": CommandSpec(
            "save a checkpoint and end the run",
            (_NOW, _DIR, _JSON),
            (("holdfast stop", "waits until the run has ended"),),
        ),
        "inject": CommandSpec(
            "break something on purpose, as a drill",
            (_RANK, _DIR, _JSON),
            (("holdfast inject kill --rank 1", "SIGKILL to rank 1"),),
            (("KIND", "kind", choice(*DRILLS)),),
            _DRILLS,
            (TorchrunOption(("--member", "--members"), True, "", _by_rank),),
        ),
        "demo": CommandSpec(
            "train a small GPT and break it nine times",
            (_WHERE, _KEEP, _QUICK),
            (("holdfast demo", "takes a few minutes"),),
        ),
    }
)  # fmt: skip
