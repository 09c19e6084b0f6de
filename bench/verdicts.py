"""Targets, and whether they were met. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """`met` is None when too little was measured to tell."""

    target: str
    found: str
    met: bool | None

    @property
    def line(self) -> str:
        word = {True: "ok    ", False: "MISSED", None: "open  "}[self.met]
        return f"{word}  {self.target}: {self.found}"


def at_most(target: str, value: float, limit: float, shown: str) -> Verdict:
    """Judge a number that must not exceed `limit`; NaN is not known."""
    return Verdict(target, shown, None if value != value else value <= limit)


def below(target: str, value: float, limit: float, shown: str) -> Verdict:
    """Judge a number that must stay below `limit`; NaN is not known."""
    return Verdict(target, shown, None if value != value else value < limit)


def all_met(verdicts: Iterable[Verdict]) -> bool:
    return all(each.met is not False for each in verdicts)
