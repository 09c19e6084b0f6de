"""What a rank's process knows of its launcher, shared by the modules that run inside of it."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from holdfast.process import gpu_assignment, linux, title
from holdfast.protocol import rank_channel
from holdfast.protocol.rank_channel import WorkerMessage, WorkerOrder
from holdfast.snapshot import member_directory


@dataclass(slots=True)
class LauncherChannel:
    """One per process. `start` is the order to run, once it has come."""

    control: socket.socket
    directory: Path  # the member's folder in the memory volume
    local_rank: int
    nproc: int
    start: WorkerOrder | None = None
    script: str = ""  # the name of its file or module
    listen_fd: int = -1
    parked: bool = False  # it has waited for that order
    on_join: Callable[[Callable[[WorkerOrder], None]], None] | None = (
        None  # who listens already, and hands over
    )
    on_failing: Callable[[], None] | None = None  # a last chance to secure the state
    on_leaving: Callable[[], None] | None = None  # the script has ended well
    lock: threading.Lock = field(default_factory=threading.Lock)
    pid: int = field(default_factory=os.getpid)  # of the rank: a process that its script forks is none

    @property
    def is_ours(self) -> bool:
        """True in the rank's own process, False in one that its script has forked."""
        return self.pid == os.getpid()

    def say(self, message: WorkerMessage) -> None:
        """Tell the launcher, as the rank alone may. One that is gone is no error: we end with it anyway."""
        if not self.is_ours:
            return
        with self.lock:
            try:
                rank_channel.send(self.control, replace(message, pid=self.pid))
            except (rank_channel.Closed, OSError):
                return

    def wait_start(self) -> WorkerOrder:
        """Block until the launcher says start. Raises `channel.Closed` when it never will.

        On return the process sees the devices of its rank.
        """
        while self.start is None:
            order, descriptors = rank_channel.receive(self.control, WorkerOrder)
            if order.what == "start":
                self.start = order
                self.listen_fd = descriptors[0] if descriptors else -1
        rank = self.start.rank
        if rank is not None:
            linux.set_name(f"rank {rank.rank}")
            title.change(f"rank {rank.rank} {self.script}".rstrip())
        if (
            rank is not None
            and rank.devices
            and not gpu_assignment.take(rank.devices, rank.local_rank, self.directory.parent)
        ):
            held = f"the GPU of rank {rank.rank} is still held by a process that was killed"
            sys.stderr.write(f"holdfast: {held}, {gpu_assignment.TURN_S:.0f} s ago or more\n")
        return self.start

    @property
    def page_path(self) -> Path:
        return self.directory / member_directory.page_name(self.local_rank)

    @property
    def arena_path(self) -> Path:
        return self.directory / member_directory.ARENA


current_channel: LauncherChannel | None = None
"""The runtime of this process; None in a script that no launcher started."""


def set_current(runtime: LauncherChannel) -> None:
    global current_channel
    current_channel = runtime
