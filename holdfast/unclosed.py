"""Close files of known libraries that a script leaves open: they are whole only with what closing writes."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

_HAVE_GC = 1 << 14  # Py_TPFLAGS_HAVE_GC: the collector can name objects of such a type
_MANY = 10_000  # objects looked at together
_DEEP = 2  # an attribute of what a thread's frame names, or an element of its arguments
_NOT_HELD = (ModuleType, FunctionType, BuiltinFunctionType, MethodType, type)

Act = Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of file: where its class is, once something has imported it, and how it is made whole."""

    module: str
    name: str
    close: Act  # harmless where it is closed already
    flush: Act | None = None  # what can be done while a thread uses it; None: nothing


def _close(each: Any) -> object:
    return each.close()


def _nothing(_: Any) -> None:
    return None


# In this order: what writes to another comes before that.
WRITERS = (
    Kind("shelve", "Shelf", _close, lambda each: each.sync()),
    Kind("dbm.dumb", "_Database", _close, lambda each: each.sync()),
    Kind("wave", "Wave_write", _close),
    Kind("pyarrow.parquet.core", "ParquetWriter", _close),
    Kind("pyarrow.orc", "ORCWriter", _close),
    Kind("pyarrow.lib", "CompressedOutputStream", _close),
    Kind("pyarrow.lib", "BufferedOutputStream", _close, lambda each: each.flush()),
    Kind(  # also where only a data set or a group is left of it
        "h5py._hl.base",
        "HLObject",
        lambda each: each.file.close() if each else None,
        lambda each: each.file.flush() if each else None,
    ),
    Kind(
        "netCDF4._netCDF4",
        "Dataset",
        lambda each: each.close() if each.isopen() and each.parent is None else None,
        lambda each: each.sync() if each.isopen() else None,
    ),
    Kind(
        "tables.file",
        "File",
        lambda each: each.close() if each.isopen else None,
        lambda each: each.flush() if each.isopen else None,
    ),
    Kind("cv2", "VideoWriter", lambda each: each.release() if each.isOpened() else None),
)
# Deleted when all is written, as at any end.
TEMPORARY = (Kind("tempfile", "_TemporaryFileCloser", lambda each: each.__del__(), _nothing),)


def close(kinds: Iterable[Kind], attempt: Callable[[Callable[[], object], Any], None]) -> list[Any]:
    """Close all that is left of `kinds`, through `attempt`; return what cannot be, as a thread uses it.

    Nothing is imported. What a thread that still runs names in its frames is not taken from it, only flushed.
    """
    loaded = [(kind, its) for kind in kinds if (its := _class(kind)) is not None]
    if not loaded:
        return []
    left, held = [], _held()
    found = _instances([its for _, its in loaded])
    for kind, its in loaded:
        for each in found:
            if its not in type(each).__mro__:
                continue
            if id(each) not in held:
                attempt(lambda act=kind.close, each=each: act(each), each)  # type: ignore[misc]
            elif kind.flush is not None:
                attempt(lambda act=kind.flush, each=each: act(each), each)  # type: ignore[misc]
            else:
                left.append(each)
    return left


def _class(kind: Kind) -> type | None:
    found = vars(sys.modules.get(kind.module) or object).get(kind.name)
    return found if isinstance(found, type) else None


def _instances(classes: list[type]) -> list[Any]:
    """Return the instances, once each; those that the collector does not know, by what refers to them."""
    wanted = frozenset(classes)
    known: dict[type, bool] = {}
    found: dict[int, Any] = {}

    def look(objects: Iterable[Any]) -> None:
        for each in objects:
            kind = type(each)
            if kind not in known:
                known[kind] = not wanted.isdisjoint(kind.__mro__)  # `issubclass` may run code of its own
            if known[kind]:
                found[id(each)] = each

    everything = gc.get_objects()
    look(everything)
    if not all(each.__flags__ & _HAVE_GC for each in classes):
        for first in range(0, len(everything), _MANY):
            referents = gc.get_referents(*everything[first : first + _MANY])
            look(referents)
            look(gc.get_referents(*(d for d in referents if type(d) is dict and not gc.is_tracked(d))))
    return list(found.values())


def _held() -> set[int]:
    """Return the identities of what the frames of other threads name, and of what that consists of."""
    held: dict[int, Any] = {}
    for named in _named():
        level = [named]
        for _ in range(_DEEP + 1):
            level = [each for each in level if not isinstance(each, _NOT_HELD)]
            held.update((id(each), each) for each in level)
            level = gc.get_referents(*level)
    return set(held)


def _named() -> Iterator[Any]:
    for thread, top in sys._current_frames().items():
        frame = top if thread != threading.get_ident() else None
        while frame is not None:
            with suppress(RuntimeError):  # it runs on
                yield from list(frame.f_locals.values())
            globals_ = frame.f_globals
            yield from [globals_.get(name) for name in frame.f_code.co_names]
            frame = frame.f_back
