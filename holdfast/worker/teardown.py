"""Finalize a script's objects as the interpreter does at exit: call `__del__`, and write buffered data.

The interpreter cannot do this for a rank with a process group. At exit, it would also destroy torch's
objects, in any order and while it holds the GIL. The backends' threads need the GIL to finish, so some of
these destructors would never return. This module therefore destroys nothing, and closes nothing that a thread
may be using. It calls the finalizers that the script's own code defines, and writes the buffers of Python's
files and of the libraries that `close_unclosed` knows.
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import stat
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

from holdfast.fileio.unclosed_files import TEMPORARY, WRITERS, FileKind, close_unclosed
from holdfast.worker.script_source import HOLDFAST_FOLDER, STDLIB_FOLDER

_LIBRARIES = ("site-packages", "dist-packages")
_FILES = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_PIPE_S = 1.0  # the limit for all pipes and sockets together, because their readers may have stopped
_C_FLUSH_S = 1.0  # the limit for C's streams, because threads that are waiting for input may hold their locks
_COMPRESSED = (("gzip", "GzipFile"), ("bz2", "BZ2File"), ("lzma", "LZMAFile"), ("zipfile", "ZipFile"))

_Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CollectorState:
    """The state of the garbage collector before the script's first line."""

    frozen: int  # the number of frozen objects (`gc.freeze`)

    @classmethod
    def of_now(cls) -> CollectorState:
        return cls(gc.get_freeze_count())


def keep_libraries_loaded() -> None:
    """Do not remove torch's operators one by one at exit. Call this right before the exit handlers run.

    `torch.library` registers a finalizer for each of its tables of operators. They take 40 ms, during
    which the group that replaces this process starts on the same cores. The process ends anyway.
    """
    library = sys.modules.get("torch.library")
    remove = getattr(library, "_del_library", None)
    with suppress(Exception):  # the registry of finalizers is an internal of Python's
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            known = finalizer.peek()
            if remove is not None and known is not None and known[1] is remove:
                finalizer.atexit = False


def tear_down(before: CollectorState, report: _Tell, *, finalize: bool = True) -> None:
    """Call the script's finalizers if `finalize` is True; then write and close the files that it left open.

    Call this after the exit handlers, right before the process exits. Exceptions of finalizers are printed,
    as at any exit. For each file that could not be written, `report` is called with a line about it; the
    interpreter would report nothing.
    """
    # In an interpreter, daemon threads would have ended by now. Here they may fail because this function has
    # closed their files, and such failures do not matter.
    threading.excepthook = lambda _: None
    reported: set[str] = set()
    mixed = gc.get_freeze_count() > before.frozen
    if mixed:
        gc.unfreeze()  # the script called gc.freeze, and its files may be among the frozen objects
    _flush_files(reported, report)  # first, because finalizers may do anything
    if finalize:
        _finalize()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the script may have put any object there, such as a tee to a file
            stream.flush()
    _close_unclosed(WRITERS, reported, report)
    # Some of these files write into compressed files, so flush them before closing the compressed files.
    _flush_files(reported, report)
    _close_compressed(reported, report)
    _flush_files(reported, report)
    _flush_pipes(reported, report)
    # After `unfreeze`, the temporary files of this process cannot be distinguished from those of the process
    # that forked it.
    if not (mixed and before.frozen):
        _close_unclosed(TEMPORARY, reported, report)
    flushing = _in_thread(_flush_c)
    if flushing is not None:
        flushing.join(_C_FLUSH_S)


def _finalize() -> None:
    """Call `__del__` once for each object whose class the script defines."""
    known: dict[type, FunctionType | None] = {}
    found = []
    for each in gc.get_objects():
        kind = type(each)
        if kind not in known:
            known[kind] = _finalizer(kind)
        finalizer = known[kind]
        if finalizer is not None:
            found.append((finalizer, each))
    _called.append(found)
    for finalizer, each in found:
        try:
            finalizer(each)
        except BaseException:  # even `sys.exit` has no effect in a finalizer, as at any exit
            with suppress(Exception):
                sys.stderr.write(f"Exception ignored in: {finalizer!r}\n{traceback.format_exc()}")


_called: list[object] = []  # keeps the objects alive, so their finalizers are not called again


def _finalizer(kind: type) -> FunctionType | None:
    for each in kind.__mro__:
        found = each.__dict__.get("__del__")
        if found is not None:
            return found if isinstance(found, FunctionType) and is_users_own(found) else None
    return None


