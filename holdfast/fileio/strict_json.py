"""Parse JSON from untrusted files, in bounded time and memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

MAX_DIGITS = 20  # sizes, offsets and checksums fit in 64 bits


class RejectedJson(ValueError):
    """The text is not acceptable JSON. The message is one line, meant to follow the file's name."""


def loads(data: bytes, *, max_values: int) -> object:
    """Return the value encoded in `data`.

    Args:
        data: UTF-8 text of a size that the caller has bounded.
        max_values: Limit on the total number of lists, objects and their items.

    Raises:
        RejectedJson: The text is not UTF-8 or not JSON, has too many values, is nested too deeply, or
            contains NaN, Infinity, a duplicate name, or an integer of more than about 64 bits.
    """
    # Every list, every object and every item after the first needs one of these characters, so their number
    # bounds the memory.
    if sum(map(data.count, (b",", b"[", b"{"))) > max_values:
        raise RejectedJson(f"has more than {max_values} values")
    try:
        return json.loads(
            data.decode(),
            object_pairs_hook=_unique,
            parse_int=integer,
            parse_constant=_constant,
        )
    except UnicodeDecodeError as error:
        raise RejectedJson(f"is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise RejectedJson(f"is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise RejectedJson("is nested too deeply") from None


def brief(value: object, limit: int = 80) -> str:
    """Format `value` for a message: one printable line of at most about `limit` characters."""
    if isinstance(value, str):
        return repr(value) if len(value) <= limit else f"{value[:limit]!r}..."
    if value is None or isinstance(value, bool | int | float):
        return str(value)
    return f"a {type(value).__name__}"


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise RejectedJson(f"has the name {brief(name)} twice")
            seen.add(name)
    return found


def mapping(value: object) -> Mapping[str, Any]:
    """Return a parsed value if it is an object; otherwise an empty object."""
    return value if isinstance(value, Mapping) else {}


def integer(text: str) -> int:
    """Return the integer whose JSON text is `text`. Raises `RejectedJson` for more than about 64 bits."""
    if len(text) > MAX_DIGITS:
        raise RejectedJson(f"has an integer of {len(text)} digits; the limit is {MAX_DIGITS}")
    return int(text)


def _constant(text: str) -> NoReturn:
    raise RejectedJson(f"has {text}, which is not JSON")
