"""Encode a job's state as the text in its Supervision, and decode it for another host's clock. Pure.

A Supervision must stay small, so the text holds the job's state and its ledger, but not the view of all
members from which they were computed, because members report to the next supervisor again.

All times in the state are CLOCK_MONOTONIC of the host that wrote it, which means nothing on another host. The
text therefore also has that clock's time and the wall time of the write, and `decode` moves all times by the
difference. An error of the wall clocks changes waits by the same amount, but it never changes an order.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from holdfast.protocol import codec
from supervisor.store.recorded import recorded
from supervisor.view.model import JobState

FORMAT = 1
PLAIN_BYTES = 8 << 10  # a longer text is compressed
MAX_BYTES = 4 << 20  # of a text after decompression; a longer text is rejected
_COMPRESSED = "zlib:"
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
    """The state that a predecessor has left in a Supervision, on this host's clock."""

    memory: JobState
    ledger: Any


class UnreadableState(ValueError):
    """The text is not the state of a job; the message is the reason."""


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
    text = json.dumps(content, separators=(",", ":"))
    if len(text) <= PLAIN_BYTES:
        return text
    return _COMPRESSED + base64.b64encode(zlib.compress(text.encode(), 6)).decode()


def decode(text: str, now: Instant) -> HeldState:
    """Return the state in `text`, with all times moved to the clock of `now`. Raises `UnreadableState`."""
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
    """Return what must be added to times of the writer's clock to get times of this host's clock."""
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
            changes[each.name] = (found + by_ns or 1) if found else 0  # not 0, which would be "never"
        elif is_dataclass(found):
            changes[each.name] = moved(found, by_ns)
        elif isinstance(found, tuple) and found and is_dataclass(found[0]):
            changes[each.name] = tuple(moved(item, by_ns) for item in found)
    return replace(value, **changes)  # type: ignore[type-var]


def _moved_ledger(ledger: Any, by_ns: int) -> Any:
    """Return the ledger with its times moved; None for a ledger without valid times.

    A value that is not a mapping is returned unchanged; its reader rejects it.
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
        if text.startswith(_COMPRESSED):
            packed = base64.b64decode(text.removeprefix(_COMPRESSED), validate=True)
            unpacker = zlib.decompressobj()
            data = unpacker.decompress(packed, MAX_BYTES)
            if not unpacker.eof:
                raise UnreadableState(f"more than {MAX_BYTES} bytes, or cut off")
            text = data.decode()
        found = json.loads(text)
    except (binascii.Error, zlib.error, RecursionError, ValueError) as error:
        raise UnreadableState(str(error)) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UnreadableState("its format is not known")
    return found
