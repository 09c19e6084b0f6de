"""Decide what a pod's launcher prints, and when it gives up, if no sidecar is connected to it. Pure.

A launcher starts ranks only on its sidecar's orders. If no sidecar reaches the launcher, it would therefore
wait forever. The launcher reports this itself, because the sidecar may know only that no launcher answers.
Once a sidecar has connected, its absence no longer ends the launcher, because the ranks keep training without
a sidecar until the kubelet restarts it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SAY_S = 8.0  # a sidecar connects within a second of its start, and a restarted sidecar within a few seconds


@dataclass(frozen=True, slots=True)
class SidecarContact:
    """Whether a sidecar was connected at the last check, and since when (monotonic seconds).

    `limit_s` is how long the launcher waits for the first connection.
    """

    limit_s: float
    since_s: float
    is_connected: bool = False
    was_connected: bool = False  # at any time
    is_absence_reported: bool = False
    is_exit_reported: bool = False

    def later(self, is_connected: bool, now_s: float) -> tuple[SidecarContact, str]:
        """Return the contact at `now_s`, and what to print about it; "" to print nothing."""
        if is_connected != self.is_connected:
            found = SidecarContact(self.limit_s, now_s, is_connected, self.was_connected or is_connected)
            return found, "the sidecar is connected" if is_connected and self.is_absence_reported else ""
        absent_s = now_s - self.since_s
        if self.is_over(now_s) and not self.is_exit_reported:
            return replace(
                self, is_exit_reported=True
            ), f"no sidecar has connected for {absent_s:.0f} s: exiting"
        if is_connected or self.is_absence_reported or absent_s < SAY_S:
            return self, ""
        return replace(self, is_absence_reported=True), self._absence(absent_s)

    def is_over(self, now_s: float) -> bool:
        """Return True if no sidecar has connected within the limit."""
        return not self.was_connected and now_s - self.since_s >= self.limit_s

    def _absence(self, absent_s: float) -> str:
        if self.was_connected:
            return (
                f"no sidecar has been connected for {absent_s:.0f} s: running ranks continue to train, but"
                " nothing restarts them after a fault"
            )
        return (
            f"no sidecar has connected for {absent_s:.0f} s, and no rank starts until one does: the launcher"
            f" exits after {self.limit_s:g} s (first-step-timeout)"
        )
