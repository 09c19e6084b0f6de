"""Run a loop on a plain selector: yield the ready events, and wake the loop when a signal arrives.

The launcher and the command line use such loops, because importing asyncio would delay the start of a run.
"""

from __future__ import annotations

import math
import selectors
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

# Within this time, another signal repeats a request to stop. Senders take much less, even on a busy machine,
# and a user who wants an immediate stop waits at least as long for a response to the first.
REPEAT_S = 1.0


def ready(selector: selectors.BaseSelector, limit_s: float) -> Iterator[selectors.SelectorKey]:
    """Wait up to `limit_s` for events, and yield the ready keys that are still registered.

    The kernel reports several descriptors together, but the handler of one event may close another
    descriptor. This happens, for example, when a process exits while its channel still has a last message.
    The number of the closed descriptor may even be in use again.
    """
    for key, _ in selector.select(limit_s):
        if is_there(selector, key):
            yield key


def is_there(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> bool:
    """Return True if `key` is still registered and unchanged."""
    return (selector.get_map() or {}).get(key.fd) is key


class SignalWakeup:
    """Turns this process's signals, and calls of `wake` from any thread, into events of a selector's loop."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        signals: Iterable[signal.Signals],
        on_wake: Callable[[bytes], None],
    ) -> None:
        """Handle `signals` by calling `on_wake` on the loop with their numbers. The number 0 means `wake`."""
        self._receiver, self._sender = socket.socketpair()
        self._on_wake = on_wake
        for each in (self._receiver, self._sender):
            each.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for signum in signals:
            signal.signal(signum, lambda *_: None)
        selector.register(self._receiver, selectors.EVENT_READ, self._receive)

    def wake(self) -> None:
        """Request a call of `on_wake` on the loop. Any thread may call this."""
        with suppress(OSError):  # if the socket's buffer is full, the loop wakes up anyway
            self._sender.send(b"\0")

    def close(self) -> None:
        self._receiver.close()

    def _receive(self) -> None:
        self._on_wake(self._receiver.recv(4096))


class SignalRepeats:
    """Recognizes signals, of whatever kind, within `REPEAT_S` of the last one that counted as a request.

    A sender may deliver one request several times within milliseconds: `timeout` of coreutils signals its
    child and then its process group, a closing terminal sends SIGHUP to the group and its leader, and a
    wrapper forwards a signal that its group has received anyway.
    """

    def __init__(self) -> None:
        self._until_s = -math.inf

    def is_repeat(self, now_s: float) -> bool:
        """True if a signal at `now_s`, in monotonic seconds, repeats an earlier request."""
        return now_s < self._until_s

    def counted(self, now_s: float) -> None:
        """Note that a signal counted as a request and was handled by `now_s`.

        Repetitions do not extend the time, so a user who keeps pressing Ctrl-C does get an immediate stop.
        """
        self._until_s = now_s + REPEAT_S
