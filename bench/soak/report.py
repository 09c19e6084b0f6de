"""The results of a soak: tables and verdicts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.harness.watch import ProcessReading
from bench.soak import growth
from bench.soak.faults import COSTLESS, InjectedFault
from bench.soak.growth import Growth
from bench.text import Verdict, percent, seconds, size, summary, table

LOGS = "run directory"  # it may grow, because incidents and the ranks' output accumulate in it
KEPT = 4  # how many additional connections a process may keep
LONG = 0.6  # a series is judged if it has this share of the readings of the longest series


def growths(readings: Iterable[ProcessReading], *, quiet: bool) -> list[Growth]:
    return growth.growths(readings, growth.WARM_UP if quiet else growth.WARM_UP_FAULTED)


def fault_line(fault: InjectedFault) -> str:
    """Return one line about a fault, with its outcome and incidents."""
    second = f" + {fault.second} after {fault.second_after_s:.2f} s" if fault.second else ""
    found = ", ".join(_incident(each) for each in fault.incidents) or fault.detail
    name = f"{fault.kind} of rank {fault.rank}{second}"
    wrong = "  WRONG RANK" if fault.named is False else ""
    return f"{fault.at_s:7.1f} s  step {fault.step:<7} {name:<44} {fault.outcome}: {found}{wrong}"


def _incident(found: Mapping[str, Any]) -> str:
    took = seconds(found["recovered_s"])
    noticed = seconds(found["detected_s"])
    return f"{found['kind']} noticed {noticed} recovered {took} lost {found['lost_steps']}"


def lines(found: Mapping[str, Any], done: Sequence[InjectedFault], grown: Sequence[Growth]) -> list[str]:
    """Return the tables."""
    shown: list[str] = []
    if done:
        kinds = list(dict.fromkeys(each.kind for each in done))
        heads = ("fault", "n", "recovered", "noticed", "first step", "worst", "lost", "named")
        shown += table(heads, [_row(kind, done) for kind in kinds]).splitlines()
    if grown:
        columns = ("part", "readings", "memory", "at the end", "per 100k steps", "files", "at the end")
        rows = [
            (
                each.what,
                str(each.readings),
                size(each.first_bytes),
                size(each.last_bytes),
                size(each.bytes_per_100k_steps),
                f"{each.first_descriptors:.0f}",
                f"{each.last_descriptors:.0f}",
            )
            for each in grown
        ]
        shown += ["", *table(columns, rows).splitlines()]
    if found["status"].get("ettr") is not None:
        total = found["status"]["total_s"]
        shown += ["", f"ETTR {percent(found['status']['ettr'])} of {total:.0f} s"]
    return shown


def _row(kind: str, done: Sequence[InjectedFault]) -> tuple[str, ...]:
    mine = [each for each in done if each.kind == kind]
    alone = [i for each in mine if not each.second for i in each.incidents]
    noticed = summary([i["detected_s"] for i in alone if i["detected_s"] is not None])
    took = summary([i["recovered_s"] for i in alone if i["recovered_s"] is not None])
    lost = [i["lost_steps"] for each in mine for i in each.incidents if i["lost_steps"] is not None]
    named = [each.named for each in mine if each.named is not None]
    return (
        kind,
        str(len(mine)),
        str(sum(1 for each in mine if each.outcome in ("recovered", "costless"))),
        seconds(noticed.median),
        seconds(took.median),
        seconds(took.worst),
        str(max(lost)) if lost else "-",
        f"{sum(named)} of {len(named)}" if named else "-",
    )


def verdicts(
    found: Mapping[str, Any], done: Sequence[InjectedFault], grown: Sequence[Growth], *, quiet: bool
) -> list[Verdict]:
    """Judge a soak: recovery from all faults, matching weights, nothing left behind, no growth."""
    judged = [
        Verdict("the run finished", f"exit code {found['exit_code']}", not found["exit_code"]),
        Verdict("no process and no memory left", str(found["left_behind"]), not found["left_behind"]),
    ]
    if not quiet:
        judged += _of_faults(found, done)
    return [*judged, _of_growth(grown, quiet=quiet)]


def _of_growth(grown: Sequence[Growth], *, quiet: bool) -> Verdict:
    """Judge the processes that ran for most of the time; a process started after a fault is too young."""
    most = max((each.readings for each in grown), default=0)
    old = [each for each in grown if each.readings >= most * LONG]
    judged = [each for each in old if quiet or each.what != LOGS]
    # With faults, the number of open connections depends on which members fetched from which.
    kept = 0 if quiet else KEPT
    growing = [each.what for each in judged if each.grows(kept)]
    found = ", ".join(growing or [each.what for each in judged])
    return Verdict("nothing grows", found, not growing if judged else None)


def _of_faults(found: Mapping[str, Any], done: Sequence[InjectedFault]) -> list[Verdict]:
    hit = [each for each in done if each.outcome not in ("refused", "over")]
    good = [each for each in hit if each.outcome in ("recovered", "costless")]
    alone = [each for each in hit if not each.second]
    costly = [each for each in alone if each.kind in COSTLESS and each.incidents]
    lost = [i["lost_steps"] or 0 for e in alone if e.kind != "nan" for i in e.incidents]
    wrong = [each for each in alone if each.named is False]
    equal = found["digests"] is not None and found["digests"] == found["reference"]
    return [
        Verdict("every fault recovered from", f"{len(good)} of {len(hit)}", len(good) == len(hit)),
        Verdict("weights, optimizer, random states match", "match" if equal else "differ", equal),
        Verdict(
            "at most one step lost by a fault that leaves the state intact",
            str(max(lost, default=0)),
            max(lost, default=0) <= 1,
        ),
        Verdict("every incident names the right rank", f"{len(wrong)} wrong", not wrong),
        Verdict("no incident for a sidecar or supervisor", f"{len(costly)} incidents", not costly),
    ]
