"""Keep the last status and incidents of a run in memory, for a run without a directory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

_INCIDENT = re.compile(r"i-[0-9]{1,19}")


class RecentStatus:
    """Stands in for a run's directory, and keeps the newest `most` incidents."""

    def __init__(
        self,
        name: str,
        most: int,
        status: Mapping[str, Any] | None = None,
        recent: Iterable[Mapping[str, Any]] = (),
        completed: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
    ) -> None:
        """Begin with the predecessor's data. Incidents without a valid ID are dropped.

        `completed` adds fields to the record of an incident. It is called in the thread that writes.
        """
        self._completed = completed
        self.path = Path(name)
        self._most = most
        self._status = None if status is None else dict(status)
        self._incidents: dict[str, dict[str, Any]] = {}
        for each in recent:
            if _INCIDENT.fullmatch(str(each.get("id"))):
                self.write_incident(each)

    def status(self) -> dict[str, Any] | None:
        return self._status

    def write_status(self, status: Mapping[str, Any]) -> None:
        self._status = dict(status)

    def incidents(self) -> list[dict[str, Any]]:
        return sorted(self._incidents.values(), key=_number)

    def write_incident(self, incident: Mapping[str, Any]) -> None:
        """Complete and keep the incident as JSON represents it, with lists instead of tuples."""
        self._incidents[str(incident["id"])] = json.loads(json.dumps(self._completed(incident)))
        if len(self._incidents) > self._most:
            oldest = min(self._incidents.values(), key=_number)
            del self._incidents[str(oldest["id"])]


def _number(incident: Mapping[str, Any]) -> int:
    return int(str(incident["id"]).removeprefix("i-"))
