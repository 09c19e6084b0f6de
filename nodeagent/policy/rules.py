"""The types of the policy's tables: what each check's values mean. `policy.loading` reads the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from nodeagent.model import VERDICT_XID, Action, Level
from nodeagent.policy import nvlink


class RuleKind(Enum):
    """What the value of an observation is."""

    LEVEL = "level"  # a sample of something that rises and falls
    RATE = "rate"  # the reading of a counter that grows; one that falls has restarted
    STATE = "state"  # one of a few named states, by number
    EVENT = "event"  # something that happened; the value is its code


class Clears(Enum):
    """What ends a finding about an event; the time without a repetition counts from there."""

    TIME = "time"  # only the time without a repetition
    RESET = "reset"  # the GPU was reset, the driver reloaded, or the node rebooted
    BOOT = "boot"  # the node rebooted
    REPLACED = "replaced"  # another GPU is in its place, or an operator has cleared it


@dataclass(frozen=True, slots=True)
class Bound:
    """The conditions for one level. All of them must hold at a sample."""

    at: float  # a level must reach it; a rate must exceed it, in counts within `window_s`
    need: int = 1  # this many ...
    of: int = 1  # ... of the newest this many samples
    for_s: float = 0.0  # and every sample for this long


@dataclass(frozen=True, slots=True)
class CheckState:
    """One value of a discrete check."""

    word: str
    level: Level
    action: Action
    for_s: float = 0.0  # how long it must have held
    why: str = ""


@dataclass(frozen=True, slots=True)
class Recurs:
    """What follows when an event recurs: bursts, not single lines, are counted."""

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
    hold_s: float  # time without a repetition, counted from what `clears` requires
    source: str
    recurs: Recurs | None = None
    # the first driver branch that sends its own verdict (Xid 154) with this code
    verdict_since: int | None = None
    overridden: bool = False  # by the operator: takes precedence over the driver's verdict, too


@dataclass(frozen=True, slots=True)
class Rule:
    """One check."""

    check: str
    kind: RuleKind
    what: str  # a noun phrase, for people: "temperature margin"
    source: str  # of the rule, for people
    unit: str = ""
    period_s: float = 0.0  # the interval between samples; 0: sampled when something happens
    below: bool = False  # a level: the lower, the worse
    window_s: float = 60.0  # of a rate
    degraded: Bound | None = None
    unhealthy: Bound | None = None
    action: Action = Action.NONE  # when unhealthy
    degraded_action: Action = Action.NONE
    clear_at: float | None = (
        None  # of a level or a rate: values on its good side are clean; None: values within the bounds are
    )
    clear_s: float = 120.0  # how long all samples must be clean
    states: Mapping[int, CheckState] = field(default_factory=dict)
    meaning: Meaning | None = None  # of an event whose check has only one code


Word = tuple[str, str]  # table, word: ("xid154", "reset_gpu"), ("nvlink5", "fatal"), ("sxid", "non-fatal")


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """Everything that the evaluator looks up."""

    rules: Mapping[str, Rule]
    xids: Mapping[int, Meaning]
    sxids: Mapping[int, Meaning]
    unknown_sxid: Meaning
    unknown_xid: Meaning
    version: str  # of the tables and the operator's file: part of every report
    nvlink4_bits: Mapping[nvlink.RegisterBit, Meaning] = field(default_factory=dict)  # of Xid 74
    nvlink5_rows: Mapping[nvlink.NvlinkPattern, Meaning] = field(default_factory=dict)  # of Xid 144 to 150
    words: Mapping[Word, Meaning] = field(default_factory=dict)  # the meanings of the driver's own words
    classes: Mapping[int, str] = field(default_factory=dict)  # of Xids: where the fault usually lies
    notes: Mapping[str, str] = field(default_factory=dict)  # by `xid.79`: remarks that fit no column
    overrides: tuple[str, ...] = ()  # keys that the operator's file sets: `xid.79.action`

    def meaning(self, check: str, code: int, variant: str = "", branch: int | None = None) -> Meaning:
        """Return the meaning of an event on a driver of `branch`, such as 575; None if it is not known.

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
            # For a bit that is not in the table, the code means what it means without registers.
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
            return found  # always fatal, whatever the line says
        return self.words.get(("sxid", variant), found)


def _placed(meaning: Meaning, variant: str) -> Meaning:
    """Drop a recurrence of the same variant if the event has no variant."""
    if not variant and meaning.recurs is not None and meaning.recurs.same_variant:
        return replace(meaning, recurs=None)
    return meaning
