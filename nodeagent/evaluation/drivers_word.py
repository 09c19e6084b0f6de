"""What the driver itself says is to be done about an Xid: the Xid 154 that it sends along. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nodeagent.evaluation.bursts import Burst, Bursts
from nodeagent.policy.rules import Meaning, Policy
from nodeagent.verdict import Action, Level

VERDICT = 154
BEFORE_S = 2.0  # it may overtake the code that it is about
AFTER_S = 10.0  # and comes at once: what comes later is about something else


def about(burst: Burst, verdicts: Mapping[str, Bursts], policy: Policy) -> tuple[Level, Action] | None:
    """Return what the driver said with a burst; of several words the newest, then the gravest."""
    last_s = burst[1] + AFTER_S
    found = [
        (min(span[1], last_s), said.level, said.action)
        for name, each in verdicts.items()
        if name and (said := policy.meaning("xid", VERDICT, name))
        for span in each.spans
        if _together(burst, span)
    ]
    return max(found)[1:] if found else None


def linked(meaning: Meaning, branch: int | None) -> bool:
    """Say whether a driver of `branch` sends its word along with the code."""
    return meaning.verdict_since is not None and (branch is None or branch >= meaning.verdict_since)


def settled(word: Burst, others: Iterable[tuple[Meaning, Sequence[Burst]]]) -> bool:
    """Say whether a word of the driver is only about codes of which the operator has decided otherwise."""
    with_it = [meaning for meaning, spans in others if any(_together(span, word) for span in spans)]
    return bool(with_it) and all(meaning.overridden for meaning in with_it)


def _together(burst: Burst, word: Burst) -> bool:
    return word[1] >= burst[0] - BEFORE_S and word[0] <= burst[1] + AFTER_S
