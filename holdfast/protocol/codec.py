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
from functools import lru_cache
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
        found: T = _object_reader(typing.cast("Hashable", kind))(value, lenient, known)
    except _Misfit as error:
        raise InvalidMessage(f"{where or kind.__name__}{error.place}: {error.why}") from None
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


@lru_cache(maxsize=1024)
def _object_reader(kind: Any) -> Callable[..., Any]:
    fields = _fields(kind)
    plan = tuple(
        (name, _read_seconds if is_seconds(name, hint) else _reader(hint, most_items), required)
        for name, (hint, required, most_items) in fields.items()
    )
    all_of = tuple((name, read_field) for name, read_field, _ in plan)
    make = _constructor(kind)

    def read(value: Any, lenient: bool, known: Mapping[str, Any] = _NOTHING) -> Any:
        if not isinstance(value, Mapping):
            raise _Misfit(f"{_short(value)} is not an object")
        if len(value) + len(known) == len(all_of):  # the usual case: exactly the fields of the class
            try:
                if not known:
                    return make(*[read_field(value[name], lenient) for name, read_field in all_of])
                return make(
                    *[
                        known[name] if name in known else read_field(value[name], lenient)
                        for name, read_field in all_of
                    ]
                )
            except (_Misfit, LookupError, ValueError):  # the code below determines what is wrong
                pass
        if not lenient and not fields.keys() >= value.keys():
            unknown = next(name for name in value if name not in fields)
            raise _Misfit("unknown field", f".{_short(unknown)}")
        found = {}
        name = ""
        try:
            for name, read_field, required in plan:
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


def _constructor(kind: Any) -> Callable[..., Any]:
    """Return a function that makes instances of a dataclass from the values of all of its fields, in order.

    A frozen dataclass sets each field by a call of `setattr`, which for a report takes as long as the
    rest of the decoding. Therefore, an instance of a twin class is made, which has the same slots but is not
    frozen. It is given its real class once it is complete.
    """
    if "__slots__" not in vars(kind) or hasattr(kind, "__post_init__"):
        return typing.cast("Callable[..., Any]", kind)
    names = [each.name for each in dataclasses.fields(kind)]
    twin = dataclasses.make_dataclass(f"Unfrozen{kind.__name__}", names, slots=True)
    try:
        object.__new__(twin).__class__ = kind
    except TypeError:  # the slots differ, for example because the class has a base class with fields
        return typing.cast("Callable[..., Any]", kind)

    def make(*values: Any) -> Any:
        made = twin(*values)
        made.__class__ = kind
        return made

    return make


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
        return _object_reader(typing.cast("Hashable", hint))
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
