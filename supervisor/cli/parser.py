"""Parse the command line. An error message is one line: the option, its value, and what was expected."""

from __future__ import annotations

import difflib
import os
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.errors import BadInput
from holdfast.version import __version__
from supervisor.cli import command_options, run_validation
from supervisor.cli.command_options import Command, Show
from supervisor.cli.option_table import COMMANDS, NEIGHBOURS, CommandSpec
from supervisor.options.run_options import Option, TorchrunOption
from supervisor.options.value_types import ValueType

_MADE = {
    "status": command_options.Status,
    "incidents": command_options.Incidents,
    "explain": command_options.Explain,
    "checkpoints": command_options.Checkpoints,
    "stop": command_options.Stop,
    "inject": command_options.Inject,
    "jobs": command_options.Jobs,
    "doctor": command_options.Doctor,
    "nodes": command_options.Nodes,
    "inject-manifest": command_options.InjectManifest,
    "plan": command_options.PlanOptions,
    "demo": command_options.Demo,
}
_HELP = ("-h", "--help")
_SCRIPTS_TOO = ("--members", "--keep")  # options that a script may also define
_LAUNCHERS_OWN = frozenset(
    name for option in COMMANDS["run"].options if option.launchers_own for name in option.names
).difference(_SCRIPTS_TOO)
_TORCHRUNS_OWN = ("--nproc-per-node", "--nnodes", "--max-restarts")
_OTHER_SPELLINGS = {  # those of mpirun, DeepSpeed and Accelerate
    "-n": "--nproc-per-node",
    "-np": "--nproc-per-node",
    "--nproc": "--nproc-per-node",
    "--gpus": "--nproc-per-node",
    "--ngpus": "--nproc-per-node",
    "--num-gpus": "--nproc-per-node",
    "--num-processes": "--nproc-per-node",
    "--num-nodes": "--members",
    "--num-machines": "--members",
}
_CHANGES_A_RUN = ("stop", "inject")  # never suggested as a correction, because they would change a run


@dataclass(slots=True)
class _Read:
    """The result of scanning the words of a command line."""

    values: dict[str, object] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)  # the arguments; for `run`, the command
    notes: list[str] = field(default_factory=list)
    given: set[str] = field(default_factory=set)  # the options on the command line
    kept: list[str] = field(default_factory=list)  # for `run`: all words except the run directory
    wants_help: bool = False


