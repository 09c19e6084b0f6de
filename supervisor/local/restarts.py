"""When is a part that died started again? At once, unless it died young or keeps failing. Pure: the clock is
an argument."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from holdfast.inspection import liveness
from holdfast.inspection.liveness import HeartbeatSilence

YOUNG_S = 1.0  # a part that dies at its start is tried once in this time, not in a loop
WELL_S = 10.0  # one that lived so long has not failed at its start
LONGEST_S = 30.0  # between two starts of a part that fails each time
ROW_S = 4 * LONGEST_S  # failures further apart have nothing to do with each other
LOOP = 3  # failures in a row that are no accident any more


@dataclass(slots=True)
class Restarts:
    """The parts that wait for their next start. Times are of one monotonic clock, in seconds."""

    _due: list[tuple[float, str]] = field(default_factory=list)
    _failures: dict[str, tuple[int, float]] = field(default_factory=dict)  # in a row, and when the last was

    def died(self, part: str, born_s: float, now_s: float, failed: bool = False) -> float:
        """Have `part` started again, and return in how many seconds.

        No sooner than `YOUNG_S` after it was born; one that has `failed`, that is ended of itself and not by
        somebody's SIGKILL, waits twice as long each time that it did not live for `WELL_S`.
        """
        before, last_s = self._failures.get(part, (0, now_s))
        in_a_row = before if now_s - last_s < ROW_S else 0
        failures = in_a_row + 1 if failed and now_s - born_s < WELL_S else 0
        self._failures[part] = failures, now_s
        pause_s = min(LONGEST_S, YOUNG_S * 2 ** min(failures - 1, 10)) if failures > 1 else 0.0
        at_s = max(now_s + pause_s, born_s + YOUNG_S)
        self._due = [(due_s, other) for due_s, other in self._due if other != part] + [(at_s, part)]
        return at_s - now_s

    def waits(self, part: str) -> bool:
        """True when a next start of `part` is due later."""
        return any(other == part for _, other in self._due)

    def failures(self, part: str) -> int:
        """Return how often in a row `part` has failed young."""
        return self._failures.get(part, (0, 0.0))[0]

    def take(self, now_s: float) -> tuple[str, ...]:
        """Return the parts whose time has come, once each."""
        ready = tuple(part for at_s, part in self._due if at_s <= now_s)
        self._due = [(at_s, part) for at_s, part in self._due if at_s > now_s]
        return ready


# When does the keeper act without a supervisor? Pure: clock, process state and own lateness are arguments.
#
# The supervisor's event loop gives a sign of life every second. One that gives none is killed and replaced,
# as one that has died is. And whoever has pressed Ctrl-C gets an end of the run: from the supervisor, or from
# the keeper when no supervisor does it.


ANSWER_S = (
    10.0  # for a supervisor to be there after Ctrl-C: twice what it may be silent, so a next one can come
)
NOW_S = 5.0  # from the second Ctrl-C to the end: members take a second
CRASHES = 3  # of supervisors after Ctrl-C: the next would not end the run either
GONE_S = 5.0  # a process that is killed is gone in milliseconds, unless the kernel cannot end it
_STOPPED = ("T", "t")
_NEVER = HeartbeatSilence()


@dataclass(frozen=True, slots=True)
class Watchdog:
    """What the keeper knows of its supervisors. Times are of one monotonic clock, in seconds; 0 is never."""

    life: HeartbeatSilence = _NEVER  # of the present supervisor, from its birth on
    spoke: bool = False  # its event loop has run
    killed_s: float = 0.0
    stop: str = ""  # what the user asked for: see `JobState.stop`
    asked: HeartbeatSilence = _NEVER  # since the newest of these
    answered: HeartbeatSilence = _NEVER  # since the later of Ctrl-C and the last sign of any supervisor
    crashes: int = 0  # since Ctrl-C

    def born(self, now_s: float) -> Watchdog:
        """There is a new supervisor."""
        return replace(self, life=HeartbeatSilence(now_s), spoke=False, killed_s=0.0)

    def heard(self, now_s: float) -> Watchdog:
        """The supervisor's event loop has given a sign."""
        return replace(
            self,
            life=HeartbeatSilence(now_s),
            spoke=True,
            answered=HeartbeatSilence(now_s if self.stop else 0.0),
        )

    def died(self) -> Watchdog:
        """The present supervisor is gone."""
        return replace(self, life=_NEVER, killed_s=0.0, crashes=self.crashes + bool(self.stop))

    def killed(self, now_s: float) -> Watchdog:
        """The present supervisor was sent SIGKILL."""
        return replace(self, killed_s=now_s)

    def told_to_stop(self, how: str, now_s: float) -> Watchdog:
        """The user wants the run to end. Asked again in the same way, nothing changes."""
        if how == self.stop:
            return self
        return replace(
            self, stop=how, asked=HeartbeatSilence(now_s), answered=HeartbeatSilence(now_s), crashes=0
        )

    def later(self, now_s: float, late_s: float) -> Watchdog:
        """Return what is known at `now_s`, for a look that came `late_s` too late."""
        moved = [each.later(each.heard_s, now_s, late_s) for each in (self.life, self.asked, self.answered)]
        return replace(self, life=moved[0], asked=moved[1], answered=moved[2])

    def doubtful(self, now_s: float) -> bool:
        """True when the present supervisor is so silent that its process state matters."""
        return not self.killed_s and self.life.length_s(now_s) > liveness.LIMIT_S

    def stuck(self, now_s: float, state: str) -> str:
        """Return why the present supervisor is to be killed, "" while it is not.

        One that has not spoken yet imports and reads its journal, for which a busy machine or slow storage
        takes its time, unless it is stopped.
        """
        length_s = self.life.length_s(now_s)
        patient = state if self.spoke or state in _STOPPED else "D"
        if self.killed_s or not liveness.verdict(length_s, patient):
            return ""
        return f"the supervisor has given no sign of life for {length_s:.0f} s and is {liveness.doing(state)}"

    def unkillable(self, now_s: float) -> bool:
        """True when SIGKILL has not ended the supervisor: until it is gone no other may be started."""
        return bool(self.killed_s) and now_s - self.killed_s > GONE_S

    def overdue(self, now_s: float) -> str:
        """Return why the keeper must end the run now because no supervisor does, "" while one may."""
        if self.stop == "now" and self.asked.length_s(now_s) > NOW_S:
            return f"the supervisor has not ended it within {NOW_S:g} s"
        if self.stop and self.answered.length_s(now_s) > ANSWER_S:
            return f"no supervisor has answered for {ANSWER_S:g} s"
        if self.stop and self.crashes >= CRASHES:
            return f"the supervisor has ended {self.crashes} times instead of answering"
        return ""
