"""Start the parts of a run. If one fails, try again at increasing intervals, and tell the user."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from supervisor.local.keeper.processes import ManagedProcess
from supervisor.local.keeper.restarts import LOOP, RestartKey, Restarts

SUPERVISOR, NEW_MEMBER = RestartKey("supervisor"), RestartKey("member")


@dataclass(slots=True)
class Starts:
    """Decides when each part is started again. `pop_due` returns the parts that are due."""

    say: Callable[[str], None]  # called with lines for the user
    log: Callable[[str], Path]  # returns the log file of a part
    _restarts: Restarts = field(default_factory=Restarts)

    def attempt(self, part: RestartKey, start: Callable[[], None]) -> bool:
        """Start `part` and return True. If the system lacks resources, schedule a retry and return False."""
        try:
            start()
        except OSError as error:
            self.try_later(part, error)
            return False
        return True

    def try_later(self, part: RestartKey, error: OSError) -> None:
        """Schedule the next start of `part`, which could not be started because of `error`."""
        now_s = time.monotonic()
        left_s = self._restarts.died(part, now_s, now_s, failed=True)
        if self._restarts.failures(part) == 1:
            self.say(
                f"{part.name} cannot be started: {error}; trying again in {left_s:.0f} s,"
                " then at increasing intervals"
            )

    def died(self, part: RestartKey, died: ManagedProcess) -> None:
        """Schedule the next start of a part. If the part keeps failing, delay the start and tell the user."""
        left_s = self._restarts.died(part, died.born_s, time.monotonic(), died.has_failed)
        if self._restarts.failures(part) == LOOP:
            without = (
                "the run cannot recover from faults" if part == SUPERVISOR else "its member is not supervised"
            )
            self._report_loop(died, part.name, left_s)
            self.say(f"the ranks keep training without {part.name}, but until it restarts, {without}")

    def launcher_failed(self, launcher: ManagedProcess) -> None:
        """Schedule the next member after one has failed, as `died` does for other parts."""
        failures = self._restarts.failures(NEW_MEMBER)
        left_s = self._restarts.died(NEW_MEMBER, launcher.born_s, time.monotonic(), failed=True)
        if self._restarts.failures(NEW_MEMBER) == LOOP > failures:
            self._report_loop(launcher, "a member's launcher", left_s)

    def waits(self, part: RestartKey) -> bool:
        """True if a start of `part` is scheduled."""
        return self._restarts.waits(part)

    def pop_due(self, now_s: float) -> tuple[RestartKey, ...]:
        """Remove and return the parts whose start is due."""
        return self._restarts.pop_due(now_s)

    def _report_loop(self, part: ManagedProcess, what: str, left_s: float) -> None:
        code, log = part.process.returncode, self.log(part.name).name
        self.say(
            f"{what} has ended {LOOP} times in a row, last with code {code} (see logs/{log}):"
            f" trying again in {left_s:.0f} s, then at increasing intervals"
        )
