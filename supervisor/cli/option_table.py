"""A table of the options of every command, from which parser, messages and help are derived. Pure.

The type of a value contains the text about what it accepts, which the help and error messages share.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from holdfast.protocol import codec, defaults
from supervisor.fault_kinds import DRILLS

_DURATION = re.compile(r"(?P<count>\d+(?:\.\d+)?|\.\d+)\s?(?P<unit>ms|s|sec|m|min|h|d)?", re.ASCII)
_SECONDS = {"ms": 1e-3, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_WHOLE = re.compile(r"[+-]?\d{1,18}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ValueType:
    """The type of an option's or argument's value: what it accepts, and how a text is parsed.

    Attributes:
        kind: "whole number", "number", "duration", "share", "word" or "path".
        expected: The words after "expected" in a message about a bad value.
        parse: Returns the value of a text. Raises `ValueError` for a bad text; if the exception has a
            message, it replaces `expected`.
        accepts: A short form of the accepted values, for the help and the user guide; "" if any is accepted.
        bounds: The smallest and the largest accepted number, in the unit of the parsed value.
        words: The accepted words, for suggestions.
    """

    kind: str
    expected: str
    parse: Callable[[str], object]
    accepts: str = ""
    bounds: tuple[float, float] | None = None
    words: tuple[str, ...] = ()

    def read(self, text: str) -> object:
        """Return the value of `text`. Raises `ValueError` with what is expected as the message."""
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(str(error) or self.expected) from None


def listed(words: Sequence[str]) -> str:
    """Return "a, b or c"."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def whole_number(low: int, high: int, words: Mapping[str, int] | None = None) -> ValueType:
    """Return a type for whole numbers, and for `words` that stand for numbers."""
    named = words or {}
    expected = listed([f"{low}-{high}", *filter(str.isalpha, named)])

    def parse(text: str) -> int:
        return named[text] if text in named else _whole(text, low, high, expected)

    return ValueType("whole number", expected, parse, expected, (low, high), tuple(named))


def number(low: float, high: float, zero: str = "") -> ValueType:
    """Return a type for numbers from `low` to `high`; with `zero`, also for 0, which has that meaning."""
    expected = f"{_plain(low)}-{_plain(high)}" + _also_zero(zero)

    def parse(text: str) -> float:
        value = _number(text)
        if zero and value == 0:
            return 0.0
        if not low <= value <= high:
            raise ValueError
        return value

    return ValueType("number", expected, parse, expected, (low, high))


def duration(low_s: float, high_s: float, zero: str = "") -> ValueType:
    """Return a type for durations (30s, 5m, 250ms or plain seconds); with `zero`, 0 has that meaning."""
    spans, also = f"{span(low_s)}-{span(high_s)}", _also_zero(zero)

    def parse(text: str) -> float:
        match = _DURATION.fullmatch(text)
        seconds = float(match["count"]) * _SECONDS[match["unit"] or "s"] if match else math.nan
        if zero and seconds == 0:
            return 0.0
        if not low_s <= seconds <= high_s:
            raise ValueError
        return seconds

    expected = f"a time of {spans}, such as 30s or 5m{also}"
    return ValueType("duration", expected, parse, spans + also, (low_s, high_s))


def _also_zero(meaning: str) -> str:
    return f", or 0 for {meaning}" if meaning else ""


def _plain(value: float) -> str:
    """Return 1.5 or 1e12."""
    return f"{value:g}".replace("e+", "e")


def choice(*words: str) -> ValueType:
    """Return a type that accepts only `words`."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return ValueType("word", listed(words), parse, listed(words), words=words)


def _parse_share(text: str) -> float:
    value = _number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < value <= 1:
        raise ValueError
    return value


def _parse_directory(text: str) -> Path:
    if not text or text.startswith("--") or "\0" in text:
        raise ValueError
    return Path(text).expanduser()


_RANK_WORDS = ("auto", "cpu", "gpu")  # from torchrun: as many ranks as there are devices
_RANKS = listed([f"1-{codec.MAX_RANKS}", *_RANK_WORDS])
_MOST_NODES = 4096
_NODES = f"1-{_MOST_NODES}"


def _parse_ranks(text: str) -> int | str:
    return text if text in _RANK_WORDS else _whole(text, 1, codec.MAX_RANKS, _RANKS)


def _parse_nodes(text: str) -> int:
    """Parse torchrun's N or N:N. Raises `ValueError` for a range N:M with different numbers."""
    low, colon, high = text.partition(":")
    members = _whole(low, 1, _MOST_NODES, _NODES)
    if colon and _whole(high, 1, _MOST_NODES, _NODES) != members:
        raise ValueError(f"{low} or {high} (a range is not supported yet)")
    return members


