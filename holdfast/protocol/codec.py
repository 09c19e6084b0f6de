"""Encode messages as JSON, and decode them with strict validation.

A message is a frozen dataclass. `decode` accepts only the dataclass's fields, and only values of exactly the
right types and within bounds. Otherwise it reports the first invalid field. Messages are untrusted input,
even from other parts of Holdfast.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache, partial
from itertools import repeat
from typing import Any, TypeVar

MAX_MESSAGE_BYTES = 4 << 20
# The limit on each list whose field has no lower limit of its own (`at_most`). A report lists up to 30
# private states for each rank of its member.
MAX_ITEMS = 16_384
# The maximum number of ranks on one member. Even with this many, the member's report stays within both limits
# above, because its texts are bounded too (`holdfast.protocol.foreign_text`).
MAX_RANKS = 512
MAX_TEXT = 1 << 20
MAX_FLOAT = sys.float_info.max
# The limit on fields named `seconds` or `..._s`, because receivers convert them to nanoseconds and add them
# to times. Wall-clock times are about 2e9.
MAX_SECONDS = 1e10

T = TypeVar("T")
_NOTHING: Mapping[str, Any] = types.MappingProxyType({})
_AT_MOST = "at_most"  # the key of a field's metadata for the maximum length of its list
_ADDED = "added"  # the key for `added`


def added() -> Mapping[str, bool]:
    """Return the metadata of a field that older versions do not know: its default is not written.

    An older receiver refuses a field that it does not know. It is therefore sent only if it is needed.
    """
    return {_ADDED: True}


def is_added(declared: dataclasses.Field[Any]) -> bool:
    """True if the field has the metadata of `added`."""
    return bool(declared.metadata.get(_ADDED))


def at_most(items: int) -> Mapping[str, int]:
    """Return the metadata of a field that contains a list, to limit its length to `items`.

    A list of small numbers takes ten times as much memory as its text. A receiver that keeps messages of
    untrusted senders therefore needs a limit on each list within a list.
    """
    return types.MappingProxyType({_AT_MOST: items})


class InvalidMessage(ValueError):
    """The received data is not a valid message of its type. The exception states the field and the reason."""


def encode(message: Any) -> bytes:
    """Return one JSON line, newline included, for a dataclass instance.

    Fields appear in the order of their definition, so equal messages have equal encodings.
    """
    return _ENCODER.encode(message).encode() + b"\n"


def _fields_of(message: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance, whose values are not copied, for the JSON encoder."""
    names, added = _names(typing.cast("Hashable", type(message)))
    found = {name: getattr(message, name) for name in names}
    for name, default in added:
        if (value := getattr(message, name)) != default:
            found[name] = value
    return found


@lru_cache(maxsize=256)
def _names(kind: Any) -> tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]:
    """Return the names of the fields that are always written, and the others with their defaults."""
    fields = dataclasses.fields(kind)
    added = tuple((each.name, each.default) for each in fields if is_added(each))
    return tuple(each.name for each in fields if not is_added(each)), added


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_fields_of)


def decode(kind: type[T], line: bytes | str) -> T:
    """Return the message of type `kind` that `line` encodes. Raises only `InvalidMessage`."""
    return from_json(kind, parse(line, kind.__name__))


