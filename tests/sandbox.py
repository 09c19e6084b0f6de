"""Tools for tests that damage something: a directory in memory, a child process, a bit of a file."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = Path("/dev/shm")


@contextmanager
def memory_directory() -> Iterator[Path]:
    """Create a directory on tmpfs if possible: arenas are also on tmpfs, and fsync costs nothing there."""
    path = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def in_child(act: Callable[[], object]) -> int:
    """Run `act` in a forked child. Return its waitpid status: 0 if `act` returned."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            act()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def limit_file_size(limit_bytes: int) -> None:
    """Make every write and allocation beyond the first `limit_bytes` of a file fail in this process."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))


def flip(path: Path, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
