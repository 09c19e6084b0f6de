"""Determine the value of a variable at a given command in a shell's text, if possible. Pure.

Many guides write `export GPUS=8`, or set a variable of the container, and then use
`torchrun --nproc-per-node=$GPUS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from supervisor.admission.shell_text import SimpleCommand

_REFERENCE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})", re.ASCII)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII | re.DOTALL)
_DECLARATIONS = frozenset({"export", "readonly", "declare", "typeset", "local"})
_MAY_SET_ANY = re.compile(r"source|\.|eval|read|mapfile|readarray|getopts")


def value_at(
    text: str,
    command: SimpleCommand,
    commands: Sequence[SimpleCommand],
    environment: Mapping[str, str | None],
) -> str | None:
    """Return the value of `text` in `command`; None if `text` is not a reference or its value is unknown.

    Args:
        text: A word without its quotes; a reference is "$N" or "${N}".
        command: One of `commands`. The shell expands its words before any assignments that precede them
            (`N=8 torchrun ...`) take effect.
        commands: All commands of the text.
        environment: The container's variables. A value is None if the pod does not contain it.
    """
    reference = _REFERENCE.fullmatch(text)
    if reference is None:
        return None
    name = str(reference[1] or reference[2])
    value = environment.get(name)
    # Compiled once, because a name can be as long as the text, and the text can have thousands of commands.
    mentioned = re.compile(rf"(?<![\w$]){name}(?!\w)", re.ASCII)
    plain = re.compile(rf"\$\{{{name}\}}", re.ASCII)
    for each in commands[: commands.index(command)]:
        is_set, new = _effect(each, name)
        if not is_set:
            is_set = any(mentioned.search(plain.sub("", word.text)) for word in each.words)
        value = new if is_set else value
    return None if value is None or "$(" in value else value


def _effect(command: SimpleCommand, name: str) -> tuple[bool, str | None]:
    """Return whether `command` sets the variable `name`, and the resulting value if it is known."""
    words = [each for each in command.words if not each.text.startswith("-")]
    first = words[0].text if words else ""
    if _MAY_SET_ANY.fullmatch(first):
        return True, None
    declares = first in _DECLARATIONS
    assignments = [_ASSIGNMENT.fullmatch(each.text) for each in words[declares:]]
    found = [(word, match) for word, match in zip(words[declares:], assignments, strict=True) if match]
    is_plain = len(found) == len(assignments) and not command.within and command.before in ("", ";", "\n")
    mine = [(word, match[2]) for word, match in found if match and match[1] == name]
    if mine and is_plain and command.after in ("", ";", "\n", "&&"):
        word, value = mine[-1]
        return True, None if word.expands else value
    return False, None