def _whole(text: str, low: int, high: int, expected: str) -> int:
    if _WHOLE.fullmatch(text) and low <= int(text) <= high:
        return int(text)
    # 1.5 is within the range: a message with the range alone would not explain why it is refused.
    raise ValueError(f"a whole number {expected}" if low <= _number(text) <= high else expected)


def _number(text: str) -> float:
    """Return the number; NaN if `text` is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def span(spent_s: float) -> str:
    """Return a duration as a user would write it: 250ms, 1s, 30m, 7d."""
    for unit in ("d", "h", "m", "s"):
        if spent_s >= _SECONDS[unit] and spent_s % _SECONDS[unit] == 0:
            return f"{spent_s / _SECONDS[unit]:g}{unit}"
    return f"{spent_s * 1000:g}ms" if spent_s else "0s"


_SHARE = "a share above 0 and up to 1, such as 0.01 or 1%"
share = ValueType("share", _SHARE, _parse_share, "above 0, up to 1 or 100%", (0.0, 1.0))
directory = ValueType("path", "the path of a directory", _parse_directory)
ranks = ValueType("whole number", _RANKS, _parse_ranks, _RANKS, (1, codec.MAX_RANKS), _RANK_WORDS)
nodes = ValueType("whole number", _NODES, _parse_nodes, _NODES, (1, _MOST_NODES))


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    Attributes:
        names: Its spellings; help shows the first one. Dashes and underscores are equal.
        field: The field of the command's dataclass that gets the value.
        value: The type of its value; None for a flag.
        metavar: The name of the value in the help; "" for a flag.
        group: The heading under which the help lists it.
        help: What it does, beginning with a verb or a noun.
        default: The default value as on the command line, or a description if no value expresses it.
        unit: The unit of a number, which is a word of `help`; "" for durations, whose text contains it.
    """

    names: tuple[str, ...]
    field: str
    value: ValueType | None
    metavar: str
    group: str
    help: str
    default: str = "off"
    unit: str = ""


@dataclass(frozen=True, slots=True)
class TorchrunOption:
    """An option of torchrun that is accepted but has no effect.

    `note` explains to the user why. `check` returns "" for a value that can be ignored; for any other value,
    which is refused, it returns what is expected instead.
    """

    names: tuple[str, ...]
    takes_value: bool
    note: str
    check: Callable[[str], str] = lambda _: ""


_ONE_MACHINE = "(a run is on one machine, where each member acts as one node: use --members N)"


def _by_rank(_: str) -> str:
    return "the member of a rank, as in `holdfast inject member --rank R`"


def _local(text: str) -> str:
    host = text.rpartition(":")[0] if text.count(":") == 1 else text
    is_local = host in ("localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0")
    return "" if is_local else f"localhost {_ONE_MACHINE}"


def _first_node(text: str) -> str:
    return "" if text == "0" else f"0 {_ONE_MACHINE}"


