"""The data to store on a node between decisions, as JSON for an annotation. Pure.

Another version may have written it. Missing fields get their default values, and unknown fields are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, replace
from typing import Any, TypeVar

from supervisor.quarantine.model import (
    MAX_HISTORY,
    MAX_RUNS,
    NodeView,
    PastQuarantine,
    Quarantine,
    RunFault,
    Waiver,
    is_usable,
)

Record = TypeVar("Record", Quarantine, Waiver, PastQuarantine, RunFault)


class BadState(ValueError):
    """The stored data is invalid. The message says which field, its value, and what was expected."""


def to_json(node: NodeView) -> dict[str, Any]:
    """Return the data to store on the node, without fields that have their default values."""
    found: dict[str, Any] = {}
    if node.quarantine is not None:
        found["quarantine"] = _dumped(node.quarantine)
    if node.waiver is not None:
        found["waiver"] = _dumped(node.waiver)
    if node.history:
        found["history"] = [_dumped(each) for each in node.history]
    if node.released_at_s is not None:
        found["released_at_s"] = node.released_at_s
    if node.runs:
        found["runs"] = [_dumped(each) for each in node.runs[-MAX_RUNS:]]
    return found


def from_json(node: NodeView, raw: Mapping[str, Any]) -> NodeView:
    """Return the node with the stored data. Raises `BadState` if it is malformed."""
    history, runs = _list(raw, "history"), _list(raw, "runs")
    quarantine, waiver = raw.get("quarantine"), raw.get("waiver")
    released_at_s = raw.get("released_at_s")
    return replace(
        node,
        quarantine=None if quarantine is None else _loaded(Quarantine, quarantine, "quarantine"),
        waiver=None if waiver is None else _loaded(Waiver, waiver, "waiver"),
        history=tuple(_loaded(PastQuarantine, each, "history") for each in history[-MAX_HISTORY:]),
        released_at_s=None if released_at_s is None else _fit(released_at_s, "float", "released_at_s"),
        runs=tuple(_loaded(RunFault, each, "runs") for each in runs[-MAX_RUNS:]),
    )


def _list(raw: Mapping[str, Any], name: str) -> Sequence[Any]:
    found = raw.get(name) or ()
    if not isinstance(found, (list, tuple)):
        raise BadState(f"{name} is {found!r}; expected a list")
    return found


def _dumped(record: Quarantine | Waiver | PastQuarantine | RunFault) -> dict[str, Any]:
    default = {each.name: each.default for each in fields(record)}
    return {name: value for name, value in asdict(record).items() if value != default[name]}


def _loaded(kind: type[Record], raw: object, where: str) -> Record:
    if not isinstance(raw, Mapping):
        raise BadState(f"{where} is {raw!r}; expected an object")
    given: dict[str, Any] = {}
    for each in fields(kind):
        if each.name in raw:
            given[each.name] = _fit(raw[each.name], str(each.type), f"{where}.{each.name}")
        elif each.default is MISSING:
            raise BadState(f"{where}.{each.name} is missing")
    return kind(**given)


def _fit(value: object, kind: str, where: str) -> Any:
    """Return `value` as `kind`, the annotated type of its field. Raises `BadState` for another type."""
    if kind.endswith("| None") and value is None:
        return None
    if kind.startswith("float") and isinstance(value, (int, float)) and not isinstance(value, bool):
        if is_usable(value):
            return float(value)
    elif kind.startswith("tuple"):
        if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
            return tuple(value)
    elif type(value).__name__ == kind:
        return value
    raise BadState(f"{where} is {value!r}; expected {kind}")
