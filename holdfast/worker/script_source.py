"""Keep the user's script as it was when the run began, so that all ranks run that version.

The file is read once, into a sealed file in memory, which launchers, zygotes and templates inherit.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import linecache
import os
import sys
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from holdfast.fileio.storage_thread import StorageThread
from holdfast.protocol import codec, foreign_text
from holdfast.protocol.launcher_messages import MAX_CHANGED
from holdfast.worker.program import MAX_SOURCE_BYTES, Program

# The time between two checks. A change is reported only if two consecutive checks find it, because an editor
# may be saving the file.
POLL_S = 1.0
AT_ONCE_S = 0.5  # the time limit for a check while the caller waits
_MAX_TEXT_BYTES = 500
# The folders of code that is not the user's. The separator keeps them from matching folders such as
# "holdfast_examples".
HOLDFAST_FOLDER = str(Path(__file__).parents[1]) + os.sep
STDLIB_FOLDER = str(Path(os.__file__).parent) + os.sep


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A source file as it was when the run began."""

    path: str
    size: int
    mtime_ns: int
    crc32: int


@dataclass(frozen=True, slots=True)
class ProgramSources:
    """A run's program, with its sources as they were when the run began.

    `main` is the source of the script. It is None if the source is unknown, too large or unreadable. Each
    process then reads the file. `files` contains the script, unless `main` is None, and the local modules
    that it imports.
    """

    program: Program
    files: tuple[SourceFile, ...] = ()
    main: bytes | None = None
    descriptor: int = -1  # the descriptor of the file in memory


@dataclass(frozen=True, slots=True)
class _Header:
    program: Program
    files: tuple[SourceFile, ...]
    has_main: bool


