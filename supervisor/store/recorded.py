"""Convert decisions and their views to JSON. Only recorded fields are included.

A field marked with `codec.added` is left out if it has its default value. If a run does not need the field,
its lines therefore stay the same as in earlier versions.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, cast

from holdfast.journal_fields import is_recorded
from holdfast.protocol.codec import is_added


def recorded(value: Any) -> Any:
    """Return `value` in a form that `json.dumps` accepts. Unrecorded fields of dataclasses are left out."""
    if is_dataclass(value):
        names, added = _recorded_names(cast("Hashable", type(value)))
        found = {name: recorded(getattr(value, name)) for name in names}
        given = ((name, default, getattr(value, name)) for name, default in added)
        return found | {name: recorded(each) for name, default, each in given if each != default}
    if isinstance(value, tuple | list):
        return [recorded(each) for each in value]
    if isinstance(value, Mapping):
        return {key: recorded(each) for key, each in value.items()}
    return value


@lru_cache(maxsize=256)
def _recorded_names(kind: Hashable) -> tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]:
    """Return the names of the fields that are always recorded, and the others with their defaults."""
    there = [each for each in fields(cast("type[Any]", kind)) if is_recorded(each)]
    added = tuple((each.name, each.default) for each in there if is_added(each))
    return tuple(each.name for each in there if not is_added(each)), added
