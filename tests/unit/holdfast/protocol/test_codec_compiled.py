"""The code that is compiled for a class reads the same values, and refuses the others with the same words."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.protocol import codec
from tests.unit.holdfast.protocol.test_codec import KINDS, instances
from tests.unit.holdfast.protocol.test_codec_refusals import Part, Timed, Whole


def _codec_without_compiled_code() -> Any:
    """Return another instance of the module `codec`, which reads each object field by field."""
    spec = importlib.util.find_spec(codec.__name__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["_unfrozen_twin"] = lambda kind: None
    return module


REFERENCE = _codec_without_compiled_code()


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedPart:
    size: int


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedWhole:
    """A class with all kinds of fields, for which code is compiled."""

    number: int
    ratio: float = 0.0
    waited_s: float = 0.0
    text: str = ""
    flag: bool = False
    maybe: int | None = None
    pair: tuple[int, str] = (0, "")
    many: tuple[int, ...] = dataclasses.field(default=(), metadata=codec.at_most(3))
    table: Mapping[str, int] | None = None
    part: SlottedPart | None = None
    parts: tuple[SlottedPart, ...] = ()
    late: int = dataclasses.field(default=0, metadata=codec.added())


MESSAGES: tuple[type[Any], ...] = (*KINDS.values(), SlottedWhole)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1.0, 0.5, -0.0, 1e308, 1e10, 1.1e10, float("nan"), float("inf"),
    (1 << 63) - 1, -(1 << 63), -(1 << 63) - 1, (1 << 64) - 1, 1 << 64, 10**308, 10**309, -(10**400),
    "", "x", "x" * (codec.MAX_TEXT + 1), [], [0], [True], [0.0], [None], [[]], [0] * 600,
    {}, {"size": 1}, {"size": True}, {"": 0},
)  # fmt: skip
ANYTHING = st.sampled_from(VALUES).map(copy.deepcopy)


def outcome(module: ModuleType | Any, kind: type[Any], value: Any, **options: Any) -> str:
    """Return what `from_json` returns, with the types of all values, or the words of its refusal."""
    try:
        found = module.from_json(kind, value, **options)
    except module.InvalidMessage as error:
        return f"refused: {error}"
    assert type(found) is kind
    return repr(found)


def _objects(value: Any) -> list[Any]:
    """Return all objects and lists within a JSON value that have elements."""
    if not isinstance(value, dict | list) or not value:
        return []
    parts = value.values() if isinstance(value, dict) else value
    return [value, *(found for part in parts for found in _objects(part))]


def _damage(draw: st.DrawFn, value: Any) -> None:
    """Replace, remove or add an element somewhere in a JSON value."""
    where = draw(st.sampled_from(_objects(value)))
    key = draw(st.sampled_from(list(where) if isinstance(where, dict) else range(len(where))))
    change = draw(st.sampled_from(["replace", "remove", "add", "rename"]))
    if change == "replace":
        where[key] = draw(ANYTHING)
    elif change == "remove":
        del where[key]
    elif isinstance(where, list):
        where.append(draw(ANYTHING))
    else:
        where["later"] = where.pop(key) if change == "rename" else draw(ANYTHING)


@st.composite
def cases(draw: st.DrawFn) -> tuple[type[Any], Any]:
    """Return a class and the JSON value of an instance, which usually has some damage."""
    kind = draw(st.sampled_from(MESSAGES))
    value = json.loads(codec.encode(draw(instances(kind))))
    for _ in range(draw(st.integers(0, 2))):
        if value:
            _damage(draw, value)
    return kind, value


@given(cases(), st.booleans())
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_compiled_code_reads_every_value_as_field_by_field(
    case: tuple[type[Any], Any], lenient: bool
) -> None:
    kind, value = case
    assert outcome(codec, kind, value, lenient=lenient) == outcome(REFERENCE, kind, value, lenient=lenient)


@given(cases(), st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_values_that_are_known_are_used_as_they_are(case: tuple[type[Any], Any], data: st.DataObject) -> None:
    kind, value = case
    other = data.draw(instances(kind))
    names = [each.name for each in dataclasses.fields(kind)]
    known = {name: getattr(other, name) for name in data.draw(st.sets(st.sampled_from(names)))}
    for name in known if data.draw(st.booleans()) else ():
        value.pop(name, None)
    assert outcome(codec, kind, value, known=known) == outcome(REFERENCE, kind, value, known=known)


@pytest.mark.parametrize("wrong", VALUES, ids=lambda each: repr(each)[:20])
@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(SlottedWhole)])
def test_each_kind_of_field_is_read_as_field_by_field(name: str, wrong: Any) -> None:
    value = dataclasses.asdict(
        SlottedWhole(1, part=SlottedPart(1), parts=(SlottedPart(2),), many=(1,), late=1)
    )
    value = json.loads(json.dumps(value)) | {name: wrong}
    assert outcome(codec, SlottedWhole, value) == outcome(REFERENCE, SlottedWhole, value)


def test_code_is_compiled_for_the_messages_and_not_for_classes_without_slots() -> None:
    compiled = {each for each in (*MESSAGES, Whole, Part, Timed) if _is_compiled(each)}
    assert compiled == set(MESSAGES)


def _is_compiled(kind: Any) -> bool:
    return codec._object_reader(kind, ()).__code__.co_filename == "<string>"