def parse(line: bytes | str, name: str) -> Any:
    """Return the JSON value of `line`. Errors refer to it as `name`. Raises only `InvalidMessage`."""
    if len(line) > MAX_MESSAGE_BYTES:
        raise InvalidMessage(f"{name}: {len(line)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"{name}: not JSON: {error}") from None


class LineBuffer:
    """Splits a stream of bytes into lines, and buffers the unfinished line.

    The buffer holds at most `MAX_MESSAGE_BYTES` plus one byte. A longer line is truncated to that size, and
    `decode` then refuses it. Later lines are not affected.
    """

    def __init__(self) -> None:
        self._unfinished = bytearray()

    @property
    def is_overlong(self) -> bool:
        """True while the unfinished line is longer than any message."""
        return len(self._unfinished) > MAX_MESSAGE_BYTES

    def split(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, without their line endings."""
        *finished, rest = data.split(b"\n")
        lines = []
        for piece in finished:
            self._append(piece)
            lines.append(bytes(self._unfinished))
            self._unfinished.clear()
        self._append(rest)
        return lines

    def _append(self, piece: bytes) -> None:
        self._unfinished += piece[: MAX_MESSAGE_BYTES + 1 - len(self._unfinished)]


def prepare(*kinds: Any) -> None:
    """Make what the first message of each of `kinds` would make, which takes up to 10 ms each."""
    for kind in kinds:
        _object_reader(kind, ())
        _names(kind)


def from_json(
    kind: type[T],
    value: Any,
    where: str = "",
    *,
    lenient: bool = False,
    known: Mapping[str, Any] = _NOTHING,
) -> T:
    """Return the dataclass `kind` built from parsed JSON. Raises `InvalidMessage`.

    With `lenient`, fields that `kind` does not have are ignored, so that files of a later version can be
    read. `known` has the values of fields that were decoded before, and takes precedence over `value`.
    """
    try:
        found: T = _object_reader(typing.cast("Hashable", kind), tuple(known))(value, lenient, known)
    except _Misfit as error:
        raise InvalidMessage(f"{where or kind.__name__}{error.place}: {error.why}") from None
    return found


@lru_cache(maxsize=256)
def row_reader(kind: Any, names: tuple[str, ...], most_text: int) -> Callable[[Any, Any], Any]:
    """Return a function that makes a message of `kind` from another one and a row of values.

    `kind` is a frozen dataclass with slots. The row is the parsed JSON list of the values of `names`. The
    other fields have the values of the given message. A text may have up to `most_text` ASCII characters. The
    function raises `InvalidMessage`, which names the first field whose value is wrong.
    """
    twin = _unfrozen_twin(kind)
    assert twin is not None, f"{kind.__name__} has no slots"
    fields, readers = _fields(kind), _readers(kind)
    space = {"twin": twin, "kind": kind, "wrong": partial(_wrong_row, kind, names, most_text)}
    lines = [f"made.{name} = message.{name}" for name in fields if name not in names]
    for number, name in enumerate(names):
        hint, space[f"read{number}"] = fields[name][0], readers[name]
        lines.append(f"v = row[{number}]")
        lines.append(f"made.{name} = {_shortcut(name, hint, most_text)}wrong({number}, read{number}, v)")
    exec(_ROW.format(count=len(names), fields="\n    ".join(lines)), space)
    return typing.cast("Callable[[Any, Any], Any]", space["read_row"])


_ROW = """
def read_row(message, row):
    if type(row) is not list or len(row) != {count}:
        wrong(-1, None, row)
    made = twin()
    {fields}
    made.__class__ = kind
    return made
"""


def _wrong_row(
    kind: Any, names: tuple[str, ...], most_text: int, number: int, read: _Reader | None, value: Any
) -> Any:
    """Return a value of a row that is unusual but valid. Raise `InvalidMessage` for one that is wrong."""
    if read is None:
        raise InvalidMessage(f"{kind.__name__}: {_short(value)} is not a list of {len(names)}")
    try:
        found = read(value, False)
        if isinstance(found, str):
            raise _Misfit(f"{_short(found)} is not a text of at most {most_text} ASCII characters")
    except _Misfit as error:
        raise InvalidMessage(f"{kind.__name__}.{names[number]}{error.place}: {error.why}") from None
    return found


class _Misfit(Exception):
    """A part of the JSON has the wrong type. Each enclosing reader prepends its own part of the place.

    The place is composed only after an error, because a report has hundreds of values.
    """

    def __init__(self, why: str, place: str = "") -> None:
        super().__init__(why)
        self.why, self.place = why, place

    def below(self, part: str) -> _Misfit:
        self.place = part + self.place
        return self


# A function that converts parsed JSON to a value of one type, or raises `_Misfit`. Its second argument is
# True if unknown fields are ignored.
_Reader: typing.TypeAlias = "Callable[[Any, bool], Any]"


class _Field(typing.NamedTuple):
    name: str
    hint: Any
    read: _Reader
    is_required: bool


@lru_cache(maxsize=1024)
def _object_reader(kind: Any, known: tuple[str, ...]) -> Callable[..., Any]:
    """Return a reader of `kind`. Its third argument has the values of the fields `known`."""
    readers = _readers(kind)
    plan = tuple(
        _Field(name, hint, readers[name], required) for name, (hint, required, _) in _fields(kind).items()
    )
    read = _field_by_field(kind, plan)
    twin = _unfrozen_twin(kind)
    return read if twin is None else _compiled(kind, twin, plan, known, read)


def _field_by_field(kind: Any, plan: tuple[_Field, ...]) -> Callable[..., Any]:
    """Return a reader that accepts every valid object, and determines what is wrong with the others."""
    names = frozenset(name for name, *_ in plan)

    def read(value: Any, lenient: bool, known: Mapping[str, Any] = _NOTHING) -> Any:
        if not isinstance(value, Mapping):
            raise _Misfit(f"{_short(value)} is not an object")
        if not lenient and not names >= value.keys():
            unknown = next(name for name in value if name not in names)
            raise _Misfit("unknown field", f".{_short(unknown)}")
        found = {}
        name = ""
        try:
            for name, _, read_field, required in plan:
                if name in known:
                    found[name] = known[name]
                elif name in value:
                    found[name] = read_field(value[name], lenient)
                elif required:
                    raise _Misfit("missing")
        except _Misfit as error:
            raise error.below(f".{name}") from None
        try:
            return kind(**found)
        except ValueError as error:
            raise _Misfit(str(error)) from None

    return read


# Conditions under which a JSON value `v` is a value of the type. They hold for almost all values.
_HOLDS: Mapping[Any, str] = types.MappingProxyType(
    {
        int: f"type(v) is int and {-(1 << 63)} <= v < {1 << 64}",
        float: f"type(v) is float and {-MAX_FLOAT!r} <= v <= {MAX_FLOAT!r}",
        bool: "type(v) is bool",
    }
)
_HOLDS_FOR_SECONDS = f"type(v) is float and {-MAX_SECONDS!r} <= v <= {MAX_SECONDS!r}"
_COMPILED = """
def read(value, lenient, known=nothing):
    if type(value) is dict and len(value) == {count}:
        made = twin()
        try:
            {fields}
            made.__class__ = kind
            return made
        except (Misfit, KeyError):
            pass
    return read_any(value, lenient, known)
"""


def _compiled(
    kind: Any, twin: Any, plan: tuple[_Field, ...], known: tuple[str, ...], read_any: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a faster `read_any`, with code made for `kind`.

    A supervisor reads 300,000 values per second, so a function call for each of them would take a tenth of
    its time. The code reads only objects that have exactly the fields of the class, as `encode` writes them.
    It leaves all others to `read_any`, and all unusual values to the reader of their field.
    """
    space = {"twin": twin, "kind": kind, "Misfit": _Misfit, "read_any": read_any, "nothing": _NOTHING}
    lines = []
    for number, (name, hint, read_field, _) in enumerate(plan):
        if name in known:
            lines.append(f"made.{name} = known[{name!r}]")
        else:
            lines.append(f"v = value[{name!r}]")
            lines.append(f"made.{name} = {_shortcut(name, hint)}read{number}(v, lenient)")
            space[f"read{number}"] = read_field
    count = len(plan) - len(known)
    exec(_COMPILED.format(count=count, fields="\n            ".join(lines)), space)
    return typing.cast("Callable[..., Any]", space["read"])


def _shortcut(name: str, hint: Any, most_ascii: int = 0) -> str:
    """Return the beginning of an expression that converts the usual JSON value `v` of a field."""
    if is_seconds(name, hint):
        return f"v if {_HOLDS_FOR_SECONDS} else "
    if hint is str:
        bound = f"len(v) <= {most_ascii} and v.isascii()" if most_ascii else f"len(v) <= {MAX_TEXT}"
        return f"v if type(v) is str and {bound} else "
    if hint in _HOLDS:
        return f"v if {_HOLDS[hint]} else "
    args = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and args[-1] is Ellipsis:
        return "() if type(v) is list and not v else "
    return "None if v is None else " if type(None) in args else ""


def _unfrozen_twin(kind: Any) -> type[Any] | None:
    """Return a class like the frozen dataclass `kind`, with the same slots. Its instances can become `kind`.

    A frozen dataclass calls `setattr` to set each field. For a report, these calls take as long as the rest
    of the decoding. An instance of the twin is given its real class once it is complete. The result is None
    if this is impossible.
    """
    if "__slots__" not in vars(kind) or hasattr(kind, "__post_init__"):
        return None
    names = tuple(each.name for each in dataclasses.fields(kind))
    twin = type(f"Unfrozen{kind.__name__}", (), {"__slots__": names})
    try:
        twin().__class__ = kind
    except TypeError:  # the slots differ, for example because the class has a base class with fields
        return None
    return twin


def is_seconds(name: str, hint: Any) -> bool:
    """Return True if a field is a time in seconds, which `MAX_SECONDS` limits."""
    return hint is float and (name == "seconds" or name.endswith("_s"))


@lru_cache(maxsize=256)
def _fields(kind: Any) -> dict[str, tuple[Any, bool, int]]:
    """Return the type of each field, whether it is required, and how many items its list may have."""
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return {
        f.name: (
            hints[f.name],
            f.default is missing and f.default_factory is missing,
            f.metadata.get(_AT_MOST, MAX_ITEMS),
        )
        for f in dataclasses.fields(kind)
    }


@lru_cache(maxsize=256)
def _readers(kind: Any) -> dict[str, _Reader]:
    """Return the reader of each field."""
    return {
        name: _read_seconds if is_seconds(name, hint) else _reader(hint, most_items)
        for name, (hint, _, most_items) in _fields(kind).items()
    }


@lru_cache(maxsize=1024)
def _reader(hint: Any, most_items: int = MAX_ITEMS) -> _Reader:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        [given] = [each for each in typing.get_args(hint) if each is not type(None)]
        return _optional_reader(_reader(given))
    if origin is typing.Literal:  # accept any text: a newer peer may send a word that this version lacks
        return _read_text
    if origin is tuple:
        return _tuple_reader(typing.get_args(hint), most_items)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_reader(_reader(typing.get_args(hint)[1]))
    if dataclasses.is_dataclass(hint):
        return _object_reader(typing.cast("Hashable", hint), ())
    return _SCALARS.get(hint) or _other_reader(hint)


def _optional_reader(read_given: _Reader) -> _Reader:
    return lambda value, lenient: None if value is None else read_given(value, lenient)


def _tuple_reader(kinds: tuple[Any, ...], most_items: int) -> _Reader:
    readers = tuple(_reader(kind) for kind in kinds if kind is not Ellipsis)
    repeats = kinds[-1] is Ellipsis

    def read(value: Any, lenient: bool) -> Any:
        if not isinstance(value, list) or len(value) > most_items:
            raise _Misfit(f"{_short(value)} is not a list of at most {most_items}")
        if not value and repeats:
            return ()
        if not repeats and len(readers) != len(value):
            raise _Misfit(f"{len(value)} items, expected {len(readers)}")
        items = []
        try:
            for read_item, each in zip(repeat(readers[0]) if repeats else readers, value):  # noqa: B905
                items.append(read_item(each, lenient))
        except _Misfit as error:
            raise error.below(f"[{len(items)}]") from None
        return tuple(items)

    return read


def _mapping_reader(read_value: _Reader) -> _Reader:
    def read(value: Any, lenient: bool) -> Any:
        if not isinstance(value, Mapping) or len(value) > MAX_ITEMS:
            raise _Misfit(f"{_short(value)} is not an object")
        found = {}
        key: object = ""
        try:
            for key, each in value.items():
                found[str(key)] = read_value(each, lenient)
        except _Misfit as error:
            raise error.below(f".{_short(key)}") from None
        return found

    return read


def _read_anything(value: Any, lenient: bool) -> Any:
    return value


# A report has hundreds of values. The first test in each of these readers accepts almost all of them.
def _read_number(value: Any, lenient: bool) -> Any:
    if type(value) is float and -MAX_FLOAT <= value <= MAX_FLOAT:
        return value
    if type(value) is not float and type(value) is not int:
        raise _Misfit(f"{_short(value)} is not float")
    if not -MAX_FLOAT <= value <= MAX_FLOAT:  # also true for NaN, because comparisons with it are false
        raise _Misfit(f"{_short(value)} is not a finite number")
    return float(value)


def _read_seconds(value: Any, lenient: bool) -> Any:
    if type(value) is float and -MAX_SECONDS <= value <= MAX_SECONDS:
        return value
    seconds = _read_number(value, lenient)
    if abs(seconds) > MAX_SECONDS:
        raise _Misfit(f"{_short(seconds)} s; the limit is {MAX_SECONDS:g} s")
    return seconds


def _read_text(value: Any, lenient: bool) -> Any:
    if type(value) is not str:
        raise _Misfit(f"{_short(value)} is not str")
    if len(value) > MAX_TEXT:
        raise _Misfit(f"a text of {len(value)} characters; the limit is {MAX_TEXT}")
    return value


def _read_integer(value: Any, lenient: bool) -> Any:
    if type(value) is not int:
        raise _Misfit(f"{_short(value)} is not int")
    if not -(1 << 63) <= value < 1 << 64:
        raise _Misfit("out of range")
    return value


def _other_reader(hint: Any) -> _Reader:
    def read(value: Any, lenient: bool) -> Any:
        if type(value) is not hint:
            raise _Misfit(f"{_short(value)} is not {hint.__name__}")
        return value

    return read


_SCALARS: Mapping[Any, _Reader] = types.MappingProxyType(
    {Any: _read_anything, float: _read_number, str: _read_text, int: _read_integer}
)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