def parse(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> Command:
    """Return the command in `argv`. A request for help or the version is a `Show`.

    Args:
        argv: The words of the command line, without the program's name.
        environment: The environment, for CUDA_VISIBLE_DEVICES and PET_*; the default is this process's
            environment.
        directory: The working directory for the command of `run`; the default is this process's.

    Raises:
        BadInput: The command line is invalid; the message is one line.
    """
    if not argv or argv[0] in _HELP or list(argv) == ["help"]:
        return Show(overview().rstrip())
    if argv[0] in ("--version", "-V", "version"):
        return Show(f"holdfast {__version__}")
    if argv[0] == "help":
        argv = [argv[1], "--help"]
    name = _command(argv[0], argv[1:])
    entry = COMMANDS[name]
    read = _scan(list(argv[1:]), entry, whole_command=name == "run")
    if read.wants_help:
        return Show(of(name).rstrip())
    environment = os.environ if environment is None else environment
    if name == "run":
        _take_torchruns(environment, entry, read)
        here = Path.cwd() if directory is None else directory
        return run_validation.checked(
            read.values,
            read.words,
            as_module="-m" in read.given,
            as_it_stands="--no-python" in read.given,
            notes=tuple(dict.fromkeys((*read.notes, *_after_the_script(read.words)))),
            given=tuple(read.kept),
            environment=environment,
            directory=here,
        )
    _arguments(name, entry, read, directory or Path())
    _check_required(name, entry, read.values)
    _check_place(name, entry, read.values)
    if name == "nodes":
        _check_action(read.values)
    made: Any = _MADE[name]
    asked: Command = made(**read.values)
    return asked


def _command(word: str, rest: Sequence[str]) -> str:
    if word in COMMANDS:
        return word
    known = summaries()
    if word.startswith("-"):
        raise BadInput(_misplaced(word, rest) or f"unknown option {word!r}; commands are {', '.join(known)}")
    if word.endswith(".py"):
        raise BadInput(f"unknown command {word!r}: to run a script, use `holdfast run {word} ...`")
    harmless = [each for each in known if each not in _CHANGES_A_RUN]
    near = difflib.get_close_matches(word, harmless, n=1)
    if near:
        raise BadInput(f"unknown command {word!r}: did you mean {near[0]!r}?")
    raise BadInput(f"unknown command {word!r}; commands are {', '.join(known)}")


def _misplaced(word: str, rest: Sequence[str]) -> str:
    """Return the error message for an option before its command; "" if the command has no such option."""
    name = word.partition("=")[0]
    meant = next((each for each in rest if each in COMMANDS), "run")
    if _find(name, COMMANDS[meant]) is None:
        return ""
    return f"option {word!r} must come after the command: `holdfast {meant} {word} ...`"


def _scan(words: list[str], entry: CommandSpec, *, whole_command: bool) -> _Read:
    """Read the options. With `whole_command`, stop at the first word that is not an option or its value."""
    read, everything = _Read(), tuple(words)
    while words:
        start = len(everything) - len(words)
        word = words.pop(0)
        if word == "--" or (whole_command and not word.startswith("-")):
            read.words += words if word == "--" else [word, *words]
            read.kept += everything[start:]
            break
        if word in _HELP:
            read.wants_help = True
            break
        if whole_command and word in ("-m", "--module"):
            read.given.add("-m")
        elif _is_option(word, entry):
            _option(word, words, entry, read)
        else:
            read.words.append(word)
        option = _find(word.partition("=")[0], entry)
        if not (isinstance(option, Option) and option.field in ("run_dir", "resume", "from_scratch")):
            read.kept += everything[start : len(everything) - len(words)]
    return read


def _is_option(word: str, entry: CommandSpec) -> bool:
    """True if `word` is an option. A negative number is an argument, if the command takes any."""
    is_number = bool(entry.arguments) and word[1:].isdecimal()
    return word.startswith("-") and word != "-" and not is_number


def _after_the_script(words: Sequence[str]) -> list[str]:
    """Return a note for each option that follows the script but was probably meant for holdfast."""
    names = [_plain(word.partition("=")[0]) for word in words[1:] if word.startswith("--")]
    return [
        f"{name} comes after the script and is passed to it; put holdfast's options before the script"
        for name in names
        if name in _LAUNCHERS_OWN
    ]


def _option(word: str, rest: list[str], entry: CommandSpec, read: _Read) -> None:
    name, equals, inline = word.partition("=")
    option = _find(name, entry)
    if option is None and name == "--help":
        raise BadInput(f"unexpected value {inline!r} for --help: it takes no value")
    if option is None:
        raise BadInput(_unknown(name, entry))
    read.given.add(option.names[0])
    takes_value = option.takes_value if isinstance(option, TorchrunOption) else option.value is not None
    if not takes_value and equals:
        raise BadInput(f"unexpected value {inline!r} for {name}: it takes no value")
    if takes_value and not equals and not rest:
        raise BadInput(f"missing value for {name}{_expected(option)}")
    value = "" if not takes_value else inline if equals else rest.pop(0)
    if isinstance(option, TorchrunOption):
        _foreign(name, value, option, read)
    else:
        read.values[option.field] = _value(name, value, option)


def _take_torchruns(environment: Mapping[str, str], entry: CommandSpec, read: _Read) -> None:
    """Use torchrun's variables, such as PET_NNODES, for options that were not given, as torchrun does.

    Operators such as Kubeflow's set these variables. Their values are checked like the values of options, and
    the user is informed about each one.
    """
    for variable in sorted(environment):
        name = "--" + variable.removeprefix("PET_").lower().replace("_", "-")
        value, option = environment[variable], _find(name, entry)
        if not variable.startswith("PET_") or not value or option is None or option.names[0] in read.given:
            continue
        if isinstance(option, TorchrunOption):
            if option.takes_value:
                _foreign(variable, value, option, read)
        elif name in _TORCHRUNS_OWN:
            read.values[option.field] = _value(variable, value, option)
            read.notes.append(f"{variable}={value} is used as {name} {value}")


def _value(name: str, text: str, option: Option) -> object:
    return True if option.value is None else _read_value(name, text, option.value)


def _read_value(name: str, text: str, value: ValueType) -> object:
    """Return the value of `text`. Raises `BadInput`, whose message says what `name` expects."""
    try:
        found = value.read(text)
        return Path(str(found)).expanduser() if value.kind == "path" else found
    except ValueError as error:
        near = difflib.get_close_matches(text, value.words, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise BadInput(f"invalid value {text!r} for {name}: {hint}expected {error}") from None


def _expected(option: Option | TorchrunOption) -> str:
    if isinstance(option, TorchrunOption) or option.value is None:
        return ""
    return f": expected {option.value.expected}"


def _foreign(name: str, value: str, option: TorchrunOption, read: _Read) -> None:
    refused = option.check(value)
    if refused:
        raise BadInput(f"invalid value {value!r} for {name}: expected {refused}")
    if option.note:
        read.notes.append(f"{name} has no effect: {option.note}")


def _find(name: str, entry: CommandSpec) -> Option | TorchrunOption | None:
    plain = _plain(name)
    known: tuple[Option | TorchrunOption, ...] = (*entry.options, *entry.foreign)
    return next((option for option in known if plain in option.names), None)


def _plain(name: str) -> str:
    """Return an option with dashes in place of underscores, because torchrun accepts both."""
    return name if not name.startswith("--") else "--" + name[2:].replace("_", "-")


def _unknown(name: str, entry: CommandSpec) -> str:
    known = [each for option in entry.options for each in option.names]
    known += [*(each for option in entry.foreign for each in option.names), "--help"]
    meant = _OTHER_SPELLINGS.get(_plain(name), "")
    near = meant if meant in known else _near(_plain(name), known)
    if near:
        return f"unknown option {name!r}: did you mean {near!r}?"
    main = (option.names[0] for option in entry.options)
    return f"unknown option {name!r}; options are {', '.join(main)}"


def _near(name: str, known: Sequence[str]) -> str:
    """Return the option that `name` most likely misspells or abbreviates; "" if none is similar."""
    long = [each for each in known if each.startswith("--")]
    stem = name.strip("-")
    begun = [each for each in long if each[2:].startswith(stem)] if len(stem) >= 2 else []
    close = difflib.get_close_matches("--" + stem, long, n=1, cutoff=0.8)
    alike = [each for each in long if len(stem) >= 5 and each[2:7] == stem[:5]]
    # Single letters and names of a different length are ignored, because they may be options of the script.
    loose = [
        each
        for each in difflib.get_close_matches("--" + stem, long, n=1, cutoff=0.6)
        if len(stem) > 1 and abs(len(each) - len("--" + stem)) <= 1
    ]
    return next(iter([*begun, *close, *alike, *loose]), "")


def _arguments(name: str, entry: CommandSpec, read: _Read, directory: Path) -> None:
    """Parse the words as the command's arguments. Raises `BadInput` if one is missing or unexpected."""
    for position, argument in enumerate(entry.arguments):
        metavar, value = argument.metavar, argument.value
        if position >= len(read.words):
            if argument.optional:
                break
            raise BadInput(f"missing {metavar} for {name}: expected {value.expected}")
        read.values[argument.field] = _read_value(metavar, read.words[position], value)
    extra = read.words[len(entry.arguments) :]
    if extra:
        usage = " ".join(["holdfast", name, *(each.usage for each in entry.arguments), "[OPTIONS]"])
        is_place = (directory / extra[0]).is_dir() and _find("--run-dir", entry) is not None
        meant = f"did you mean --run-dir {shlex.quote(extra[0])}? " if is_place else ""
        raise BadInput(f"unexpected argument {extra[0]!r}; {meant}usage: {usage}")


def _check_required(name: str, entry: CommandSpec, values: Mapping[str, object]) -> None:
    for option in entry.options:
        if option.required and option.field not in values:
            raise BadInput(f"missing {_spelled(option)} for {name}{_expected(option)}")


def _check_place(name: str, entry: CommandSpec, values: Mapping[str, object]) -> None:
    """Raise `BadInput` if the options name both a run on this machine and a cluster, or two namespaces."""
    takes_job = _find("--job", entry) is not None
    if "job" in values and "run_dir" in values:
        raise BadInput("--job and --run-dir cannot be combined: give a job on a cluster or a run here")
    for field_name, spelled in (("context", "--context"), ("namespace", "-n")):
        if takes_job and field_name in values and "job" not in values:
            raise BadInput(f"{spelled} needs --job NAME: give the job that `holdfast {name}` should access")
    if name == "demo" and "context" in values and "cluster" not in values:
        raise BadInput("--context needs --cluster: without it, the demo runs on this machine")
    if "cluster" in values and "run_dir" in values:
        raise BadInput(
            "--cluster and --run-dir cannot be combined: on a cluster, the demo has no run directories"
        )
    given = values.get("namespace")
    if given and values.get("all_namespaces"):
        raise BadInput("-n and -A cannot be combined: give one namespace or list all")
    named = str(values.get("job") or values.get("pod") or "")
    if given and "/" in named and named.partition("/")[0] != given:
        what = "--job" if "job" in values else "POD"
        raise BadInput(f"{what} {named!r} and -n {given!r} name different namespaces: give only one")


def _check_action(values: Mapping[str, object]) -> None:
    """Raise `BadInput` if an action on a node lacks an argument, or an option has no effect."""
    action = values.get("action")
    if action is not None and "node" not in values:
        raise BadInput(f"missing NODE for nodes {action}: expected the name of a node")
    if action == "quarantine" and "why" not in values:
        raise BadInput("missing --why for nodes quarantine: give the reason, which others see on the node")
    for field_name in ("why", "drain"):
        if field_name in values and action != "quarantine":
            raise BadInput(f"--{field_name} is only for `holdfast nodes quarantine NODE`")


# -- help, generated from the table of options

_WIDTH = 100  # columns of the help
_USAGE_WIDTH = 120  # columns up to which the first line lists all options
_INDENT = 31  # the column where the text of an option begins
_INTRO = """\
Holdfast keeps distributed PyTorch training running through crashes, hangs and NaNs.

  holdfast run --nproc-per-node 2 -- python train.py ARGS

Commands
"""
_OUTRO = """
`holdfast COMMAND --help` describes a command and its options. Commands that read a run use
the newest run in holdfast-runs; --run-dir DIR selects another run, and --job NAME selects a job
on Kubernetes.
"""


def overview() -> str:
    width = max(map(len, summaries()))
    lines = (f"  {name:{width}}  {summary}\n" for name, summary in summaries().items())
    return _INTRO + "".join(lines) + _OUTRO


def summaries() -> dict[str, str]:
    """Return the one-line summary of every command, including the node agent's commands."""
    return {**{name: entry.summary for name, entry in COMMANDS.items()}, **NEIGHBOURS}


def of(name: str) -> str:
    """Return the help of the command `name`."""
    entry = COMMANDS[name]
    parts = [f"{_usage(name, entry)}\n\n{_sentence(entry.summary)}\n"]
    if entry.about:
        parts.append(f"{entry.about}\n")
    for group in dict.fromkeys(option.group for option in entry.options):
        chosen = [option for option in entry.options if option.group == group]
        parts.append(f"{group}\n{''.join(map(_line, chosen))}")
    parts.append("Examples\n" + _examples(entry))
    return "\n".join(parts)


def _usage(name: str, entry: CommandSpec) -> str:
    if name == "run":
        return "usage: holdfast run [OPTIONS] [--] COMMAND [ARGS...]"
    begin = ["usage: holdfast", name, *(each.usage for each in entry.arguments)]
    begin += [_spelled(each) for each in entry.options if each.required]
    whole = " ".join([*begin, *(f"[{_spelled(each)}]" for each in entry.options if not each.required)])
    return whole if len(whole) <= _USAGE_WIDTH else " ".join([*begin, "[OPTIONS]"])


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def _spelled(option: Option) -> str:
    return f"{option.names[0]} {option.metavar}".rstrip()


def _line(option: Option) -> str:
    also = "".join(f", {name}" for name in option.names[1:])
    spelled = f"  {_spelled(option) + also}"
    default = "required" if option.required else f"default: {option.default}"
    text = f"{option.help} ({_bounds(option)}{default})" if option.value else option.help
    lines = textwrap.wrap(text, _WIDTH - _INDENT, break_on_hyphens=False)
    if len(spelled) > _INDENT - 2:
        lines.insert(0, "")
    return "\n".join(
        [f"{spelled:{_INDENT}}{lines[0]}".rstrip(), *(" " * _INDENT + line for line in lines[1:]), ""]
    )


def _bounds(option: Option) -> str:
    return f"{option.value.accepts}; " if option.value is not None and option.value.accepts else ""


def _examples(entry: CommandSpec) -> str:
    width = max(len(line) for line, _ in entry.examples)
    if width > 60:
        return "".join(f"  {line}\n      {what}\n" for line, what in entry.examples)
    return "".join(f"  {line:{width}}   {what}\n" for line, what in entry.examples)
