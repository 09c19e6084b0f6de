"""Keep the notes for users about one job's pods that the webhook missed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MAX_NOTES = 8  # per incident, and of the pods that are waited for now
MAX_INCIDENTS = 10  # as many as the Supervision contains
FIELD = "missed_pods"  # of the record of an incident


class MissedNotes:
    """Sentences about pods that run without Holdfast: those waited for now, and those of each incident."""

    def __init__(self) -> None:
        self._now: tuple[str, ...] = ()
        self._by_incident: dict[str, tuple[str, ...]] = {}

    def set_now(self, sentences: Iterable[str], incident: str) -> None:
        """Set what the status says. `incident` is the open one, whose record keeps the sentences; or ""."""
        self._now = tuple(sentences)[:MAX_NOTES]
        for each in self._now:
            self.add(each, incident)

    def add(self, sentence: str, incident: str) -> None:
        """Add a sentence to the record of an incident, unless it is there."""
        before = self._by_incident.get(incident, ())
        if incident and sentence not in before and len(before) < MAX_NOTES:
            self._by_incident[incident] = (*before, sentence)
            while len(self._by_incident) > MAX_INCIDENTS:
                del self._by_incident[next(iter(self._by_incident))]

    def status(self, published: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a published status with the sentences."""
        opened = published.get("open_incident")
        if not self._now and not (opened and self._by_incident):
            return published
        warnings = [*(published.get("warnings") or ()), *self._now]
        return {**published, "warnings": warnings, "open_incident": self.incident(opened) if opened else None}

    def incident(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the record of an incident with its sentences."""
        found = self._by_incident.get(str(record.get("id")))
        return {**record, FIELD: list(found)} if found else record
