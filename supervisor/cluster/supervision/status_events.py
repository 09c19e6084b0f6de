"""Find the problems in a job's successive statuses, to report them as events. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

CHECKPOINT_FAILED = "CheckpointFailed"
LAUNCHER_UNREACHABLE = "LauncherUnreachable"


class StatusEvents:
    """Remembers which problems the last status had, to report each only when it begins."""

    def __init__(self) -> None:
        self._present: frozenset[tuple[str, str]] = frozenset()

    def observe(self, status: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return the event's reason and message for each new problem."""
        found = {(reason, place): text for reason, place, text in _problems(status)}
        new = [(key[0], text) for key, text in found.items() if key not in self._present]
        self._present = frozenset(found)
        return new


def _problems(status: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the reason, the place and the message of each problem. The message may differ each time."""
    error = (status.get("checkpoint") or {}).get("error")
    if error:
        fails = f"no checkpoint can be written: {error}; training continues, and saving is retried"
        yield CHECKPOINT_FAILED, "", fails
    for each in status.get("members") or ():
        if each.get("launcher_error"):
            why = f"member {each.get('name')} cannot start ranks: {each['launcher_error']}"
            yield LAUNCHER_UNREACHABLE, str(each.get("name")), why
