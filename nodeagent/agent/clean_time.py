"""Measures how long a watched node has had no findings. Pure.

This decides when the node may return to service. Time without a running agent is no evidence of health, so
the count restarts after a gap, but ignores the short one while the agent restarts. While an operator has the
agent release the GPUs, the count pauses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from nodeagent.model import HealthFinding, Level

GAP_S = 180.0  # the state is saved every minute, and an upgrade of the agent takes about a minute


@dataclass(frozen=True, slots=True)
class CleanTime:
    """The agent times that the clean times count from; None if unknown."""

    watched_s: float | None = None  # the time since which all sensors have been watching
    unhealthy_s: float | None = None  # the last time that anything was unhealthy
    found_s: float | None = None  # the last time that there was any finding
    # How much of the time without unhealthy findings, and without any, the GPUs were released.
    released_s: tuple[float, float] = (0.0, 0.0)
    at_s: float | None = None  # of the last cycle; not saved

    def after(
        self, now_s: float, findings: Iterable[HealthFinding], ready: bool, *, released: bool = False
    ) -> CleanTime:
        """Return the times after a cycle.

        Args:
            ready: True once every sensor has been tried.
            released: True if the GPUs were released at some time since the last cycle.
        """
        level = max((each.level for each in findings), default=Level.HEALTHY)
        watched = self._paused(now_s - self.at_s) if released and self.at_s is not None else self
        clean_s, quiet_s = watched.released_s if watched.watched_s is not None else (0.0, 0.0)
        return CleanTime(
            now_s if self.watched_s is None and ready else self.watched_s,
            now_s if level is Level.UNHEALTHY else self.unhealthy_s,
            now_s if level is not Level.HEALTHY else self.found_s,
            (
                0.0 if level is Level.UNHEALTHY else clean_s,
                0.0 if level is not Level.HEALTHY else quiet_s,
            ),
            now_s,
        )

    def resumed(self, last_s: float, now_s: float, released_until_s: float = -inf) -> CleanTime:
        """Return the times saved at `last_s`, without those that a gap has invalidated.

        A gap that a release of the GPUs explains invalidates nothing, and is not counted.
        """
        explained_s = max(last_s, min(released_until_s, now_s))
        if not (last_s <= now_s and now_s - explained_s <= GAP_S):
            return replace(self, watched_s=None)
        return self._paused(now_s - last_s) if explained_s > last_s else self

    def _paused(self, for_s: float) -> CleanTime:
        clean_s, quiet_s = self.released_s
        return replace(self, released_s=(clean_s + for_s, quiet_s + for_s))

    def as_json(self, now_s: float) -> dict[str, float | None]:
        """Return the times without unhealthy findings, without findings, and since the last unhealthy one."""
        ended_s = self.unhealthy_s
        clean_s, quiet_s = self.released_s
        return {
            "clean_s": self._since(now_s - clean_s, self.unhealthy_s),
            "quiet_s": self._since(now_s - quiet_s, self.found_s),
            "calmed_s": None if ended_s is None else round(max(0.0, now_s - ended_s), 3),
        }

    def _since(self, now_s: float, bad_s: float | None) -> float:
        if self.watched_s is None:
            return 0.0
        began_s = self.watched_s if bad_s is None else max(self.watched_s, bad_s)
        return round(max(0.0, now_s - began_s), 3)

    def dump(self) -> list[float | None]:
        """Return the times as JSON, for `load_clean_time`."""
        return [self.watched_s, self.unhealthy_s, self.found_s]


def load_clean_time(raw: Any, released_s: Any = (0.0, 0.0)) -> CleanTime:
    """Restore the dumped times. Raises ValueError or TypeError if they are malformed."""
    watched_s, unhealthy_s, found_s = (None if each is None else float(each) for each in raw)
    clean_s, quiet_s = (float(each) for each in released_s)
    return CleanTime(watched_s, unhealthy_s, found_s, (clean_s, quiet_s))
