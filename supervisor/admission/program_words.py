"""Find which program a command starts, and which script Python runs. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from supervisor.admission.shell_text import ShellWord, UnclearCommand

DEFAULT_PYTHON = "python3"  # starts Holdfast if the command does not name a Python interpreter
SET_COMMAND = "set the container's command to python, torchrun or accelerate launch"
SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh"})

SSH_SERVER = "sshd"
_IN_EACH_POD = "start the script with python or torchrun in each pod"
_WITH_TORCHRUN = "starts the ranks itself: start the script with torchrun"
_OF_MPI = f"starts the ranks itself, even in other pods: {_IN_EACH_POD}"
OTHER_LAUNCHERS = {
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "horovodrun"), _OF_MPI),
    **dict.fromkeys(("deepspeed", "composer", "colossalai", "tune", "dlrover-run"), _WITH_TORCHRUN),
    SSH_SERVER: f"waits for mpirun to start the ranks: {_IN_EACH_POD}",
    "ray": f"starts the training's actors itself, which Holdfast does not supervise: {_IN_EACH_POD}",
}
"""Launchers that Holdfast cannot replace, with the reason and what the user can do instead."""

_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_INITS = frozenset({"tini", "dumb-init"})  # each starts one program and forwards signals to it
_FLAGS_WITH_VALUE = "WX"
# Directories where torchrun may be installed without its Python, which is then found through the PATH.
_COMMON_DIRECTORIES = ("", "/bin", "/usr/bin", "/usr/local/bin")
_OF_A_USER = "/.local/bin"


def program(word: ShellWord) -> str:
    """Return the name of the program that a word starts; "" if it cannot be determined."""
    return "" if word.expands else word.text.rpartition("/")[2]


def is_python(word: ShellWord) -> bool:
    """Return True if a word starts Python."""
    return bool(_PYTHON.fullmatch(program(word)))


def python_beside(path: str) -> str:
    """Return the Python that runs the launcher at `path`: the one in its virtual environment, or python3."""
    directory = path.rpartition("/")[0]
    shared = directory in _COMMON_DIRECTORIES or directory.endswith(_OF_A_USER)
    return DEFAULT_PYTHON if shared else f"{directory}/{DEFAULT_PYTHON}"


def python_flags(words: Sequence[ShellWord]) -> tuple[tuple[str, ...], str | None, int]:
    """Return Python's flags, the module after -m, and the index of the script or module.

    Combined flags that end in m or c, such as `-um`, are split.
    """
    flags: list[str] = []
    place = 1
    while place < len(words):
        text = words[place].text
        if words[place].expands or not text.startswith("-") or text == "-":
            break
        place += 1
        if text.startswith("--"):
            flags.append(text)
            if text == "--check-hash-based-pycs":
                flags.extend(each.text for each in words[place : place + 1])
                place += 1
            continue
        plain = text[1:].rstrip("mc") if text[-1] in "mc" and not _has_value(text) else text[1:]
        flags += [f"-{plain}"] if plain else []
        if plain != text[1:]:
            if place >= len(words) or (text[-1] == "m" and words[place].expands):
                raise UnclearCommand(f"the program after {words[0].text} {text} is missing or not known")
            if text[-1] == "m":
                return tuple(flags), words[place].text, place
            return (*flags, "-c"), None, place
        if text[-1] in _FLAGS_WITH_VALUE and not _has_value(text[:-1]) and place < len(words):
            flags.append(words[place].text)
            place += 1
    if place < len(words) and words[place].text == "-":
        raise UnclearCommand(f"{words[0].text} reads its script from standard input")
    return tuple(flags), None, place


def _has_value(text: str) -> bool:
    """Return True if the combined flags `text` include a flag whose value is the rest, as in -Wignore."""
    return any(flag in text for flag in _FLAGS_WITH_VALUE)


def module(words: Sequence[ShellWord]) -> str:
    """Return the module that Python runs; "" if it runs a script, or if the module is unknown."""
    try:
        return python_flags(words)[1] or ""
    except UnclearCommand:
        return ""


def has_script(words: Sequence[ShellWord]) -> bool:
    """Return True if Python runs a script or a module, and not text from standard input."""
    try:
        return python_flags(words)[2] < len(words)
    except UnclearCommand:
        return False


def after_prefix(words: Sequence[ShellWord]) -> int:
    """Return the index after programs that only start another program: `env`, `tini`, `dumb-init`."""
    place = 0
    while place < len(words) and (name := program(words[place])) in {"env", *_INITS}:
        place += 1
        while place < len(words) and words[place].text.startswith("-"):
            option = words[place].text
            place += 1
            if option == "--":
                break
            if name != "env":
                continue
            if option in ("-u", "--unset", "-C", "--chdir"):
                place += 1
            elif not option.startswith(("--unset=", "--chdir=")):
                raise UnclearCommand(f"env {option} may change the command's environment or its arguments")
        while name == "env" and place < len(words) and "=" in words[place].text:
            place += 1
    return place


def shell_text_at(words: Sequence[ShellWord]) -> int:
    """Return the index of TEXT in a command such as `bash -lc TEXT`."""
    place, has_text = 1, False
    while place < len(words) and words[place].text[:1] in ("-", "+") and len(words[place].text) > 1:
        option = words[place].text
        place += 1
        if option == "--":
            break
        if option.startswith("--"):
            continue
        has_text = has_text or "c" in option
        place += option.count("o") + option.count("O")  # their values, such as pipefail
    if not has_text:
        raise UnclearCommand(f"{words[0].text} runs a file that Holdfast cannot read: {SET_COMMAND}")
    if place >= len(words):
        raise UnclearCommand(f"{words[0].text} -c has no text")
    return place
