"""The Xid and SXid tables that we ship, from text to meanings: whole, or BadPolicy. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nodeagent.policy.mistakes import Mistakes
from nodeagent.policy.rows import OTHERS, meant_by, rows
from nodeagent.policy.rules import Meaning, Word

HIGHEST_SXID = 99_999


@dataclass(frozen=True, slots=True)
class Xids:
    """`xid.csv`."""

    meanings: Mapping[int, Meaning]
    unknown: Meaning
    classes: Mapping[int, str]
    notes: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Sxids:
    """`sxid.csv`."""

    meanings: Mapping[int, Meaning]
    unknown: Meaning
    words: Mapping[Word, Meaning]


def xids(text: str) -> Xids:
    """Return the Xids. Raises BadPolicy."""
    mistakes = Mistakes("xid.csv")
    found: dict[int, Meaning] = {}
    unknown: list[Meaning] = []
    classes: dict[int, str] = {}
    notes: dict[int, str] = {}
    for at, row in rows(text):
        code, kind, note = row.pop("xid", ""), row.pop("class", ""), row.pop("note", "")
        meaning = meant_by(mistakes, at, row)
        if code == OTHERS:
            unknown.append(meaning)
        elif (number := _code(mistakes, at, code, found)) is not None:
            found[number] = meaning
            classes[number] = kind
            notes |= {number: note} if note else {}
    _one(mistakes, unknown)
    mistakes.end()
    return Xids(found, unknown[0], classes, notes)


def sxids(text: str) -> Sxids:
    """Return the SXids, those of a range by each of its numbers. Raises BadPolicy."""
    mistakes = Mistakes("sxid.csv")
    ranges: list[tuple[range, Meaning]] = []
    unknown: list[Meaning] = []
    words: dict[Word, Meaning] = {}
    for at, row in rows(text):
        first, last, word = row.pop("first", ""), row.pop("last", ""), row.pop("word", "")
        row.pop("note", None)
        meaning = meant_by(mistakes, at, row)
        if word:
            words["sxid", word] = meaning
        elif first == OTHERS:
            unknown.append(meaning)
        elif first.isdecimal() and last.isdecimal() and int(first) <= int(last) <= HIGHEST_SXID:
            ranges.append((range(int(first), int(last) + 1), meaning))
        else:
            mistakes.wrong(at, f"{first}-{last}", f"first and last, up to {HIGHEST_SXID}")
    _one(mistakes, unknown)
    mistakes.end()
    # A code by itself goes before the group that it is in.
    widest_first = sorted(ranges, key=lambda each: -len(each[0]))
    found = {code: meaning for codes, meaning in widest_first for code in codes}
    return Sxids(found, unknown[0], words)


def verdicts(text: str) -> Mapping[Word, Meaning]:
    """Return what the words of Xid 154 mean. Raises BadPolicy."""
    mistakes = Mistakes("xid154.csv")
    found = {("xid154", row.pop("word", "")): meant_by(mistakes, at, row) for at, row in rows(text)}
    mistakes.end()
    return found


def _code(mistakes: Mistakes, at: str, text: str, before: Mapping[int, Meaning]) -> int | None:
    if text.isdecimal() and int(text) not in before:
        return int(text)
    mistakes.wrong(at, text, "a code, once")
    return None


def _one(mistakes: Mistakes, unknown: list[Meaning]) -> None:
    if len(unknown) != 1:
        mistakes.note(OTHERS, f"{len(unknown)} rows for all other codes; expected one")
