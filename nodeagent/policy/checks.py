"""Reads the rules of sampled checks from `checks.toml` and an operator's file. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from nodeagent.model import ENTITY_KINDS, Action, Level, word
from nodeagent.policy import meanings
from nodeagent.policy.meanings import ACTIONS, LEVELS
from nodeagent.policy.rules import Bound, CheckState, Rule, RuleKind
from nodeagent.policy.validation import Mistakes, key_of

KINDS: Mapping[str, RuleKind] = {each.value: each for each in RuleKind}
ENTITIES = (*ENTITY_KINDS, "sensor", "any")
BOUND = tuple(each.name for each in fields(Bound))
STATE = ("level", "action", "for_s", "why")
LIMIT = 1e12  # no counter or level exceeds this
# The evaluator keeps 4096 samples (5.7 hours at one every 5 s), so a bound that needs more is never reached.
LONGEST_WINDOW_S = 4 * 3600.0
MOST_SAMPLES = 1024
LONGEST_CLEAR_S = 7 * 86400.0

# The fields that an operator may set. The others describe the sensor, which no file can change.
OPERATOR: Mapping[RuleKind, tuple[str, ...]] = {
    RuleKind.LEVEL: ("degraded", "unhealthy", "action", "degraded_action", "clear_at", "clear_s"),
    RuleKind.RATE: ("degraded", "unhealthy", "action", "degraded_action", "clear_at", "window_s", "clear_s"),
    RuleKind.STATE: ("states", "clear_s"),
    RuleKind.EVENT: meanings.OPERATOR,
}
_FLAGS = ("below", "lasts", "restarts_at_boot", "of_gpus")
_OWN = ("kind", "entity", "what", "source", "unit", "period_s", *_FLAGS)


def read(mistakes: Mistakes, name: str, raw: Mapping[str, Any]) -> Rule | None:
    """Return one rule of `checks.toml`; None if its kind is invalid."""
    for needed in ("kind", "entity", "what", "source"):
        if needed not in raw:
            mistakes.note(name, f"{needed} is missing")
    kind = mistakes.choice(f"{name}.kind", raw.get("kind"), KINDS)
    mistakes.choice(f"{name}.entity", raw.get("entity"), {each: each for each in ENTITIES})
    if kind is None:
        return None
    rule = Rule(name, kind, str(raw.get("what", "")), str(raw.get("source", "")))
    if kind is RuleKind.EVENT:
        own = {key: value for key, value in raw.items() if key not in ("kind", "entity", "what")}
        return replace(rule, meaning=meanings.read(mistakes, name, own))
    set_here = {key: value for key, value in raw.items() if key not in ("kind", "entity")}
    if kind is RuleKind.STATE:
        rule = replace(rule, states=_states(mistakes, f"{name}.states", set_here.pop("states", None)))
    rule = changed(mistakes, name, rule, set_here, (*OPERATOR[kind], *_OWN))
    sound(mistakes, name, rule)
    return rule


def changed(
    mistakes: Mistakes, key: str, rule: Rule, raw: Mapping[str, Any], accepted: tuple[str, ...]
) -> Rule:
    """Return `rule`, a rule for samples, with the valid fields in `raw`; record mistakes in the others."""
    new: dict[str, Any] = {}
    for name, value in raw.items():
        at = key_of(*key.split("."), name)
        if name not in accepted:
            mistakes.unknown(at, name, accepted)
        elif name in ("degraded", "unhealthy"):
            new[name] = _bound(mistakes, at, getattr(rule, name), value)
        elif name == "states":
            new[name] = _restated(mistakes, at, rule.states, value)
        else:
            found = _field(mistakes, at, name, value)
            new |= {} if found is None else {name: found}
    return replace(rule, **new)


def _field(mistakes: Mistakes, key: str, name: str, value: object) -> object:
    if name in ("action", "degraded_action"):
        return mistakes.choice(key, value, ACTIONS)
    if name in _FLAGS:
        return mistakes.flag(key, value)
    if name in ("what", "source", "unit"):
        return mistakes.text(key, value)
    if name == "clear_at":
        return mistakes.number(key, value, -LIMIT, LIMIT)
    if name == "window_s":
        return mistakes.number(key, value, 1, LONGEST_WINDOW_S)
    return mistakes.number(key, value, 0, LONGEST_CLEAR_S)


def _bound(mistakes: Mistakes, key: str, before: Bound | None, value: object) -> Bound | None:
    """Return a bound with the fields that `value` sets; None for `false`, which removes it."""
    if value is False:
        return None
    if not isinstance(value, dict):
        mistakes.wrong(key, value, "a table such as { at = 5, need = 3, of = 4 }, or false for none")
        return before
    new: dict[str, Any] = {}
    for name, each in value.items():
        at = key_of(*key.split("."), name)
        if name not in BOUND:
            mistakes.unknown(at, name, BOUND)
        elif name == "at":
            new[name] = mistakes.number(at, each, -LIMIT, LIMIT)
        elif name == "for_s":
            new[name] = mistakes.number(at, each, 0, LONGEST_WINDOW_S)
        else:
            new[name] = mistakes.whole(at, each, 1, MOST_SAMPLES)
    new = {name: each for name, each in new.items() if each is not None}
    if before is None and "at" not in new:
        if "at" not in value:
            mistakes.note(key, "at is missing")
        return None
    bound = replace(before, **new) if before is not None else Bound(**new)
    if bound.need > bound.of:
        mistakes.note(key, f"need = {bound.need} of only {bound.of} samples (of = {bound.of})")
    return bound


def _states(mistakes: Mistakes, key: str, raw: object) -> Mapping[int, CheckState]:
    """Return the states of a shipped check, a list of tables."""
    states: dict[int, CheckState] = {}
    for table in raw if isinstance(raw, list) else []:
        own = dict(table)
        value, said = own.pop("value", None), own.pop("word", None)
        if type(value) is not int or not isinstance(said, str) or value in states:
            mistakes.wrong(key, table, "a value and a word, each once")
        else:
            blank = CheckState(said, Level.HEALTHY, Action.NONE)
            states[value] = _state(mistakes, f"{key}.{said}", blank, own)
    return states


def _restated(
    mistakes: Mistakes, key: str, before: Mapping[int, CheckState], raw: object
) -> Mapping[int, CheckState]:
    """Return the states with the fields that an operator sets for each state name."""
    by_word = {state.word: value for value, state in before.items()}
    states = dict(before)
    for said, table in (mistakes.table(key, raw) or {}).items():
        at = key_of(*key.split("."), said)
        if said not in by_word:
            mistakes.unknown(at, said, by_word)
        elif (fields_set := mistakes.table(at, table)) is not None:
            value = by_word[said]
            states[value] = _state(mistakes, at, states[value], fields_set)
    return states


def _state(mistakes: Mistakes, key: str, state: CheckState, raw: Mapping[str, Any]) -> CheckState:
    new: dict[str, Any] = {}
    for name, value in raw.items():
        at = key_of(*key.split("."), name)
        if name not in STATE:
            mistakes.unknown(at, name, STATE)
        elif name == "level":
            new[name] = mistakes.choice(at, value, LEVELS)
        elif name == "action":
            new[name] = mistakes.choice(at, value, ACTIONS)
        elif name == "for_s":
            new[name] = mistakes.number(at, value, 0, LONGEST_WINDOW_S)
        else:
            new[name] = mistakes.text(at, value)
    state = replace(state, **{name: value for name, value in new.items() if value is not None})
    if meanings.fits(state.level, state.action):
        return state
    if "action" in raw:
        mistakes.note(f"{key}.action", meanings.UNFIT.format(word(state.action)))
    return replace(state, action=Action.NONE)


def sound(mistakes: Mistakes, key: str, rule: Rule) -> None:
    """Record contradictions within a rule for samples."""
    if rule.kind is RuleKind.STATE:
        if not any(state.level is Level.HEALTHY for state in rule.states.values()):
            mistakes.note(f"{key}.states", "no state is healthy, so the check could never recover")
        return
    low, high = rule.degraded, rule.unhealthy
    if low is None and high is None:
        mistakes.note(key, "neither degraded nor unhealthy is set, so the check could never report anything")
    worse = -1 if rule.below else 1
    if low is not None and high is not None and (high.at - low.at) * worse < 0:
        mistakes.note(f"{key}.unhealthy.at", f"{high.at:g} is reached before degraded.at {low.at:g}")
    first = low or high
    if first is not None and rule.clear_at is not None:
        # For a lower limit, a sample at the limit is bad, and a sample at clear_at is not yet clean. For a
        # rate, a sample at the limit is not yet bad. In both cases, the limit and clear_at may be equal.
        apart = (first.at - rule.clear_at) * worse
        if apart < 0 or (apart == 0 and not rule.below and rule.kind is RuleKind.LEVEL):
            mistakes.note(
                f"{key}.clear_at", f"{rule.clear_at:g} is on the bad side of the limit {first.at:g}"
            )
