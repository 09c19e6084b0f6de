"""Reads and validates `kernel_lines.toml`: the rules for kernel lines that matter. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from nodeagent import model
from nodeagent.model import Action, Level, normalized_pci
from nodeagent.policy import meanings, validation
from nodeagent.policy.rules import Clears, Meaning, Recurs, Rule, RuleKind
from nodeagent.policy.validation import BadPolicy, Mistakes

KERNEL = "kernel_"  # the prefix of the checks of kernel lines
MAX_PATTERN = 400
LONGEST_HOLD_S = meanings.LONGEST_S
ENTITY_KINDS = (*model.ENTITY_KINDS, "nfs")
ALL = ("name", "has", "pattern", "entity", "what", "source", "example")
JUDGED = ("level", "action", "clears", "hold_s")  # required unless the line clears another line's findings
RECURS = meanings.RECURS[:4]  # optional, all or none: what follows if a line recurs
ENDS = "ends"
CLEARS = {each.value: each for each in (Clears.TIME, Clears.RESET, Clears.BOOT)}
PLACEHOLDER = re.compile(r"\{(\w*)\}")
_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
_WORDS = {
    "level": tuple(meanings.LEVELS),
    "action": tuple(meanings.ACTIONS),
    "clears": tuple(CLEARS),
}

FILE = "kernel_lines.toml"
MAX_LINES = 256  # each pattern costs time on every kernel line that contains its characters
MAX_ENTITY = 128

# The kernel begins some lines with the name of a process: 15 bytes that its user chooses. The rest of the
# line may quote more of the user's text, such as the file in which a program crashed or the cgroup of a
# failed allocation. So a user can make such a line begin like any other ("NVRM: a[11744]: segfault at ... in
# FILE"). The Linux source prints the name in these forms: show_signal_msg(), do_trap() and others;
# drop_caches and others; print_fatal_signal(); oom_kill_process(); warn_alloc().
_ABOUT_PROCESS = re.compile(
    r".{0,15}?(?:\[\d{1,10}\]| ?\(\d{1,10}\)|(?:/\d{1,10})?: potentially unexpected fatal signal"
    r"| invoked oom-killer|: .{0,160}?, ?mode:0x)",
    re.DOTALL,
)
_TASK = "INFO: task "
# After these words, only three characters of a name of 15 bytes remain.
_OF_ANOTHER_TASK = re.compile(r"INFO: task .{1,4}(?:\[\d{1,10}\]: | ?\(\d{1,10}\): )", re.DOTALL)
_UNFIT = re.compile(r"[^\w.:/@+-]+", re.ASCII)


def about_process(text: str) -> bool:
    """Return True for a line that begins with a process's name, which its user chooses."""
    if text.startswith(_TASK):  # check_hung_task(): the name follows, and may contain anything
        return _OF_ANOTHER_TASK.match(text) is not None
    return _ABOUT_PROCESS.match(text) is not None


def table_mistakes(table: dict[str, Any]) -> list[str]:
    """Return the mistakes of one `[[line]]`; none if it is valid."""
    texts = [key for key in (*ALL, ENDS, *_WORDS) if key in table]
    wrong = _key_mistakes(table)
    empty = [f"{key}: must be non-empty text" for key in texts if not _is_text(table[key])]
    return wrong + (empty or [*_value_mistakes(table), *_pattern_mistakes(table)])


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _key_mistakes(table: dict[str, Any]) -> list[str]:
    needed = ALL if ENDS in table else (*ALL, *JUDGED)
    wrong = [f"{key}: missing" for key in needed if key not in table]
    known = (*needed, ENDS) if ENDS in table else (*needed, ENDS, *RECURS)
    for key in table:
        if key not in known:
            near = validation.close_match(key, known)
            wrong.append(f"{key}: unknown key" + (f"; did you mean {near}?" if near else ""))
    return wrong


def _value_mistakes(table: dict[str, Any]) -> list[str]:
    wrong = []
    if "name" in table and not _NAME.fullmatch(table["name"]):
        wrong.append("name: expected lower-case letters, digits and _")
    for key, allowed in _WORDS.items():
        if key in table and table[key] not in allowed:
            wrong.append(f"{key}: {table[key]!r}; expected one of {', '.join(allowed)}")
    hold_s = table.get("hold_s", 0)
    if isinstance(hold_s, bool) or not isinstance(hold_s, (int, float)) or not 0 <= hold_s <= LONGEST_HOLD_S:
        wrong.append(f"hold_s: expected a number of seconds from 0 to {LONGEST_HOLD_S:.0f}")
    return wrong or _recurs_mistakes(table)


def _recurs_mistakes(table: dict[str, Any]) -> list[str]:
    mistakes = Mistakes("")
    if ENDS not in table and any(key in table for key in RECURS) and all(key in table for key in JUDGED):
        meanings.sound(mistakes, "", _meaning(table, mistakes))
    return [each.lstrip(":. ") for each in mistakes.found]  # drop the empty file and key prefixes


