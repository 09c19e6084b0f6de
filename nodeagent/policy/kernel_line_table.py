"""What may be wrong with one `[[line]]` of `kernel_lines.toml`, by itself. Pure."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Any

from nodeagent.policy.rules import Clears
from nodeagent.verdict import Action, Level, word

MAX_PATTERN = 400
LONGEST_HOLD_S = 30 * 86400.0
KINDS = ("gpu", "driver", "node", "disk", "port", "net", "device", "nvswitch", "nfs")  # of entities
ALL = ("name", "has", "pattern", "entity", "what", "source", "example")
JUDGED = ("level", "action", "clears", "hold_s")  # of a line that does not end another
ENDS = "ends"
CLEARS = {each.value: each for each in (Clears.TIME, Clears.RESET, Clears.BOOT)}
PLACEHOLDER = re.compile(r"\{(\w*)\}")

_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")
_WORDS = {
    "level": tuple(word(each) for each in Level),
    "action": tuple(word(each) for each in Action),
    "clears": tuple(CLEARS),
}


def mistakes(table: dict[str, Any]) -> list[str]:
    """Return what is wrong, in words; nothing if a line can be made of it."""
    texts = [key for key in (*ALL, ENDS, *_WORDS) if key in table]
    wrong = _keys(table)
    untold = [f"{key}: must be a text that is not empty" for key in texts if not _is_text(table[key])]
    return wrong + (untold or [*_values(table), *_pattern(table)])


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _keys(table: dict[str, Any]) -> list[str]:
    needed = ALL if ENDS in table else (*ALL, *JUDGED)
    wrong = [f"{key}: missing" for key in needed if key not in table]
    for key in table:
        if key not in (*needed, ENDS):
            near = get_close_matches(key, (*needed, ENDS), 1)
            wrong.append(f"{key}: not known here" + (f", did you mean {near[0]}?" if near else ""))
    return wrong


def _values(table: dict[str, Any]) -> list[str]:
    wrong = []
    if "name" in table and not _NAME.fullmatch(table["name"]):
        wrong.append("name: small letters, digits and _ only")
    for key, allowed in _WORDS.items():
        if key in table and table[key] not in allowed:
            wrong.append(f"{key}: one of {', '.join(allowed)}, not {table[key]!r}")
    hold_s = table.get("hold_s", 0)
    if isinstance(hold_s, bool) or not isinstance(hold_s, (int, float)) or not 0 <= hold_s <= LONGEST_HOLD_S:
        wrong.append(f"hold_s: a number of seconds from 0 to {LONGEST_HOLD_S:.0f}")
    return wrong


def _pattern(table: dict[str, Any]) -> list[str]:
    text, entity, example = table.get("pattern"), table.get("entity", "node"), table.get("example")
    wrong = []
    if entity.partition("/")[0] not in KINDS:
        wrong.append(f"entity: one of {', '.join(KINDS)}, not {entity!r}")
    if example is not None and table.get("has", "") not in example:
        wrong.append("has: is not in the example")
    if text is None:
        return wrong
    if len(text) > MAX_PATTERN:
        return [*wrong, f"pattern: {len(text)} characters, at most {MAX_PATTERN}"]
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
    return wrong
