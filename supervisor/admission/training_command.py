"""Understand a training container's command well enough for Holdfast to start the ranks instead. Pure.

A launcher such as torchrun is replaced. Holdfast reads the number of ranks from its options, and starts the
ranks as torchrun would. The words around the launcher (`env A=b`, `bash -c "cd /app && ..."`) stay in place,
and still run once per pod, not once per rank.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast import launch_commands
from supervisor.admission import launcher_options, pod_layout, program_words, shell_variables
from supervisor.admission.launcher_options import LaunchArguments
from supervisor.admission.program_words import SET_COMMAND
from supervisor.admission.shell_text import ShellWord, SimpleCommand, UnclearCommand, simple_commands
from supervisor.options.value_types import ranks

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=", re.ASCII)
_REFERENCE = re.compile(r"\$\$|\$\(([-._A-Za-z0-9]+)\)", re.ASCII)  # in a container's `command` and `args`

_NOT_TRAINING = frozenset({"pip", "venv", "ensurepip", "compileall", "site"})  # modules that never train
_ONLY_NAME_PROGRAMS = frozenset(
    {"echo", "printf", "which", "type", "command", "pip", "pip3", "apt-get", "kill", "pkill"}
)
# A pod with a longer command is not injected, and the reason is reported. No training needs such a long
# command: Linux does not start a program with a word above 128 KiB or, on most nodes, with words above 2 MiB
# in total. The creation of all other pods would wait while the webhook reads the command.
MAX_WORDS = 8192
MAX_CHARS = 512 << 10
# The maximum length of a word that should be a number, and of the value of each variable in it. A longer word
# is not a number, and expanding thousands of variables in it could take any amount of memory.
_MAX_STATED = 256
_LAUNCHER_WORDS = 6  # enough to recognize a launcher, such as `python -u -X dev -m torch.distributed.run`
_SHORTEN = "have the script read the values from a file"
_SET_NPROC = f"set {pod_layout.NPROC_PER_NODE}"
_NO_SIGNALS = "the shell does not pass SIGTERM on to the training: start it last, with `exec`"


@dataclass(frozen=True, slots=True)
class ShellFrame:
    """A shell's text `before` the launcher, and `after` it, from the script to the end."""

    before: str
    after: str


@dataclass(frozen=True, slots=True)
class TrainingCommand:
    """What a training container runs.

    Attributes:
        interpreter: The Python that starts Holdfast: the ranks' Python, if the command names it.
        start: The first words of a rank's command, such as ("python3", "-u"); empty if a rank is not Python.
        script: The script, module or program, and its arguments, which keep their quotes in a shell's text.
        nproc: The number of ranks in each pod as specified, or "gpu", "auto" or "cpu"; None if not specified.
        nnodes: The number of pods as specified; "" if it is not specified or not known.
        environment: The variables that the replaced launcher would have set.
        prefix: The words before the launcher: `env` with its arguments, or a shell with its options.
        suffix: The words after a shell's text: its $0, $1 and so on.
        shell: The text around the launcher, if a shell starts it.
        launcher: The launcher that is replaced; "" if there is none.
        notes: Messages for the user.
    """

    interpreter: str
    start: tuple[str, ...]
    script: tuple[str, ...]
    nproc: int | str | None = None
    nnodes: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    prefix: tuple[str, ...] = ()
    suffix: tuple[str, ...] = ()
    shell: ShellFrame | None = None
    launcher: str = ""
    notes: tuple[str, ...] = ()

    @property
    def per_rank(self) -> tuple[str, ...]:
        """The command of one rank."""
        return self.start + self.script

    def started_by(self, launch: Sequence[str]) -> tuple[str, ...]:
        """Return the container's whole command, with `launch` before the command of a rank."""
        if self.shell is None:
            return (*self.prefix, *launch, *self.per_rank)
        text = f"{self.shell.before}{shlex.join((*launch, *self.start))} {self.shell.after}"
        return (*self.prefix, text, *self.suffix)


@dataclass(frozen=True, slots=True)
class NotUnderstood:
    """The command is unclear. `why` says what is unclear, and what the user can do."""

    why: str


