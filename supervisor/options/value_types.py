"""The types of the values of options, arguments and annotations.

Each type parses a text and describes the values that it accepts. Help and error messages share this
description. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.protocol import codec

_DURATION = re.compile(r"(?P<count>\d+(?:\.\d+)?|\.\d+)\s?(?P<unit>ms|s|sec|m|min|h|d|y)?", re.ASCII)
_YEAR_S = 365 * 86_400.0
_SECONDS = {
    "ms": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86_400.0,
    "y": _YEAR_S,
}
_SIZE = re.compile(r"(?P<count>\d+(?:\.\d+)?|\.\d+)\s?(?P<prefix>[kKMGTP]?)(?P<binary>i?)B?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d{1,18}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ValueType:
    """The type of an option's or argument's value: what it accepts, and how to parse it.

    Attributes:
        kind: "whole number", "number", "duration", "share", "size", "rate", "word", "name" or "path".
        expected: The words that follow "expected" in a message about a bad value.
        parse: Returns the value of a text. Raises `ValueError` for a bad text. If the exception has a
            message, the message replaces `expected`.
        accepts: The accepted values in short form, for the help and the user guide; "" if all are accepted.
        bounds: The smallest and largest accepted number, in the unit of the parsed value.
        words: The accepted words, for suggestions.
    """

    kind: str
    expected: str
    parse: Callable[[str], object]
    accepts: str = ""
    bounds: tuple[float, float] | None = None
    words: tuple[str, ...] = ()

    def read(self, text: str) -> object:
        """Return the value of `text`. Raises `ValueError`, whose message says what is expected."""
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(str(error) or self.expected) from None


def listed(words: Sequence[str]) -> str:
    """Return "a, b or c"."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def whole_number(low: int, high: int, words: Mapping[str, int] | None = None) -> ValueType:
    """Return a type for whole numbers. `words` maps words to the numbers that they stand for."""
    named = words or {}
    expected = listed([f"{low}-{high}", *filter(str.isalpha, named)])

    def parse(text: str) -> int:
        return named[text] if text in named else _whole(text, low, high, expected)

    return ValueType("whole number", expected, parse, expected, (low, high), tuple(named))


def number(low: float, high: float, zero: str = "") -> ValueType:
    """Return a type for numbers from `low` to `high`. If `zero` is given, 0 is accepted with that meaning."""
    expected = f"{_plain(low)}-{_plain(high)}" + _also_zero(zero)

    def parse(text: str) -> float:
        value = _number(text)
        if zero and value == 0:
            return 0.0
        if not low <= value <= high:
            raise ValueError
        return value

    return ValueType("number", expected, parse, expected, (low, high))


def duration(low_s: float, high_s: float, zero: str = "") -> ValueType:
    """Return a type for durations: 30s, 5m, 3y or plain seconds. 0 has the meaning `zero`, if given."""
    spans, also = f"{span(low_s)}-{span(high_s)}", _also_zero(zero)

    def parse(text: str) -> float:
        match = _DURATION.fullmatch(text)
        seconds = float(match["count"]) * _SECONDS[match["unit"] or "s"] if match else math.nan
        if zero and seconds == 0:
            return 0.0
        if not low_s <= seconds <= high_s:
            raise ValueError
        return seconds

    expected = f"a time of {spans}, such as {'90d or 50000h' if high_s > _YEAR_S else '30s or 5m'}{also}"
    return ValueType("duration", expected, parse, spans + also, (low_s, high_s))


def _bytes(text: str) -> float:
    """Return the bytes of 500GB, 4TiB or a plain number. Raises `ValueError` for anything else, and for 0."""
    match = _SIZE.fullmatch(text)
    if not match or (match["binary"] and not match["prefix"]):
        raise ValueError
    power = " KMGTP".index(match["prefix"].upper() or " ")
    found = float(match["count"]) * float((1024 if match["binary"] else 1000) ** power)
    if not 1 <= found < math.inf:
        raise ValueError
    return found


def _size_with_unit(text: str) -> float:
    """Return the bytes of `text`, which needs a unit if its number is so small that one must be missing."""
    found = _bytes(text)
    if found < 1000 and text[-1].isdigit():
        raise ValueError(f"a size with its unit, such as {text}GB or {text}TiB")
    return found


def _bytes_per_second(text: str) -> float:
    if not text.endswith("/s"):
        raise ValueError
    return _bytes(text.removesuffix("/s"))


def _also_zero(meaning: str) -> str:
    return f", or 0 for {meaning}" if meaning else ""


def _plain(value: float) -> str:
    """Return a number as 1.5 or 1e12."""
    return f"{value:g}".replace("e+", "e")