def _pattern_mistakes(table: dict[str, Any]) -> list[str]:
    text, entity, example = table.get("pattern"), table.get("entity", "node"), table.get("example")
    wrong = []
    if entity.partition("/")[0] not in ENTITY_KINDS:
        wrong.append(f"entity: {entity!r}; expected one of {', '.join(ENTITY_KINDS)}")
    if example is not None and table.get("has", "") not in example:
        wrong.append("has: does not occur in the example")
    if text is None:
        return wrong
    if len(text) > MAX_PATTERN:
        return [*wrong, f"pattern: {len(text)} characters; expected at most {MAX_PATTERN}"]
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        return [*wrong, f"pattern: {error}"]
    groups = pattern.groupindex
    wrong += [
        f"entity: no group {g!r} in the pattern" for g in PLACEHOLDER.findall(entity) if g not in groups
    ]
    if example is not None and not pattern.match(example):
        wrong.append("example: does not match the pattern")
    if example is not None and about_process(example) and table.get("level") != "healthy":
        wrong.append("level: must be healthy, because a user can produce a line like the example")
    return wrong


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One pattern of a kernel line, and its meaning."""

    name: str
    has: str  # text that every such line contains; searching for it first is faster than the pattern
    pattern: re.Pattern[str]  # matches from the first character
    entity: str  # "disk/{device}": may contain groups of the pattern
    what: str
    source: str
    example: str  # a real line
    level: Level = Level.HEALTHY
    action: Action = Action.NONE
    clears: Clears = Clears.TIME
    hold_s: float = 0.0
    recurs: Recurs | None = None
    ends: str = ""  # the line whose findings this line clears, along with all other findings of the entity

    @property
    def check(self) -> str:
        return KERNEL + self.name

    def of(self, match: re.Match[str]) -> str:
        """Return the entity affected by a line."""
        return PLACEHOLDER.sub(lambda found: _fit(found[1], match[found[1]] or ""), self.entity)[:MAX_ENTITY]

    def facts(self, match: re.Match[str]) -> tuple[tuple[str, str], ...]:
        """Return the pattern's other groups, as facts."""
        placed = PLACEHOLDER.findall(self.entity)
        return tuple((k, v.strip()) for k, v in match.groupdict().items() if v and k not in placed)


def _fit(group: str, value: str) -> str:
    return normalized_pci(value) if group == "pci" else _UNFIT.sub("_", value.strip())


def load_lines(text: str) -> tuple[KernelLine, ...]:
    """Return the lines in the order of the file; the first line that matches applies.

    Raises:
        BadPolicy: the file has mistakes; the exception lists all of them.
    """
    try:
        document = validation.load_toml(text)
    except validation.TomlError as error:
        raise BadPolicy([f"{FILE}: {error}"]) from error
    tables = document.get("line", [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise BadPolicy([f"{FILE}: line: must be [[line]], a list of tables"])
    wrong = [f"{key}: unknown key; expected only [[line]]" for key in document if key != "line"]
    if len(tables) > MAX_LINES:
        wrong.append(f"{len(tables)} lines; expected at most {MAX_LINES}")
    lines = []
    for at, table in enumerate(tables[:MAX_LINES], 1):
        found = table_mistakes(table)
        wrong += [f"{table.get('name') or f'line {at}'}: {each}" for each in found]
        if not found:
            lines.append(_line(table))
    wrong += _mistakes_between(lines, complete=not wrong)
    if wrong:
        raise BadPolicy(f"{FILE}: {each}" for each in wrong)
    return tuple(lines)


def line_rules(lines: tuple[KernelLine, ...]) -> dict[str, Rule]:
    """Return an event rule for each line, except lines that only clear the findings of others."""
    return {line.check: _rule(line) for line in lines if not line.ends}


def _rule(line: KernelLine) -> Rule:
    meaning = Meaning(line.what, line.level, line.action, line.clears, line.hold_s, line.source, line.recurs)
    return Rule(line.check, RuleKind.EVENT, line.what, line.source, meaning=meaning)


def _meaning(table: dict[str, Any], mistakes: Mistakes) -> Meaning:
    """Return the level, action and recurrence of a line; record the mistakes of its recurrence."""
    judged = {key: table[key] for key in ("level", "action", *RECURS) if key in table}
    return meanings.changed(mistakes, "", meanings.BLANK, judged, tuple(judged))


def _line(table: dict[str, Any]) -> KernelLine:
    return KernelLine(
        **{key: table[key] for key in (*ALL, ENDS) if key in table and key != "pattern"},
        pattern=re.compile(table["pattern"]),
        level=Level[table.get("level", "healthy").upper()],
        action=Action[table.get("action", "none").upper()],
        clears=CLEARS[table.get("clears", "time")],
        hold_s=float(table.get("hold_s", 0.0)),
        recurs=_meaning(table, Mistakes("")).recurs,
    )


def _mistakes_between(lines: list[KernelLine], complete: bool) -> list[str]:
    """Return the contradictions between lines. References to other lines are checked only if `complete`."""
    wrong, by_name = [], {line.name: line for line in lines}
    names = [line.name for line in lines]
    wrong += [f"{name}: more than one line has this name" for name in by_name if names.count(name) > 1]
    for at, line in enumerate(lines):
        before = next((b.name for b in lines[:at] if b.pattern.match(line.example)), line.name)
        if before != line.name:
            wrong.append(f"{line.name}: its example already matches {before}")
        if line.ends and complete:
            wrong += _ending(line, by_name, lines)
    return wrong


def _ending(line: KernelLine, by_name: dict[str, KernelLine], lines: list[KernelLine]) -> list[str]:
    ended = by_name.get(line.ends)
    if ended is None or ended.ends:
        return [f"{line.name}: ends: {line.ends!r} is not a line that reports a fault"]
    if ended.entity != line.entity:
        return [f"{line.name}: entity: must be {ended.entity!r}, the entity of {ended.name}"]
    # The line clears every finding of its entity, so no other line may report on the same kind of entity.
    kind = line.entity.partition("/")[0]
    others = [o.name for o in lines if o.entity.partition("/")[0] == kind and o not in (line, ended)]
    return [f"{line.name}: entity: it would also clear {', '.join(others)}"] if others else []