def read_sources(program: Program) -> ProgramSources:
    """Read the sources of `program`, and open a descriptor of them for child processes. Raises `OSError`."""
    main, own = _read_file(program.source), [_read_file(each) for each in program.own]
    files = tuple(file for file, _ in filter(None, (main, *own)))
    text = main[1] if main is not None else None
    head = json.dumps(asdict(_Header(program, files, text is not None))).encode() + b"\n"
    descriptor = os.memfd_create("script", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as out:
        out.write(head + (text or b""))
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return ProgramSources(program, files, text, descriptor)


def load(descriptor: int) -> ProgramSources:
    """Return the sources that another process has read, from their inherited `descriptor`.

    Raises `OSError`, `ValueError`.
    """
    raw = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    line, _, main = raw.partition(b"\n")
    head = codec.from_json(_Header, json.loads(line))
    return ProgramSources(head.program, head.files, main if head.has_main else None, descriptor)


def load_main(descriptor: int) -> bytes | None:
    """Return the script's source, and close its descriptor to keep child processes from inheriting it.

    Returns None if there is no source or if it cannot be read.
    """
    if descriptor < 0:
        return None
    with suppress(OSError, ValueError):
        try:
            return load(descriptor).main
        finally:
            os.close(descriptor)
    return None


def _read_file(path: str) -> tuple[SourceFile, bytes] | None:
    """Return a file's metadata and content; None if it does not exist, is too large, or cannot be read."""
    if not path:
        return None
    try:
        with open(path, "rb") as opened:
            # Read the time first, to notice a write while the content is being read.
            mtime_ns = os.fstat(opened.fileno()).st_mtime_ns
            text = opened.read(MAX_SOURCE_BYTES + 1)
    except OSError:
        return None
    if len(text) > MAX_SOURCE_BYTES:
        return None
    return SourceFile(path, len(text), mtime_ns, zlib.crc32(text)), text


def _read(path: str) -> bytes | None:
    found = _read_file(path)
    return found[1] if found is not None else None


# -- changes of the files


def change_of(file: SourceFile) -> str:
    """Return "changed" or "removed" if that happened to the file since the run began; otherwise "".

    The result is also "" if the storage is unavailable.
    """
    try:
        found = Path(file.path).stat()
        if (found.st_size, found.st_mtime_ns) == (file.size, file.mtime_ns):
            return ""
        with open(file.path, "rb") as opened:
            text = opened.read(file.size + 1)
    except (FileNotFoundError, NotADirectoryError):
        return "removed"
    except OSError:  # the storage is unavailable
        return ""
    return "" if (len(text), zlib.crc32(text)) == (file.size, file.crc32) else "changed"


def change_message(file: SourceFile, what: str, program: Program, here: str) -> str:
    """Return a message saying that a file has changed or was removed, and what this means for the run."""
    inside = here and file.path.startswith(here.rstrip("/") + "/")
    name = os.path.relpath(file.path, here) if inside else file.path
    name = "".join(each if each.isprintable() else "?" for each in name)
    has = f"{name} {'has changed' if what == 'changed' else 'was removed'} since the run began"
    if file.path == program.source:
        message = f"{has}: the run continues to use the version from its start; restart it to use the new one"
    else:
        message = (
            f"{has}: ranks that start from now on import the current file, but running ranks keep the old"
            " version; restart the run to have the same version in all ranks"
        )
    return foreign_text.shortened(message, _MAX_TEXT_BYTES)


def working_directory() -> str:
    """Return the working directory; "" if it no longer exists."""
    with suppress(OSError):
        return str(Path.cwd())
    return ""


@dataclass(slots=True)
class SourceChanges:
    """Checks a run's files for changes periodically. A thread does this, because storage may not respond."""

    sources: ProgramSources
    messages: tuple[str, ...] = ()  # the messages so far, one per file
    _files: StorageThread = field(default_factory=lambda: StorageThread("sources"))
    _checking: Future[dict[str, str]] | None = None
    _before: dict[str, str] = field(default_factory=dict)  # the changes found by the previous check, by path
    _next_s: float = 0.0
    _known: set[str] = field(default_factory=set)
    _here: str = field(default_factory=working_directory)

    def check(self, now_s: float) -> None:
        """Take the result of the last check, and begin the next check if it is due. Never waits."""
        if not self.sources.files:
            return
        if self._checking is not None and self._checking.done():
            if self._checking.exception() is None:
                self._note(self._checking.result())
            self._checking = None
        if self._checking is None and now_s >= self._next_s:
            self._next_s = now_s + POLL_S
            with suppress(OSError):  # no thread could be started
                self._checking = self._files.submit(self._fates)

    def check_at_once(self) -> tuple[str, ...]:
        """Check now, for up to `AT_ONCE_S`, and return all messages. They may explain why a process died."""
        if self.sources.files:
            with suppress(OSError):
                self._before = self._files.do(self._fates, AT_ONCE_S)
                self._note(self._before)
        return self.messages

    def _fates(self) -> dict[str, str]:
        return {file.path: what for file in self.sources.files if (what := change_of(file))}

    def _note(self, found: dict[str, str]) -> None:
        for file in self.sources.files:
            what = found.get(file.path)
            if what is None or what != self._before.get(file.path) or file.path in self._known:
                continue
            if len(self.messages) < MAX_CHANGED:
                self._known.add(file.path)
                self.messages += (change_message(file, what, self.sources.program, self._here),)
        self._before = found


# -- in a rank's process

_pinned: dict[str, bytes] = {}  # the sources that this process executes, by path


def pin(path: str, text: bytes) -> None:
    """Make tracebacks and `inspect` show `text` for the file `path`. This process executes that source."""
    _pinned[path] = text
    with suppress(SyntaxError, ValueError):  # the compilation of the source will raise the same error
        lines = importlib.util.decode_source(text).splitlines(keepends=True)
        linecache.cache[path] = (len(text), None, lines, path)  # without an mtime, linecache never reloads it


def text_of(path: str) -> bytes:
    """Return the source that this process executes for the file `path`. Raises `OSError`."""
    found = _pinned.get(path)
    return found if found is not None else Path(path).read_bytes()


def is_outdated() -> bool:
    """Return True if any file differs from the source that this process executes for it."""
    return any(_read(path) != text for path, text in _pinned.items())


def pin_module(program: Program, text: bytes) -> None:
    """Make runpy run `text` as the module of `program` if the content of the module's file has changed."""
    name = program.target
    if Path(program.source).name == "__main__.py" and name.rpartition(".")[2] != "__main__":
        name += ".__main__"
    sys.meta_path.insert(0, _OriginalModuleFinder(name, program.source, text))


class _OriginalSourceLoader(SourceFileLoader):
    """Loads source text that the file no longer contains. It therefore neither reads nor writes bytecode."""

    def __init__(self, name: str, path: str, text: bytes) -> None:
        super().__init__(name, path)
        self._text = text

    def get_data(self, path: str) -> bytes:
        return self._text if path == self.path else super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        pin(str(self.path), self._text)
        made = self.source_to_code(self._text, self.path)
        assert isinstance(made, CodeType)
        return made


class _OriginalModuleFinder:
    """Finds one module, once. If the module's file has not changed, the usual finders load it."""

    def __init__(self, name: str, path: str, text: bytes) -> None:
        self._name, self._path, self._text = name, path, text

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        with suppress(ValueError):  # an import hook may have replaced the list of finders with a copy
            sys.meta_path.remove(self)
        now = _read(self._path)
        found = PathFinder.find_spec(name, path, target)
        another = found is not None and found.origin != self._path
        if now == self._text or another or (found is None and Path(self._path).exists()):
            return None
        loader = _OriginalSourceLoader(name, self._path, self._text)
        return importlib.util.spec_from_file_location(name, self._path, loader=loader)
