"""Encode a job's state as text in its Supervision, and decode it for the clock of another host. Pure.

A Supervision must stay small, so the text contains the job's state and its ledger. It does not contain the
view of all members from which the state was computed, because members report to the next supervisor again.

All times in the state are times of the writing host's CLOCK_MONOTONIC, which mean nothing on another host.
The text therefore also contains the monotonic time and the wall time of the write, from which `decode`
computes by how much to shift all times. An error of the wall clocks lengthens or shortens waits by the same
amount, but never changes the order of events.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from holdfast.protocol import codec
from supervisor.store import packed_json
from supervisor.store.recorded import recorded
from supervisor.view.model import JobState

FORMAT = 1
PLAIN_BYTES = 8 << 10  # a longer text is compressed
_MOVED_LEDGER = ("opened_ns", "at_ns", "stretch_ns")
_WINDOWS = ("hour", "day")
_LATEST_NS, _LATEST_S = 1 << 63, 1 << 40  # later times are invalid

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Instant:
    """One moment on the clocks of a host. `clock` identifies the host's CLOCK_MONOTONIC."""

    monotonic_ns: int
    wall_s: float
    clock: str = ""


@dataclass(frozen=True, slots=True)
class HeldState:
    """The state that the previous supervisor stored in a Supervision, in times of this host's clock."""

    memory: JobState
    ledger: Any


class UnreadableState(ValueError):
    """The text is not a job's state. The message says why."""


def encode(memory: JobState, ledger: Any, now: Instant) -> str:
    """Return the text for a job's state at `now`. Equal arguments yield equal texts."""
    content = {
        "format": FORMAT,
        "at_ns": now.monotonic_ns,
        "wall_s": now.wall_s,
        "clock": now.clock,
        "memory": recorded(memory),
        "ledger": ledger,
    }
    return packed_json.pack(content, PLAIN_BYTES)


def decode(text: str, now: Instant) -> HeldState:
    """Return the state in `text`, with all times shifted to the clock of `now`. Raises `UnreadableState`."""
    found = _parse(text)
    try:
        memory = codec.from_json(JobState, found.get("memory"), lenient=True)
        at_ns, wall_s, clock = found["at_ns"], found["wall_s"], found["clock"]
    except KeyError as error:
        raise UnreadableState(f"{error} is missing") from None
    except ValueError as error:
        raise UnreadableState(str(error)) from None
    if type(at_ns) is not int or type(wall_s) not in (int, float) or not isinstance(clock, str):
        raise UnreadableState("its time is missing")
    if not (-_LATEST_NS < at_ns < _LATEST_NS and -_LATEST_S < wall_s < _LATEST_S):  # false for NaN too
        raise UnreadableState("its time is out of range")
    by_ns = _difference_ns(Instant(at_ns, float(wall_s), clock), now)
    return HeldState(moved(memory, by_ns), _moved_ledger(found.get("ledger"), by_ns))


def _difference_ns(then: Instant, now: Instant) -> int:
    """Return the number to add to a time of the writer's clock to get the time of this host's clock."""
    if then.clock and then.clock == now.clock:
        return 0
    passed_s = max(0.0, now.wall_s - then.wall_s)
    return now.monotonic_ns - then.monotonic_ns - int(passed_s * 1e9)


def moved(value: _T, by_ns: int) -> _T:
    """Return the dataclass `value` with `by_ns` added to each time in it, at any depth; 0 means "never"."""
    if not by_ns:
        return value
    changes: dict[str, Any] = {}
    for each in fields(value):  # type: ignore[arg-type]  # only called with dataclasses
        found = getattr(value, each.name)
        if each.name.endswith("_ns") and type(found) is int:
            changes[each.name] = (found + by_ns or 1) if found else 0  # a time must not become 0, "never"
        elif is_dataclass(found):
            changes[each.name] = moved(found, by_ns)
        elif isinstance(found, tuple) and found and is_dataclass(found[0]):
            changes[each.name] = tuple(moved(item, by_ns) for item in found)
    return replace(value, **changes)  # type: ignore[type-var]


def _moved_ledger(ledger: Any, by_ns: int) -> Any:
    """Return the ledger with its times shifted; None if they are not valid.

    A value that is not a mapping is returned unchanged, because its reader rejects it.
    """
    if not isinstance(ledger, Mapping) or not by_ns:
        return ledger
    try:
        times = {name: ledger[name] + by_ns for name in _MOVED_LEDGER}
        windows = {name: [[at_ns + by_ns, good] for at_ns, good in ledger[name]] for name in _WINDOWS}
    except (KeyError, TypeError, ValueError):
        return None
    return {**ledger, **times, **windows}


def _parse(text: str) -> Mapping[str, Any]:
    try:
        found = packed_json.unpack(text)
    except packed_json.UnreadableText as error:
        raise UnreadableState(str(error)) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UnreadableState("its format is not known")
    return found
