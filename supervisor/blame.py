"""Which exit is the root cause? Pure.

When one rank dies the others fail within milliseconds, in the collective that it never joined.
Their tracebacks are long and say nothing. So a rank that failed in a collective is blamed only if
no rank failed in any other way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast import victims
from holdfast.launcher_messages import OUT_OF_MEMORY

SYSTEM_EXIT, DISTRIBUTED = "system_exit", "distributed"

SIGABRT = 6  # how C++ ends when an exception leaves a thread

_PREFIX = re.compile(r"^(?:\[rank\d+\]:\s?)?(?:[ |+-]*\| )?", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_RAISED = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?::\s|:?$)", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):"
_TAIL = 20_000  # characters of a message that are looked at


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one rank. Times are of one clock, the supervisor's."""

    rank: int
    member: str
    at_ns: int
    code: int | None
    signal: int | None  # never one that we sent: those exits are not evidence
    fail_kind: str = ""  # "", exception, system_exit, distributed, bad_input, numeric
    failed_ns: int = 0  # when the rank said that it fails; 0: it did not
    message: str = ""  # the traceback or the tail of stderr


def blame(exits: tuple[Exit, ...]) -> Exit:
    """Return the exit that caused the others. Raises `ValueError` without any."""
    if not exits:
        raise ValueError("no exits: nobody can be blamed")
    return min(exits, key=lambda each: (_class(each), each.failed_ns or each.at_ns, each.rank))


def is_victim(exit_: Exit) -> bool:
    """Say whether this rank failed because another one did: as it said itself, else by the end of its log."""
    if exit_.signal not in (None, SIGABRT) or exit_.fail_kind:
        return exit_.fail_kind == DISTRIBUTED
    return victims.in_log(exit_.message)


def signature(exit_: Exit) -> str:
    """Return what is equal when the same failure happens again: no pids, times or addresses."""
    if exit_.signal is not None:
        return OUT_OF_MEMORY if is_out_of_memory(exit_.message) else f"signal {exit_.signal}"
    if exit_.fail_kind == SYSTEM_EXIT:
        return f"{SYSTEM_EXIT} {exit_.code}"
    kind = exit_.fail_kind or "exit"
    text = _last_traceback(exit_.message)
    frames = list(_FRAME.finditer(text))
    if not frames:  # then what looks like an exception's name may be any line of a log
        return f"{kind} {exit_.code}"
    raised = _RAISED.search(text, frames[-1].end())
    name = raised["name"] if raised is not None else "unknown"
    return f"{kind} {name} at {frames[-1]['file']}:{frames[-1]['line']}"


def is_out_of_memory(message: str) -> bool:
    """Say whether the kernel's own word, put in front of a log's end by the launcher, is that."""
    return message.startswith(f"{OUT_OF_MEMORY}: ")


def _class(exit_: Exit) -> int:
    if exit_.code == 0 and exit_.signal is None and exit_.fail_kind in ("", SYSTEM_EXIT):
        return 2  # a rank that finished
    return 1 if is_victim(exit_) else 0


def _last_traceback(message: str) -> str:
    """Return the last traceback without the prefixes that torch and exception groups add."""
    text = _PREFIX.sub("", message[-_TAIL:])
    start = text.rfind(_TRACEBACK)
    return text if start < 0 else text[start + len(_TRACEBACK) :]
