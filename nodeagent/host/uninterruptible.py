"""Which threads are stuck, not only often asleep. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

STUCK_S = 60.0  # "a minute or more"
MAX_SUSPECTS = 256
NAMED = 3  # in the text

Key = tuple[int, int]  # process, thread

# Wait channels of a thread that was frozen on purpose: a paused container of cgroup v1 is in state D.
FROZEN = ("__refrigerator", "do_freezer_trap", "get_signal")


@dataclass(frozen=True, slots=True)
class Asleep:
    """A thread in uninterruptible sleep."""

    name: str
    start: int
    switches: int
    wait_channel: str  # "" where it may not be read


@dataclass(frozen=True, slots=True)
class Suspect:
    """A thread that has been asleep without a switch since it was first seen."""

    asleep: Asleep
    since_s: float


def suspects(before: Mapping[Key, Suspect], now: Mapping[Key, Asleep], now_s: float) -> dict[Key, Suspect]:
    """Return who may be stuck, and since when. One that has run since the last look begins anew."""
    found = {}
    for key, asleep in list(now.items())[:MAX_SUSPECTS]:
        known = before.get(key)
        same = (
            known is not None
            and known.asleep.start == asleep.start
            and known.asleep.switches == asleep.switches
        )
        if asleep.wait_channel not in FROZEN:
            found[key] = Suspect(asleep, known.since_s if known is not None and same else now_s)
    return found


def processes(stuck: Iterable[Key]) -> int:
    """Return how many processes the threads belong to."""
    return len({pid for pid, _ in stuck})


def longer(found: Mapping[Key, Suspect], now_s: float, for_s: float) -> dict[Key, Suspect]:
    """Return those that have been asleep for `for_s` or more."""
    return {key: each for key, each in found.items() if now_s - each.since_s >= for_s}


def words(stuck: Mapping[Key, Suspect], now_s: float) -> str:
    """Return who is stuck, for people: the longest first, and how many more."""
    order = sorted(stuck.items(), key=lambda item: (item[1].since_s, item[0]))
    told = [
        f"{each.asleep.name} ({tid}) for {now_s - each.since_s:.0f} s"
        + (f" in {each.asleep.wait_channel}" if each.asleep.wait_channel else "")
        for (_, tid), each in order[:NAMED]
    ]
    more = [f"and {len(order) - NAMED} more"] if len(order) > NAMED else []
    return ", ".join(told + more)
