"""Reads the shipped CSV tables into meanings: Xids, SXids, Xid 154, NVLink. Pure."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nodeagent.model import Action, Level
from nodeagent.policy import meanings, nvlink
from nodeagent.policy.nvlink import NvlinkPattern
from nodeagent.policy.rules import Clears, Meaning, ModelMeaning, Word
from nodeagent.policy.validation import Mistakes

WITHOUT_MIG = "off"  # marks a meaning that does not apply while MIG is on
OTHERS = "*"  # marks the row for all values that no other row names
_NUMBERS = ("hold_s", "recurs_bursts", "recurs_within_s", "verdict_since")
HIGHEST_CODE = 99_999  # the highest number of an Xid or an SXid
_DECODED = (
    "xid", "units", "mask_lt_575", "mask_ge_575", "error_status", "second_mask_lt_575", "second_mask_ge_575",
    "second_action", "severity", "investigate", "note",
)  # fmt: skip


def csv_rows(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a key for messages and the non-empty columns of each row."""
    for number, row in enumerate(csv.DictReader(text.splitlines()), 2):
        yield f"line-{number}", {name: value for name, value in row.items() if name and value}


def row_meaning(mistakes: Mistakes, at: str, row: Mapping[str, str]) -> Meaning:
    """Return the meaning in a row's columns; record their mistakes."""
    return meanings.read(mistakes, at, {name: _typed(name, value) for name, value in row.items()})


def _typed(name: str, value: str) -> Any:
    """Convert a column's text to the type that it has in a TOML file."""
    reader: Callable[[str], Any] = int if name in _NUMBERS else str
    if name == "recurs_same_variant":
        return {"true": True, "false": False}.get(value, value)
    try:
        return reader(value)
    except ValueError:
        return value


@dataclass(frozen=True, slots=True)
class XidTable:
    """`xid.csv`."""

    meanings: Mapping[int, Meaning]
    unknown: Meaning
    classes: Mapping[int, str]
    notes: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class SxidTable:
    """`sxid.csv`."""

    meanings: Mapping[int, Meaning]
    unknown: Meaning
    words: Mapping[Word, Meaning]


def read_xids(text: str) -> XidTable:
    """Return the meanings of the Xids. Raises BadPolicy."""
    mistakes = Mistakes("xid.csv")
    found: dict[int, Meaning] = {}
    unknown: list[Meaning] = []
    classes: dict[int, str] = {}
    notes: dict[int, str] = {}
    for at, row in csv_rows(text):
        code, kind, note = row.pop("xid", ""), row.pop("class", ""), row.pop("note", "")
        meaning = row_meaning(mistakes, at, row)
        if code == OTHERS:
            unknown.append(meaning)
        elif (number := _code(mistakes, at, code, found)) is not None:
            found[number] = meaning
            classes[number] = kind
            notes |= {number: note} if note else {}
    _one_unknown(mistakes, unknown)
    mistakes.end()
    return XidTable(found, unknown[0], classes, notes)


def read_models(text: str, xids: Mapping[int, Meaning]) -> tuple[ModelMeaning, ...]:
    """Return the meanings that differ from those in `xids` for a GPU model (A100).

    Raises BadPolicy.
    """
    mistakes = Mistakes("xid_models.csv")
    found: dict[tuple[str, str], ModelMeaning] = {}
    for at, row in csv_rows(text):
        code, model, mig = row.pop("xid", ""), row.pop("model", ""), row.pop("mig", "")
        row.pop("note", None)
        meaning = row_meaning(mistakes, at, row)
        if not model:
            mistakes.note(f"{at}.model", "is missing")
        if mig not in ("", WITHOUT_MIG):
            mistakes.wrong(f"{at}.mig", mig, f"{WITHOUT_MIG}, or nothing for any mode")
        if code.isdecimal() and int(code) in xids and (code, model) not in found:
            meaning = replace(meaning, verdict_since=xids[int(code)].verdict_since)
            found[code, model] = ModelMeaning(model, int(code), meaning, mig == WITHOUT_MIG)
        else:
            mistakes.wrong(at, code, "a code of xid.csv, once for each model")
    mistakes.end()
    return tuple(found.values())


def read_sxids(text: str) -> SxidTable:
    """Return the meanings of the SXids, with an entry for each number in a range. Raises BadPolicy."""
    mistakes = Mistakes("sxid.csv")
    ranges: list[tuple[range, Meaning]] = []
    unknown: list[Meaning] = []
    words: dict[Word, Meaning] = {}
    for at, row in csv_rows(text):
        first, last, word = row.pop("first", ""), row.pop("last", ""), row.pop("word", "")
        row.pop("note", None)
        meaning = row_meaning(mistakes, at, row)
        if word:
            words["sxid", word] = meaning
        elif first == OTHERS:
            unknown.append(meaning)
        elif first.isdecimal() and last.isdecimal() and int(first) <= int(last) <= HIGHEST_CODE:
            ranges.append((range(int(first), int(last) + 1), meaning))
        else:
            mistakes.wrong(at, f"{first}-{last}", f"first and last, up to {HIGHEST_CODE}")
    _one_unknown(mistakes, unknown)
    mistakes.end()
    # A single code takes precedence over a range that contains it.
    widest_first = sorted(ranges, key=lambda each: -len(each[0]))
    found = {code: meaning for codes, meaning in widest_first for code in codes}
    return SxidTable(found, unknown[0], words)


