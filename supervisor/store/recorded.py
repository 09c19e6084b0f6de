"""Convert decisions and their views to JSON. Only recorded fields are included."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, cast

from supervisor.view.model import is_recorded


def recorded(value: Any) -> Any:
    """Return `value` in a form that `json.dumps` accepts. Unrecorded fields of dataclasses are left out."""
    if is_dataclass(value):
        return {
            name: recorded(getattr(value, name)) for name in _recorded_names(cast("Hashable", type(value)))
        }
    if isinstance(value, tuple | list):
        return [recorded(each) for each in value]
    if isinstance(value, Mapping):
        return {key: recorded(each) for key, each in value.items()}
    return value


@lru_cache(maxsize=256)
def _recorded_names(kind: Hashable) -> tuple[str, ...]:
    return tuple(each.name for each in fields(cast("type[Any]", kind)) if is_recorded(each))