_GROUP = "holdfast forms the process group and chooses address and port"
_OUTPUT = "the output of all ranks is shown, prefixed with the rank, and kept in the run directory"
TORCHRUN_OPTIONS = (
    TorchrunOption(("--standalone",), False, ""),
    TorchrunOption(("--no-python",), False, ""),  # a program that is not Python is started unchanged
    TorchrunOption(("--rdzv-backend",), True, _GROUP),
    TorchrunOption(("--rdzv-endpoint",), True, _GROUP, _local),
    TorchrunOption(("--rdzv-id",), True, _GROUP),
    TorchrunOption(("--rdzv-conf",), True, _GROUP),
    TorchrunOption(("--node-rank",), True, _GROUP, _first_node),
    TorchrunOption(("--master-addr",), True, _GROUP, _local),
    TorchrunOption(("--master-port",), True, _GROUP),
    TorchrunOption(("--local-addr",), True, _GROUP, _local),
    TorchrunOption(("--log-dir",), True, "logs are in the run directory, which --run-dir chooses"),
    TorchrunOption(("--redirects", "-r"), True, _OUTPUT),
    TorchrunOption(("--tee", "-t"), True, _OUTPUT),
    TorchrunOption(("--local-ranks-filter",), True, _OUTPUT),
    TorchrunOption(("--log-line-prefix-template",), True, _OUTPUT),
    TorchrunOption(("--logs-specs",), True, _OUTPUT),
    TorchrunOption(("--run-path",), False, "a script is always run as __main__"),
    TorchrunOption(("--monitor-interval",), True, "an exit is noticed immediately, without polling"),
    TorchrunOption(("--start-method",), True, "--warm chooses how processes are started"),
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
           "1", "ranks"),
    Option(("--members", "--nnodes"), "members", nodes, "M", _PROCESSES,
           "members, each acting as one node; torchrun's M:M is accepted, a range is not", "1", "members"),
    Option(("--standby",), "standby", whole_number(0, 64), "S", _PROCESSES,
           "hot-spare members: warm, without ranks, ready to replace a lost member", "0", "members"),
    Option(("--warm",), "warm", choice(*defaults.WARM_STRATEGIES), "HOW", _PROCESSES,
           "method of keeping replacement processes ready", defaults.WARM_STRATEGIES[0]),
    Option(("--snapshot-every",), "snapshot_every",
           whole_number(0, 1_000_000_000, dict.fromkeys(("auto", "-1"), defaults.AUTOMATIC)), "K", _STATE,
           "steps between snapshots; auto: as often as --snapshot-budget allows, 0: only the first",
           "auto", "steps"),
    Option(("--snapshot-budget",), "snapshot_budget", share, "SHARE", _STATE,
           "share of the step time that Holdfast may use when it chooses K, such as 0.01 or 1%",
           f"{defaults.SNAPSHOT_BUDGET:.0%}", "share"),
    Option(("--checkpoint-every",), "checkpoint_every_s", duration(1, 30 * 86_400, "none"),
           "TIME", _STATE, "time between checkpoints; a run that ends successfully writes one more",
           f"{defaults.CHECKPOINT_EVERY_S:g}s"),
    Option(("--keep-checkpoints", "--keep"), "keep_checkpoints", whole_number(1, 100_000), "N",
           _STATE, "checkpoints to keep", str(defaults.KEEP_CHECKPOINTS), "checkpoints"),
    Option(("--max-restarts",), "max_restarts", whole_number(0, 1_000_000), "N", _FAULTS,
           "restarts within one hour after which the run stops", str(defaults.MAX_RESTARTS), "restarts"),
    Option(("--skip-bad-batches",), "skip_bad_batches", None, "", _FAULTS,
           "skip a batch that gives NaN, Inf or a loss jump twice"),
    Option(("--loss-jump",), "loss_jump", number(1.5, 1e12, "never"), "X", _FAULTS,
           "roll back once when a loss exceeds the usual loss by X times its usual spread",
           f"only a warning, at {defaults.LOSS_JUMP:g}", "times"),
    Option(("--hang-factor",), "hang_factor", number(1.5, 1000), "X", _FAULTS,
           f"examine a step that takes longer than X times the p99 of the other steps, plus {_FLOOR}",
           f"{defaults.HANG_FACTOR:g}", "times"),
    Option(("--hang-floor",), "hang_floor_s", duration(0.05, 86_400), "TIME", _FAULTS,
           f"time that replaces those {_FLOOR}; a step that late counts as a hang without examination",
           "not given"),
    Option(("--stall-limit",), "stall_limit_s", duration(1, 7 * 86_400), "TIME", _FAULTS,
           "time without a sign of work after which a late rank that may be working counts as hung",
           f"{defaults.STALL_LIMIT_S:g}s"),
    Option(("--first-step-timeout",), "first_step_timeout_s", _LONG, "TIME",
           _FAULTS, "limit for joining, restoring and the first step, including compilation",
           span(defaults.FIRST_STEP_S)),
    Option(("--pause-timeout",), "pause_timeout_s", _LONG, "TIME", _FAULTS,
           "limit for a declared pause that has no limit of its own", span(defaults.PAUSE_S)),
    Option(("--member-timeout",), "member_timeout_s", duration(0.5, 3600), "TIME", _FAULTS,
           "silence after which a member counts as lost", span(defaults.MEMBER_TIMEOUT_S)),
    Option(("--grace",), "grace_s", duration(0, 86_400), "TIME", _FAULTS,
           "time for a script to finish on its own before it is killed", span(defaults.GRACE_S)),
    Option(("--run-dir",), "run_dir", directory, "DIR", _PLACE,
           "directory of this run: new, empty, or that of an earlier run, which is resumed",
           "holdfast-runs/DATE-TIME"),
    Option(("--resume",), "resume", None, "", _PLACE,
           "refuse to start unless --run-dir holds a run to resume"),
    Option(("--from-scratch",), "from_scratch", None, "", _PLACE,
           "start from step 0; checkpoints in --run-dir become void"),
    Option(("--port",), "port", whole_number(0, 65_535), "P", _PLACE,
           "port of the HTTP API on 127.0.0.1; 0: any free port", "0", "port"),
    Option(("--no-drills",), "no_drills", None, "", _PLACE, "refuse `holdfast inject` in this run"),
    Option(("--plain",), "plain", None, "", _PLACE, "print plain lines instead of the live display"),
    Option(("--quiet",), "quiet", None, "", _PLACE,
           "print only what the ranks print, and how the run ended"),
)  # fmt: skip