def is_users_own(function: FunctionType) -> bool:
    """Return True if `function` is the user's own, rather than Holdfast's, torch's or a library's."""
    names = function.__globals__
    if names.get("__name__") == "__main__":
        return True
    name = function.__code__.co_filename
    if name.startswith("<"):  # code that a module has generated
        name = str(names.get("__file__") or "")
    if not name:
        return False
    path = Path(os.path.realpath(name))
    torch = getattr(sys.modules.get("torch"), "__file__", None)  # a locally built torch may be in any folder
    theirs = (HOLDFAST_FOLDER, STDLIB_FOLDER, Path(torch).parent if torch else HOLDFAST_FOLDER)
    inside = any(path.is_relative_to(os.path.realpath(each)) for each in theirs)
    return not inside and not any(each in path.parts for each in _LIBRARIES)


def _live(kinds: tuple[type, ...]) -> list[Any]:
    # Do not use `isinstance`, because reading an object's `__class__` may run the object's code.
    return [each for each in gc.get_objects() if issubclass(type(each), kinds)]


def _flush_files(reported: set[str], report: _Tell) -> None:
    """Flush files on disk only, because a thread may hold the lock of a pipe or socket indefinitely."""
    ours = {id(each) for stream in (sys.stdout, sys.stderr) for each in (stream, _buffer(stream))}
    for kinds in (_FILES[:1], _FILES[1:]):
        for each in _live(kinds):
            if id(each) not in ours and _is_on_disk(each):
                _attempt(each.flush, each, reported, report)


def _flush_pipes(reported: set[str], report: _Tell) -> None:
    """Flush pipes and sockets, each in its own thread, because the other end may not be reading."""
    ours = {id(each) for stream in (sys.stdout, sys.stderr) for each in (stream, _buffer(stream))}
    for kinds in (_FILES[:1], _FILES[1:]):
        found = [each for each in _live(kinds) if id(each) not in ours and _is_pipe(each)]
        waited = [(each, _in_thread(partial(_attempt, each.flush, each, reported, report))) for each in found]
        until = time.monotonic() + _PIPE_S
        for each, thread in waited:
            if thread is not None:
                thread.join(max(until - time.monotonic(), 0.0))
            if thread is None or thread.is_alive():
                _report_once(each, "could not be written: the other end is not reading", reported, report)


def _in_thread(act: Callable[[], object]) -> threading.Thread | None:
    thread = threading.Thread(target=act, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread could be started
        return None
    return thread


def _buffer(stream: object) -> object:
    return stream.buffer if issubclass(type(stream), io.TextIOWrapper) else None  # type: ignore[attr-defined]


def _is_on_disk(file: Any) -> bool:
    return stat.S_ISREG(_mode(file))


def _is_pipe(file: Any) -> bool:
    return stat.S_ISFIFO(_mode(file)) or stat.S_ISSOCK(_mode(file))


def _mode(file: Any) -> int:
    """Return the mode (`st_mode`) of `file`; 0 if it is not open for writing."""
    try:
        return os.fstat(file.fileno()).st_mode if not file.closed and file.writable() else 0
    except Exception:  # the file is detached, in memory, or of a class that the script defines
        return 0


def _close_unclosed(kinds: tuple[FileKind, ...], reported: set[str], report: _Tell) -> None:
    def attempt(act: Callable[[], object], file: Any) -> None:
        try:
            act()
        except Exception as error:  # libraries raise their own types for disk errors
            _report_once(file, f"cannot be closed: {_first_line(error)}", reported, report)

    left: list[Any] = []
    with suppress(Exception):  # a library may raise anything; the remaining files must still be written
        left = close_unclosed(kinds, attempt)
    for each in left:
        _report_once(
            each, "was not closed and may be incomplete, because a thread still uses it", reported, report
        )


def _close_compressed(reported: set[str], report: _Tell) -> None:
    """Close compressed files and archives, because only `close` completes them."""
    for each in _live(tuple(_compressed_types())):
        inner = getattr(each, "fp", each) if type(each).__name__ == "ZipFile" else each
        if inner is not None and _is_on_disk(inner):
            _attempt(each.close, each, reported, report)


def _compressed_types() -> Iterator[type]:
    for module, name in _COMPRESSED:
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type):
            yield found


def _attempt(act: Callable[[], object], file: Any, reported: set[str], report: _Tell) -> None:
    try:
        act()
    except OSError as error:
        _report_once(file, f"cannot be written: {error.strerror or error}", reported, report)
    except Exception:  # a subclass of Python's file types may raise anything
        return


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _report_once(file: Any, what: str, reported: set[str], report: _Tell) -> None:
    try:
        name = next(
            str(n) for a in ("filename", "name", "where") if (n := getattr(file, a, None)) not in (None, "")
        )
    except Exception:
        name = object.__repr__(file)
    name = f"file descriptor {name}" if name.isdecimal() else name
    if name not in reported:
        reported.add(name)
        report(f"{name} {what}")


def _flush_c() -> None:
    with suppress(Exception):
        ctypes.CDLL(None).fflush(None)
