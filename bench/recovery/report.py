"""The results of the recovery bench: tables, verdicts, JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.recovery.turns import Kill, Turn
from bench.text import Summary, Verdict, at_most, below, number, percent, ratio, seconds, summary, table

MEDIAN_S, WORST_S, SHARE = 0.3, 0.6, 0.1
COPIES, LARGE_S = 1.5, 0.5  # the limit for a large state: this many plain copies plus this many seconds
_STAGES = (  # the name of each part of a recovery, and the mark at its end
    ("detect", "noticed"),
    ("secure", "secured"),
    ("decide", "decided"),
    ("start", "started"),
    ("join", "joined"),
    ("restore", "restored"),
    ("step", "first step"),
)


def kills_of(turns: Iterable[Turn], mode: str) -> list[Kill]:
    return [kill for turn in turns if turn.mode == mode for kill in turn.kills]


def times(kills: Iterable[Kill]) -> list[float]:
    return [kill.took_s for kill in kills if kill.took_s is not None]


def pieces_s(incident: Mapping[str, Any]) -> dict[str, float]:
    """Return how long each part of a recovery took, according to the incident's timeline."""
    marks = {each["what"]: float(each["at_s"]) for each in incident["timeline"]}
    found: dict[str, float] = {}
    last_s = marks.get("fault", 0.0)
    for name, mark in _STAGES:
        if mark in marks:
            found[name] = marks[mark] - last_s
            last_s = marks[mark]
    return found


def timeline(incident: Mapping[str, Any]) -> str:
    """Return the parts of a recovery in milliseconds, on one line."""
    parts = [f"{name} {1e3 * took_s:.0f}" for name, took_s in pieces_s(incident).items()]
    return f"ms: {' '.join(parts)}" if parts else ""


def lines(turns: Sequence[Turn]) -> list[str]:
    """Return the lines of the tables: kills and times by mode, and how holdfast's time is divided."""
    found = table(
        ("mode", "kills", "recovered", "hung", "median", "p90", "worst", "best", "redone", "start"),
        [_row(turns, name) for name in _names(turns)],
    ).splitlines()
    pieces = _pieces(turns)
    if pieces:
        found += ["", "the parts of a recovery under holdfast (median and worst of each):"]
        found += table(
            ("part", *[name for name, _ in pieces]),
            [
                ("median", *[seconds(each.median) for _, each in pieces]),
                ("worst", *[seconds(each.worst) for _, each in pieces]),
            ],
        ).splitlines()
    ettr = ettr_of(turns, "holdfast")
    if not math.isnan(ettr):
        found += ["", f"ETTR of the holdfast runs: {percent(ettr)}, including start-up and all kills"]
        found.append(f"most steps lost in an incident, as holdfast counts them: {_lost(turns)}")
    return found


def _names(turns: Sequence[Turn]) -> list[str]:
    return list(dict.fromkeys(turn.mode for turn in turns))


def _row(turns: Sequence[Turn], mode: str) -> tuple[str, ...]:
    kills = kills_of(turns, mode)
    took = summary(times(kills))
    redone = max((kill.redone for kill in kills if kill.redone is not None), default=None)
    starts = summary([turn.start_s for turn in turns if turn.mode == mode])
    return (
        mode,
        str(len(kills)),
        str(_count(kills, "recovered")),
        str(len(kills) - _count(kills, "recovered")),
        seconds(took.median),
        seconds(took.p90),
        seconds(took.worst),
        seconds(took.best),
        "-" if redone is None else str(redone),
        seconds(starts.median),
    )


def _count(kills: Iterable[Kill], outcome: str) -> int:
    return sum(1 for kill in kills if kill.outcome == outcome)


def _pieces(turns: Sequence[Turn]) -> list[tuple[str, Summary]]:
    all_of = [pieces_s(k.incident) for k in kills_of(turns, "holdfast") if k.incident is not None]
    names = [name for name, _ in _STAGES if any(name in each for each in all_of)]
    return [(name, summary([each[name] for each in all_of if name in each])) for name in names]


