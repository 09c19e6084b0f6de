"""Refuse a step if the script caught an exception that a lost peer caused.

Many scripts catch exceptions in a step to skip a batch that does not fit into memory. When a peer is lost,
such a script commits the step without an update, or with gradients that lack the peer's contribution. Python
does not report exceptions that a script catches. So a step is suspect if its optimizers wrote nothing, if one
of its backward passes or collectives failed, or if it had fewer backward passes than the previous step.

A script may do any of this on purpose, so a suspect step is normally accepted. It is refused only if a
connection to a peer is closed as well, because then the group cannot have completed the step.
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
from typing import Any

from holdfast.errors import PeerLost

# If a connection is closed but nothing failed, wait this long for the group to be stopped.
HOLD_S = 20.0
POLL_S = 0.01
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class PeerConnections:
    """This process's connections to its peers, which stay open while the peers live.

    Checks only the state of the sockets. It neither reads from them nor keeps them open.
    """

    def __init__(self, inodes: dict[int, int]) -> None:
        # The sockets' inodes by descriptor. A different inode shows that the descriptor was reused.
        self._inodes = inodes

    @classmethod
    def since(cls, before: Iterable[int]) -> PeerConnections:
        """Return the sockets that this process has opened since `before`, a result of `open_sockets`."""
        known = set(before)
        return cls({fd: inode for fd, inode in open_sockets().items() if fd not in known})

    def forget_closed(self) -> None:
        """Forget the connections that are already closed, such as those used only to form the group."""
        gone = self._gone()
        self._inodes = {fd: inode for fd, inode in self._inodes.items() if fd not in gone}

    def lost(self) -> bool:
        """Return True if a connection is broken or was closed by either side."""
        return bool(self._gone())

    def _gone(self) -> set[int]:
        poller = select.poll()
        for fd in self._inodes:
            poller.register(fd, select.POLLRDHUP)
        found = {fd for fd, events in poller.poll(0) if events & _GONE}
        return found | {fd for fd, inode in self._inodes.items() if _socket_inode(fd) != inode}


def open_sockets() -> dict[int, int]:
    """Return the inodes of this process's sockets by descriptor; empty if /proc cannot be read."""
    try:
        fds = [int(each) for each in os.listdir("/proc/self/fd")]  # noqa: PTH208 - numbers, not paths
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
    """Counts this process's backward passes and failed collectives since the first call of `watch`.

    The counts only grow.
    """

    def __init__(self) -> None:
        self.begun = self.ended = 0  # backward passes
        self.failed = 0  # collectives that the script itself called
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

        # Make torch.compile skip this frame, because it skips torch's own function too.
        skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
        if skip is not None:
            skip(backward.__code__)
        torch.autograd.backward = wraps(inner)(backward)

    def _watch_collectives(self) -> None:
        """Count failed collectives. Torch writes a log record while it handles a collective's exception."""
        activity = self

        class Handler(logging.Handler):
            def emit(self, _record: logging.LogRecord) -> None:
                activity.failed += sys.exc_info()[1] is not None

        logger = getattr(sys.modules.get("torch.distributed.c10d_logger"), "_c10d_logger", None)
        if isinstance(logger, logging.Logger):
            logger.addHandler(Handler(logging.DEBUG))


_activity = _TorchActivity()


class CaughtErrorCheck:
    """Checks each step of one rank. It checks the connections to `peers` only if the step is suspect.

    `frozen` returns True once the group has been stopped. If a connection is closed but nothing failed in the
    step, the step is not refused, because the connection may not lead to a peer, or the peer may have ended
    after its last step. The check then only waits up to `hold_s` for the group to be stopped.
    """

    def __init__(self, peers: PeerConnections, frozen: Callable[[], bool], hold_s: float = HOLD_S) -> None:
        self._peers, self._frozen, self._hold_s = peers, frozen, hold_s
        self._peers.forget_closed()
        _activity.watch()
        self._usual = 0  # backward passes of the previous step
        self._count()

    def writes(self, step: int) -> None:
        """Check the step before an optimizer writes. Raises `PeerLost` if the step must be refused."""
        failed = self._pass_failed() or _activity.failed != self._failed
        if failed or _activity.ended - self._ended < self._usual:
            self._refuse_if_peer_is_lost(
                failed,
                f"step {step}: the optimizer would update the parameters without a lost peer's gradients",
            )

    def commits(self, step: int, *, written: bool) -> None:
        """Check the step before it is counted. Raises `PeerLost` if the step must be refused.

        A collective that failed after the optimizer's writes is ignored, because it may have exchanged only
        metrics.
        """
        failed = self._pass_failed() or (not written and _activity.failed != self._failed)
        if failed or not written:
            self._refuse_if_peer_is_lost(
                failed, f"step {step}: the step would be counted without an update, because a peer was lost"
            )

    def committed(self) -> None:
        """Record the counts at the end of a step. They are the baseline for the next step."""
        self._usual = _activity.ended - self._ended
        self._count()

    def _count(self) -> None:
        self._begun, self._ended, self._failed = _activity.begun, _activity.ended, _activity.failed

    def _pass_failed(self) -> bool:
        """Return True if a backward pass of this step has not completed."""
        return _activity.begun - self._begun != _activity.ended - self._ended

    def _refuse_if_peer_is_lost(self, failed: bool, what: str) -> None:
        if not self._peers.lost():
            return
        if failed:
            raise PeerLost(f"{what}; the script caught the resulting exception")
        give_up_at = time.monotonic() + self._hold_s
        while not self._frozen() and time.monotonic() < give_up_at:
            time.sleep(POLL_S)
        self._peers.forget_closed()
