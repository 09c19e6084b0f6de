"""What NVIDIA's catalogue says of NVLink errors, from the text of our tables to meanings. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from nodeagent.policy import nvlink4, nvlink5
from nodeagent.policy.mistakes import Mistakes
from nodeagent.policy.nvlink5 import Pattern
from nodeagent.policy.rows import OTHERS, meant_by, rows
from nodeagent.policy.rules import Clears, Meaning, Word
from nodeagent.verdict import Action, Level

_DECODED = (
    "xid", "units", "mask_lt_575", "mask_ge_575", "error_status", "second_mask_lt_575", "second_mask_ge_575",
    "second_action", "severity", "investigate", "note",
)  # fmt: skip


def nvlink4_bits(text: str) -> Mapping[nvlink4.Bit, Meaning]:
    """Return what the bits of Xid 74's registers mean. Raises BadPolicy."""
    mistakes = Mistakes("nvlink4_bits.csv")
    found: dict[nvlink4.Bit, Meaning] = {}
    for at, row in rows(text):
        register, bit = row.pop("register", ""), row.pop("bit", "")
        row.pop("note", None)
        meaning = meant_by(mistakes, at, row)
        if not (register.isdecimal() and int(register) in nvlink4.REGISTERS):
            mistakes.wrong(f"{at}.register", register, ", ".join(map(str, nvlink4.REGISTERS)))
        elif not (bit.isdecimal() and int(bit) < nvlink4.WIDTH) or (int(register), int(bit)) in found:
            mistakes.wrong(f"{at}.bit", bit, "a bit from 0 to 31, once")
        else:
            found[int(register), int(bit)] = meaning
    mistakes.end()
    return found


def nvlink5_rows(text: str) -> tuple[Mapping[Pattern, Meaning], Mapping[Word, Meaning]]:
    """Return what reports of NVLink 5 units mean, and what their word means by itself. Raises BadPolicy."""
    mistakes = Mistakes("nvlink5.csv")
    found: dict[Pattern, Meaning] = {}
    words: dict[Word, Meaning] = {}
    for at, row in rows(text):
        plain = {key: row.pop(key, "") for key in _DECODED}
        meaning = meant_by(mistakes, at, {**row, "name": _nvlink5_name(plain)})
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
) -> Iterator[tuple[Pattern, Meaning]]:
    try:
        statuses = frozenset(int(each, 16) for each in row["error_status"].split("/") if each)
        units = frozenset(each.upper() for each in row["units"].split("/"))
        for prefix in ("", "second_"):
            before, since = row[f"{prefix}mask_lt_575"], row[f"{prefix}mask_ge_575"]
            if before or not prefix:
                masks = (nvlink5.mask(before), nvlink5.mask(since))
                meant = _promoted(meaning, row["second_action"]) if prefix else meaning
                yield Pattern(int(row["xid"]), units, *masks, statuses), meant
    except (ValueError, KeyError) as error:
        mistakes.note(at, f"cannot be read: {error}")


def _nvlink5_name(row: Mapping[str, str]) -> str:
    unit = "" if row["units"] == OTHERS else f" {row['units']}"
    later = row["investigate"].replace("_", " ").lower()
    advice = f" (then {later})" if later and later != "ignore" else ""
    return f"NVLink 5{unit}: {row['severity'].rstrip('*?')}{advice}"


def _promoted(meaning: Meaning, action: str) -> Meaning:
    """Return what an error means that the driver has made fatal: its second action."""
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
