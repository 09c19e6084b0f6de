"""From lines to observations: storms made one, UUIDs remembered. Pure but for its own state.

A fault makes hundreds of equal lines within a second, and one of them says it all. But not if something else
has come between that changes what holds: then the order counts, and the line is told again.
"""

from __future__ import annotations

from nodeagent.kernel import nvidia
from nodeagent.kernel.lines import Lines
from nodeagent.kernel.seen import CLEARED, Seen
from nodeagent.observation import Observation

STORM_S = 1.0
MAX_KEYS = 1024  # different events told within about a second
MAX_GPUS = 64
VERDICT = 154  # the Xid by which the driver takes back what it said before

Key = tuple[str, str, float, str]  # check, entity, value, variant


class Sightings:
    """Reads one source's lines."""

    def __init__(self, lines: Lines, source: str) -> None:
        self._lines = lines
        self._source = source
        self._told: dict[Key, float] = {}  # when, oldest first
        self._uuids: dict[str, str] = {}  # by entity

    def worth(self, raw: bytes) -> bool:
        """Say whether `take` may find something in a record's text; cheap."""
        return self._lines.worth_raw(raw)

    def take(self, text: str, at_s: float) -> list[Observation]:
        """Return what a line of that time tells that was not told within `STORM_S` before."""
        self._remember(text)
        return [self._with_uuid(seen).at(at_s, self._source) for seen in self._new(text, at_s)]

    def _new(self, text: str, at_s: float) -> list[Seen]:
        found = []
        for seen in self._lines.read(text):
            key = (seen.check, seen.entity, seen.value, seen.variant)
            told_s = self._told.get(key)
            if told_s is None or abs(at_s - told_s) >= STORM_S:
                self._tell(key, at_s)
                found.append(seen)
        return found

    def _tell(self, key: Key, at_s: float) -> None:
        check, entity, value, _ = key
        self._told.pop(key, None)
        self._told.pop((CLEARED, entity, 0.0, ""), None)
        if check == CLEARED or (check == "xid" and value == VERDICT):
            for other in [each for each in self._told if _ended(each, key)]:
                del self._told[other]
        self._told[key] = at_s
        while len(self._told) > MAX_KEYS or at_s - next(iter(self._told.values())) > STORM_S:
            del self._told[next(iter(self._told))]

    def _remember(self, text: str) -> None:
        named = nvidia.uuid(text)
        if named is not None and (named[0] in self._uuids or len(self._uuids) < MAX_GPUS):
            self._uuids[named[0]] = named[1]

    def _with_uuid(self, seen: Seen) -> Seen:
        known = self._uuids.get(seen.entity)
        return seen.knowing("uuid", known) if known else seen


def _ended(before: Key, now: Key) -> bool:
    """Say whether what was told before holds no more, so that it would be news if it came again."""
    return before[1] == now[1] and (now[0] == CLEARED or (before[0] == now[0] and before[2] == now[2]))