def understand(
    command: Sequence[str],
    args: Sequence[str],
    environment: Mapping[str, str | None],
    nproc: int | str | None = None,
) -> TrainingCommand | NotUnderstood:
    """Return what a container with this `command` and these `args` runs.

    Args:
        command: The container's `command`. If it is empty, the image determines what runs, which is unknown.
        args: The container's `args`.
        environment: The container's variables. A value is None if the pod does not contain it.
        nproc: The number of ranks in each pod, if the user has set it. It overrides the command's number.
    """
    if not command:
        return NotUnderstood(
            f"the container has no command, and the command of its image is not known: {SET_COMMAND}"
        )
    count, size = len(command) + len(args), sum(map(len, (*command, *args)))
    if count > MAX_WORDS or size > MAX_CHARS:
        return NotUnderstood(
            f"the container's command and args have {count:,} words and {size:,} characters, but Holdfast"
            f" reads at most {MAX_WORDS:,} and {MAX_CHARS:,}: {_SHORTEN}"
        )
    words = [_kubernetes_word(each) for each in (*command, *args)]
    try:
        found = _Reader(environment, nproc).read(words)
    except UnclearCommand as error:
        return NotUnderstood(str(error))
    return replace(found, nproc=nproc) if nproc is not None else found


def _kubernetes_word(text: str) -> ShellWord:
    """Return a word of `command` or `args`. Its `expands` is True if Kubernetes expands a part of it."""
    return ShellWord(text, expands=any(match[1] for match in _REFERENCE.finditer(text)))


