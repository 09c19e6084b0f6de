"""Watch the processes of one member: receive their messages, and detect when they end."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.launcher.workers import worker_process
from holdfast.launcher.workers.worker_process import WorkerProcess
from holdfast.protocol import codec, rank_channel
from holdfast.protocol.rank_channel import WorkerMessage


@dataclass(slots=True)
class ProcessWatch:
    """Watches the channel and the pidfd of every process that runs the script, from its start to its end.

    `on_message` is called with each message of a process. If the message contains the process's pid, or how
    the process will end, this has already been recorded. `on_end` is called once for each process: when the
    kernel reports its end, or when its channel closes before its pid is known. All messages of the process
    have been received by then. `on_end` must reap the process; its descriptors are closed afterwards.
    """

    selector: selectors.BaseSelector
    on_message: Callable[[WorkerProcess, WorkerMessage], None]
    on_end: Callable[[WorkerProcess], None]

    def add(self, process: WorkerProcess) -> None:
        """Start to receive the messages of a process, and to watch for its end once it reports its pid."""
        self.selector.register(process.control, selectors.EVENT_READ, lambda: self._receive(process))

    def remove(self, process: WorkerProcess) -> None:
        """Stop watching a process, and close its descriptors."""
        if process.pidfd >= 0:
            self._stop_watching(process.pidfd)
        self._stop_watching(process.control.fileno())
        process.close()

    def born(self, process: WorkerProcess, pid: int) -> None:
        """Record the pid of a process, and watch for its end. If a signal was due earlier, send it now."""
        process.pid = pid
        try:
            process.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has already died and been reaped by a sweep; its channel will close
            return
        if process.killed:
            process.kill(process.killed)
        self.selector.register(process.pidfd, selectors.EVENT_READ, lambda: self.ended(process))

    def ended(self, process: WorkerProcess) -> None:
        """Receive the last messages of a process that has exited, call `on_end`, and remove the process.

        The kernel may report the end of a process before it delivers the last messages.
        """
        if process.pidfd >= 0:
            self._stop_watching(process.pidfd)
        while process.control.fileno() in self.selector.get_map() and self._receive(process):
            pass
        self.on_end(process)
        self.remove(process)

    def _receive(self, process: WorkerProcess) -> bool:
        """Receive one message. Return False if none is ready, or if the channel is closed."""
        try:
            message, _ = rank_channel.receive(process.control, WorkerMessage, wait=False)
        except BlockingIOError:
            return False
        except codec.InvalidMessage:  # the script's forks inherit the channel and may write anything to it
            return True
        except rank_channel.Closed:
            self._stop_watching(process.control.fileno())
            if process.pid == 0:
                self.ended(process)
            return False
        if message.what == "born" and process.pid == 0:
            self.born(process, message.pid)
        elif process.sent(message):
            process.reported = worker_process.reported_ending(process.reported, message)
        self.on_message(process, message)
        return True

    def _stop_watching(self, descriptor: int) -> None:
        if descriptor in self.selector.get_map():
            self.selector.unregister(descriptor)
