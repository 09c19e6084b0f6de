"""The shapes of the policy's tables: what each check's values mean. `policy.loading` reads the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from nodeagent.model import VERDICT_XID, Action, Level
from nodeagent.policy import nvlink


class Kind(Enum):
    """What an observation's value is."""

    LEVEL = "level"  # a sample of something that rises and falls
    RATE = "rate"  # the reading of a counter that grows; one that falls has begun anew
    STATE = "state"  # one of a few named states, by number
    EVENT = "event"  # something that happened; the value is its code


class Clears(Enum):
    """What ends a finding about an event, before the time without a repetition counts."""

    TIME = "time"  # nothing else
    RESET = "reset"  # the GPU was reset, the driver reloaded, or the node booted anew
    BOOT = "boot"  # the node booted anew
    REPLACED = "replaced"  # another GPU is in its place, or an operator has cleared it


@dataclass(frozen=True, slots=True)
class Bound:
    """What it takes for one level. All of it must hold at a sample."""

    at: float  # a level: reached or passed; a rate: passed, in counts within `window_s`
    need: int = 1  # so many ...
    of: int = 1  # ... of the newest so many samples
    for_s: float = 0.0  # and every sample for so long


@dataclass(frozen=True, slots=True)
class State:
    """One value of a discrete check."""

    word: str
    level: Level
    action: Action
    for_s: float = 0.0  # how long it must have held
    why: str = ""


@dataclass(frozen=True, slots=True)
class Recurs:
    """What follows when an event comes again: bursts, not single lines, are counted."""

    bursts: int
    within_s: float
    level: Level
    action: Action
    same_variant: bool = False  # count only those of the same variant


@dataclass(frozen=True, slots=True)
class Meaning:
    """What one code of an event check means."""

    name: str
    level: Level
    action: Action
    clears: Clears
    hold_s: float  # time without a repetition, counted from what `clears` asks for
    source: str
    recurs: Recurs | None = None
    verdict_since: int | None = None  # the driver branch that sends its own verdict (Xid 154) with this code
    overridden: bool = False  # by the operator: goes before the driver's verdict, too


@dataclass(frozen=True, slots=True)
class Rule:
    """One check."""

    check: str
    kind: Kind
    what: str  # a noun phrase, for people: "temperature margin"
    source: str  # who says so
    unit: str = ""
    period_s: float = 0.0  # how often a sensor gives a sample; 0: when it happens
    below: bool = False  # a level: the lower, the worse
    window_s: float = 60.0  # of a rate
    degraded: Bound | None = None
    unhealthy: Bound | None = None
    action: Action = Action.NONE  # when unhealthy
    degraded_action: Action = Action.NONE
    clear_at: float | None = (
        None  # of a level or a rate: what is on its good side is clean; None: within the bounds
    )
    clear_s: float = 120.0  # how long all must be clean
    states: Mapping[int, State] = field(default_factory=dict)
    meaning: Meaning | None = None  # of an event whose check has one code only


Word = tuple[str, str]  # table, word: ("xid154", "reset_gpu"), ("nvlink5", "fatal"), ("sxid", "non-fatal")


@dataclass(frozen=True, slots=True)
class Policy:
    """Everything that the evaluator looks up."""

    rules: Mapping[str, Rule]
    xids: Mapping[int, Meaning]
    sxids: Mapping[int, Meaning]
    unknown_sxid: Meaning
    unknown_xid: Meaning
    version: str  # of the tables, with the operator's file: goes into every report
    nvlink4_bits: Mapping[nvlink.RegisterBit, Meaning] = field(default_factory=dict)  # of Xid 74
    nvlink5_rows: Mapping[nvlink.NvlinkPattern, Meaning] = field(default_factory=dict)  # of Xid 144 to 150
    words: Mapping[Word, Meaning] = field(default_factory=dict)  # what the driver's own words mean
    classes: Mapping[int, str] = field(default_factory=dict)  # of Xids: whose fault it mostly is
    notes: Mapping[str, str] = field(default_factory=dict)  # by `xid.79`: what no column can say
    overrides: tuple[str, ...] = ()  # keys that the operator's file has set: `xid.79.action`

    def meaning(self, check: str, code: int, variant: str = "", branch: int | None = None) -> Meaning:
        """Return what an event means on a driver of `branch` (575); None if that is not known.

        Raises:
            KeyError: no check of events has that name.
        """
        if check == "xid":
            return _placed(self._xid(code, variant, branch), variant)
        if check == "sxid":
            return self._sxid(code, variant)
        found = self.rules[check].meaning
        if found is None:
            raise KeyError(check)
        return found

    def _xid(self, code: int, variant: str, branch: int | None) -> Meaning:
        found = self.xids.get(code, self.unknown_xid)
        if found.overridden or not variant:
            return found
        if code == VERDICT_XID:
            meant = [self.words[word] for word in (("xid154", variant),) if word in self.words]
        elif code == nvlink.NVLINK4_XID:
            # A bit that the table does not have leaves the code as bad as it is without its registers.
            meant = [self.nvlink4_bits.get(bit, found) for bit in nvlink.set_bits(variant)]
        elif code in nvlink.NVLINK5_XIDS:
            meant = self._nvlink5(code, variant, branch)
        else:
            meant = []
        worst = max(meant, key=lambda each: (each.level, each.action), default=found)
        return replace(worst, verdict_since=found.verdict_since)

    def _nvlink5(self, code: int, variant: str, branch: int | None) -> list[Meaning]:
        report = nvlink.parse_report(variant)
        if report is None:
            return []
        rows = nvlink.matching_rows(self.nvlink5_rows, code, report, branch)
        if rows:
            return [self.nvlink5_rows[row] for row in rows]
        word = ("nvlink5", "fatal" if report.fatal else "nonfatal")
        return [self.words[word]] if word in self.words else []

    def _sxid(self, code: int, variant: str) -> Meaning:
        found = self.sxids.get(code, self.unknown_sxid)
        if found.overridden or found.level is Level.UNHEALTHY:
            return found  # always fatal, whatever its line says
        return self.words.get(("sxid", variant), found)


def _placed(meaning: Meaning, variant: str) -> Meaning:
    """Leave out the recurrence at the same place of what has told no place."""
    if not variant and meaning.recurs is not None and meaning.recurs.same_variant:
        return replace(meaning, recurs=None)
    return meaning
