"""Saves the agent's state in a separate thread, so that a hanging disk delays nothing else.

Only the newest content waits: while a write hangs, each `submit` replaces the waiting content, which is
written when the disk answers. The same thread answers a successor that asks whether this agent is alive
(`claim`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.process.clock import seconds_to_next_tick
from nodeagent.agent import claim, saved_state, unsaved
from nodeagent.agent.claim import Claim, FolderInUse
from nodeagent.sensing.sensor import WAIT_S

ANSWER_EVERY_S = WAIT_S  # the thread wakes up at the same moments as the sensors


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """The result of the last write that returned."""

    number: int = 0  # all submissions up to this one are saved, or have failed
    problem: str = ""  # why the write failed; "" if the state is saved


class StateWriter:
    """Writes the submitted contents to a folder; see the module's docstring."""

    def __init__(
        self, folder: Path, claimed: Claim | None, done: Callable[[], None], superseded: Callable[[], None]
    ) -> None:
        """Start the thread.

        Args:
            folder: Where to write.
            claimed: The ownership of the folder; None if the disk has not permitted it yet. The writer then
                claims the folder before it writes.
            done: Called in the writer's thread after each write, whether it succeeded or not.
            superseded: Called in the writer's thread when a successor has taken over; nothing is written
                after that.
        """
        self._folder, self._claim = folder, claimed
        self._done, self._superseded = done, superseded
        self._changed = threading.Condition()
        self._waiting: bytes | None = None
        self._submitted = 0
        self._ending = False
        self.outcome = SaveOutcome()  # replaced as a whole
        self._thread = threading.Thread(target=self._run, name="state-writer", daemon=True)
        self._thread.start()

    def submit(self, content: bytes) -> int:
        """Queue `content` to be written; it replaces content that is still waiting.

        Returns its number, and never blocks.
        """
        with self._changed:
            self._waiting = content
            self._submitted += 1
            self._changed.notify_all()
            return self._submitted

    def finish(self, within_s: float) -> bool:
        """Write the waiting content, then give up the folder.

        Returns False if that takes longer than `within_s`.
        """
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._waiting is not None or self._ending, seconds_to_next_tick(ANSWER_EVERY_S)
                )
                content, number, self._waiting = self._waiting, self._submitted, None
                ending = self._ending
            if not self._is_owner():
                break
            if content is not None:
                self.outcome = SaveOutcome(number, self._write(content))
                self._done()
            elif ending:
                break
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def _is_owner(self) -> bool:
        """Answer a successor that asks; return False after a successor has taken over."""
        if self._claim is None:
            return True
        try:
            self._claim.answer()
            if not self._claim.is_superseded():
                return True
        except OSError:
            return True  # the folder cannot be read; a write fails the same way and reports it
        self._superseded()
        return False

    def _write(self, content: bytes) -> str:
        """Return the problem; "" if the content is saved."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._claim is None:
                self._claim = claim.take(self._folder)
            with suppress(OSError):  # the save reports what is wrong
                unsaved.reserve(self._folder, self._claim.generation)
            saved_state.write(self._folder, content, self._claim.generation)
        except (OSError, FolderInUse) as error:
            return f"the state cannot be saved: {error}{self._mark_unsaved()}"
        return ""

    def _mark_unsaved(self) -> str:
        """Record for the next start that the saved state is out of date; return a clause if that fails."""
        if self._claim is None:
            return ""
        try:
            saved_state.mark_unsaved(self._folder, self._claim.generation)
        except OSError as error:
            return f"; nor can this be recorded for the next start: {error}"
        return ""
