"""Refuse a step in which the script has caught the exception that a lost peer caused.

Many scripts catch what a step raises, to leave out a batch that does not fit into memory: then they commit
the step without an update, or update with gradients that the lost peer has no part in. Python does not report
an exception that was caught. So a step is doubted when its optimizers wrote nothing, when a backward pass or
a collective failed in it, or when it has fewer backward passes than the step before. All of that can be
intended, and such a step is made as usual. Only if a connection to a peer is gone as well is it a step that
the group cannot have made.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

from holdfast.errors import PeerLost

HOLD_S = 20.0  # for the group to be stopped when a connection is gone and nothing was seen to fail
POLL_S = 0.01
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class PeerConnections:
    """The sockets that lead to the peers, open while the peers live. None is read or held open here."""

    def __init__(self, inodes: dict[int, int]) -> None:
        self._inodes = inodes  # by descriptor, which another file may have later

    @classmethod
    def since(cls, before: Iterable[int]) -> PeerConnections:
        """Return the sockets of this process that were not open `before`, as `open_sockets` found them."""
        known = set(before)
        return cls({fd: inode for fd, inode in open_sockets().items() if fd not in known})

    def settle(self) -> None:
        """Forget those that are gone: only the forming of the group used them."""
        gone = self._gone()
        self._inodes = {fd: inode for fd, inode in self._inodes.items() if fd not in gone}

    def lost(self) -> bool:
        """True when one is gone: closed, by either side, or broken."""
        return bool(self._gone())

    def _gone(self) -> set[int]:
        poller = select.poll()
        for fd in self._inodes:
            poller.register(fd, select.POLLRDHUP)
        found = {fd for fd, events in poller.poll(0) if events & _GONE}
        return found | {fd for fd, inode in self._inodes.items() if _socket_inode(fd) != inode}


def open_sockets() -> dict[int, int]:
    """Return the inodes of this process's sockets by descriptor, {} where /proc cannot be read."""
    try:
        fds = [int(each.name) for each in Path("/proc/self/fd").iterdir()]
    except OSError:
        return {}
    return {fd: inode for fd in fds if (inode := _socket_inode(fd)) is not None}


def _socket_inode(fd: int) -> int | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else None


class _TorchActivity:
    """Counts, which only grow, of what this process has done and failed to do since `watch` was called."""

    def __init__(self) -> None:
        self.begun = self.ended = 0  # backward passes
        self.failed = 0  # collectives of the script's own
        self._watches = False

    def watch(self) -> None:
        if self._watches:
            return
        self._watches = True
        self._watch_passes()
        self._watch_collectives()

    def _watch_passes(self) -> None:
        import torch

        inner = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            self.begun += 1
            inner(*args, **kwargs)
            self.ended += 1

        # torch.compile of a training step finds no frame to compile here, as in torch's own function.
        skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
        if skip is not None:
            skip(backward.__code__)
        torch.autograd.backward = wraps(inner)(backward)

    def _watch_collectives(self) -> None:
        """Torch logs what its collectives raise, as it passes them."""
        activity = self

        class Handler(logging.Handler):
            def emit(self, _record: logging.LogRecord) -> None:
                activity.failed += sys.exc_info()[1] is not None

        logger = getattr(sys.modules.get("torch.distributed.c10d_logger"), "_c10d_logger", None)
        if isinstance(logger, logging.Logger):
            logger.addHandler(Handler(logging.DEBUG))


_activity = _TorchActivity()


class CaughtErrorCheck:
    """Checks one rank's steps. `peers` are looked at only in a step that is doubted.

    `frozen` says whether the group has been stopped. Where no failure was seen, the check waits for that: the
    connection may not lead to a peer, or lead to one that has done its last step and ended.
    """

    def __init__(self, peers: PeerConnections, frozen: Callable[[], bool], hold_s: float = HOLD_S) -> None:
        self._peers, self._frozen, self._hold_s = peers, frozen, hold_s
        self._peers.settle()
        _activity.watch()
        self._usual = 0  # backward passes of the step before
        self._count()

    def writes(self, step: int) -> None:
        """An optimizer is about to write. Raises `PeerLost`."""
        failed = self._pass_failed() or _activity.failed != self._failed
        if failed or _activity.ended - self._ended < self._usual:
            self._doubt(
                failed, f"step {step}: its optimizer would write without the gradients of a lost peer"
            )

    def commits(self, step: int, *, written: bool) -> None:
        """The step is about to be counted. Raises `PeerLost`.

        A collective that failed after the optimizer had written may have concerned only the numbers.
        """
        failed = self._pass_failed() or (not written and _activity.failed != self._failed)
        if failed or not written:
            self._doubt(
                failed, f"step {step}: it would be counted without its update, because a peer is lost"
            )

    def committed(self) -> None:
        """The step is counted, and another one may begin."""
        self._usual = _activity.ended - self._ended
        self._count()

    def _count(self) -> None:
        self._begun, self._ended, self._failed = _activity.begun, _activity.ended, _activity.failed

    def _pass_failed(self) -> bool:
        """True when a backward pass of this step has not come to its end."""
        return _activity.begun - self._begun != _activity.ended - self._ended

    def _doubt(self, failed: bool, what: str) -> None:
        if not self._peers.lost():
            return
        if failed:
            raise PeerLost(f"{what}; the script has caught the exception that this caused")
        give_up_at = time.monotonic() + self._hold_s
        while not self._frozen() and time.monotonic() < give_up_at:
            time.sleep(POLL_S)
        self._peers.settle()
