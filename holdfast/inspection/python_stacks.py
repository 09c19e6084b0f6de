"""Parse the Python stacks that `py-spy dump --json` reports, for display and comparison. Pure.

Holdfast's own threads are omitted, and so are the frames that started the script. They are the
same in every process and say nothing about the script.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile

from holdfast.fileio import strict_json

MAX_TEXT = 8_000  # the maximum number of characters that are kept of one rank's stacks
MAX_DUMP_BYTES = 1 << 22
MAX_VALUES = 1 << 17
_OURS = "holdfast"  # the names of Holdfast's own threads begin with this
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "/lib64/python", "<frozen")
# The function of CPython that waits for a lock of Python, and the libraries whose functions it calls. No
# extension and no native thread uses it for its own locks.
_LOCK_CALL = "PyThread_acquire_lock_timed"
_SYSTEM = re.compile(r"(libc|libpthread|ld-musl-\w+)[-.]")

# The positions of a wait for a lock of Python: modules of Python that only wait for such locks, and `ACQUIRE`
LOCK_POSITION = re.compile(r"\(((threading|queue|concurrent/futures/\w+)\.py:\d+|_thread)\)$")


@dataclass(frozen=True, slots=True)
class Frame:
    """One call. `file` is the short name for display, and `path` the full path.

    A native frame is a call of a C function. `path` is then the library's path.
    """

    function: str
    file: str
    path: str
    line: int
    native: bool = False

    @property
    def ours(self) -> bool:
        return self.file.startswith("holdfast/")

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})" if self.line else f"{self.function} ({self.file})"


@dataclass(frozen=True, slots=True)
class Thread:
    """One Python thread and its frames, innermost first."""

    tid: int  # the kernel's thread id; 0 if unknown
    name: str
    active: bool
    frames: tuple[Frame, ...]

    @property
    def ours(self) -> bool:
        return self.name.startswith(_OURS)


def parse(dump: bytes) -> tuple[Thread, ...]:
    """Return the threads of a dump, the main thread first. Raises `ValueError` if the input is not a dump."""
    found = strict_json.loads(dump, max_values=MAX_VALUES)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ValueError("not a dump of threads")
    try:
        threads = [_thread(each) for each in found]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a dump of threads: {error!r}") from error
    return tuple(sorted(threads, key=lambda thread: thread.name != "MainThread"))


def _thread(found: dict[str, object]) -> Thread:
    frames = found.get("frames") or []
    if not isinstance(frames, list):
        raise TypeError("frames")
    return Thread(
        tid=int(str(found.get("os_thread_id") or 0)),
        name=str(found.get("thread_name") or ""),
        active=found.get("active") is True,
        frames=tuple(_frame(each) for each in frames),
    )


def _frame(found: dict[str, object]) -> Frame:
    library = found.get("module")
    if library is not None:
        # `filename` would be the source of the C function, if the library has debug information.
        return Frame(str(found["name"]), str(library).rpartition("/")[2], str(library), 0, native=True)
    path = str(found["filename"])
    return Frame(
        str(found["name"]), str(found.get("short_filename") or path), path, int(str(found.get("line") or 0))
    )


def of_the_rank(threads: tuple[Thread, ...]) -> tuple[Thread, ...]:
    """Return all threads except Holdfast's own, and omit the frames that started the script."""
    return tuple(
        Thread(thread.tid, thread.name, thread.active, _above(thread.frames))
        for thread in threads
        if not thread.ours
    )


def _above(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """Return the frames above those that started the script, or all frames if it runs without Holdfast."""
    end = len(frames)
    while end and (frames[end - 1].ours or frames[end - 1].path.startswith("<") or _starts(frames[end - 1])):
        end -= 1
    return frames[:end] if any(each.ours for each in frames[end:]) and end else frames


def _starts(frame: Frame) -> bool:
    return frame.file == "runpy.py"


def text(threads: tuple[Thread, ...]) -> str:
    """Return the stacks as readable text, cut to `MAX_TEXT`."""
    lines = []
    for thread in threads:
        doing = "active" if thread.active else "idle"
        lines += [
            f'Thread {thread.tid} ({doing}): "{thread.name}"',
            *(f"    {each}" for each in thread.frames),
        ]
    return "\n".join(lines)[:MAX_TEXT]


def functions(threads: tuple[Thread, ...]) -> tuple[tuple[str, str], ...]:
    """Return the main thread's functions. Line numbers are omitted, because they change within a function."""
    return tuple((each.function, each.path) for each in threads[0].frames) if threads else ()


def innermost(threads: tuple[Thread, ...]) -> str:
    """Return the innermost function of the main thread; "" if unknown."""
    frames = threads[0].frames if threads else ()
    return str(frames[0]) if frames else ""


# What a thread does that waits for a lock of Python. Python has no frame for it.
ACQUIRE = Frame("acquire", "_thread", "_thread", 0)


def all_wait_for_python_locks(threads: tuple[Thread, ...]) -> bool:
    """Return True if each thread that runs Python code waits in a call that acquires a lock of Python.

    `threads` is a dump with native frames. Only a thread that runs Python code can release such a lock, so a
    thread without Python frames does not count.
    """
    at_work = [each.frames for each in threads if not all(frame.native for frame in each.frames)]
    return bool(at_work) and all(map(_acquires_python_lock, at_work))


def _acquires_python_lock(frames: tuple[Frame, ...]) -> bool:
    native = takewhile(lambda frame: frame.native, frames)
    calls = tuple(dropwhile(lambda frame: _SYSTEM.match(frame.file), native))
    if not calls or calls[0].function != _LOCK_CALL:
        return False
    # All calls between the lock and the Python code must be the interpreter's, or those of its SimpleQueue.
    return all(each.path == calls[0].path or each.file.startswith("_queue.") for each in calls)


def with_call(threads: tuple[Thread, ...], call: Frame) -> tuple[Thread, ...]:
    """Return the threads, with `call` as the innermost frame of the main thread."""
    main = threads[0]
    return (replace(main, frames=(call, *main.frames)), *threads[1:])


def where(threads: tuple[Thread, ...]) -> str:
    """Return the main thread's innermost line in the script's own code; "" if there is none."""
    for frame in threads[0].frames if threads else ():
        library = any(each in frame.path for each in _LIBRARIES)
        if not library and not frame.ours:
            return str(frame)
    return ""
