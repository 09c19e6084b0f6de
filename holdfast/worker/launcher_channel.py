"""A rank's connection to its launcher, shared by the modules that run inside the rank's process."""

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
from holdfast.protocol.launcher_messages import SecureAnswer
from holdfast.protocol.rank_channel import WorkerMessage, WorkerOrder
from holdfast.snapshot import member_directory

# After reporting a bad number, a rank waits this long for the restart that ends it. Then it continues.
FLAG_WAIT_S = 600.0


@dataclass(slots=True)
class LauncherChannel:
    """The connection of one process to its launcher. `start` is the order to start, once it has arrived."""

    control: socket.socket
    directory: Path  # the member's folder in the memory volume
    local_rank: int
    nproc: int
    start: WorkerOrder | None = None
    script: str = ""  # the script's file or module name
    listen_fd: int = -1
    parked: bool = False  # whether this process waited for the order as a warm process
    # Set if a thread already receives the orders. `join` then passes that thread the function that obeys the
    # orders.
    on_join: Callable[[Callable[[WorkerOrder], None]], None] | None = None
    # Called before a failure is reported, to secure the state. What it returns is reported too.
    on_failing: Callable[[], SecureAnswer | None] | None = None
    on_leaving: Callable[[], None] | None = None  # called when the script has ended without an error
    lock: threading.Lock = field(default_factory=threading.Lock)
    # The pid of the rank, which distinguishes it from processes that its script forks.
    pid: int = field(default_factory=os.getpid)

    @property
    def is_ours(self) -> bool:
        """True in the rank's own process, False in a process that its script has forked."""
        return self.pid == os.getpid()

    def say(self, message: WorkerMessage) -> None:
        """Send `message` to the launcher; do nothing in a process that the script has forked.

        It is not an error if the launcher has exited, because this process is about to be terminated too.
        """
        if not self.is_ours:
            return
        with self.lock:
            try:
                rank_channel.send(self.control, replace(message, pid=self.pid))
            except (rank_channel.Closed, OSError):
                return

    def wait_start(self) -> WorkerOrder:
        """Block until the launcher sends the order to start.

        On return, the GPUs of the rank are visible to this process. Raises `rank_channel.Closed` if the
        launcher has ended.
        """
        while self.start is None:
            order, descriptors = rank_channel.receive(self.control, WorkerOrder)
            if order.do == "start":
                self.start = order
                self.listen_fd = descriptors[0] if descriptors else -1
        rank = self.start.rank
        if rank is not None:
            linux.set_name(f"rank {rank.rank}")
            title.change(f"rank {rank.rank} {self.script}".rstrip())
        if (
            rank is not None
            and rank.devices
            and not gpu_assignment.await_turn(rank.devices, rank.local_rank, self.directory.parent)
        ):
            held = f"the GPU of rank {rank.rank} is still held by a process that was killed at least"
            sys.stderr.write(f"holdfast: {held} {gpu_assignment.TURN_S:.0f} s ago\n")
        return self.start

    @property
    def page_path(self) -> Path:
        """The rank's progress page."""
        return self.directory / member_directory.page_name(self.local_rank)

    @property
    def arena_path(self) -> Path:
        """The folder of the member's snapshots."""
        return self.directory / member_directory.ARENA


current_channel: LauncherChannel | None = None
"""The connection of this process; None in a script that no launcher started."""


def set_current(channel: LauncherChannel) -> None:
    """Make `channel` this process's connection to its launcher."""
    global current_channel
    current_channel = channel
