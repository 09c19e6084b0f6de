"""The types of the policy's tables, which define the meaning of each check's values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType

from nodeagent.model import VERDICT_XID, Action, Level
from nodeagent.policy import nvlink


class RuleKind(Enum):
    """The kind of value that an observation has."""

    LEVEL = "level"  # a sample of a quantity that rises and falls
    RATE = "rate"  # a reading of a growing counter; a lower reading means that the counter has restarted
    STATE = "state"  # the number of one of a few named states
    EVENT = "event"  # an occurrence; the value is its code


class Clears(Enum):
    """The condition that clears a finding about an event; the hold time starts when it is met."""

    TIME = "time"  # no condition: the finding clears after a time without a repetition
    RESET = "reset"  # the GPU was reset, the driver reloaded, or the node rebooted
    BOOT = "boot"  # the node rebooted
    REPLACED = "replaced"  # another GPU has taken its place, or an operator has cleared the finding


# The condition that ends a finding with this action, unless the table sets another condition.
CLEARED_BY: Mapping[Action, Clears] = MappingProxyType(
    {
        Action.RESET_GPU: Clears.RESET,
        Action.REBOOT_NODE: Clears.BOOT,
        Action.REPLACE: Clears.REPLACED,
    }
)

# The remedy that meets each condition; none for `Clears.TIME`.
REMEDY_OF: Mapping[Clears, Action] = MappingProxyType(
    {clears: action for action, clears in CLEARED_BY.items()}
)

# The condition in words; "" if only time clears the finding.
CLEARS_IN_WORDS: Mapping[Clears, str] = MappingProxyType(
    {
        Clears.TIME: "",
        Clears.RESET: "a reset of the GPU or a reboot",
        Clears.BOOT: "a reboot",
        Clears.REPLACED: "holdfast node clear, or another GPU in its place",
    }
)


@dataclass(frozen=True, slots=True)
class Bound:
    """The conditions for one level. All of them must hold at a sample."""

    at: float  # the limit: a level must reach it; a rate, in counts within `window_s`, must exceed it
    need: int = 1  # how many of the newest `of` samples must meet the limit
    of: int = 1
    for_s: float = 0.0  # how long every sample must have met it


@dataclass(frozen=True, slots=True)
class CheckState:
    """One value of a discrete check."""

    word: str
    level: Level
    action: Action
    for_s: float = 0.0  # how long the state must have lasted
    why: str = ""


@dataclass(frozen=True, slots=True)
class Recurs:
    """The consequence of a recurring event. Recurrence counts bursts, not single lines."""

    bursts: int
    within_s: float
    level: Level
    action: Action
    same_variant: bool = False  # count only bursts of the same variant


@dataclass(frozen=True, slots=True)
class Meaning:
    """The meaning of one code of an event check."""

    name: str
    level: Level
    action: Action
    clears: Clears
    hold_s: float  # the time without a repetition after the condition in `clears` is met
    source: str
    recurs: Recurs | None = None
    # the first driver branch that sends a verdict (Xid 154) with this code
    verdict_since: int | None = None
    overridden: bool = False  # by the operator: also takes precedence over the driver's verdict


@dataclass(frozen=True, slots=True)
class Rule:
    """One check."""

    check: str
    kind: RuleKind
    what: str  # a noun phrase, for people: "temperature margin"
    source: str  # the origin of the rule, for people
    unit: str = ""
    period_s: float = 0.0  # the interval between samples; 0: sampled when something happens
    below: bool = False  # for a level: lower values are worse
    window_s: float = 60.0  # for a rate: the window in which its counts are added up
    degraded: Bound | None = None
    unhealthy: Bound | None = None
    action: Action = Action.NONE  # when unhealthy
    degraded_action: Action = Action.NONE
    # For a level or a rate: values on the good side of this are clean. If it is None, values within the
    # bounds are clean.
    clear_at: float | None = None
    clear_s: float = 120.0  # how long all samples must have been clean
    states: Mapping[int, CheckState] = field(default_factory=dict)
    # For a rate: growth beyond `unhealthy` is a fault until it is remedied, even if the growth stops.
    lasts: bool = False
    # For a rate: the counter starts at 0 at each boot. Errors counted before the first reading after a boot
    # are not a fault, because links count errors while they come up.
    restarts_at_boot: bool = False
    of_gpus: bool = False  # about the GPUs or their driver, although the entity is the node or the agent
    meaning: Meaning | None = None  # for an event check with only one code
    # Derived once, because it is needed for each sample: the longest time that a bound or a state must last,
    # and the most samples that a bound counts, which may be one more after a gap.
    longest_s: float = field(init=False, compare=False, repr=False)
    most_samples: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        bounds = [each for each in (self.degraded, self.unhealthy) if each]
        waits = [each.for_s for each in bounds] + [state.for_s for state in self.states.values()]
        object.__setattr__(self, "longest_s", max(waits, default=0.0))
        more = 1 if self.period_s else 0
        counted = [each.of + more for each in bounds if each.need > 1]
        object.__setattr__(self, "most_samples", max([1, *counted]))


@dataclass(frozen=True, slots=True)
class ModelMeaning:
    """The meaning that an Xid has only on GPUs of one model."""

    model: str  # in the GPU's name: A100
    code: int
    meaning: Meaning
    without_mig: bool = False  # only while MIG is not known to be on

    def is_about(self, name: str) -> bool:
        """Return True for a GPU of the model: "NVIDIA A100-SXM4-80GB" and "A100X", but not "RTX A1000"."""
        return re.search(rf"(?<![A-Za-z0-9]){re.escape(self.model)}(?![0-9])", name) is not None


Word = tuple[str, str]  # table, word: ("xid154", "reset_gpu"), ("nvlink5", "fatal"), ("sxid", "non-fatal")


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """The tables that the evaluator uses."""

    rules: Mapping[str, Rule]
    xids: Mapping[int, Meaning]
    sxids: Mapping[int, Meaning]
    unknown_sxid: Meaning
    unknown_xid: Meaning
    version: str  # the version of the tables and the operator's file, which is part of every report
    nvlink4_bits: Mapping[nvlink.RegisterBit, Meaning] = field(default_factory=dict)  # for Xid 74
    nvlink5_rows: Mapping[nvlink.NvlinkPattern, Meaning] = field(default_factory=dict)  # for Xids 144 to 150
    words: Mapping[Word, Meaning] = field(default_factory=dict)  # the meanings of the driver's keywords
    classes: Mapping[int, str] = field(default_factory=dict)  # by Xid: the usual location of the fault
    notes: Mapping[str, str] = field(default_factory=dict)  # by `xid.79`: remarks that fit no column
    models: tuple[ModelMeaning, ...] = ()  # meanings that differ by GPU model
    overrides: tuple[str, ...] = ()  # keys that the operator's file sets: `xid.79.action`

    def is_event(self, check: str) -> bool:
        """Return True if the observations of a check are events."""
        rule = self.rules.get(check)
        return check in ("xid", "sxid") or (rule is not None and rule.kind is RuleKind.EVENT)

    def has_check(self, check: str) -> bool:
        return check in ("xid", "sxid") or check in self.rules

    def meaning(self, check: str, code: int, variant: str = "", branch: int | None = None) -> Meaning:
        """Return the meaning of an event on a driver of `branch`, such as 575 (None: an unknown branch).

        Raises:
            KeyError: no event check has that name.
        """
        if check == "xid":
            return _placed(self._xid(code, variant, branch), variant)
        if check == "sxid":
            return self._sxid(code, variant)
        found = self.rules[check].meaning
        if found is None:
            raise KeyError(check)
        return found

    def for_gpu(self, name: str, *, mig: bool = False) -> HealthPolicy:
        """Return the policy for a GPU of this name, such as `NVIDIA A100-SXM4-80GB`.

        Args:
            mig: True if MIG is on. Some errors are then contained to one instance of the GPU.
        """
        own = {
            each.code: each.meaning
            for each in self.models
            if each.is_about(name) and not (each.without_mig and mig) and not self.xids[each.code].overridden
        }
        return replace(self, xids={**self.xids, **own}) if own else self

    def _xid(self, code: int, variant: str, branch: int | None) -> Meaning:
        found = self.xids.get(code, self.unknown_xid)
        if found.overridden or not variant:
            return found
        if code == VERDICT_XID:
            meant = [self.words[word] for word in (("xid154", variant),) if word in self.words]
        elif code == nvlink.NVLINK4_XID:
            # If a bit is not in the table, the code keeps the meaning that it has without registers.
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
            return found  # always fatal, regardless of the line's severity
        return self.words.get(("sxid", variant), found)


def _placed(meaning: Meaning, variant: str) -> Meaning:
    """Drop a recurrence rule for the same variant if the event has no variant."""
    if not variant and meaning.recurs is not None and meaning.recurs.same_variant:
        return replace(meaning, recurs=None)
    return meaning