def read_verdicts(text: str) -> Mapping[Word, Meaning]:
    """Return the meanings of Xid 154's keywords. Raises BadPolicy."""
    mistakes = Mistakes("xid154.csv")
    found = {("xid154", row.pop("word", "")): row_meaning(mistakes, at, row) for at, row in csv_rows(text)}
    mistakes.end()
    return found


def _code(mistakes: Mistakes, at: str, text: str, before: Mapping[int, Meaning]) -> int | None:
    if text.isdecimal() and int(text) not in before:
        return int(text)
    mistakes.wrong(at, text, "a code, once")
    return None


def _one_unknown(mistakes: Mistakes, unknown: list[Meaning]) -> None:
    if len(unknown) != 1:
        mistakes.note(OTHERS, f"{len(unknown)} rows for all other codes; expected one")


def read_nvlink4(text: str) -> Mapping[nvlink.RegisterBit, Meaning]:
    """Return the meanings of the bits of Xid 74's registers. Raises BadPolicy."""
    mistakes = Mistakes("nvlink4_bits.csv")
    found: dict[nvlink.RegisterBit, Meaning] = {}
    for at, row in csv_rows(text):
        register, bit = row.pop("register", ""), row.pop("bit", "")
        row.pop("note", None)
        meaning = row_meaning(mistakes, at, row)
        if not (register.isdecimal() and int(register) in nvlink.REGISTERS):
            mistakes.wrong(f"{at}.register", register, ", ".join(map(str, nvlink.REGISTERS)))
        elif not (bit.isdecimal() and int(bit) < nvlink.WIDTH) or (int(register), int(bit)) in found:
            mistakes.wrong(f"{at}.bit", bit, f"a bit from 0 to {nvlink.WIDTH - 1}, once")
        else:
            found[int(register), int(bit)] = meaning
    mistakes.end()
    return found


def read_nvlink5(text: str) -> tuple[Mapping[NvlinkPattern, Meaning], Mapping[Word, Meaning]]:
    """Return the meanings of NVLink 5 reports, by unit and by severity alone. Raises BadPolicy."""
    mistakes = Mistakes("nvlink5.csv")
    found: dict[NvlinkPattern, Meaning] = {}
    words: dict[Word, Meaning] = {}
    for at, row in csv_rows(text):
        plain = {key: row.pop(key, "") for key in _DECODED}
        meaning = row_meaning(mistakes, at, {**row, "name": _nvlink5_name(plain)})
        if plain["units"] == OTHERS:
            words["nvlink5", plain["severity"]] = meaning
            continue
        for pattern, meant in _patterns(mistakes, at, plain, meaning):
            if pattern in found:
                mistakes.note(at, "is given twice")
            found[pattern] = meant
    mistakes.end()
    return found, words


def _patterns(
    mistakes: Mistakes, at: str, row: Mapping[str, str], meaning: Meaning
) -> Iterator[tuple[NvlinkPattern, Meaning]]:
    try:
        statuses = frozenset(int(each, 16) for each in row["error_status"].split("/") if each)
        units = frozenset(each.upper() for each in row["units"].split("/"))
        for prefix in ("", "second_"):
            before, since = row[f"{prefix}mask_lt_575"], row[f"{prefix}mask_ge_575"]
            if before or not prefix:
                masks = (nvlink.parse_mask(before), nvlink.parse_mask(since))
                meant = _promoted(meaning, row["second_action"]) if prefix else meaning
                yield NvlinkPattern(int(row["xid"]), units, *masks, statuses), meant
    except (ValueError, KeyError) as error:
        mistakes.note(at, f"cannot be read: {error}")


def _nvlink5_name(row: Mapping[str, str]) -> str:
    unit = "" if row["units"] == OTHERS else f" {row['units']}"
    later = row["investigate"].replace("_", " ").lower()
    advice = f" (then {later})" if later and later != "ignore" else ""
    return f"NVLink 5{unit}: {row['severity'].rstrip('*?')}{advice}"


def _promoted(meaning: Meaning, action: str) -> Meaning:
    """Return the meaning of an error that the driver has promoted to fatal, with the row's second action."""
    if action != "reset_gpu":
        raise ValueError(f"second_action {action!r} is not reset_gpu")
    recurs = meaning.recurs and replace(meaning.recurs, level=Level.UNHEALTHY)
    return replace(
        meaning,
        name=f"{meaning.name}; made fatal",
        level=Level.UNHEALTHY,
        action=Action.RESET_GPU,
        clears=Clears.RESET,
        recurs=recurs,
    )
