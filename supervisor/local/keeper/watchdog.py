"""Decide when the keeper kills a supervisor that no longer works, and when it ends the run itself.

Pure: the clock, the process state and the keeper's lateness are arguments.

The supervisor's event loop sends a heartbeat every second. If the heartbeats stop, the keeper kills the
supervisor and starts another one. After Ctrl-C the supervisor must end the run. If no supervisor does, the
keeper ends the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.inspection import liveness
from holdfast.inspection.liveness import HeartbeatSilence
from supervisor.view.model import StopRequest

# The limit from Ctrl-C to the next heartbeat of a supervisor. It is twice the allowed silence, to give a
# successor enough time.
ANSWER_S = 10.0
NOW_S = 5.0  # the limit from the second Ctrl-C to the end of the run; members take one second to end
CRASHES = 3  # if this many supervisors have died after Ctrl-C, another one would not end the run either
GONE_S = 5.0  # a killed process is gone within milliseconds, unless the kernel cannot end it
_STOPPED = ("T", "t")
_NEVER = HeartbeatSilence()


@dataclass(frozen=True, slots=True)
class Watchdog:
    """What the keeper knows about its supervisors. Times are monotonic seconds, or 0 for never."""

    silence: HeartbeatSilence = _NEVER  # the silence since the current supervisor's start or last heartbeat
    spoke: bool = False  # the current supervisor has sent a heartbeat
    killed_s: float = 0.0  # when SIGKILL was sent to it
    stop: StopRequest = ""  # how the user asked the run to stop (`JobState.stop`)
    since_stop: HeartbeatSilence = _NEVER  # the time since `stop` last changed
    # the time since `stop` last changed or, if later, since any supervisor's last heartbeat
    unanswered: HeartbeatSilence = _NEVER
    crashes: int = 0  # supervisors that died since `stop` last changed

    def born(self, now_s: float) -> Watchdog:
        """Return the state after a supervisor was started."""
        return replace(self, silence=HeartbeatSilence(now_s), spoke=False, killed_s=0.0)

    def heard(self, now_s: float) -> Watchdog:
        """Return the state after a heartbeat of the current supervisor."""
        return replace(
            self,
            silence=HeartbeatSilence(now_s),
            spoke=True,
            unanswered=HeartbeatSilence(now_s if self.stop else 0.0),
        )

    def died(self) -> Watchdog:
        """Return the state after the current supervisor has ended."""
        return replace(self, silence=_NEVER, killed_s=0.0, crashes=self.crashes + bool(self.stop))

    def killed(self, now_s: float) -> Watchdog:
        """Return the state after SIGKILL was sent to the current supervisor."""
        return replace(self, killed_s=now_s)

    def stop_requested(self, how: StopRequest, now_s: float) -> Watchdog:
        """Return the state after the user's request to stop the run. Repeating a request changes nothing."""
        if how == self.stop:
            return self
        return replace(
            self, stop=how, since_stop=HeartbeatSilence(now_s), unanswered=HeartbeatSilence(now_s), crashes=0
        )

    def later(self, now_s: float, late_s: float) -> Watchdog:
        """Return the state at `now_s`, for a check that is `late_s` late.

        The delay is not counted as silence.
        """
        moved = [
            each.later(each.heard_s, now_s, late_s)
            for each in (self.silence, self.since_stop, self.unanswered)
        ]
        return replace(self, silence=moved[0], since_stop=moved[1], unanswered=moved[2])

    def doubtful(self, now_s: float) -> bool:
        """True if the current supervisor has been silent for so long that its process must be checked."""
        return not self.killed_s and self.silence.length_s(now_s) > liveness.LIMIT_S

    def stuck(self, now_s: float, state: str) -> str:
        """Return why the current supervisor must be killed; "" if there is no reason to kill it.

        `state` is the letter of its process state. Before its first heartbeat, a supervisor imports modules
        and reads its journal, which can take a long time on a busy machine or slow storage. Until then, the
        supervisor has the longer limit of a process that waits for a disk, unless it is stopped.
        """
        length_s = self.silence.length_s(now_s)
        patient = state if self.spoke or state in _STOPPED else "D"
        if self.killed_s or not liveness.verdict(length_s, patient):
            return ""
        return f"the supervisor has sent no heartbeat for {length_s:.0f} s and is {liveness.doing(state)}"

    def unkillable(self, now_s: float) -> bool:
        """True if SIGKILL has not ended the supervisor within `GONE_S`, so its successor must wait."""
        return bool(self.killed_s) and now_s - self.killed_s > GONE_S

    def overdue(self, now_s: float) -> str:
        """Return why the keeper must end the run itself; "" while a supervisor can still do so."""
        if self.stop == "now" and self.since_stop.length_s(now_s) > NOW_S:
            return f"the supervisor has not ended the run within {NOW_S:g} s"
        if self.stop and self.unanswered.length_s(now_s) > ANSWER_S:
            return f"no supervisor has answered for {ANSWER_S:g} s"
        if self.stop and self.crashes >= CRASHES:
            return f"the supervisor has died {self.crashes} times instead of ending the run"
        return ""
