"""Do for what a script leaves what the interpreter's own end does: run its `__del__`, write what is buffered.

A rank with a process group cannot be left to the interpreter: its end destroys what torch keeps, too, in any
order and with its lock held, while threads of the backends wait for that lock, and some never return. So
nothing is destroyed here, and nothing taken away that a thread may use: finalizers that the script itself
defines are called, and the files on disk are written.
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

_OURS = str(Path(__file__).parent)
_STDLIB = str(Path(os.__file__).parent)
_LIBRARIES = ("site-packages", "dist-packages")
_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_C_FLUSH_S = 1.0  # C's own lock of a stream may be held by a thread that waits to read from it
_PACKED = (("gzip", "GzipFile"), ("bz2", "BZ2File"), ("lzma", "LZMAFile"), ("zipfile", "ZipFile"))

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Before:
    """What the process had before the script's first line."""

    frozen: int  # objects that the collector leaves out
    folder: str  # what the script imports from there is its own

    @classmethod
    def of_now(cls) -> Before:
        return cls(gc.get_freeze_count(), os.path.realpath(sys.path[0] or os.curdir))


def tear_down(before: Before, tell: Tell, *, finalize: bool = True) -> None:
    """Call the script's finalizers, unless not to `finalize`, and write all buffers of files on disk.

    Exit handlers have run, and the process ends right after. What a finalizer raises is printed, as at any
    end. `tell` gets a line for each file that could not be written; the interpreter would say nothing.
    """
    # Daemons would be gone by now: what they make of files that are closed is of no interest.
    threading.excepthook = lambda _: None
    told: set[str] = set()
    if gc.get_freeze_count() > before.frozen:
        gc.unfreeze()  # the script has, and its files may be among them
    _flush_files(told, tell)  # first of all: whatever a finalizer does, this is safe
    if finalize:
        _finalize(before.folder)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a script may put there what it likes, as a tee to a file
            stream.flush()
    _close_packed(told, tell)
    _flush_files(told, tell)
    flushing = threading.Thread(target=_flush_c, daemon=True)
    flushing.start()
    flushing.join(_C_FLUSH_S)


def _finalize(folder: str) -> None:
    """Call what the script defines as `__del__` for each of its objects, once."""
    known: dict[type, FunctionType | None] = {}
    found = []
    for each in gc.get_objects():
        kind = type(each)
        if kind not in known:
            known[kind] = _finalizer(kind, folder)
        finalizer = known[kind]
        if finalizer is not None:
            found.append((finalizer, each))
    _called.append(found)
    for finalizer, each in found:
        try:
            finalizer(each)
        except BaseException:  # also `sys.exit`: it changes nothing here, as at any end
            with suppress(Exception):
                sys.stderr.write(f"Exception ignored in: {finalizer!r}\n{traceback.format_exc()}")


_called: list[object] = []  # as long as they are here, nobody calls their finalizers a second time


def _finalizer(kind: type, folder: str) -> FunctionType | None:
    for each in kind.__mro__:
        found = each.__dict__.get("__del__")
        if found is not None:
            return found if isinstance(found, FunctionType) and _is_scripts(found, folder) else None
    return None


def _is_scripts(function: FunctionType, folder: str) -> bool:
    if function.__globals__.get("__name__") == "__main__":
        return True
    path = os.path.realpath(function.__code__.co_filename)
    inside = path.startswith(f"{folder.rstrip(os.sep)}{os.sep}")
    return inside and not path.startswith((_OURS, _STDLIB)) and not any(each in path for each in _LIBRARIES)


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


def _close_packed(told: set[str], tell: Tell) -> None:
    """Close compressed files and archives: they are whole only with what `close` writes."""
    for each in _live(tuple(_packed())):
        inner = getattr(each, "fp", each) if type(each).__name__ == "ZipFile" else each
        if inner is not None and _is_on_disk(inner):
            _attempt(each.close, each, told, tell)


def _packed() -> Iterator[type]:
    for module, name in _PACKED:
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
