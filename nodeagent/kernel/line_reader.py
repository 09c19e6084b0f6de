"""Turns kernel lines into observations, merging repeated lines. Pure but for its own state.

A fault writes hundreds of equal lines within a second, and one of them is enough. If an event that ends or
changes a finding comes between two equal lines, the order matters and the second line is reported again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from nodeagent.kernel import nvidia_lines
from nodeagent.kernel.nvidia_lines import CLEARED, LineFact, quoted
from nodeagent.model import VERDICT_XID, Observation
from nodeagent.policy.kernel_lines import KernelLine
from nodeagent.sensing.clock import Clock

MAX_LINE = 4096  # characters that are looked at: the kernel's own limit is 2048 (PRINTK_MESSAGE_MAX)
REPORT_S = 30.0  # between two readings that are equal: without them it would not be seen that it is over
STORM_S = 1.0
MAX_KEYS = 1024  # different events told within about a second
MAX_GPUS = 64
EventKey = tuple[str, str, float, str]  # check, entity, value, variant


class LinePatterns:
    """Knows the lines that mean something."""

    def __init__(self, lines: Iterable[KernelLine]) -> None:
        self._lines = tuple(lines)
        hints = {*nvidia_lines.NVIDIA_HINTS, *(line.has for line in self._lines)}
        pattern = _any_of(sorted(hints))
        self._hinted = re.compile(pattern)
        # A log escapes what does not print, and its backslashes: elsewhere a hint is there as it is.
        plain = all(each.isascii() and each.isprintable() and "\\" not in each for each in hints)
        self._hinted_raw = re.compile(pattern.encode() if plain else b"")

    def worth(self, text: str) -> bool:
        """Say whether a line may mean something; what is refused does not. In one pass: nearly all are."""
        return self._hinted.search(text) is not None

    def worth_raw(self, raw: bytes) -> bool:
        """Say the same of a whole record that has not been taken apart; cheap."""
        return self._hinted_raw.search(raw) is not None

    def read(self, text: str) -> tuple[LineFact, ...]:
        """Return what a line tells, mostly nothing. Never raises, in time linear in its length."""
        text = text[:MAX_LINE]
        if not self.worth(text):
            return ()
        return nvidia_lines.parse_nvidia(text) or self._told(text)

    def _told(self, text: str) -> tuple[LineFact, ...]:
        for line in self._lines:
            match = line.pattern.match(text) if line.has in text else None
            if match is not None:
                check = CLEARED if line.ends else line.check
                return (LineFact(check, line.of(match), text=quoted(text), facts=line.facts(match)),)
        return ()


def _any_of(words: list[str]) -> str:
    """Return the pattern of any of `words`, none of them the empty one, as a tree: each character once."""
    rests: dict[str, list[str]] = defaultdict(list)
    for each in words:
        rests[each[0]].append(each[1:])
    branches = [
        re.escape(first) + (_any_of(rest) if all(rest) else "")  # a word that ends here is enough
        for first, rest in rests.items()
    ]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


class LostRecords:
    """Counts since it was made; `count` is raised by whoever finds that something is missing."""

    def __init__(self, clock: Clock, source: str, text: str) -> None:
        self.count = 0
        self._clock = clock
        self._source = source
        self._text = text
        self._told: tuple[float, int] | None = None

    def told(self) -> list[Observation]:
        """Return a reading if there is one to tell now."""
        now_s = self._clock.now_s()
        if self._told is None:
            return [self._reading(now_s, 0)]  # a counter's growth shows from its second reading on
        at_s, count = self._told
        if count == self.count and now_s - at_s < REPORT_S:
            return []
        return [self._reading(now_s, self.count)]

    def _reading(self, now_s: float, count: int) -> Observation:
        self._told = (now_s, count)
        text = self._text if count else ""
        entity = f"sensor/{self._source}"
        return Observation(now_s, "observations_dropped", entity, self._source, float(count), text=text)


class LineReader:
    """Reads one source's lines."""

    def __init__(self, lines: LinePatterns, source: str) -> None:
        self._lines = lines
        self._source = source
        self._told: dict[EventKey, float] = {}  # when, oldest first
        self._uuids: dict[str, str] = {}  # by entity

    def worth(self, raw: bytes) -> bool:
        """Say whether `take` may find something in a record's text; cheap."""
        return self._lines.worth_raw(raw)

    def take(self, text: str, at_s: float) -> list[Observation]:
        """Return what a line of that time tells that was not told within `STORM_S` before."""
        self._remember(text)
        return [self._with_uuid(seen).at(at_s, self._source) for seen in self._new(text, at_s)]

    def _new(self, text: str, at_s: float) -> list[LineFact]:
        found = []
        for seen in self._lines.read(text):
            key = (seen.check, seen.entity, seen.value, seen.variant)
            told_s = self._told.get(key)
            if told_s is None or abs(at_s - told_s) >= STORM_S:
                self._tell(key, at_s)
                found.append(seen)
        return found

    def _tell(self, key: EventKey, at_s: float) -> None:
        check, entity, value, _ = key
        self._told.pop(key, None)
        self._told.pop((CLEARED, entity, 0.0, ""), None)
        if check == CLEARED or (check == "xid" and value == VERDICT_XID):
            for other in [each for each in self._told if _ended(each, key)]:
                del self._told[other]
        self._told[key] = at_s
        while len(self._told) > MAX_KEYS or at_s - next(iter(self._told.values())) > STORM_S:
            del self._told[next(iter(self._told))]

    def _remember(self, text: str) -> None:
        named = nvidia_lines.gpu_uuid(text)
        if named is not None and (named[0] in self._uuids or len(self._uuids) < MAX_GPUS):
            self._uuids[named[0]] = named[1]

    def _with_uuid(self, seen: LineFact) -> LineFact:
        known = self._uuids.get(seen.entity)
        return seen.knowing("uuid", known) if known else seen


def _ended(before: EventKey, now: EventKey) -> bool:
    """Say whether what was told before holds no more, so that it would be news if it came again."""
    return before[1] == now[1] and (now[0] == CLEARED or (before[0] == now[0] and before[2] == now[2]))
