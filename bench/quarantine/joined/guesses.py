"""The joined year's figures without a published source. The sweep halves and doubles each of them. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

HOUR_S, DAY_S = 3600.0, 86400.0
MOST_SHARE = 0.9  # a doubled share stays below 1


def _guess(default: float, what: str) -> float:
    _WORDS.append(what)
    return default


_WORDS: list[str] = []


@dataclass(frozen=True, slots=True)
class Guesses:
    """Our guesses: mean times if the name ends in `_s`; all others are shares unless stated otherwise."""

    recurs: float = _guess(0.1, "remedies after which the same fault returns")
    recurs_lemon: float = _guess(0.5, "  on lemons")
    recurs_s: float = _guess(2 * DAY_S, "  time until it returns")
    lemon_factor: float = _guess(8.0, "faults of a lemon (1% of the nodes), as a multiple of the others'")
    wrong: float = _guess(0.1, "remedies that are cheaper than what the fault needs")
    late: float = _guess(0.1, "remedies that are carried out late")
    late_s: float = _guess(4 * DAY_S, "  their delay")
    worn: float = _guess(0.1, "memory errors of GPUs that have to be replaced, which a reset only hides")
    unseen: float = _guess(0.2, "resets during which the agent is stopped")
    no_verdict: float = _guess(0.2, "Xids without the driver's verdict, although the driver sends it")
    no_second: float = _guess(0.1, "faults that only one of two witnesses sees")
    returns_s: float = _guess(2 * HOUR_S, "time until the symptoms return after a wrong remedy")
    drain_s: float = _guess(120.0, "time until a drained job has ended")
    job_s: float = _guess(12 * HOUR_S, "time until a job that is not drained ends")
    reset_s: float = _guess(300.0, "time until a GPU is reset, once its node is empty")
    reboot_s: float = _guess(900.0, "time until a node is rebooted, once it is empty")
    replace_s: float = _guess(2 * DAY_S, "time until a GPU is replaced, once its node is empty")
    answer_s: float = _guess(4 * HOUR_S, "time until an operator answers an alert")
    overruled: float = _guess(0.2, "false alarms whose taint an operator removes")
    restarts: float = _guess(6.0, "restarts of an agent per node and year (a number)")
    false_alarms: float = _guess(1.0, "false alarms per node and year (a number)")
    false_s: float = _guess(90.0, "  duration of a false reading")
    lies: float = _guess(0.02, "false alarms from two witnesses per node and year (a number)")
    silences: float = _guess(
        0.25, "times that a healthy node's reports do not arrive, per node and year (a number)"
    )


ABOUT = dict(zip((each.name for each in fields(Guesses)), _WORDS, strict=True))


def variations(base: Guesses) -> Iterator[tuple[str, Guesses]]:
    """Yield each guess halved and doubled, with its name and value."""
    for each in fields(Guesses):
        value: float = getattr(base, each.name)
        is_share = value < 1
        for factor in (0.5, 2.0):
            changed = min(MOST_SHARE, value * factor) if is_share else value * factor
            yield f"{each.name} = {changed:g}", replace(base, **{each.name: changed})