def choice(*words: str) -> ValueType:
    """Return a type that accepts only `words`."""

    def parse(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return ValueType("word", listed(words), parse, listed(words), words=words)


def _parse_share(text: str) -> float:
    value = _number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    if not 0 < value <= 1:
        raise ValueError
    return value


def _parse_directory(text: str) -> str:
    if not text or text.startswith("--") or "\0" in text:
        raise ValueError
    return text


_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_NAMESPACE = re.compile(_LABEL, re.ASCII)
_SUBDOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
_OBJECT = re.compile(rf"(?:{_LABEL}/)?(?=[^/]{{1,253}}\Z){_SUBDOMAIN}", re.ASCII)


def _parse_namespace(text: str) -> str:
    if not _NAMESPACE.fullmatch(text):
        raise ValueError
    return text


def _parse_object(text: str) -> str:
    if not _OBJECT.fullmatch(text):
        raise ValueError
    return text


def _parse_word(text: str) -> str:
    if not text or text.startswith("--") or not text.isprintable():
        raise ValueError
    return text


MAX_REASON = 300  # characters


def _parse_subdomain(text: str) -> str:
    if "/" in text or not _OBJECT.fullmatch(text):
        raise ValueError
    return text


def _parse_reason(text: str) -> str:
    if not text.strip() or len(text) > MAX_REASON or not text.isprintable():
        raise ValueError
    return text


_RANK_WORDS = ("auto", "cpu", "gpu")  # torchrun's words for one rank per device
_RANKS = listed([f"1-{codec.MAX_RANKS}", *_RANK_WORDS])
_MOST_NODES = 4096
_NODES = f"1-{_MOST_NODES}"


def _parse_ranks(text: str) -> int | str:
    return text if text in _RANK_WORDS else _whole(text, 1, codec.MAX_RANKS, _RANKS)


def _parse_nodes(text: str) -> int:
    """Parse torchrun's N or N:N. Raises `ValueError` for a range N:M with different numbers."""
    low, colon, high = text.partition(":")
    members = _whole(low, 1, _MOST_NODES, _NODES)
    most = _whole(high, 1, _MOST_NODES, _NODES) if colon else members
    if members < most:
        raise ValueError(
            f"one number; for a range, use --members {most} --min-members {members}, if the script supports"
            " other numbers of ranks"
        )
    if members > most:
        raise ValueError(f"{low} or {high}")
    return members


def _whole(text: str, low: int, high: int, expected: str) -> int:
    if _WHOLE.fullmatch(text) and low <= int(text) <= high:
        return int(text)
    # 1.5 is within the range, so the range alone would not explain why it is refused.
    raise ValueError(f"a whole number {expected}" if low <= _number(text) <= high else expected)


def _number(text: str) -> float:
    """Return the number; NaN if `text` is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def span(spent_s: float) -> str:
    """Return a duration as a user would write it: 250ms, 1s, 30m, 7d, 2y."""
    for unit in ("y", "d", "h", "m", "s"):
        if spent_s >= _SECONDS[unit] and spent_s % _SECONDS[unit] == 0:
            return f"{spent_s / _SECONDS[unit]:g}{unit}"
    return f"{spent_s * 1000:g}ms" if spent_s else "0s"


_SHARE = "a share above 0 and up to 1, such as 0.01 or 1%"
share = ValueType("share", _SHARE, _parse_share, "above 0, up to 1 or 100%", (0.0, 1.0))
size = ValueType("size", "a size such as 500GB or 4TiB", _size_with_unit, "such as 500GB or 4TiB")
rate = ValueType("rate", "a rate such as 2GB/s or 500MiB/s", _bytes_per_second, "such as 2GB/s or 500MiB/s")
directory = ValueType("path", "the path of a directory", _parse_directory)
namespace = ValueType("name", "the name of a namespace", _parse_namespace)
job = ValueType("name", "the name of a job, or NAMESPACE/NAME", _parse_object)
pod = ValueType("name", "the name of a pod, or NAMESPACE/NAME", _parse_object)
context = ValueType("name", "the name of a context of the kubeconfig", _parse_word)
node = ValueType("name", "the name of a node", _parse_subdomain)
reason = ValueType("name", f"a reason of 1-{MAX_REASON} characters", _parse_reason)
image = ValueType("name", "the name of an image", _parse_word)
file = ValueType("name", "the path of a manifest, or - for the standard input", _parse_word)
ranks = ValueType("whole number", _RANKS, _parse_ranks, _RANKS, (1, codec.MAX_RANKS), _RANK_WORDS)
nodes = ValueType("whole number", _NODES, _parse_nodes, _NODES, (1, _MOST_NODES))
