"""Reloads the operator's policy file while the agent runs: a valid change takes effect, a mistake does not.

The file is read at the start, again every few seconds, and on SIGHUP. If its content has changed and is
valid, the agent uses it from the next cycle on. If the file is missing, unreadable or wrong, the last good
policy stays in force, even across restarts, because a copy is kept beside the saved state. One mistake in a
file that a whole fleet mounts must not stop every agent.

The beginning of a TOML file is often a valid file with another meaning. New content is therefore adopted
only if two reads in a row have found it. A file that has become empty is assumed to have been cut off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.fileio import durable
from nodeagent.model import Observation
from nodeagent.policy import loading
from nodeagent.policy.rules import HealthPolicy
from nodeagent.policy.validation import BadPolicy
from nodeagent.sensing.sensor import WAIT_S

KEPT = "policy.last-good.toml"  # beside the saved state
MAX_NAMED = 3  # mistakes named in the report; `holdfast node explain` lists all
MAX_UNSETTLED = 4  # how many reads in a row may each find new content before this is a problem
START_PAUSE_S = 0.25  # between the first two reads; the later ones are `WAIT_S` apart
_UNREAD = object()


@dataclass(frozen=True, slots=True)
class PolicyInForce:
    """The policy to use for the evaluation."""

    policy: HealthPolicy
    problem: str = ""  # with the file, or with its copy
    rejected: bool = False  # the policy differs from the file's


class PolicyFile:
    """Follows the file. This is a sensor without observations, so a hanging disk delays nothing else."""

    name = "policy"
    period_s = WAIT_S

    def __init__(
        self,
        path: Path,
        folder: Path | None,
        *,
        required: bool,
        reads_now: bool = True,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        """Read the file. Never raises: `current` contains the policy to use, and any problem.

        Args:
            path: The file, or a symbolic link that is switched from one file to the next.
            folder: Where a copy of the last good file is kept; None: nowhere.
            required: False if a missing file means the shipped policy.
            reads_now: False if the file's disk does not answer; then the first `read` is the first attempt.
        """
        self._path = path
        self._required = required
        self._kept = None if folder is None else folder / KEPT
        self._asked = False
        self._tried: object = _UNREAD  # the content that was last tried, good or bad; None: no file
        self._good: str | None = None  # the last good content; None: no file, or unknown
        self._seen: object = None  # the content and the stamp that the last read found
        self._unsettled = 0  # reads in a row that have found another content
        self.notify: Callable[[], None] = lambda: None  # called after `current` has changed
        self.current, self._instead = self._recall()
        if reads_now:
            self.read()
            if self._unsettled:
                pause(START_PAUSE_S)
                self.read()
        else:
            why = f"{self._instead}: the file cannot be read yet, because its disk does not answer"
            self.current = replace(self.current, problem=why, rejected=True)

    def ask(self) -> None:
        """Read the file again soon, even if it has not changed. May be called from a signal handler."""
        self._asked = True

    def open(self) -> None: ...

    def close(self) -> None: ...

    def read(self) -> tuple[Observation, ...]:
        """Read the file, and adopt new content that two reads in a row have found.

        Returns no observations.
        """
        asked, self._asked = self._asked, False
        before = self.current
        try:
            text = self._content()
            if text != self._tried and not self._confirm(text):
                return ()
            self._unsettled = 0
            if asked or text != self._tried:
                self._accept(text)
            elif before.problem and not before.rejected:  # the copy of the file could not be written
                self.current = replace(before, problem=self._keep(text))
        except BadPolicy as error:
            self.current = replace(before, problem=f"{self._instead}: {_brief(error)}", rejected=True)
        if self.current != before:
            self.notify()
        return ()

    def _content(self) -> str | None:
        """Return the file's text; None if there is no file and none is required. Raises BadPolicy."""
        if not self._required and not _is_there(self._path):
            return None
        try:
            return loading.read_overrides(self._path)
        except BadPolicy:
            self._tried = _UNREAD  # the same content counts as a change when it can be read again
            raise

    def _confirm(self, text: str | None) -> bool:
        """Note what a read has found. Return True if the last read, or the last good file, had the same.

        Raises BadPolicy if the file keeps changing.
        """
        before, self._seen = self._seen, (text, _stamp(self._path))
        if self._seen == before or text == self._good:
            return True
        self._unsettled += 1
        if self._unsettled > MAX_UNSETTLED:
            self._tried = _UNREAD
            raise BadPolicy([f"--policy {self._path}: it changes all the time, expected a finished file"])
        return False

    def _accept(self, text: str | None) -> None:
        """Put a valid text in force and keep a copy of it. Raises BadPolicy for an invalid text."""
        self._tried = text
        if text is not None and not text.strip() and (self._good or "").strip():
            hint = "to use the shipped policy, write a comment into it"
            raise BadPolicy([f"--policy {self._path}: it has become empty; {hint}"])
        policy = loading.load(text, str(self._path))
        if policy.version == self.current.policy.version:
            policy = self.current.policy
        self._good = text
        self.current = PolicyInForce(policy, self._keep(text))
        self._instead = f"{self._path} is not used; the last good policy remains in force"

    def _recall(self) -> tuple[PolicyInForce, str]:
        """Return the last policy that an earlier agent found valid, and a message about its use."""
        why = "no earlier valid policy is known"
        if self._kept is not None and _is_there(self._kept):
            try:
                self._good = loading.read_overrides(self._kept)
                policy = loading.load(self._good, str(self._kept))
                words = f"{self._path} is not used; the last good policy ({self._kept}) remains in force"
                return PolicyInForce(policy), words
            except BadPolicy as error:
                why = f"the last good policy is no longer valid ({_brief(error)})"
        words = f"{self._path} is not used; the shipped policy is in force because {why}"
        return PolicyInForce(loading.shipped()), words

    def _keep(self, text: str | None) -> str:
        """Keep a copy of a good file for the next start; return the problem if that fails."""
        if self._kept is None:
            return ""
        try:
            if text is None:
                self._kept.unlink(missing_ok=True)
            elif not _is_there(self._kept) or self._kept.read_bytes() != text.encode():
                durable.replace_file(self._kept, text.encode(), 0o600)
        except OSError as error:
            return f"{self._path} is in force, but its copy {self._kept} cannot be written: {error.strerror}"
        return ""


def _is_there(path: Path) -> bool:
    """Return False only if there is certainly no file; a broken link or a forbidden folder is a mistake."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes whenever a file is written or exchanged; () if there is none."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _brief(error: BadPolicy) -> str:
    more = len(error.messages) - MAX_NAMED
    return "; ".join(error.messages[:MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
