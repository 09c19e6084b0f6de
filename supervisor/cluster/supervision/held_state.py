"""Encode a job's state as text in its Supervision, and decode it for the clock of another host. Pure.

A Supervision must stay small. The text therefore contains the job's state and its ledger, but not the view of
all members from which the state was computed. Members report to the next supervisor anyway.

All times in the state are times of the writing host's CLOCK_MONOTONIC, which mean nothing on another host.
The text therefore also contains the monotonic time and the wall time of the write, from which `decode`
computes how far to shift all times. Wrong wall clocks lengthen or shorten waits by their error, but never
change the order of events.

The state of a large job lists a source for each rank and holder and, after a fault, up to one fault for each
rank. The text has one entry for consecutive ranks of one holder, and the first `MAX_LISTED` faults, because
members report all faults again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

from holdfast.protocol import codec
from holdfast.protocol.member_messages import StateSource
from supervisor.decision import state_sources
from supervisor.store import packed_json
from supervisor.store.recorded import recorded
from supervisor.view import faults
from supervisor.view.model import Fault, JobState, ResumePoint

FORMAT = 2
_READ = (1, FORMAT)  # the first version lists every source in full, within the state
PLAIN_BYTES = 8 << 10  # a longer text is compressed
_MOVED_LEDGER = ("opened_ns", "at_ns", "stretch_ns")
_WINDOWS = ("hour", "day")
_LATEST_NS, _LATEST_S = 1 << 63, 1 << 40  # later times are invalid
MAX_LISTED = 256  # faults, and lines of evidence, of the open incident
MAX_SOURCES = 1 << 19  # 16 for each rank of the largest job

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
        "memory": recorded(_without_sources(_shortened(memory))),
        "sources": _rows(memory.sources),
        "peers": _rows(memory.peers),
        "bystanders": list(memory.bystanders),  # journals do not contain them
        "backups": list(memory.launch.backups) if memory.launch is not None else [],
        "ledger": ledger,
    }
    resumed = _resumed(memory)
    if resumed is not None:
        same = resumed.sources == memory.sources
        content["resumed"] = None if same else _rows(resumed.sources)
        content["holders"] = [memory.positions.get(name, name) for name in resumed.holders]
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
    memory = moved(memory, by_ns)
    if found["format"] == FORMAT:
        memory = _with_sources(memory, found)
    memory = replace(memory, bystanders=_names(found.get("bystanders")))
    if memory.launch is not None:
        backups = _positions(found.get("backups"), len(memory.placement))
        memory = replace(memory, launch=replace(memory.launch, backups=backups))
    return HeldState(memory, _moved_ledger(found.get("ledger"), by_ns))


# -- the parts of the state that grow with the number of ranks


def _shortened(memory: JobState) -> JobState:
    """Return the state without most of the faults and evidence if its incident involves many ranks."""
    incident, unbegun = memory.incident, memory.unbegun
    if incident is not None and max(len(incident.faults), len(incident.evidence)) > MAX_LISTED:
        shorter = replace(
            incident, faults=_first_faults(incident.faults), evidence=incident.evidence[:MAX_LISTED]
        )
        memory = replace(memory, incident=shorter)
    if unbegun is not None and len(unbegun.raised) > MAX_LISTED:
        memory = replace(memory, unbegun=replace(unbegun, raised=_first_faults(unbegun.raised)))
    return memory


def _first_faults(found: tuple[Fault, ...]) -> tuple[Fault, ...]:
    """Return at most `MAX_LISTED` of the faults: the first ones, always including the cause."""
    if len(found) <= MAX_LISTED:
        return found
    first, cause = found[:MAX_LISTED], faults.root_cause(found)
    return first if cause in first else (*first[:-1], cause)


def _resumed(memory: JobState) -> ResumePoint | None:
    return memory.incident.resume if memory.incident is not None else None


def _without_sources(memory: JobState) -> JobState:
    return _set(memory, (), (), (), ())


def _with_sources(memory: JobState, found: Mapping[str, Any]) -> JobState:
    """Return the state with the sources and holders that `_without_sources` removed from it."""
    sources, peers = _sources(found.get("sources")), _sources(found.get("peers"))
    if _resumed(memory) is None:
        return _set(memory, sources, peers, (), ())
    rows, names = found.get("resumed"), found.get("holders")
    resumed = sources if rows is None else _sources(rows)
    try:
        holders = [each if isinstance(each, str) else memory.placement[each] for each in names or ()]
    except (TypeError, IndexError):
        raise UnreadableState("the holders of its snapshot are not members") from None
    return _set(memory, sources, peers, resumed, tuple(holders))


def _set(
    memory: JobState,
    sources: tuple[StateSource, ...],
    peers: tuple[StateSource, ...],
    resumed: tuple[StateSource, ...],
    holders: tuple[str, ...],
) -> JobState:
    incident = memory.incident
    if incident is not None and incident.resume is not None:
        point = replace(incident.resume, sources=resumed, holders=holders)
        incident = replace(incident, resume=point)
    return replace(memory, sources=sources, peers=peers, incident=incident)


def _names(found: Any) -> tuple[str, ...]:
    """Return the names in a list; none for the state of an older version, which has no such list."""
    return tuple(each for each in found if isinstance(each, str)) if isinstance(found, list) else ()


def _positions(found: Any, count: int) -> tuple[int, ...]:
    """Return the backups of `count` members, which an older version did not write; () if they are invalid."""
    if not isinstance(found, list) or len(found) != count:
        return ()
    is_valid = all(type(each) is int and 0 <= each < count for each in found)
    return tuple(found) if is_valid else ()


def _rows(sources: tuple[StateSource, ...]) -> list[list[Any]]:
    """Return the sources as lists of the fields of `StateSource`, in their order."""
    found = state_sources.grouped(sources)
    return [[each.url, each.rank, each.generation, each.step, each.count] for each in found]


def _sources(rows: Any) -> tuple[StateSource, ...]:
    """Return the sources in `rows`, one for each rank and holder. Raises `UnreadableState`."""
    kinds = (str, int, int, int, int)
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and len(row) == len(kinds) and all(map(_is_kind, row, kinds)) for row in rows
    ):
        raise UnreadableState("its sources are not lists of a URL and four numbers")
    if not all(0 < row[-1] <= MAX_SOURCES for row in rows) or sum(row[-1] for row in rows) > MAX_SOURCES:
        raise UnreadableState(f"it has more than {MAX_SOURCES} sources")
    return state_sources.of_each_rank(StateSource(*row) for row in rows)


def _is_kind(value: object, kind: type) -> bool:
    return type(value) is kind


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
    if not isinstance(found, dict) or found.get("format") not in _READ:
        raise UnreadableState("its format is not known")
    return found