def _lost(turns: Sequence[Turn]) -> str:
    found = [
        kill.incident["lost_steps"]
        for kill in kills_of(turns, "holdfast")
        if kill.incident is not None and kill.incident["lost_steps"] is not None
    ]
    return str(max(found)) if found else "-"


def ettr_of(turns: Iterable[Turn], mode: str) -> float:
    """Return the productive share of the total time of a mode's turns; NaN if it is unknown for one turn."""
    good_s = total_s = 0.0
    for turn in turns:
        if turn.mode == mode and turn.status is not None and turn.status.get("total_s"):
            if turn.status.get("ettr", 0.0) is None:
                return math.nan
            good_s += turn.status["buckets_s"]["productive"] + turn.status["pending_s"]
            total_s += turn.status["total_s"]
    return ratio(good_s, total_s)


def verdicts(turns: Sequence[Turn], wanted: int, plain_copy_s: float = math.nan) -> list[Verdict]:
    """Judge the figures against the project's targets.

    The targets for a large state are based on `plain_copy_s`, the seconds that it takes to copy that state
    over a plain socket.
    """
    ours, plain = kills_of(turns, "holdfast"), kills_of(turns, "holdfast-unmodified")
    found: list[Verdict] = []
    fresh = summary(times(kills_of(turns, "torchrun-fresh"))).median
    if ours:
        took = summary(times(ours))
        recovered = _count(ours, "recovered")
        share = ratio(took.median, fresh)
        most = max((kill.redone for kill in ours if kill.redone is not None), default=0)
        found += [
            Verdict(
                f"holdfast: all of {wanted} kills recovered",
                f"{recovered} of {len(ours)}",
                recovered == len(ours) and len(ours) >= wanted,
            ),
            *(_of_small(took, share, fresh) if math.isnan(plain_copy_s) else _of_large(took, plain_copy_s)),
            Verdict("holdfast: at most one step lost", f"{most}", most <= 1),
        ]
    if plain:
        found += _of_unmodified(turns, plain)
    return found


def _of_small(took: Summary, share: float, fresh: float) -> list[Verdict]:
    return [
        at_most(f"holdfast: median <= {MEDIAN_S} s", took.median, MEDIAN_S, seconds(took.median)),
        at_most(f"holdfast: worst <= {WORST_S} s", took.worst, WORST_S, seconds(took.worst)),
        at_most(
            f"holdfast: median <= 1/{1 / SHARE:g} of torchrun with a fresh store",
            share,
            SHARE,
            f"1/{number(ratio(1, share), 1)} ({seconds(took.median)} to {seconds(fresh)})",
        ),
    ]


def _of_large(took: Summary, plain_copy_s: float) -> list[Verdict]:
    limit_s = COPIES * plain_copy_s + LARGE_S
    target = f"holdfast: median <= {COPIES} plain socket copies of the state + {LARGE_S} s"
    shown = f"{seconds(took.median)} (a plain copy takes {seconds(plain_copy_s)}, so {seconds(limit_s)})"
    return [at_most(target, took.median, limit_s, shown)]


def _of_unmodified(turns: Sequence[Turn], plain: Sequence[Kill]) -> list[Verdict]:
    mine = summary(times(plain)).median
    theirs = summary(times(kills_of(turns, "torchrun-unmodified"))).median
    recovered = _count(plain, "recovered")
    return [
        Verdict(
            "unmodified script under holdfast: never hangs",
            f"{recovered} of {len(plain)} recovered",
            recovered == len(plain),
        ),
        below(
            "unmodified script: faster than under torchrun (fresh store), median",
            ratio(mine, theirs),
            1.0,
            f"{seconds(mine)} to {seconds(theirs)}",
        ),
    ]


def summaries(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the figures of each mode as JSON."""
    found: dict[str, Any] = {}
    for name in _names(turns):
        kills = kills_of(turns, name)
        found[name] = {
            "kills": len(kills),
            "recovered": _count(kills, "recovered"),
            "took_s": asdict(summary(times(kills))),
            "ettr": ettr_of(turns, name),
        }
    return found