_OPTIONS = "Options"
_DIR = Option(("--run-dir",), "run_dir", directory, "DIR", _OPTIONS,
              "directory of the run", "the newest run in holdfast-runs")  # fmt: skip
_LIVING = Option(("--run-dir",), "run_dir", directory, "DIR", _OPTIONS,
                 "directory of the run", "the run in progress in holdfast-runs")  # fmt: skip
_JSON = Option(("--json",), "json", None, "", _OPTIONS, "print JSON")
_RANK = Option(("--rank",), "rank", whole_number(0, 1_000_000), "R", _OPTIONS,
               "rank to break; with member or sidecar, a rank of that member", "0", "rank")  # fmt: skip
_VERIFY = Option(("--verify",), "verify", None, "", _OPTIONS,
                 "read every byte and compare checksums, not only sizes")  # fmt: skip
_NOW = Option(("--now",), "now", None, "", _OPTIONS, "stop immediately, without a final checkpoint")
_KEEP = Option(("--keep",), "keep", None, "", _OPTIONS, "keep the run directories")
_QUICK = Option(("--quick",), "quick", None, "", _OPTIONS,
                "train a smaller model with three faults, in about half a minute")  # fmt: skip
_WHERE = Option(("--run-dir",), "run_dir", directory, "DIR", _OPTIONS,
                "parent directory of the two runs, which are kept", "a temporary directory")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Argument:
    """One word that a command needs."""

    metavar: str
    field: str
    value: ValueType


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """One command. `summary` is its line in the list of commands, `about` the text above its options."""

    summary: str
    options: tuple[Option, ...]
    examples: tuple[tuple[str, str], ...]  # command line, what it does
    about: str = ""
    arguments: tuple[Argument, ...] = ()
    foreign: tuple[TorchrunOption, ...] = ()


_INCIDENT = ValueType("word", "an incident from `holdfast incidents`, such as 3, i-0003 or last", str)

_RUN_ABOUT = """\
COMMAND is what you would give torchrun: `python train.py ARGS`, `train.py ARGS`, `-m MODULE ARGS`,
or any other program. Options before COMMAND belong to holdfast, arguments after it to the script.
torchrun's spellings of shared options and its PET_* variables are accepted.

If a rank crashes, hangs or computes a NaN, holdfast restarts what is needed and training resumes
from the newest state that survives in memory, or else from the newest checkpoint. Ctrl-C saves a
checkpoint and stops the run; pressed again, it stops the run immediately. The exit code is the
script's; it is 130 after Ctrl-C and 2 for bad input.

A TIME is 250ms, 30s, 5m, 2h, 1d or plain seconds."""

_STATUS_ABOUT = """\
Prints the step, the loss, what is saved, the last incident, the state of each rank, and where the
time went. Works during a run and after it."""

_INCIDENTS_ABOUT = """\
For each fault: what happened, to which rank, at which step, how long it took to notice and to
recover, how many steps were lost, and the remedy. `holdfast explain ID` prints one in full."""

_EXPLAIN_ABOUT = """\
ID is an incident from `holdfast incidents`: i-0003, 3 or last. Prints the evidence, the decision
and its reason, the time that each part of the recovery took, and the stacks of hung ranks."""

