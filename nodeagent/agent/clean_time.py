"""How long a node has been without findings while it was watched: what returns it to service. Pure.

Time in which no agent looked proves nothing, so the count restarts after a gap. The short gap of an agent
that is restarted does not count as one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from nodeagent.model import HealthFinding, Level

GAP_S = 180.0  # the state is saved every minute; an upgrade of the agent takes about as long


@dataclass(frozen=True, slots=True)
class CleanTime:
    """Agent times; None: never, as far as known."""

    watched_s: float | None = None  # since when all sensors have been watching
    unhealthy_s: float | None = None  # when something was last unhealthy
    found_s: float | None = None  # when there was last any finding

    def after(self, now_s: float, findings: Iterable[HealthFinding], ready: bool) -> CleanTime:
        """Return the times after a look. `ready`: each sensor has been tried."""
        level = max((each.level for each in findings), default=Level.HEALTHY)
        return CleanTime(
            now_s if self.watched_s is None and ready else self.watched_s,
            now_s if level is Level.UNHEALTHY else self.unhealthy_s,
            now_s if level is not Level.HEALTHY else self.found_s,
        )

    def resumed(self, last_s: float, now_s: float) -> CleanTime:
        """Return what still counts of the times saved at `last_s`."""
        return self if 0 <= now_s - last_s <= GAP_S else replace(self, watched_s=None)

    def as_json(self, now_s: float) -> dict[str, float | None]:
        """Return ages: without an unhealthy finding, without any finding, since the last unhealthy one."""
        ended_s = self.unhealthy_s
        return {
            "clean_s": self._since(now_s, self.unhealthy_s),
            "quiet_s": self._since(now_s, self.found_s),
            "calmed_s": None if ended_s is None else round(max(0.0, now_s - ended_s), 3),
        }

    def _since(self, now_s: float, bad_s: float | None) -> float:
        if self.watched_s is None:
            return 0.0
        began_s = self.watched_s if bad_s is None else max(self.watched_s, bad_s)
        return round(max(0.0, now_s - began_s), 3)

    def dump(self) -> list[float | None]:
        """Return what `load_clean_time` takes: JSON."""
        return [self.watched_s, self.unhealthy_s, self.found_s]


def load_clean_time(raw: Any) -> CleanTime:
    """Return what was dumped. Raises ValueError, TypeError for anything else."""
    watched_s, unhealthy_s, found_s = (None if each is None else float(each) for each in raw)
    return CleanTime(watched_s, unhealthy_s, found_s)
