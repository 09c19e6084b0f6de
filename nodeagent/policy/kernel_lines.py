"""The kernel's lines that mean something: `kernel_lines.toml` read, checked as a whole, made rules. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from nodeagent.observation import pci
from nodeagent.policy import toml
from nodeagent.policy.kernel_line_table import ALL, CLEARS, ENDS, PLACEHOLDER, mistakes
from nodeagent.policy.mistakes import BadPolicy
from nodeagent.policy.rules import Clears, Kind, Meaning, Rule
from nodeagent.verdict import Action, Level

FILE = "kernel_lines.toml"
MAX_LINES = 256  # each costs time on every line that has its characters
MAX_ENTITY = 128

_UNFIT = re.compile(r"[^\w.:/@+-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Line:
    """One shape of a line, and what it means."""

    name: str
    has: str  # characters that are in every such line: found faster than the pattern
    pattern: re.Pattern[str]  # from the first character on
    entity: str  # "disk/{device}": with groups of the pattern
    what: str
    source: str
    example: str  # a real one
    level: Level = Level.HEALTHY
    action: Action = Action.NONE
    clears: Clears = Clears.TIME
    hold_s: float = 0.0
    ends: str = ""  # the name of the line whose findings this one ends, all those of its entity

    @property
    def check(self) -> str:
        return f"kernel_{self.name}"

    def of(self, match: re.Match[str]) -> str:
        """Return the entity that a line is about."""
        return PLACEHOLDER.sub(lambda found: _fit(found[1], match[found[1]] or ""), self.entity)[:MAX_ENTITY]

    def facts(self, match: re.Match[str]) -> tuple[tuple[str, str], ...]:
        """Return what else the line names."""
        placed = PLACEHOLDER.findall(self.entity)
        return tuple((k, v.strip()) for k, v in match.groupdict().items() if v and k not in placed)


def _fit(group: str, value: str) -> str:
    return pci(value) if group == "pci" else _UNFIT.sub("_", value.strip())


def load(text: str) -> tuple[Line, ...]:
    """Return the lines in the order of the file; the first that matches counts.

    Raises:
        BadPolicy: with all mistakes of the file, not only the first.
    """
    try:
        document = toml.loads(text)
    except toml.TomlError as error:
        raise BadPolicy([f"{FILE}: {error}"]) from error
    tables = document.get("line", [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise BadPolicy([f"{FILE}: line: must be [[line]], a list of tables"])
    wrong = [f"{key}: not known, only [[line]] is" for key in document if key != "line"]
    if len(tables) > MAX_LINES:
        wrong.append(f"{len(tables)} lines, at most {MAX_LINES} are read")
    lines = []
    for at, table in enumerate(tables[:MAX_LINES], 1):
        found = mistakes(table)
        wrong += [f"{table.get('name') or f'line {at}'}: {each}" for each in found]
        if not found:
            lines.append(_line(table))
    wrong += _together(lines, complete=not wrong)
    if wrong:
        raise BadPolicy(f"{FILE}: {each}" for each in wrong)
    return tuple(lines)


def rules(lines: tuple[Line, ...]) -> dict[str, Rule]:
    """Return a rule of events for each line but those that only end others."""
    return {line.check: _rule(line) for line in lines if not line.ends}


def _rule(line: Line) -> Rule:
    meaning = Meaning(line.what, line.level, line.action, line.clears, line.hold_s, line.source)
    return Rule(line.check, Kind.EVENT, line.what, line.source, meaning=meaning)


def _line(table: dict[str, Any]) -> Line:
    return Line(
        **{key: table[key] for key in (*ALL, ENDS) if key in table and key != "pattern"},
        pattern=re.compile(table["pattern"]),
        level=Level[table.get("level", "healthy").upper()],
        action=Action[table.get("action", "none").upper()],
        clears=CLEARS[table.get("clears", "time")],
        hold_s=float(table.get("hold_s", 0.0)),
    )


def _together(lines: list[Line], complete: bool) -> list[str]:
    """Return the mistakes that are between lines; if not all could be made, none may be missed."""
    wrong, by_name = [], {line.name: line for line in lines}
    names = [line.name for line in lines]
    wrong += [f"{name}: more than one of that name" for name in by_name if names.count(name) > 1]
    for at, line in enumerate(lines):
        before = next((b.name for b in lines[:at] if b.pattern.match(line.example)), line.name)
        if before != line.name:
            wrong.append(f"{line.name}: its example is matched by {before} already")
        if line.ends and complete:
            wrong += _ending(line, by_name, lines)
    return wrong


def _ending(line: Line, by_name: dict[str, Line], lines: list[Line]) -> list[str]:
    ended = by_name.get(line.ends)
    if ended is None or ended.ends:
        return [f"{line.name}: ends: no line {line.ends!r} that says something is wrong"]
    if ended.entity != line.entity:
        return [f"{line.name}: entity: must be that of {ended.name}, {ended.entity!r}"]
    # What it ends is everything of its entity, so nothing else may be told of such an entity.
    kind = line.entity.partition("/")[0]
    others = [o.name for o in lines if o.entity.partition("/")[0] == kind and o not in (line, ended)]
    return [f"{line.name}: entity: {', '.join(others)} would be ended too"] if others else []