_CHECKPOINTS_ABOUT = """\
Newest first. The exit code is 1 if one of them is damaged."""

_STOP_ABOUT = """\
Returns when the run has ended. The exit code is 1 if it has not ended in time."""


def _in_two_columns(rows: Mapping[str, str]) -> str:
    cells = [f"{name:<12}{text}" for name, text in rows.items()]
    half = (len(cells) + 1) // 2
    pairs = itertools.zip_longest(cells[:half], cells[half:], fillvalue="")
    return "\n".join(f"  {left:<48}{right}".rstrip() for left, right in pairs)


_DRILLS = f"""\
Use it to see how your training recovers. KIND is one of
{_in_two_columns(DRILLS)}"""

_DEMO_ABOUT = """\
Trains the model twice, undisturbed and with nine injected faults (with --quick, three), prints how
each fault was recovered, and compares the final weights bit for bit. Needs torch and numpy. The
exit code is 0 only if every fault was recovered and the weights are equal."""

# Commands of the node agent, which `holdfast` dispatches before the supervisor's parser is called.
NEIGHBOURS: Mapping[str, str] = MappingProxyType(
    {"node": "monitor the GPUs and the host of this node, and recommend what to do about faults"}
)

COMMANDS: Mapping[str, CommandSpec] = MappingProxyType(
    {
        "run": CommandSpec(
            "run a training command and keep it going through faults",
            RUN,
            (
                ("holdfast run --nproc-per-node 2 -- python train.py --lr 0.1", "two ranks"),
                ("holdfast run --nproc_per_node=2 train.py --lr 0.1", "the same in torchrun's spelling"),
                ("holdfast run --nproc-per-node 4 --members 2 --standby 1 -m pkg.train",
                 "two members with four ranks each, and one hot spare"),
                ("holdfast run --run-dir runs/a -- python train.py",
                 "start a run in runs/a, or resume the one that is there"),
            ),
            _RUN_ABOUT,
            foreign=TORCHRUN_OPTIONS,
        ),
        "status": CommandSpec(
            "show what a run is doing, and where its time went",
            (_DIR, _JSON),
            (
                ("holdfast status", "the newest run here"),
                ("holdfast status --json | jq .step", "the step, for a script"),
            ),
            _STATUS_ABOUT,
        ),
        "incidents": CommandSpec(
            "list the faults of a run, one per line",
            (_DIR, _JSON),
            (
                ("holdfast incidents", "a table"),
                ("holdfast incidents --json | jq '.[].recovered_s'", "the time that each recovery took"),
            ),
            _INCIDENTS_ABOUT,
        ),
        "explain": CommandSpec(
            "explain one fault: evidence, decision, timeline, stacks",
            (_DIR, _JSON),
            (
                ("holdfast explain i-0003", "one incident"),
                ("holdfast explain last", "the newest incident"),
            ),
            _EXPLAIN_ABOUT,
            (Argument("ID", "incident", _INCIDENT),),
        ),
        "checkpoints": CommandSpec(
            "list the checkpoints of a run, and check them for damage",
            (_VERIFY, _DIR, _JSON),
            (
                ("holdfast checkpoints", "compare sizes: fast"),
                ("holdfast checkpoints --verify", "read every byte"),
            ),
            _CHECKPOINTS_ABOUT,
        ),
        "stop": CommandSpec(
            "save a checkpoint and stop a run",
            (_NOW, _LIVING, _JSON),
            (
                ("holdfast stop", "save a checkpoint, then stop"),
                ("holdfast stop --now", "stop without saving"),
            ),
            _STOP_ABOUT,
        ),
        "inject": CommandSpec(
            "inject a fault into a run, as a drill",
            (_RANK, _LIVING, _JSON),
            (
                ("holdfast inject kill --rank 1", "kill rank 1"),
                ("holdfast inject member --rank 2", "kill the member that has rank 2"),
            ),
            _DRILLS,
            (Argument("KIND", "kind", choice(*DRILLS)),),
            (TorchrunOption(("--member", "--members"), True, "", _by_rank),),
        ),
        "demo": CommandSpec(
            "train a small GPT, break it nine times, and compare the weights",
            (_WHERE, _KEEP, _QUICK),
            (
                ("holdfast demo --quick", "about half a minute"),
                ("holdfast demo", "a few minutes"),
            ),
            _DEMO_ABOUT,
        ),
    }
)  # fmt: skip
