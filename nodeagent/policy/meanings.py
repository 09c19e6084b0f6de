"""Reads the meaning of an event from a table's columns or an operator's keys. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from nodeagent.model import Action, Level, word
from nodeagent.policy.rules import Clears, Meaning, Recurs
from nodeagent.policy.validation import Mistakes, key_of

LEVELS: Mapping[str, Level] = {word(each): each for each in Level}
ACTIONS: Mapping[str, Action] = {word(each): each for each in Action}
CLEARS: Mapping[str, Clears] = {each.value: each for each in Clears}

LONGEST_S = 30 * 86400.0  # the evaluator discards older evidence
MOST_BURSTS = 64  # the evaluator keeps this many bursts of one event
HIGHEST_BRANCH = 9999

RECURS = ("recurs_bursts", "recurs_within_s", "recurs_level", "recurs_action", "recurs_same_variant")
OPERATOR = ("name", "level", "action", "clears", "hold_s", *RECURS)
COLUMNS = (*OPERATOR, "verdict_since", "source")
UNFIT = "{} does not fit the level healthy; set level to degraded or unhealthy"
BLANK = Meaning("", Level.HEALTHY, Action.NONE, Clears.TIME, 0.0, "")


def read(mistakes: Mistakes, key: str, raw: Mapping[str, Any]) -> Meaning:
    """Return the meaning in a shipped table; record its mistakes."""
    for name in ("name", "level", "action", "source"):
        if name not in raw:
            mistakes.note(key, f"{name} is missing")
    meaning = changed(mistakes, key, BLANK, raw, COLUMNS)
    sound(mistakes, key, meaning)
    return meaning


def changed(
    mistakes: Mistakes, key: str, meaning: Meaning, raw: Mapping[str, Any], accepted: Collection[str]
) -> Meaning:
    """Return `meaning` with the valid fields in `raw`; record mistakes in the others."""
    fields: dict[str, Any] = {}
    for name, value in raw.items():
        at = key_of(*key.split("."), name)
        if name not in accepted:
            mistakes.unknown(at, name, accepted)
        elif name not in RECURS:
            fields[name] = _field(mistakes, at, name, value)
    fields = {name: value for name, value in fields.items() if value is not None}
    return replace(meaning, **fields, recurs=_recurs(mistakes, key, meaning.recurs, raw))


def _field(mistakes: Mistakes, key: str, name: str, value: object) -> object:
    if name in ("level", "recurs_level"):
        return mistakes.choice(key, value, LEVELS)
    if name in ("action", "recurs_action"):
        return mistakes.choice(key, value, ACTIONS)
    if name == "clears":
        return mistakes.choice(key, value, CLEARS)
    if name in ("hold_s", "recurs_within_s"):
        return mistakes.number(key, value, 0, LONGEST_S)
    if name == "recurs_bursts":
        return mistakes.whole(key, value, 0, MOST_BURSTS)
    if name == "recurs_same_variant":
        return mistakes.flag(key, value)
    if name == "verdict_since":
        return mistakes.whole(key, value, 0, HIGHEST_BRANCH)
    return mistakes.text(key, value)


def _recurs(mistakes: Mistakes, key: str, before: Recurs | None, raw: Mapping[str, Any]) -> Recurs | None:
    given = [name for name in RECURS if name in raw]
    fields = {name: _field(mistakes, f"{key}.{name}", name, raw[name]) for name in given}
    values: dict[str, Any] = {name.removeprefix("recurs_"): value for name, value in fields.items()}
    if not given or None in values.values():
        return before
    if values.get("bursts") == 0:
        return None
    if values.get("bursts") == 1:
        mistakes.wrong(f"{key}.recurs_bursts", 1, "2 or more, or 0 for none")
        return before
    if before is not None:
        return replace(before, **values)
    missing = [name for name in RECURS[:4] if name not in given]
    if missing:
        mistakes.note(key, f"{', '.join(missing)} must be set with {given[0]}")
        return None
    return Recurs(**values)


def sound(mistakes: Mistakes, key: str, meaning: Meaning) -> None:
    """Record contradictions within a meaning."""
    if not fits(meaning.level, meaning.action):
        mistakes.note(f"{key}.action", UNFIT.format(word(meaning.action)))
    recurs = meaning.recurs
    if recurs is not None and (recurs.level, recurs.action) <= (meaning.level, meaning.action):
        mistakes.note(
            f"{key}.recurs_action",
            f"{word(recurs.level)}, {word(recurs.action)} is no more than {word(meaning.level)}, "
            f"{word(meaning.action)}, which the first occurrence already requires; "
            "recurs_bursts = 0 removes it",
        )


def fits(level: Level, action: Action) -> bool:
    """Return True if an action makes sense at a level. A healthy entity needs at most RESTART_APP."""
    return level is not Level.HEALTHY or action <= Action.RESTART_APP
