"""Load the table of workload kinds that Holdfast adopts from `workload_kinds.toml`."""

from __future__ import annotations

import pkgutil
import sys
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, NamedTuple

if sys.version_info >= (3, 11):
    import tomllib as _toml
else:
    import tomli as _toml

FILE = "workload_kinds.toml"
PLACES = ("label", "annotation", "env", "name")
_TEXTS = (
    "kind", "failure", "success", "source", "below", "parts", "part_name", "instance", "after_stop", "halt"
)  # fmt: skip
_NEEDED = ("kind", "groups", "failure", "success", "source", "after_stop")


class PodSource(NamedTuple):
    """A place in a pod to read a value from.

    `place` is one of `PLACES`. `key` is the name of the label, annotation or environment variable. The place
    "name" stands for the digits at the end of the pod's name.
    """

    place: str
    key: str


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """One row of the table. The comment at the top of the file describes the fields.

    A path is a sequence of field names joined by dots.
    """

    kind: str
    groups: tuple[str, ...]
    failure: str
    success: str
    source: str
    after_stop: str
    recreates: bool = False
    halt: str = ""
    versions: tuple[str, ...] = ()
    below: str = ""
    parts: str = ""
    part_name: str = ""
    size: tuple[str, ...] = ()
    size_default: int = 1
    agree: tuple[tuple[str, str], ...] = ()
    templates: tuple[str, ...] = ()
    replica_type: tuple[PodSource, ...] = ()
    trains: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    index: tuple[tuple[PodSource, ...], ...] = ()
    instance: str = ""
    group: tuple[PodSource, ...] = ()
    count: tuple[PodSource, ...] = ()
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkloadKinds:
    """The whole table. `owners` are kinds that own pods, and `pods` are groups of pods without an owner."""

    owners: tuple[WorkloadKind, ...]
    pods: tuple[WorkloadKind, ...]
    links: frozenset[tuple[str, str]]  # (API group, kind) of owners that are not workloads themselves
    fallback_index: tuple[PodSource, ...]

    def find(self, api_version: str, kind: str) -> WorkloadKind | None:
        """Return the row for objects of this `kind` and API version; None if there is none."""
        group, _, version = api_version.rpartition("/")
        for row in self.owners:
            if row.kind == kind and group in row.groups and (not row.versions or version in row.versions):
                return row
        return None

    def is_link(self, api_version: str, kind: str) -> bool:
        """Return True if the owner of an object of this kind also owns the object's pods."""
        return (api_version.rpartition("/")[0], kind) in self.links


class InvalidKindTable(ValueError):
    """The table has a mistake. The message names the row and the field."""


@cache
def shipped() -> WorkloadKinds:
    """Return the table of this package. Raises `InvalidKindTable`, or `OSError` if the file is missing.

    Pure modules may call this, because the package's loader reads the file in the same way as code.
    """
    text = pkgutil.get_data(__name__.rpartition(".")[0], FILE)
    if text is None:
        raise FileNotFoundError(FILE)
    return read(text.decode())


def read(text: str) -> WorkloadKinds:
    """Return the table in the TOML document `text`. Raises `InvalidKindTable`."""
    try:
        document = _toml.loads(text)
    except _toml.TOMLDecodeError as error:
        raise InvalidKindTable(f"{FILE}: {error}") from None
    rows = tuple(_row(raw) for raw in document.get("kind", []))
    links = frozenset((str(raw["group"]), str(raw["kind"])) for raw in document.get("links", []))
    return WorkloadKinds(
        owners=tuple(row for row in rows if not row.group),
        pods=tuple(row for row in rows if row.group),
        links=links,
        fallback_index=_sources(document.get("fallback_index", []), "fallback_index", ()),
    )


def _row(raw: dict[str, Any]) -> WorkloadKind:
    where = f"{FILE}: {raw.get('kind', 'a row without kind')}"
    missing = [name for name in _NEEDED if name not in raw]
    unknown = sorted(set(raw) - {each.name for each in fields(WorkloadKind)})
    if missing or unknown:
        raise InvalidKindTable(f"{where}: missing: {missing}, unknown: {unknown}")
    return WorkloadKind(**{name: _field(name, value, where, raw) for name, value in raw.items()})


def _field(name: str, value: Any, where: str, raw: dict[str, Any]) -> Any:
    where = f"{where}.{name}"
    if name == "size_default":
        return _is(int, value, where)
    if name == "recreates":
        return _is(bool, value, where)
    if name in _TEXTS:
        return _is(str, value, where)
    if name == "index":
        ignored = tuple(raw.get("ignored", ()))
        return tuple(_sources(each, where, ignored) for each in _is(list, value, where))
    if name in ("replica_type", "group", "count"):
        return _sources(value, where, ())
    if name == "agree":
        return tuple((key, _is(str, each, where)) for key, each in _is(dict, value, where).items())
    return tuple(_is(str, each, where) for each in _is(list, value, where))


def _sources(value: Any, where: str, ignored: tuple[str, ...]) -> tuple[PodSource, ...]:
    found = []
    for each in _is(list, value, where):
        place, colon, key = _is(str, each, where).partition(":")
        if place not in PLACES or not colon or bool(key) == (place == "name"):
            raise InvalidKindTable(f"{where}: {each!r}: expected PLACE:NAME with a place of {PLACES}")
        if place == "env" and key in ignored:
            raise InvalidKindTable(f"{where}: {key} is listed both as a source and as ignored")
        found.append(PodSource(place, key))
    return tuple(found)


def _is(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, kind):
        raise InvalidKindTable(f"{where}: {value!r}: expected {kind.__name__}")
    return value
