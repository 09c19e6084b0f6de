"""Define how Holdfast treats each option of torchrun and `accelerate launch`. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from holdfast.launch_commands import ACCELERATE_LAUNCH
from supervisor.admission.shell_text import ShellWord, UnclearCommand
from supervisor.options.run_options import TORCHRUN_OPTIONS

# dropped: the option configures something that Holdfast does itself. read: the option specifies the number of
# ranks, or what the script is. variable: for this option, the launcher would have set a variable, so Holdfast
# sets it. refused: Holdfast cannot honor the option, and ignoring it would change what the ranks do.
Effect: TypeAlias = Literal["dropped", "read", "variable", "refused"]


@dataclass(frozen=True, slots=True)
class LaunchOption:
    """One option of a launcher.

    Attributes:
        names: The spellings of the option, with dashes; underscores are equivalent.
        takes_value: True if the option takes a value.
        effect: How Holdfast treats the option.
        detail: The variable that the option sets, or why the option is refused.
        value: The value of the variable, for a flag with the effect "variable".
    """

    names: tuple[str, ...]
    takes_value: bool
    effect: Effect = "dropped"
    detail: str = ""
    value: str = ""


@dataclass(frozen=True, slots=True)
class LaunchArguments:
    """The arguments of a launcher: its options with their values, and the position of the script."""

    given: tuple[tuple[LaunchOption, ShellWord], ...]
    script: int  # the index of the script's word

    def value(self, name: str) -> ShellWord | None:
        """Return the last value of the option `name`; None if it is not given."""
        found = [value for option, value in self.given if name in option.names]
        return found[-1] if found else None

    def has(self, name: str) -> bool:
        return self.value(name) is not None


def _table(options: Iterable[LaunchOption]) -> Mapping[str, LaunchOption]:
    return {name: option for option in options for name in option.names}


_LOCAL_RANKS = "it gives every rank the local rank 0"
TORCHRUN = _table(
    [
        *(LaunchOption(each.names, each.takes_value) for each in TORCHRUN_OPTIONS),
        LaunchOption(("--nproc-per-node",), True, "read"),
        LaunchOption(("--nnodes",), True, "read"),
        LaunchOption(("--module", "-m"), False, "read"),
        LaunchOption(("--no-python",), False, "read"),
        LaunchOption(("--use-env",), False, "read"),  # exists only in torch.distributed.launch
        LaunchOption(("--max-restarts",), True),  # `holdfast.dev/max-restarts` has a different default
        LaunchOption(("--duplicate-stdout-filters",), True),
        LaunchOption(("--duplicate-stderr-filters",), True),
        LaunchOption(("--numa-binding",), True),
        LaunchOption(("--virtual-local-rank",), False, "refused", _LOCAL_RANKS),
    ]
)  # fmt: skip

_DYNAMO = "ACCELERATE_DYNAMO_"
_PARADIGM = "Holdfast does not set its variables: start the script with python, and set them in the pod"
_DEVICES = "the pod's resources determine the devices"
_ELSEWHERE = "it does not start the ranks as torchrun does"
ACCELERATE = _table(
    [
        LaunchOption(("--num-processes",), True, "read"),
        LaunchOption(("--num-machines",), True, "read"),
        LaunchOption(("--module", "-m"), False, "read"),
        LaunchOption(("--no-python",), False, "read"),
        LaunchOption(("--config-file",), True, "read"),
        LaunchOption(("--gpu-ids",), True, "read"),
        LaunchOption(("--cpu",), False, "variable", "ACCELERATE_USE_CPU", "True"),
        LaunchOption(("--mixed-precision",), True, "variable", "ACCELERATE_MIXED_PRECISION"),
        LaunchOption(("--dynamo-backend",), True, "variable", _DYNAMO + "BACKEND"),
        LaunchOption(("--dynamo-mode",), True, "variable", _DYNAMO + "MODE"),
        LaunchOption(("--dynamo-use-fullgraph",), False, "variable", _DYNAMO + "USE_FULLGRAPH", "True"),
        LaunchOption(("--dynamo-use-dynamic",), False, "variable", _DYNAMO + "USE_DYNAMIC", "True"),
        LaunchOption(("--dynamo-use-regional-compilation",), False, "variable",
                     _DYNAMO + "USE_REGIONAL_COMPILATION", "True"),
        LaunchOption(("--num-cpu-threads-per-process",), True, "variable", "OMP_NUM_THREADS"),
        LaunchOption(("--enable-cpu-affinity",), False, "variable", "ACCELERATE_CPU_AFFINITY", "1"),
        LaunchOption(("--debug",), False, "variable", "ACCELERATE_DEBUG_MODE", "true"),
        *(LaunchOption((name,), False) for name in ("--multi-gpu", "--same-network")),
        LaunchOption(("--quiet", "-q"), False),
        LaunchOption(("--tee", "-t"), True),
        *(LaunchOption((name,), True) for name in (
            "--machine-rank", "--main-process-ip", "--main-process-port", "--log-dir", "--role",
            "--rdzv-backend", "--rdzv-conf", "--max-restarts", "--monitor-interval")),
        *(LaunchOption((name,), False, "refused", _PARADIGM) for name in (
            "--use-fsdp", "--use-deepspeed", "--use-megatron-lm", "--use-parallelism-config")),
        *(LaunchOption((name,), False, "refused", _DEVICES) for name in ("--use-xpu", "--ipex")),
        *(LaunchOption((name,), False, "refused", _ELSEWHERE) for name in ("--tpu", "--tpu-cluster")),
        *(LaunchOption((name,), True, "refused", _ELSEWHERE) for name in (
            "--mpirun-hostfile", "--aws-access-key-id", "--aws-secret-access-key",
            "--main-training-function")),
    ]
)  # fmt: skip
# Options with these prefixes configure a paradigm that is refused.
_FAMILIES = ("--fsdp-", "--deepspeed-", "--megatron-lm-", "--fp8-", "--zero", "--offload-", "--parallelism-")


def scan(words: Sequence[ShellWord], options: Mapping[str, LaunchOption], program: str) -> LaunchArguments:
    """Parse a launcher's options, up to the script. `words` are the words after the launcher.

    Raises:
        UnclearCommand: An option is unknown or refused, or there is no script.
    """
    given: list[tuple[LaunchOption, ShellWord]] = []
    place = 0
    while place < len(words):
        word = words[place]
        if word.text.startswith(("$", "`")) and word.expands:
            raise UnclearCommand(f"{word.text} may expand to options of {program}: write them out")
        if word.text == "--":
            place += 1
            break
        if not word.text.startswith("-") or word.text == "-":
            break
        option, value = _find(word, options, program)
        place += 1
        if option.takes_value and value is None:
            if place == len(words):
                raise UnclearCommand(f"{program} needs a value for {word.text}")
            value, place = words[place], place + 1
        given.append((option, value or word))
    if place == len(words):
        raise UnclearCommand(f"{program} has no script")
    return LaunchArguments(tuple(given), place)


def _find(
    word: ShellWord, options: Mapping[str, LaunchOption], program: str
) -> tuple[LaunchOption, ShellWord | None]:
    """Return the option in `word`, and its value if `word` contains it."""
    name, equals, inline = word.text.partition("=")
    if not name.startswith("--") and len(name) > 2:  # such as -r3, which argparse accepts
        name, equals, inline = word.text[:2], "=", word.text[2:].removeprefix("=")
    plain = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
    option = options.get(plain)
    if option is None and program == ACCELERATE_LAUNCH and plain.startswith(_FAMILIES):
        raise UnclearCommand(f"{program} {name}: {_PARADIGM}")
    if option is None or (equals and not option.takes_value):
        near = difflib.get_close_matches(plain[:100], options, n=1, cutoff=0.8) if option is None else ()
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnclearCommand(f"{program} has an option that Holdfast does not know: {word.text}{hint}")
    if option.effect == "refused":
        raise UnclearCommand(f"{program} {name}: {option.detail}")
    if not equals:
        return option, None
    return option, ShellWord(inline, word.expands, word.splits, word.start, word.end)
