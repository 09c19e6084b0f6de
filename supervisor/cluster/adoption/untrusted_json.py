"""Read JSON objects from the API server without assuming that their types are right. Pure.

A custom resource may lack a schema, and users write labels and annotations. Each function treats a missing or
null value as empty, and raises `UnfitObject` for a value of the wrong type or size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from holdfast.fileio.strict_json import brief

MAX_TEXT = 253  # characters of an object's name, which is a DNS subdomain; a label has at most 63

NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
UID = re.compile(r"[A-Za-z0-9][-A-Za-z0-9_]{0,127}")
KIND = re.compile(r"[A-Za-z][A-Za-z0-9]{0,127}")
API_VERSION = re.compile(r"([a-z0-9][-a-z0-9.]*/)?[a-z0-9]{1,63}")


class UnfitObject(ValueError):
    """An object is invalid. The message says where, and what was expected."""


def refuse(why: str) -> NoReturn:
    raise UnfitObject(why)


def table(value: object, where: str) -> Mapping[str, Any]:
    """Return a JSON object."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        refuse(f"{where} is {brief(value)}; expected an object")
    return value


def items(value: object, where: str, most: int) -> Sequence[Any]:
    """Return a JSON list of at most `most` items."""
    if value is None:
        return ()
    if not isinstance(value, list):
        refuse(f"{where} is {brief(value)}; expected a list")
    if len(value) > most:
        refuse(f"{where} has {len(value)} items; expected at most {most}")
    return value


def text(value: object, where: str, most: int = MAX_TEXT) -> str:
    """Return a string of at most `most` characters."""
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > most:
        refuse(f"{where} is {brief(value)}; expected a string of at most {most} characters")
    return value


def matching(pattern: re.Pattern[str], value: object, where: str) -> str:
    """Return a string that `pattern` matches in full. A missing value is treated as "".

    This check is needed because names become parts of URLs, and the API server does not check
    ownerReferences.
    """
    found = text(value, where)
    if not pattern.fullmatch(found):
        refuse(f"{where} is {brief(found)}, which is not valid")
    return found


def whole(value: object, where: str, most: int, default: int) -> int:
    """Return an integer from 0 to `most`; `default` if the value is missing."""
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        refuse(f"{where} is {brief(value)}; expected a whole number from 0 to {most}")
    return value


def at(value: Mapping[str, Any], path: str, where: str) -> object:
    """Return the value at `path`, a sequence of field names joined by dots; None if it is missing."""
    found: object = value
    for name in path.split("."):
        found = table(found, f"a part of {path} in {where}").get(name)
    return found


def metadata_of(value: object, where: str) -> Mapping[str, Any]:
    return table(table(value, where).get("metadata"), f"metadata of {where}")
