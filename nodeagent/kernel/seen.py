"""What one line of the kernel tells: an observation that has no time yet. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nodeagent.observation import MAX_TEXT, Observation

CLEARED = "cleared"  # the check whose events end all that stands of an entity


@dataclass(frozen=True, slots=True)
class Seen:
    """One fact; the fields are those of an `Observation`."""

    check: str
    entity: str
    value: float = 0.0
    variant: str = ""
    text: str = ""
    facts: tuple[tuple[str, str], ...] = ()

    def at(self, at_s: float, source: str) -> Observation:
        """Return the observation that `source` makes of it."""
        return Observation(
            at_s, self.check, self.entity, source, self.value, self.variant, self.text, self.facts
        )

    def knowing(self, name: str, value: str) -> Seen:
        """Return the same with one more fact."""
        return replace(self, facts=(*self.facts, (name, value)))


def quoted(text: str) -> str:
    """Return a line as evidence: in one line, no longer than is kept."""
    return " ".join(text[: 2 * MAX_TEXT].split())[:MAX_TEXT]


def named(groups: dict[str, str | None]) -> tuple[tuple[str, str], ...]:
    """Return the groups of a match that have matched, as facts."""
    return tuple((name, value) for name, value in groups.items() if value)
