"""Run code as another user without any right of root, as in a container that drops all capabilities."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sandbox import MEMORY, in_child

_CAPABILITY_VERSION_3 = 0x20080522
_STRICT = 0o077

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users: run it as root")


@dataclass(frozen=True, slots=True)
class Identity:
    """The user and the groups of a container. Root, too, has no capabilities."""

    user: int
    group: int
    groups: tuple[int, ...] = ()

    def __str__(self) -> str:
        return ".".join(map(str, (self.user, self.group, *self.groups)))

    def assume(self) -> None:
        """Make this process run as this user for good, with a umask that gives others no rights."""
        os.setgroups(self.groups)
        os.setresgid(self.group, self.group, self.group)
        os.setresuid(self.user, self.user, self.user)
        _drop_capabilities()
        os.umask(_STRICT)

    @contextmanager
    def effective(self) -> Iterator[None]:
        """Act as this user in this process, with all of its threads, while the context is open."""
        before = os.geteuid(), os.getegid()
        os.setegid(self.group)
        os.seteuid(self.user)
        try:
            yield
        finally:
            os.seteuid(before[0])
            os.setegid(before[1])

    def run(self, act: Callable[[], object]) -> int:
        """Run `act` as this user in a child. Return its wait status: 0 if `act` returned.

        `act` cannot use this process's thread pools, whose threads the child does not have.
        """

        def become_and_act() -> None:
            self.assume()
            act()

        return in_child(become_and_act)


def _drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    if ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError(ctypes.get_errno(), "capset")


@contextmanager
def kubelet_volume(mode: int = 0o1777) -> Iterator[Path]:
    """Yield an empty folder that all users reach, with the mode of the kubelet's memory volumes."""
    path = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir=MEMORY if MEMORY.is_dir() else None))
    try:
        path.chmod(mode)
        yield path
    finally:
        shutil.rmtree(path)
