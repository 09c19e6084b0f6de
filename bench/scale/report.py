"""The figures of the scale bench as a table, and the verdicts on its targets. Pure.

The targets are for 2,000 members that report once a second. The phase with crashes goes far beyond that, so
its CPU has no limit, but decisions, memory and /metrics must meet their limits even then.
"""

from __future__ import annotations

import math
from typing import Any

from bench.text import Verdict, at_most, below, number, percent, percentile, seconds, size

CPU = 0.5  # of a core
MEMORY_BYTES = 500e6
DECISION_S = 0.1
SCRAPE_S = 0.2
PHASES = ("rest", "faults")


def phase_words(name: str, faults_per_s: float) -> str:
    """Return the words for a phase in the table and in the progress lines."""
    if name == "rest":
        return "at rest"
    return f"beyond the requirement, {faults_per_s:g} crashes/s"


def rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the table."""
    found = [
        ("from the supervisor's start until all members are connected", seconds(figures["connected_s"])),
        ("until all jobs train and have settled", seconds(figures["adopted_s"])),
    ]
    for name in PHASES:
        phase, words = figures[name], phase_words(name, figures["faults_per_s"])
        found += [
            (f"{words}: CPU of the supervisor, of one core", percent(phase["cpu"], 1)),
            ("  CPU of the members' process and the API server", _both(phase)),
            (
                "  memory of the supervisor, and its threads",
                f"{size(phase['rss_bytes'])}, {phase['threads']}",
            ),
            ("  reports per second, and their size", _reports(phase)),
            ("  writes to the API server per second", number(sum(phase["writes_per_s"].values()), 1)),
            ("  /metrics, median and worst", _spread(phase["scrapes_s"])),
            ("  load of the machine", number(phase["load"])),
        ]
    found += [
        ("decision, median, p99 and worst", _tail(decisions(figures, "last_s"))),
        ("  the first member's order, median", seconds(_share(decisions(figures, "first_s"), 50))),
        (
            "from a crash until the job has settled, median and worst",
            _spread(decisions(figures, "settled_s")),
        ),
        ("lag of the supervisor's event loop, p99 and longest", _lag(figures["lag"])),
        ("lag of the members' event loop, p99 and longest", _members_lag(figures["faults"])),
    ]
    restart = figures["restart"]
    return [
        *found,
        ("SIGKILL of the supervisor, until all members are connected", seconds(restart["connected_s"])),
        ("  until all are supervised by its successor", seconds(restart["supervised_s"])),
    ]


def judge(figures: dict[str, Any]) -> list[Verdict]:
    cpu, restart = figures["rest"]["cpu"], figures["restart"]
    peak = max(figures["faults"]["peak_bytes"], restart["peak_bytes"])
    took = decisions(figures, "last_s")
    p99_s, scrape_s = _share(took, 99), max(each for name in PHASES for each in figures[name]["scrapes_s"])
    undecided = sum(each["settled_s"] is None for each in figures["decisions"])
    return [
        below(f"CPU of the supervisor at rest below {CPU:.0%} of a core", cpu, CPU, percent(cpu, 1)),
        below(f"peak memory below {MEMORY_BYTES / 1e6:g} MB", peak, MEMORY_BYTES, size(peak)),
        below(
            f"decision p99 below {DECISION_S * 1e3:g} ms",
            p99_s,
            DECISION_S,
            f"{seconds(p99_s)}, {len(took)} decisions",
        ),
        below(f"/metrics below {SCRAPE_S * 1e3:g} ms", scrape_s, SCRAPE_S, seconds(scrape_s)),
        at_most("every job recovers", undecided, 0, f"{undecided} not"),
        at_most(
            "no generation changes with the supervisor", restart["changed"], 0, f"{restart['changed']} jobs"
        ),
    ]


def decisions(figures: dict[str, Any], what: str) -> list[float]:
    return [each[what] for each in figures["decisions"] if each[what] is not None]


def _share(values: list[float], share: float) -> float:
    return percentile(values, share) if values else math.nan


def _spread(values: list[float]) -> str:
    return f"{seconds(_share(values, 50))}, {seconds(max(values, default=math.nan))}"


def _tail(values: list[float]) -> str:
    p99 = seconds(_share(values, 99))
    return f"{seconds(_share(values, 50))}, {p99}, {seconds(max(values, default=math.nan))}"


def _both(phase: dict[str, Any]) -> str:
    return f"{percent(phase['members_cpu'], 1)}, {percent(phase['api_cpu'], 1)}"


def _reports(phase: dict[str, Any]) -> str:
    return f"{phase['reports_per_s']:.0f}, {size(phase['report_bytes'])}"


def _lag(found: dict[str, float]) -> str:
    return f"{seconds(found.get('p99_s'))}, {seconds(found.get('max_s'))}"


def _members_lag(phase: dict[str, Any]) -> str:
    most_s, p99_s = phase["members_lag_s"]
    return f"{seconds(p99_s)}, {seconds(most_s)}"
