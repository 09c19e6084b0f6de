"""Applies an operator's TOML file to the shipped policy. Pure.

A level or an action in that file also takes precedence over the driver's verdict. Setting one of them also
changes the fields that depend on it, so one line is enough: `clears` follows the action, and an event that
the operator declares healthy does not escalate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nodeagent.model import VERDICT_XID, Action, Level
from nodeagent.policy import checks, meanings, nvlink, validation
from nodeagent.policy.kernel_lines import KERNEL
from nodeagent.policy.rules import CLEARED_BY, Clears, HealthPolicy, Meaning, Rule, RuleKind
from nodeagent.policy.tables import HIGHEST_CODE
from nodeagent.policy.validation import BadPolicy, Mistakes, key_of

MAX_CHARACTERS = 65_536
SECTIONS = ("checks", "kernel", "sxid", "xid")

_DECODED = (nvlink.NVLINK4_XID, *nvlink.NVLINK5_XIDS, VERDICT_XID)


def overridden(policy: HealthPolicy, text: str, file: str) -> HealthPolicy:
    """Return `policy` with the changes from the operator's file.

    Raises:
        BadPolicy: the file has mistakes; the exception lists all of them.
    """
    document = _document(text, file)
    mistakes = Mistakes(file)
    rules, xids, sxids = dict(policy.rules), dict(policy.xids), dict(policy.sxids)
    for section, name, raw in _entries(mistakes, document):
        key = key_of(section, name)
        if section == "xid":
            _code(mistakes, key, name, raw, xids, policy.unknown_xid)
        elif section == "sxid":
            _code(mistakes, key, name, raw, sxids, policy.unknown_sxid)
        else:
            _rule(mistakes, key, section, name, raw, rules)
    mistakes.end()
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return replace(
        policy,
        rules=rules,
        xids=xids,
        sxids=sxids,
        version=f"{policy.version}+{digest}",
        overrides=tuple(sorted(_keys(document))),
    )


def _document(text: str, file: str) -> dict[str, Any]:
    if len(text) > MAX_CHARACTERS:
        raise BadPolicy([f"{file}: {len(text)} characters; expected at most {MAX_CHARACTERS}"])
    try:
        return validation.load_toml(text)
    except ValueError as error:  # a number with thousands of digits raises ValueError, not TomlError
        raise BadPolicy([f"{file}: not valid TOML: {' '.join(str(error).split())}"]) from error
    except RecursionError as error:
        raise BadPolicy([f"{file}: not valid TOML: nested too deep"]) from error


def _entries(mistakes: Mistakes, document: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for section, tables in document.items():
        if section not in SECTIONS:
            mistakes.unknown(key_of(section), section, SECTIONS)
            continue
        for name, raw in (mistakes.table(section, tables) or {}).items():
            if (table := mistakes.table(key_of(section, name), raw)) is not None:
                yield section, name, table


def _code(
    mistakes: Mistakes,
    key: str,
    name: str,
    raw: Mapping[str, Any],
    codes: dict[int, Meaning],
    unknown: Meaning,
) -> None:
    if not (name.isascii() and name.isdecimal() and str(int(name[:6])) == name and int(name) <= HIGHEST_CODE):
        mistakes.note(key, f"is not a code; expected a whole number from 0 to {HIGHEST_CODE}")
        return
    code = int(name)
    if key.startswith("xid") and code in _DECODED and not {"level", "action"} & raw.keys():
        mistakes.note(
            key, "its meaning depends on its line; set level and action to give it one fixed meaning"
        )
        return
    codes[code] = _spoken(mistakes, key, codes.get(code, unknown), raw)


def _rule(
    mistakes: Mistakes, key: str, section: str, name: str, raw: Mapping[str, Any], rules: dict[str, Rule]
) -> None:
    check = KERNEL + name if section == "kernel" else name
    known = {each: each for each in rules if not each.startswith(KERNEL)}
    if section == "kernel":
        known = {each.removeprefix(KERNEL): each for each in rules if each.startswith(KERNEL)}
    if name not in known:
        mistakes.unknown(key, name, known)
        return
    rule = rules[check]
    if rule.kind is RuleKind.EVENT and rule.meaning is not None:
        if section == "checks" and rule.meaning.level is Level.HEALTHY and not rule.meaning.hold_s:
            mistakes.note(key, "is not a fault but clears other findings: there is nothing to set")
            return
        rules[check] = replace(rule, meaning=_spoken(mistakes, key, rule.meaning, raw))
        return
    rules[check] = checks.changed(mistakes, key, rule, raw, checks.OPERATOR[rule.kind])
    checks.sound(mistakes, key, rules[check])


def _spoken(mistakes: Mistakes, key: str, before: Meaning, raw: Mapping[str, Any]) -> Meaning:
    """Return an event's meaning with the operator's changes and the fields that depend on them."""
    new = meanings.changed(mistakes, key, before, raw, meanings.OPERATOR)
    if {"level", "action"} & raw.keys():
        new = _followed(new, raw)
    meanings.sound(mistakes, key, new)
    return new


def _followed(new: Meaning, raw: Mapping[str, Any]) -> Meaning:
    healthy = new.level is Level.HEALTHY
    if healthy and "action" not in raw and not meanings.fits(new.level, new.action):
        new = replace(new, action=Action.NONE)
    if "clears" not in raw:
        follows = CLEARED_BY.get(new.action, new.clears) if "action" in raw else new.clears
        new = replace(new, clears=Clears.TIME if healthy else follows)
    recurs = new.recurs
    if recurs is not None and not raw.keys() & set(meanings.RECURS):
        ignored = healthy and "level" in raw
        if ignored or (recurs.level, recurs.action) <= (new.level, new.action):
            new = replace(new, recurs=None)
    return replace(new, overridden=True)


def _keys(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys that a valid document sets."""
    for section, tables in document.items():
        for name, raw in tables.items():
            yield from (f"{section}.{name}.{each}" for each in raw)
