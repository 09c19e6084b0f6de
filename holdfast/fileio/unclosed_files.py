"""Close files of known libraries that a script leaves open, because only closing completes them."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

_HAVE_GC = 1 << 14  # Py_TPFLAGS_HAVE_GC: the collector tracks objects of this type
_MANY = 10_000  # how many objects are passed to one call of gc.get_referents
_DEEP = 2  # how many levels of references to follow from a thread's frame, such as an attribute of an object
_NOT_HELD = (ModuleType, FunctionType, BuiltinFunctionType, MethodType, type)

FileAction = Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class FileKind:
    """One kind of file: the module and name of its class, and the functions that complete the file."""

    module: str
    name: str
    close: FileAction  # harmless if the file is already closed
    # Called instead of `close` while a thread uses the file; None if no call is safe then.
    flush: FileAction | None = None


def _close(each: Any) -> object:
    return each.close()


def _nothing(_: Any) -> None:
    return None


# The order matters, because a file that writes into another file must be closed first.
WRITERS = (
    FileKind("shelve", "Shelf", _close, lambda each: each.sync()),
    FileKind("dbm.dumb", "_Database", _close, lambda each: each.sync()),
    FileKind("wave", "Wave_write", _close),
    FileKind("pyarrow.parquet.core", "ParquetWriter", _close),
    FileKind("pyarrow.orc", "ORCWriter", _close),
    FileKind("pyarrow.lib", "CompressedOutputStream", _close),
    FileKind("pyarrow.lib", "BufferedOutputStream", _close, lambda each: each.flush()),
    FileKind(  # closes the file even if only one of its data sets or groups is still referenced
        "h5py._hl.base",
        "HLObject",
        lambda each: each.file.close() if each else None,
        lambda each: each.file.flush() if each else None,
    ),
    FileKind(
        "netCDF4._netCDF4",
        "Dataset",
        lambda each: each.close() if each.isopen() and each.parent is None else None,
        lambda each: each.sync() if each.isopen() else None,
    ),
    FileKind(
        "tables.file",
        "File",
        lambda each: each.close() if each.isopen else None,
        lambda each: each.flush() if each.isopen else None,
    ),
    FileKind("cv2", "VideoWriter", lambda each: each.release() if each.isOpened() else None),
)
# The objects that delete temporary files. As at any exit, this happens after all files have been written.
TEMPORARY = (FileKind("tempfile", "_TemporaryFileCloser", lambda each: each.__del__(), _nothing),)


def close_unclosed(
    kinds: Iterable[FileKind], attempt: Callable[[Callable[[], object], Any], None]
) -> list[Any]:
    """Close all open files of `kinds` through `attempt`. Return those left open because a thread uses them.

    If the frames of a running thread refer to a file, the file is only flushed. A file whose kind cannot be
    flushed is left as it is and returned. This function imports no module.
    """
    loaded = [(kind, its) for kind in kinds if (its := _class(kind)) is not None]
    if not loaded:
        return []
    left, held = [], _used_by_threads()
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


def _class(kind: FileKind) -> type | None:
    found = vars(sys.modules.get(kind.module) or object).get(kind.name)
    return found if isinstance(found, type) else None


def _instances(classes: list[type]) -> list[Any]:
    """Return the instances of `classes`, each once.

    Instances that the collector does not track are found through the objects that refer to them.
    """
    wanted = frozenset(classes)
    known: dict[type, bool] = {}
    found: dict[int, Any] = {}

    def search(objects: Iterable[Any]) -> None:
        for each in objects:
            kind = type(each)
            if kind not in known:
                known[kind] = not wanted.isdisjoint(kind.__mro__)  # `issubclass` may run a class's code
            if known[kind]:
                found[id(each)] = each

    everything = gc.get_objects()
    search(everything)
    if not all(each.__flags__ & _HAVE_GC for each in classes):
        for first in range(0, len(everything), _MANY):
            referents = gc.get_referents(*everything[first : first + _MANY])
            search(referents)
            search(gc.get_referents(*(d for d in referents if type(d) is dict and not gc.is_tracked(d))))
    return list(found.values())


def _used_by_threads() -> set[int]:
    """Return the ids of the objects that other threads' frames refer to, directly or indirectly."""
    held: dict[int, Any] = {}
    for named in _names_in_frames():
        level = [named]
        for _ in range(_DEEP + 1):
            level = [each for each in level if not isinstance(each, _NOT_HELD)]
            held.update((id(each), each) for each in level)
            level = gc.get_referents(*level)
    return set(held)


def _names_in_frames() -> Iterator[Any]:
    for thread, top in sys._current_frames().items():
        frame = top if thread != threading.get_ident() else None
        while frame is not None:
            with suppress(RuntimeError):  # the frame's thread is running, so the frame may change
                yield from list(frame.f_locals.values())
            globals_ = frame.f_globals
            yield from [globals_.get(name) for name in frame.f_code.co_names]
            frame = frame.f_back