class _Reader:
    """Parses one command. Methods raise `UnclearCommand` if they do not understand it."""

    def __init__(self, environment: Mapping[str, str | None], nproc: int | str | None) -> None:
        self.environment = environment
        self.nproc = nproc
        self.around: tuple[SimpleCommand, tuple[SimpleCommand, ...]] | None = None  # set in a shell's text

    def read(self, words: list[ShellWord]) -> TrainingCommand:
        begin = program_words.after_prefix(words)
        prefix = tuple(each.text for each in words[:begin])
        program = program_words.program(words[begin]) if begin < len(words) else ""
        if program in program_words.SHELLS:
            return self._shell(prefix, words[begin:])
        found = self._launched(words[begin:])
        if found is None:
            if program in program_words.OTHER_LAUNCHERS:
                raise UnclearCommand(f"{program} {program_words.OTHER_LAUNCHERS[program]}")
            if _hidden_launcher(words[begin:]):
                raise UnclearCommand(_in_front(words[begin:]))
            name = words[begin].text if begin < len(words) else prefix[-1]
            raise UnclearCommand(f"Holdfast does not know how {name!r} starts the training: {SET_COMMAND}")
        return replace(found[0], prefix=prefix)

    def _shell(self, prefix: tuple[str, ...], words: list[ShellWord]) -> TrainingCommand:
        place = program_words.shell_text_at(words)
        text = words[place].text
        try:
            found = self._within(text, _commands(text))
        except UnclearCommand as error:
            raise UnclearCommand(f"the text of {words[0].text} -c: {error}") from None
        before = tuple(each.text for each in words[:place])
        return replace(found, prefix=prefix + before, suffix=tuple(each.text for each in words[place + 1 :]))

    def _within(self, text: str, commands: tuple[SimpleCommand, ...]) -> TrainingCommand:
        """Return what a shell's text runs, if exactly one of its commands trains."""
        command = _training(commands)
        if command.after == "&":
            raise UnclearCommand("the training runs in the background")
        self.around = command, commands
        first, begin = _places(command)
        launched = self._launched(list(command.words[begin:]))
        assert launched is not None
        found, script = launched
        head, start = command.words[first].start, command.words[begin].start
        end = command.words[begin + script].start
        if any(start < place < end for place in command.redirections):
            raise UnclearCommand("a redirection precedes the script")
        before, notes = text[:start], found.notes
        if command.words[first].text != "exec":
            if _is_last(command, commands):
                before = f"{text[:head]}exec {text[head:start]}"
            else:
                notes = (*notes, _NO_SIGNALS)
        rest = tuple(text[each.start : each.end] for each in command.words[begin + script :])
        return replace(found, script=rest, shell=ShellFrame(before, text[end:]), notes=notes)

    def _launched(self, words: list[ShellWord]) -> tuple[TrainingCommand, int] | None:
        """Return what `words` start, and the index of the script; None if they start no known program."""
        program = program_words.program(words[0]) if words else ""
        if program == launch_commands.TORCHRUN:
            return self._torchrun(program_words.python_beside(words[0].text), words, 1, program)
        if program == launch_commands.ACCELERATE_LAUNCH_PROGRAM:
            return self._accelerate(program_words.python_beside(words[0].text), words, 1)
        if program == launch_commands.ACCELERATE_PROGRAM:
            return self._accelerate(
                program_words.python_beside(words[0].text), words, _after_launch(words, 1)
            )
        if words and program_words.is_python(words[0]):
            return self._python(words)
        return None

    def _python(self, words: list[ShellWord]) -> tuple[TrainingCommand, int]:
        interpreter = words[0].text
        flags, module, place = program_words.python_flags(words)
        if module is None:
            if place == len(words):
                raise UnclearCommand(f"{interpreter} has no script")
            return self._plain(interpreter, flags, words, place)
        if module in (launch_commands.TORCHRUN_MODULE, launch_commands.OLD_MODULE):
            return self._torchrun(interpreter, words, place + 1, module)
        if module == launch_commands.ACCELERATE_LAUNCH_MODULE:
            return self._accelerate(interpreter, words, place + 1)
        if module == launch_commands.ACCELERATE_MODULE:
            return self._accelerate(interpreter, words, _after_launch(words, place + 1))
        if module.partition(".")[0] == "deepspeed":
            raise UnclearCommand(f"{module} starts the ranks itself: {SET_COMMAND}")
        return self._plain(interpreter, (*flags, "-m"), words, place)

    @staticmethod
    def _plain(
        interpreter: str, flags: tuple[str, ...], words: list[ShellWord], place: int
    ) -> tuple[TrainingCommand, int]:
        rest = tuple(each.text for each in words[place:])
        if words[place].splits and words[place].text.startswith(("$", "`")):
            raise UnclearCommand(f"{words[place].text} may expand to several words: write out the script")
        return TrainingCommand(interpreter, (interpreter, *flags), rest), place

    def _torchrun(
        self, interpreter: str, words: list[ShellWord], begin: int, program: str
    ) -> tuple[TrainingCommand, int]:
        arguments = launcher_options.scan(words[begin:], launcher_options.TORCHRUN, program)
        if program == launch_commands.OLD_MODULE and not arguments.has("--use-env"):
            raise UnclearCommand(
                f"{program} passes --local-rank to the script: use torchrun, or --use-env if the script reads"
                " LOCAL_RANK"
            )
        start = self._start(interpreter, arguments, of_torchrun=True)
        nproc = self._number(arguments.value("--nproc-per-node"), "PET_NPROC_PER_NODE", program)
        nnodes = self._stated(arguments.value("--nnodes"), "PET_NNODES") or ""
        place = begin + arguments.script
        rest = tuple(each.text for each in words[place:])
        return TrainingCommand(
            interpreter, start, rest, nproc, nnodes, launcher=launch_commands.TORCHRUN
        ), place

    def _accelerate(
        self, interpreter: str, words: list[ShellWord], begin: int
    ) -> tuple[TrainingCommand, int]:
        program = launch_commands.ACCELERATE_LAUNCH
        arguments = launcher_options.scan(words[begin:], launcher_options.ACCELERATE, program)
        gpu_ids, notes = arguments.value("--gpu-ids"), tuple[str, ...]()
        if gpu_ids and gpu_ids.text != "all":
            raise UnclearCommand(f"{program} --gpu_ids: the pod's resources determine the devices")
        if config := arguments.value("--config-file"):
            if self.nproc is None:
                raise UnclearCommand(
                    f"the pod does not contain the settings in {config.text}: set the ACCELERATE_* variables,"
                    f" and {pod_layout.NPROC_PER_NODE}"
                )
            notes = (f"{config.text} has no effect: set the ACCELERATE_* variables in the pod instead",)
        machines = self._stated(arguments.value("--num-machines"), "")
        nproc = self._share(arguments, program) if self.nproc is None else None
        place = begin + arguments.script
        found = TrainingCommand(
            interpreter,
            self._start(interpreter, arguments, of_torchrun=False),
            tuple(each.text for each in words[place:]),
            nproc,
            machines or "",
            self._accelerate_variables(arguments),
            launcher=program,
            notes=notes,
        )
        return found, place

    def _share(self, arguments: LaunchArguments, program: str) -> int | str:
        """Return the number of ranks in each pod: all processes divided by the number of machines."""
        if arguments.has("--cpu"):
            return 1  # Accelerate then starts one process, regardless of other options
        total, all_machines = arguments.value("--num-processes"), arguments.value("--num-machines")
        machines = "1" if all_machines is None else self._stated(all_machines, "") or ""
        if total is None and machines == "1":
            return "gpu"  # Accelerate then starts one process per GPU
        count = self._stated(total, "") if total else None
        if not (count and count.isdecimal() and machines.isdecimal() and int(machines)):
            raise UnclearCommand(f"Holdfast cannot tell how many processes {program} starts: {_SET_NPROC}")
        if int(count) % int(machines) or int(count) < int(machines):
            raise UnclearCommand(f"{count} processes cannot be divided evenly among {machines} machines")
        return _checked(str(int(count) // int(machines)), program)

    def _accelerate_variables(self, arguments: LaunchArguments) -> tuple[tuple[str, str], ...]:
        found: dict[str, str] = {}
        for option, word in arguments.given:
            if option.effect != "variable":
                continue
            value = word.text if option.takes_value else option.value
            if option.takes_value and word.expands:
                raise UnclearCommand(
                    f"accelerate launch {option.names[0]}: the value of {value} is not known: write it out"
                )
            if value == "fp8":
                raise UnclearCommand(
                    "accelerate launch --mixed_precision fp8 needs variables that Holdfast does not set"
                )
            found[option.detail] = value.upper() if option.detail.endswith("_BACKEND") else value
        for name, value in found.items():
            if self.environment.get(name, value) != value:
                raise UnclearCommand(
                    f"accelerate launch sets {name} to {value}, but the container sets it too"
                )
        return tuple(found.items())

    def _start(self, interpreter: str, arguments: LaunchArguments, of_torchrun: bool) -> tuple[str, ...]:
        """Return the words that a launcher puts before the script to start a rank."""
        variables = self.environment if of_torchrun else {}
        as_module = arguments.has("--module") or variables.get("PET_MODULE") == "1"
        if arguments.has("--no-python") or variables.get("PET_NO_PYTHON") == "1":
            if as_module:
                raise UnclearCommand("--no-python and --module cannot be combined")
            return ()
        python = self.environment.get("PYTHON_EXEC") or interpreter
        return (python, "-u", "-m") if as_module else (python, "-u")

    def _number(self, word: ShellWord | None, variable: str, program: str) -> int | str | None:
        """Return the number of ranks in each pod, from the option or else from torchrun's variable."""
        if self.nproc is not None or (word is None and variable not in self.environment):
            return None
        stated = self._stated(word, variable)
        if stated is None:
            where = f"{program} --nproc-per-node {word.text}" if word else variable
            raise UnclearCommand(f"the number of ranks is not known ({where}): {_SET_NPROC}")
        return _checked(stated, program)

    def _stated(self, word: ShellWord | None, variable: str) -> str | None:
        """Return the value of an option or, without it, of torchrun's variable; None if unknown."""
        if word is None:
            return _certain(self.environment.get(variable))
        if not word.expands:
            return _short(word.text)
        if _short(word.text) is None:
            return None
        if word.start or word.end:
            return _short(self._of_shell(word.text))
        return self._resolved(word.text)

    def _of_shell(self, text: str) -> str | None:
        """Return the value of `text` in the shell that starts the training; None if unknown."""
        if (reference := _REFERENCE.fullmatch(text)) and reference[1] in self.environment:
            return self._resolved(text)  # Kubernetes expands it before the shell reads the text
        if self.around is None:
            return None
        return shell_variables.value_at(text, *self.around, self.environment)

    def _resolved(self, text: str) -> str | None:
        """Return `text` with Kubernetes' references expanded; None if a reference has no known value."""
        values = [self.environment.get(match[1]) for match in _REFERENCE.finditer(text) if match[1]]
        if any(_certain(value) is None for value in values):
            return None
        return _short(
            _REFERENCE.sub(lambda match: str(self.environment[match[1]]) if match[1] else "$", text)
        )


def _certain(value: str | None) -> str | None:
    """Return the value of a variable; None if it is missing, refers to others, or is too long."""
    return None if value is None or "$(" in value else _short(value)


def _short(text: str | None) -> str | None:
    """Return `text`; None if it is missing, or too long for a number."""
    return text if text is not None and len(text) <= _MAX_STATED else None


def _checked(text: str, program: str) -> int | str:
    try:
        value = ranks.read(text)
    except ValueError as error:
        raise UnclearCommand(
            f"{program} starts {text!r} ranks on each node, but Holdfast accepts {error}: {_SET_NPROC}"
        ) from None
    assert isinstance(value, int | str)
    return value


def _commands(text: str) -> tuple[SimpleCommand, ...]:
    try:
        return simple_commands(text)
    except UnclearCommand as error:
        raise UnclearCommand(f"{error}: {SET_COMMAND}") from None


def _training(commands: Sequence[SimpleCommand]) -> SimpleCommand:
    """Return the command that trains: a launcher, or else the only Python command that may train."""
    placed = [(each, each.words[_places(each)[1] :]) for each in commands]
    launchers = [each for each, words in placed if words and _is_launcher(words)]
    pythons = [(each, words) for each, words in placed if words and _is_python_training(words)]
    with_script = [each for each, words in pythons if program_words.has_script(words)]
    chosen = launchers or with_script or [each for each, _ in pythons]
    others = [name for _, words in placed if (name := _other_launcher(words))]
    if program_words.SSH_SERVER in others and (chosen or len(set(others)) > 1):
        others = [each for each in others if each != program_words.SSH_SERVER]
    if others and not launchers:
        raise UnclearCommand(f"{others[0]} {program_words.OTHER_LAUNCHERS[others[0]]}")
    hidden = [words for _, words in placed if _hidden_launcher(words)]
    if hidden and not launchers:
        raise UnclearCommand(_in_front(hidden[0]))
    if len(chosen) != 1:
        problem = "several commands could be the training" if chosen else _no_python(commands)
        raise UnclearCommand(f"{problem}: {SET_COMMAND}")
    if within := chosen[0].within:
        around = "a subshell" if within == "(" else f"a compound command ({within})"
        raise UnclearCommand(f"the training is within {around}: {SET_COMMAND}")
    return chosen[0]


def _no_python(commands: Sequence[SimpleCommand]) -> str:
    last = " ".join(each.text for each in commands[-1].words[:2]) if commands else ""
    which = f" (the last one is '{last[:60]}')" if last else ""
    return f"none of its commands starts Python{which}"


def _other_launcher(words: Sequence[ShellWord]) -> str:
    """Return the name of a launcher that Holdfast cannot replace; "" if the words start none."""
    name = program_words.program(words[0]) if words else ""
    return name if name in program_words.OTHER_LAUNCHERS else ""


def _hidden_launcher(words: Sequence[ShellWord]) -> str:
    """Return the launcher that another program starts, as in `nsys profile torchrun`; "" if there is none."""
    if not words or _is_launcher(words) or program_words.program(words[0]) in _ONLY_NAME_PROGRAMS:
        return ""
    rest = (words[place : place + _LAUNCHER_WORDS] for place in range(1, len(words)))
    return next((program_words.program(each[0]) for each in rest if len(each) > 1 and _is_launcher(each)), "")


def _in_front(words: Sequence[ShellWord]) -> str:
    launcher = _hidden_launcher(words)
    program = words[0].text
    return f"{program} precedes {launcher}, so Holdfast cannot replace {launcher}: remove {program}"


def _places(command: SimpleCommand) -> tuple[int, int]:
    """Return the index of the first word after assignments, and the index of the program that is started.

    If the program cannot be determined, the second index is the number of words.
    """
    words, first = command.words, 0
    while first < len(words) and _ASSIGNMENT.match(words[first].text):
        first += 1
    begin = first + (first < len(words) and words[first].text == "exec")
    try:
        return first, begin + program_words.after_prefix(words[begin:])
    except UnclearCommand:
        return first, len(words)


def _is_last(command: SimpleCommand, commands: Sequence[SimpleCommand]) -> bool:
    """Return True if `command` can replace the shell, because the shell does nothing after it."""
    traps = any(each.words[0].text == "trap" for each in commands)
    last = command is commands[-1] and command.after in ("", ";", "\n")
    return last and command.before in ("", ";", "\n", "&", "&&") and not traps


def _is_launcher(words: Sequence[ShellWord]) -> bool:
    program = program_words.program(words[0])
    if program == launch_commands.ACCELERATE_PROGRAM:
        return [each.text for each in words[1:2]] == ["launch"]
    if program_words.is_python(words[0]):
        return program_words.module(words) in (
            *launch_commands.LAUNCHER_MODULES,
            launch_commands.ACCELERATE_MODULE,
        )
    return program in launch_commands.LAUNCHER_PROGRAMS


def _is_python_training(words: Sequence[ShellWord]) -> bool:
    """Return True if a Python command may be the training, unlike pip or a one-liner, for example."""
    if not program_words.is_python(words[0]):
        return False
    prepares = program_words.module(words).partition(".")[0] in _NOT_TRAINING
    return not prepares and [each.text for each in words[1:2]] not in (["-c"], ["-V"], ["--version"])


def _after_launch(words: Sequence[ShellWord], place: int) -> int:
    """Return the index after the word `launch`, which is the only accelerate command that trains."""
    if place >= len(words) or words[place].text != "launch":
        raise UnclearCommand("accelerate without launch does not start a training")
    return place + 1
