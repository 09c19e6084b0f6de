"""The keeper's end of a template: it forks a local run's members from one, our own parts from another."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from pathlib import Path

from holdfast import channel, logfile, wire
from holdfast.channel import Do, Say
from supervisor.children import Adopted, Children, Part
from supervisor.plan import Start

# A template that imports for longer is given up: whoever would be forked from it imports for itself.
IMPORT_S = 120.0  # what a script imports
PARTS_S = 20.0  # what our own parts do: until then there is no supervisor
BORN_S = 2.0  # a fork takes milliseconds, and the keeper waits for it


class Template:
    """One process that imports what many need. Without it each of them does that for itself.

    `settled` is called when `importing` is over: it may be forked now, or there is none.
    """

    def __init__(
        self, name: str, children: Children, settled: Callable[[], None], import_s: float = IMPORT_S
    ) -> None:
        self.importing = False
        self._import_s = import_s
        self._name = name
        self._children = children
        self._settled = settled
        self._line: socket.socket | None = None
        self._part: Part | None = None
        self._limit_s = 0.0

    def start(self, begin: Callable[[int], Start | None], now_s: float) -> None:
        """Start what `begin` returns for its line's descriptor. Ends in `settled`, at once if it is None."""
        ours, theirs = channel.pair()
        with theirs:
            start = begin(theirs.fileno())
            if start is None:
                ours.close()
                return self._settled()
            try:
                self._part = self._children.spawn(self._name, start)
            except OSError:  # without it each imports for itself, or says why it cannot
                ours.close()
                return self._settled()
        self._line, self._limit_s, self.importing = ours, now_s + self._import_s, True
        self._children.selector.register(ours, selectors.EVENT_READ, self._hear)
        return None

    def turn(self, now_s: float) -> None:
        """Give it up when it has imported for too long."""
        if self.importing and now_s > self._limit_s:
            self._drop()

    def fork(self, name: str, order: Do, descriptors: tuple[int, ...] = ()) -> Part | None:
        """Return the process that `order` asks for, given `descriptors`; None where there is none to fork."""
        if self._line is None:
            return None
        try:
            born = _forked(self._line, order, self._children.log(name), descriptors)
            return self._children.watch(name, born)
        except channel.Closed:
            self._drop()
            return None

    def _hear(self) -> None:
        assert self._line is not None
        try:
            ready = channel.receive(self._line, Say)[0].what == "ready"
        except (channel.Closed, wire.Malformed):
            ready = False
        if ready:
            self._settle()
        else:
            self._drop()

    def _drop(self) -> None:
        """Go on without it. What it has forked is apart from it."""
        if self._line is not None and self._part is not None:
            self._children.selector.unregister(self._line)
            self._line.close()
            self._line = None
            self._part.process.kill()
        self._settle()

    def _settle(self) -> None:
        if self.importing:
            self.importing = False
            self._settled()


def _forked(line: socket.socket, order: Do, log: Path, descriptors: tuple[int, ...]) -> Adopted:
    """Return the process that was forked, or raise `Closed` when none has come in time."""
    ours, theirs = channel.pair()
    ours.settimeout(BORN_S)
    with ours, logfile.opened(log) as out:
        try:
            with theirs:
                channel.send(line, order, (theirs.fileno(), out.fileno(), *descriptors))
            born, _ = channel.receive(ours, Say)
        except (TimeoutError, wire.Malformed):  # it hangs, or the command is of 100 KB
            raise channel.Closed from None
    return Adopted(born.pid)
