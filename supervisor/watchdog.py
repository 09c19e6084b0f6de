"""When does the keeper act without a supervisor? Pure: clock, process state and own lateness are arguments.

The supervisor's event loop gives a sign of life every second. One that gives none is killed and replaced, as
one that has died is. And whoever has pressed Ctrl-C gets an end of the run: from the supervisor, or from the
keeper when no supervisor does it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast import silence
from holdfast.silence import Silence

ANSWER_S = (
    10.0  # for a supervisor to be there after Ctrl-C: twice what it may be silent, so a next one can come
)
NOW_S = 5.0  # from the second Ctrl-C to the end: members take a second
CRASHES = 3  # of supervisors after Ctrl-C: the next would not end the run either
GONE_S = 5.0  # a process that is killed is gone in milliseconds, unless the kernel cannot end it
_STOPPED = ("T", "t")
_NEVER = Silence()


@dataclass(frozen=True, slots=True)
class Watchdog:
    """What the keeper knows of its supervisors. Times are of one monotonic clock, in seconds; 0 is never."""

    life: Silence = _NEVER  # of the present supervisor, from its birth on
    spoke: bool = False  # its event loop has run
    killed_s: float = 0.0
    stop: str = ""  # what the user asked for: see `Memory.stop`
    asked: Silence = _NEVER  # since the newest of these
    answered: Silence = _NEVER  # since the later of Ctrl-C and the last sign of any supervisor
    crashes: int = 0  # since Ctrl-C

    def born(self, now_s: float) -> Watchdog:
        """There is a new supervisor."""
        return replace(self, life=Silence(now_s), spoke=False, killed_s=0.0)

    def heard(self, now_s: float) -> Watchdog:
        """The supervisor's event loop has given a sign."""
        return replace(self, life=Silence(now_s), spoke=True, answered=Silence(now_s if self.stop else 0.0))

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
        return replace(self, stop=how, asked=Silence(now_s), answered=Silence(now_s), crashes=0)

    def later(self, now_s: float, late_s: float) -> Watchdog:
        """Return what is known at `now_s`, for a look that came `late_s` too late."""
        moved = [each.later(each.heard_s, now_s, late_s) for each in (self.life, self.asked, self.answered)]
        return replace(self, life=moved[0], asked=moved[1], answered=moved[2])

    def doubtful(self, now_s: float) -> bool:
        """True when the present supervisor is so silent that its process state matters."""
        return not self.killed_s and self.life.length_s(now_s) > silence.LIMIT_S

    def stuck(self, now_s: float, state: str) -> str:
        """Return why the present supervisor is to be killed, "" while it is not.

        One that has not spoken yet imports and reads its journal, for which a busy machine or slow storage
        takes its time, unless it is stopped.
        """
        length_s = self.life.length_s(now_s)
        patient = state if self.spoke or state in _STOPPED else "D"
        if self.killed_s or not silence.verdict(length_s, patient):
            return ""
        return f"the supervisor has given no sign of life for {length_s:.0f} s and is {silence.doing(state)}"

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
