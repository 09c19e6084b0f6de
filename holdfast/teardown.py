"""Do for what a script leaves what the interpreter's own end does: run `__del__`, close files, write buffers.

A rank with a process group cannot be left to the interpreter: its end destroys what torch keeps, too, in any
order and with its lock held, while threads of the backends wait for that lock, and some never return. So the
script's own objects are finalized here, and those of libraries are left to the end of the process.
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

_OURS = str(Path(__file__).parent)
_STDLIB = str(Path(os.__file__).parent)
_LIBRARIES = ("site-packages", "dist-packages")
_KEPT = (ModuleType, FunctionType, BuiltinFunctionType, type, str, bytes, int, float, bool, type(None))
_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_FINALIZED, _OTHER, _FILE, _LAST = range(4)  # in which order the globals of a module are taken away
_MARK = "__holdfast_end__"
_C_FLUSH_S = 1.0  # C's own lock of a stream may be held by a thread that waits to read from it
_COMPRESSED = (("gzip", "GzipFile"), ("bz2", "BZ2File"), ("lzma", "LZMAFile"))

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Before:
    """What the process had before the script's first line: the rest is the script's."""

    modules: frozenset[str]
    frozen: int  # objects that the collector leaves out
    folder: str  # what the script imports from there is its own

    @classmethod
    def of_now(cls) -> Before:
        return cls(frozenset(sys.modules), gc.get_freeze_count(), os.path.realpath(sys.path[0] or os.curdir))


def tear_down(before: Before, tell: Tell) -> None:
    """Finalize the objects of the script's modules and write all buffers of files.

    Exit handlers have run, and the process ends right after: nothing of the script can be used any more.
    What a finalizer raises is printed, as at any end. `tell` gets a line for each file that could not be
    written; the interpreter would say nothing.
    """
    # Daemons would be gone by now: what they make of modules that are empty is of no interest.
    threading.excepthook = lambda _: None
    told: set[str] = set()
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)  # its frames hold what their functions had opened
    _flush_files(told, tell)  # first of all: whatever a finalizer does, this is safe
    for name in ("stdin", "stdout", "stderr"):  # what a script has put there is its own, a tee to a file
        setattr(sys, name, getattr(sys, f"__{name}__"))
    if gc.get_freeze_count() > before.frozen:
        gc.unfreeze()  # the script has, and its files may be among them
    _empty([name for name, module in list(sys.modules.items()) if _is_scripts(name, module, before)])
    _close_compressed(told, tell)
    _flush_files(told, tell)
    flushing = threading.Thread(target=_flush_c, daemon=True)
    flushing.start()
    flushing.join(_C_FLUSH_S)


def _is_scripts(name: str, module: object, before: Before) -> bool:
    if not issubclass(type(module), ModuleType):
        return False
    if name == "__main__":
        return True
    file = getattr(module, "__file__", None)
    if name in before.modules or name.partition(".")[0] == "torch" or not isinstance(file, str):
        return False
    path = os.path.realpath(file)
    inside = path.startswith(f"{before.folder.rstrip(os.sep)}{os.sep}")
    return inside and not path.startswith((_OURS, _STDLIB)) and not any(each in path for each in _LIBRARIES)


def _empty(names: list[str]) -> None:
    """Finalize what the modules hold.

    As the interpreter does it: a module that nothing else refers to is garbage with all that it holds, so its
    finalizers find their globals whole. What a library still refers to (as a hook, a handler) keeps its
    globals, and is emptied by hand. Other than there, files are closed after all finalizers of a script: one
    that writes to its log, as its end, can.
    """
    marks = []
    for name in names:
        held = vars(sys.modules[name])
        held[_MARK] = FunctionType(_mark.__code__, held)  # is there for as long as the globals are
        marks.append(weakref.ref(held[_MARK]))
        sys.modules[name] = None  # type: ignore[assignment] # as the interpreter: not to be imported again
    held = {}
    files = _live(tuple({*_FILES, *_compressed()}))
    gc.collect()
    left = [mark.__globals__ for mark in (each() for each in marks) if mark is not None]
    for order in (_FINALIZED, _OTHER):
        for held in left:
            _clear(held, order)
    gc.collect()
    files.clear()
    for order in (_FILE, _LAST):
        for held in left:
            _clear(held, order)
    left, held = [], {}
    gc.collect()


def _mark() -> None: ...


def _clear(held: dict[str, Any], order: int) -> None:
    for name in [name for name, value in list(held.items()) if _order(value) == order]:
        if name != "__builtins__":
            held[name] = None


def _order(value: object) -> int:
    if issubclass(type(value), _KEPT):
        return _LAST
    if issubclass(type(value), _FILES):
        return _FILE
    return _FINALIZED if any("__del__" in vars(kind) for kind in type(value).__mro__) else _OTHER


def _live(kinds: tuple[type, ...]) -> list[Any]:
    # By the type: to ask an object for its class may run code of its own.
    return [each for each in gc.get_objects() if issubclass(type(each), kinds)]


def _flush_files(told: set[str], tell: Tell) -> None:
    """Write what is buffered for files on disk: no other can be waited for while a thread holds its lock."""
    ours = {id(each) for stream in (sys.stdout, sys.stderr) for each in (stream, _buffer(stream))}
    for kinds in (_FILES[:1], _FILES[1:]):
        for each in _live(kinds):
            if id(each) not in ours and _is_on_disk(each):
                _attempt(each.flush, each, told, tell)


def _buffer(stream: object) -> object:
    return stream.buffer if issubclass(type(stream), io.TextIOWrapper) else None  # type: ignore[attr-defined]


def _is_on_disk(file: Any) -> bool:
    try:
        return not file.closed and file.writable() and stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except Exception:  # detached, in memory, or a class of the script
        return False


def _close_compressed(told: set[str], tell: Tell) -> None:
    """Close compressed files: they are whole only with what `close` writes."""
    for each in _live(tuple(_compressed())):
        if _is_on_disk(each):
            _attempt(each.close, each, told, tell)


def _compressed() -> Iterator[type]:
    for module, name in _COMPRESSED:
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type):
            yield found


def _attempt(act: Callable[[], object], file: Any, told: set[str], tell: Tell) -> None:
    try:
        act()
    except OSError as error:
        name = str(getattr(file, "name", file))
        if name not in told:
            told.add(name)
            tell(f"{name} cannot be written: {error.strerror or error}")
    except Exception:  # a class that is derived from one of Python's: its finalizer speaks for itself
        return


def _flush_c() -> None:
    with suppress(Exception):
        ctypes.CDLL(None).fflush(None)
