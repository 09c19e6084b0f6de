"""Turns kernel lines into observations, merging repeated lines. No I/O.

A fault writes hundreds of identical lines within a second, and reporting one of them is enough. If something
between two identical lines clears or changes a finding, the order matters, and the second line is reported
again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from nodeagent.kernel import nvidia_lines
from nodeagent.kernel.nvidia_lines import CLEARED, LineFact, quoted
from nodeagent.model import VERDICT_XID, Observation
from nodeagent.policy.kernel_lines import KernelLine, about_process
from nodeagent.sensing.clock import Clock

MAX_LINE = 4096  # characters searched: the kernel's limit is 2048 (PRINTK_MESSAGE_MAX)
REPORT_S = 30.0  # between two identical readings; without them, nothing would show that the loss has ended
STORM_S = 1.0
MAX_KEYS = 1024  # distinct events reported within about a second
MAX_GPUS = 64
EventKey = tuple[str, str, float, str]  # check, entity, value, variant


class LinePatterns:
    """Recognises lines in the drivers' formats and lines in the policy's table. Pure."""

    def __init__(self, lines: Iterable[KernelLine]) -> None:
        self._lines = tuple(lines)
        self._of_processes = tuple(line for line in self._lines if about_process(line.example))
        hints = {*nvidia_lines.NVIDIA_HINTS, *(line.has for line in self._lines)}
        pattern = _any_of(sorted(hints))
        self._hinted = re.compile(pattern)
        # The log escapes backslashes and characters that do not print; all other hints appear unchanged.
        plain = all(each.isascii() and each.isprintable() and "\\" not in each for each in hints)
        self._hinted_raw = re.compile(pattern.encode() if plain else b"")

    def may_match(self, text: str) -> bool:
        """Return False for an irrelevant line; takes one pass, because nearly all lines are irrelevant."""
        return self._hinted.search(text) is not None

    def may_match_raw(self, raw: bytes) -> bool:
        """Return False for an irrelevant record that has not been parsed; as cheap as `may_match`."""
        return self._hinted_raw.search(raw) is not None

    def read(self, text: str) -> tuple[LineFact, ...]:
        """Return the facts in a line, usually none. Never raises; takes time linear in its length."""
        text = text[:MAX_LINE]
        if not self.may_match(text):
            return ()
        if about_process(text):  # a user chose how the line begins, and may have chosen the rest
            return self._match(text, self._of_processes)
        return nvidia_lines.parse_nvidia(text) or self._match(text, self._lines)

    def _match(self, text: str, lines: tuple[KernelLine, ...]) -> tuple[LineFact, ...]:
        for line in lines:
            match = line.pattern.match(text) if line.has in text else None
            if match is not None:
                check = CLEARED if line.ends else line.check
                return (LineFact(check, line.of(match), text=quoted(text), facts=line.facts(match)),)
        return ()


def _any_of(words: list[str]) -> str:
    """Return a pattern, in the form of a prefix tree, that matches any of `words`; no word may be empty."""
    rests: dict[str, list[str]] = defaultdict(list)
    for each in words:
        rests[each[0]].append(each[1:])
    branches = [
        re.escape(first) + (_any_of(rest) if all(rest) else "")  # a word that ends here matches
        for first, rest in rests.items()
    ]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


class LostRecords:
    """Counts lost records, and reports the total as a reading. The caller increments `count`."""

    def __init__(self, clock: Clock, source: str, text: str) -> None:
        self.count = 0
        self._clock = clock
        self._source = source
        self._text = text
        self._reported: tuple[float, int] | None = None

    def due_readings(self) -> list[Observation]:
        """Return one reading if it is due, otherwise none."""
        now_s = self._clock.now_s()
        if self._reported is None:
            return [self._reading(now_s, 0)]  # a counter's growth is visible only from its second reading on
        at_s, count = self._reported
        if count == self.count and now_s - at_s < REPORT_S:
            return []
        return [self._reading(now_s, self.count)]

    def _reading(self, now_s: float, count: int) -> Observation:
        self._reported = (now_s, count)
        text = self._text if count else ""
        entity = f"sensor/{self._source}"
        return Observation(now_s, "observations_dropped", entity, self._source, float(count), text=text)


class LineReader:
    """Reads the lines of one source."""

    def __init__(self, lines: LinePatterns, source: str) -> None:
        self._lines = lines
        self._source = source
        self._reported: dict[EventKey, float] = {}  # the last report of each, oldest first
        self._uuids: dict[str, str] = {}  # by entity

    def may_match(self, raw: bytes) -> bool:
        """Return True if `read` may find a fact in a record's text; cheap."""
        return self._lines.may_match_raw(raw)

    def read(self, text: str, at_s: float) -> list[Observation]:
        """Return the facts in a line, except those reported within the last `STORM_S`."""
        self._remember(text)
        return [self._with_uuid(seen).at(at_s, self._source) for seen in self._new(text, at_s)]

    def _new(self, text: str, at_s: float) -> list[LineFact]:
        found = []
        for seen in self._lines.read(text):
            key = (seen.check, seen.entity, seen.value, seen.variant)
            reported_s = self._reported.get(key)
            if reported_s is None or abs(at_s - reported_s) >= STORM_S:
                self._record(key, at_s)
                found.append(seen)
        return found

    def _record(self, key: EventKey, at_s: float) -> None:
        check, entity, value, _ = key
        self._reported.pop(key, None)
        self._reported.pop((CLEARED, entity, 0.0, ""), None)
        if check == CLEARED or (check == "xid" and value == VERDICT_XID):
            for other in [each for each in self._reported if _ended(each, key)]:
                del self._reported[other]
        self._reported[key] = at_s
        while len(self._reported) > MAX_KEYS or at_s - next(iter(self._reported.values())) > STORM_S:
            del self._reported[next(iter(self._reported))]

    def _remember(self, text: str) -> None:
        named = nvidia_lines.gpu_uuid(text)
        if named is not None and (named[0] in self._uuids or len(self._uuids) < MAX_GPUS):
            self._uuids[named[0]] = named[1]

    def _with_uuid(self, seen: LineFact) -> LineFact:
        known = self._uuids.get(seen.entity)
        return seen.knowing("uuid", known) if known else seen


def _ended(before: EventKey, now: EventKey) -> bool:
    """Return True if `now` clears the finding from `before`, so that a repetition must be reported."""
    return before[1] == now[1] and (now[0] == CLEARED or (before[0] == now[0] and before[2] == now[2]))
