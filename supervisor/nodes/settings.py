"""The operator's settings of the quarantine, from the data of a ConfigMap. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from holdfast.node_report import ACTIONS
from supervisor.options.value_types import ValueType, choice, duration, number, whole_number
from supervisor.quarantine.model import NodePolicy

FIRST_HOUR = "first-hour"
DRY_RUN_S = 3600.0  # the time after the installation when an operator can see what would be done
MAX_PROBLEMS = 10


class BadSettings(ValueError):
    """The settings are invalid. `problems` has a sentence for each mistake."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class QuarantineSettings:
    """What an operator can set. `dry_run` is "true", "false" or "first-hour".

    With `drain_others`, other people's pods are evicted from a drained node too.
    """

    policy: NodePolicy = field(default_factory=NodePolicy)
    dry_run: str = FIRST_HOUR
    drain_others: bool = False

    def is_dry(self, installed_s: float | None, now_s: float) -> bool:
        """True if actions are only announced. `installed_s` is when Holdfast was installed, if known."""
        if self.dry_run != FIRST_HOUR:
            return self.dry_run == "true"
        return installed_s is None or now_s - installed_s < DRY_RUN_S


def _drained_actions(text: str) -> frozenset[str]:
    found = frozenset(filter(None, (each.strip() for each in text.split(","))))
    if not found <= frozenset(ACTIONS):
        raise ValueError
    return found


_FLAG = choice("true", "false")
_SHARE = number(0.0, 1.0)
_COUNT = whole_number(0, 100_000)
_TIME = duration(0.001, 365 * 86400.0)
_TIMES = number(1.0, 1000.0)
_DRAINED = ValueType(
    "word", f"some of {', '.join(ACTIONS)}, separated by commas", _drained_actions, words=ACTIONS
)
_SHARES, _FACTORS = ("max_share", "storm_share", "cohort_share"), ("unremedied",)


def _type_of(field_name: str) -> ValueType:
    if field_name == "drain_for":
        return _DRAINED
    if field_name == "prefer_away":
        return _FLAG
    if field_name in _SHARES:
        return _SHARE
    if field_name in _FACTORS:
        return _TIMES
    return _TIME if field_name.endswith("_s") else _COUNT


def key_of(field_name: str) -> str:
    """Return the key of a field of the policy: `confirm_s` is "confirm"."""
    return field_name.removesuffix("_s").replace("_", "-")


POLICY_KEYS: Mapping[str, str] = {key_of(each.name): each.name for each in fields(NodePolicy)}
KEYS: Mapping[str, ValueType] = {
    "dry-run": choice("true", "false", FIRST_HOUR),
    "drain-others": _FLAG,
    **{key: _type_of(name) for key, name in POLICY_KEYS.items()},
}


def parse(data: Mapping[str, str]) -> QuarantineSettings:
    """Return the settings. Keys that are not given have their defaults. Raises `BadSettings`."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key in sorted(data):
        try:
            values[key] = _value(key, data[key])
        except ValueError as error:
            problems.append(str(error))
    given = {POLICY_KEYS[key]: _policy_value(value) for key, value in values.items() if key in POLICY_KEYS}
    policy = NodePolicy()
    if not problems:
        try:
            policy = NodePolicy(**given)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise BadSettings(tuple(problems[:MAX_PROBLEMS]))
    return QuarantineSettings(
        policy, values.get("dry-run", FIRST_HOUR), values.get("drain-others", "false") == "true"
    )


def _policy_value(value: object) -> Any:
    return value == "true" if value in ("true", "false") else value


def _value(key: str, text: object) -> object:
    known = KEYS.get(key)
    if known is None:
        near = difflib.get_close_matches(key.replace("_", "-").removesuffix("-s"), KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(KEYS)}"
        raise ValueError(f"{key}: unknown setting: {hint}")
    try:
        return known.read(str(text))
    except ValueError as error:
        near = difflib.get_close_matches(str(text), known.words, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"{key}: invalid value {str(text)[:80]!r}: {hint}expected {error}") from None
