"""A child that outlives a killed writer must not keep the writer's locks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.snapshot.arena import Arena
from holdfast.snapshot.slot_file import lock_shared
from tests.samples.snapshots import layout, snapshot


def forked(ready: int, _held: tuple[int, ...]) -> None:
    """Fork a child that never ends, like a worker of a DataLoader."""
    if os.fork() == 0:
        os.write(ready, str(os.getpid()).encode())
        while True:
            signal.pause()


def spawned(ready: int, held: tuple[int, ...]) -> None:
    """Start the same child with exec, so it inherits only the descriptors that are marked inheritable."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], close_fds=False)
    os.write(ready, str(child.pid).encode())


@contextmanager
def orphan(act: Callable[[], object], child: Callable[[int, tuple[int, ...]], None]) -> Iterator[None]:
    """Kill a writer after `act`. Its child lives until the context ends."""
    reading, writing = os.pipe()
    writer = os.fork()
    if writer == 0:
        held = act()
        child(writing, ())
        signal.pause()
        del held
    pid = int(os.read(reading, 100))
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("child", [forked, spawned])
def test_the_slot_of_a_killed_writer_is_free_even_if_its_child_lives(
    memory: Path, child: Callable[[int, tuple[int, ...]], None]
) -> None:
    snapshot(Arena(memory), 1, 1)

    def inside_a_copy() -> object:
        return Arena(memory).begin(layout(500), 1, 2, 2)

    with orphan(inside_a_copy, child):
        draft = Arena(memory).begin(layout(500), 1, 3, 2)
        assert draft is not None
        draft.abandon()


@pytest.mark.parametrize("child", [forked, spawned])
def test_the_slot_of_a_killed_reader_can_be_written_even_if_its_child_lives(
    memory: Path, child: Callable[[int, tuple[int, ...]], None]
) -> None:
    snapshot(Arena(memory), 1, 1)
    path = snapshot(Arena(memory), 1, 2).path

    with orphan(lambda: lock_shared(path), child):
        arena = Arena(memory)
        snapshot(arena, 1, 3)
        snapshot(arena, 1, 4)


def test_a_slot_that_the_parent_locks_is_locked_for_its_forked_child(memory: Path) -> None:
    arena = Arena(memory)
    draft = arena.begin(layout(500), 1, 1, 2)
    assert draft is not None
    pid = os.fork()
    if pid == 0:
        busy = arena.begin(layout(500), 1, 2, 2) is None
        os._exit(0 if busy else 1)
    assert os.waitpid(pid, 0)[1] == 0, "the child got the lock that its parent holds"
    draft.abandon()
