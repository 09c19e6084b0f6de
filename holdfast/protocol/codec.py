"""Encode messages as JSON, and decode them with strict validation.

A message is a frozen dataclass. `decode` accepts only its fields, with exactly their types and within bounds,
and names the first field that is wrong. A message is untrusted input even if its sender is part of Holdfast.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

MAX_MESSAGE_BYTES = 4 << 20
MAX_ITEMS = 16_384  # a report lists about 30 private states for each rank of its member
# The most ranks on one member. Even then, the member's report stays within both limits above, because its
# texts are also bounded (`holdfast.protocol.foreign_text`).
MAX_RANKS = 512
MAX_TEXT = 1 << 20
MAX_FLOAT = sys.float_info.max
# Of a field named `seconds` or `..._s`: receivers convert it to nanoseconds and add it to times. Times of the
# wall clock are about 2e9.
MAX_SECONDS = 1e10

T = TypeVar("T")


class InvalidMessage(ValueError):
    """The received data is not a valid message of its type; the exception names the field and the reason."""


def encode(message: Any) -> bytes:
    """Return one JSON line, newline included, for a dataclass instance.

    Fields appear in the order in which the class defines them, so equal messages have equal encodings.
    """
    return json.dumps(dataclasses.asdict(message), separators=(",", ":")).encode() + b"\n"


def decode(kind: type[T], line: bytes | str) -> T:
    """Return the message of type `kind` encoded in `line`. Raises `InvalidMessage`, and nothing else."""
    return from_json(kind, parse(line, kind.__name__))


def parse(line: bytes | str, name: str) -> Any:
    """Return the JSON value of `line`, the message `name`. Raises `InvalidMessage`, and nothing else."""
    if len(line) > MAX_MESSAGE_BYTES:
        raise InvalidMessage(f"{name}: {len(line)} bytes; the limit is {MAX_MESSAGE_BYTES}")
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"{name}: not JSON: {error}") from None


class LineBuffer:
    """Splits a stream of bytes into lines, and buffers the unfinished one.

    It buffers at most `MAX_MESSAGE_BYTES` plus one byte of a line. It truncates a longer line to that size,
    which `decode` then refuses; the lines after it are not affected.
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


def from_json(kind: type[T], value: Any, where: str = "", *, lenient: bool = False) -> T:
    """Return the dataclass `kind` built from parsed JSON. Raises `InvalidMessage`.

    `lenient` ignores fields that `kind` does not have; it is for files written by a later version.
    """
    where = where or kind.__name__
    if not isinstance(value, Mapping):
        raise InvalidMessage(f"{where}: {_short(value)} is not an object")
    fields = _fields(typing.cast("Hashable", kind))
    for name in value:
        if name not in fields and not lenient:
            raise InvalidMessage(f"{where}.{_short(name)}: unknown field")
    found = {}
    for name, (hint, required) in fields.items():
        if name in value:
            found[name] = read = _read(hint, value[name], f"{where}.{name}", lenient)
            if is_seconds(name, hint) and abs(read) > MAX_SECONDS:
                raise InvalidMessage(f"{where}.{name}: {_short(read)} s; the limit is {MAX_SECONDS:g} s")
        elif required:
            raise InvalidMessage(f"{where}.{name}: missing")
    try:
        return kind(**found)
    except ValueError as error:
        raise InvalidMessage(f"{where}: {error}") from None


def check_number(name: str, text: str) -> None:
    """Raise `ValueError` if `text`, of the field `name`, is not a number as `float` reads it.

    Numbers that may be NaN or infinite are sent as text, because JSON has neither.
    """
    try:
        float(text)
    except ValueError:
        raise ValueError(f"{name} is {_short(text)}: expected a number, such as '0.5' or 'nan'") from None


def is_seconds(name: str, hint: Any) -> bool:
    """True if a field is a time in seconds, which `MAX_SECONDS` limits."""
    return hint is float and (name == "seconds" or name.endswith("_s"))


@lru_cache(maxsize=256)
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return {
        f.name: (hints[f.name], f.default is missing and f.default_factory is missing)
        for f in dataclasses.fields(kind)
    }


def _read(hint: Any, value: Any, where: str, lenient: bool) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        [hint] = [a for a in typing.get_args(hint) if a is not type(None)]
        return _read(hint, value, where, lenient)
    if origin is typing.Literal:  # any text: a newer peer may send a word that this version lacks
        return _read_scalar(str, value, where)
    if origin is tuple:
        return _read_tuple(hint, value, where, lenient)
    if origin is not None and issubclass(origin, Mapping):
        return _read_mapping(hint, value, where, lenient)
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast("type[Any]", hint), value, where, lenient=lenient)
    return _read_scalar(hint, value, where)


def _read_tuple(hint: Any, value: Any, where: str, lenient: bool) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) > MAX_ITEMS:
        raise InvalidMessage(f"{where}: {_short(value)} is not a list of at most {MAX_ITEMS}")
    kinds = typing.get_args(hint)
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise InvalidMessage(f"{where}: {len(value)} items, expected {len(kinds)}")
    return tuple(
        _read(kind, each, f"{where}[{n}]", lenient)
        for n, (kind, each) in enumerate(zip(kinds, value, strict=True))
    )


def _read_mapping(hint: Any, value: Any, where: str, lenient: bool) -> dict[str, Any]:
    if not isinstance(value, Mapping) or len(value) > MAX_ITEMS:
        raise InvalidMessage(f"{where}: {_short(value)} is not an object")
    kind = typing.get_args(hint)[1]
    return {str(k): _read(kind, v, f"{where}.{_short(k)}", lenient) for k, v in value.items()}


def _read_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    if hint is float and type(value) in (int, float):
        if not -MAX_FLOAT <= value <= MAX_FLOAT:  # also true for NaN, as comparisons with it are false
            raise InvalidMessage(f"{where}: {_short(value)} is not a finite number")
        return float(value)
    if type(value) is not hint:
        raise InvalidMessage(f"{where}: {_short(value)} is not {hint.__name__}")
    if hint is str and len(value) > MAX_TEXT:
        raise InvalidMessage(f"{where}: a text of {len(value)} characters; the limit is {MAX_TEXT}")
    if hint is int and not -(1 << 63) <= value < 1 << 64:
        raise InvalidMessage(f"{where}: out of range")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
