"""`holdfast incidents` and `holdfast explain`: list the incidents of a run, and explain one of them."""

from __future__ import annotations

import difflib
import re
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from holdfast.errors import BadInput
from holdfast.inspection.tracebacks import HEADER
from holdfast.protocol.foreign_text import harmless
from supervisor.cli import command_options
from supervisor.cli.api_client import RunRecords, age_of, is_current, newest_status, outdated, title
from supervisor.display.ansi import BOLD, CYAN, DIM, Style
from supervisor.display.screen import say_all, say_json, style_of
from supervisor.observability.incident_record import SCHEMA
from supervisor.store.run_directory import RunDir
from supervisor.wording import (
    is_cost_unknown,
    lost_in_words,
    outcome,
    place,
    seconds,
    skipped,
    state_in_full,
    table,
    what,
)

_RIGHT = frozenset({2, 3, 4, 5, 6})
_ADDED_FIELDS: dict[str, Any] = {"schema": SCHEMA, "overtaken_by": None}  # older records lack these fields
_BAR = 40  # columns, for the time from the fault to the first new step
_ENDS_OF_LOG = ("crash", "victim", "hang")  # kinds of faults whose message is the end of the rank's log
_MEANING: Mapping[str, str] = {  # by `RecoveryStage`
    "fault": "the fault",
    "noticed": "noticed",
    "looked": "stacks and process states gathered",
    "secured": "the survivors' state secured",
    "manned": "enough members ready",
    "decided": "decided",
    "started": "processes released",
    "joined": "group formed",
    "restored": "state restored",
    "first step": "first new step",
}


def show(run: RunRecords, command: command_options.Incidents) -> int:
    found = _known(run)
    for name in run.unreadable_incidents():
        sys.stderr.write(f"holdfast: {run.path / 'incidents' / name} cannot be read and is not shown\n")
    if command.json:
        say_json(found)
    else:
        say_all(lines(found))
    return 0


def explain(run: RunRecords, command: command_options.Explain) -> int:
    chosen = _choose(_known(run), command.incident)
    if command.json:
        say_json(chosen)
    else:
        say_all(explanation(chosen, style_of(sys.stdout)))
    return 0


def _known(run: RunRecords) -> list[dict[str, Any]]:
    """Return all incidents, including an open one."""
    found = {str(each["id"]): {**_ADDED_FIELDS, **each} for each in run.incidents()}
    status, alive, _ = newest_status(run)
    age_s = None if isinstance(run, RunDir) else age_of(status, time.time())
    if alive and age_s is not None and is_current(status, time.time()) is False:
        sys.stderr.write(f"holdfast: {outdated(title(run), age_s)}\n")
    opened = (status or {}).get("open_incident")
    if alive and isinstance(opened, dict) and opened.get("id"):
        found.setdefault(str(opened["id"]), opened)
    return list(found.values())


def _choose(found: list[dict[str, Any]], word: str) -> dict[str, Any]:
    """Return the incident that `word` (i-0003, 3 or last) names. Raises `BadInput` if there is none."""
    names = [str(each["id"]) for each in found]
    if not names:
        raise BadInput(f"unknown incident {word!r}: this run has had no incidents")
    number = re.fullmatch(r"(?:i-)?([0-9]{1,9})", word)
    wanted = names[-1] if word == "last" else f"i-{int(number[1]):04d}" if number else word
    if wanted in names:
        return found[names.index(wanted)]
    if not re.fullmatch(r"i-\d+", wanted):
        listed = "an incident from `holdfast incidents`, such as 3, i-0003 or last"
        raise BadInput(f"invalid value {word!r} for ID: expected {listed}")
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.5) or names[-3:]
    raise BadInput(f"unknown incident {word!r}: expected {', '.join(sorted(near))} or last")


def lines(found: list[dict[str, Any]]) -> list[str]:
    """Return the output of `holdfast incidents`."""
    if not found:
        return ["no incidents"]
    rows = [
        (
            str(each.get("id")),
            str(each.get("kind") or "-"),
            _rank(each),
            _step(each),
            _time(each.get("detected_s")),
            _time(each.get("recovered_s")),
            _lost(each),
            str(each.get("remedy") or "-"),
            what(each, with_step=False) + skipped(each),
        )
        for each in found
    ]
    head = ("ID", "KIND", "RANK", "STEP", "NOTICED", "BACK IN", "LOST", "REMEDY", "WHAT HAPPENED")
    return table(head, rows, _RIGHT)


def _rank(incident: Mapping[str, Any]) -> str:
    rank = incident.get("rank")
    return str(rank) if isinstance(rank, int) and rank >= 0 else "-"


def _step(incident: Mapping[str, Any]) -> str:
    step = incident.get("step")
    if not isinstance(step, int) or step < 0:  # -1 means unknown
        return "?" if is_cost_unknown(incident) else "-"
    return str(step)


def _lost(incident: Mapping[str, Any]) -> str:
    lost = incident.get("lost_steps")
    more = "+" if incident.get("lost_at_least") else ""
    return f"{lost}{more}" if lost is not None else "?" if is_cost_unknown(incident) else "-"


def _time(value: object) -> str:
    return seconds(float(value)) if isinstance(value, int | float) else "-"


def explanation(incident: Mapping[str, Any], style: Style) -> list[str]:
    """Return the lines that explain `incident`."""
    parts = [
        _head(incident, style),
        _section("What was seen", _observations(incident), style),
        _section("What was decided", _decided(incident), style),
        _section("Pods without Holdfast", [*map(_one_line, incident.get("missed_pods") or ())], style),
        _section("From the fault to the first new step", _timeline(incident, style), style),
        *_stacks(incident, style),
        _section(_title_of_message(incident), _message(incident), style),
    ]
    lines = [line for part in parts if part for line in ("", *part)]
    return [harmless(line, colour=style.colour) for line in lines[1:]]


def _head(incident: Mapping[str, Any], style: Style) -> list[str]:
    return [
        style.paint(f"{incident.get('id')}  {what(incident)}{_where(incident)}", BOLD),
        style.paint(f"{_when(incident.get('at'))}  {outcome(incident)}".strip(), DIM),
    ]


def _where(incident: Mapping[str, Any]) -> str:
    return place(str(incident.get("message") or "")) if incident.get("kind") == "exception" else ""


def _when(at: object) -> str:
    if not isinstance(at, int | float):
        return ""
    try:
        return datetime.fromtimestamp(at).astimezone().isoformat(" ", "milliseconds")
    except (ValueError, OverflowError, OSError):
        return ""


def _section(title: str, lines: list[str], style: Style) -> list[str]:
    return [style.paint(title, BOLD), *(f"  {line}" for line in lines)] if lines else []


def _observations(incident: Mapping[str, Any]) -> list[str]:
    cause = (incident.get("kind"), incident.get("rank"))
    faults = list(incident.get("faults") or [])
    faults.sort(key=lambda each: (each.get("kind"), each.get("rank")) != cause)
    lines = [_of_fault(each, incident) for each in faults]
    lines += [_one_line(each) for each in incident.get("evidence") or []]
    return list(dict.fromkeys(line for line in lines if line))


def _of_fault(fault: Mapping[str, Any], incident: Mapping[str, Any]) -> str:
    cause = incident.get("rank")
    if fault.get("kind") == "victim" and incident.get("kind") != "victim" and isinstance(cause, int):
        return f"rank {fault.get('rank')} lost its peers" + f" (rank {cause} ended)" * (cause >= 0)
    return _one_line(fault.get("detail")) + place(str(fault.get("message") or "")) * (
        fault.get("kind") == "exception"
    )


def _decided(incident: Mapping[str, Any]) -> list[str]:
    decision = incident.get("decision") or {}
    # `measure` omits the cause, because the previous section shows it. Older records have no `measure`.
    why = _one_line(decision.get("measure") or decision.get("why") or incident.get("why"))
    lines = [why or str(decision.get("action") or incident.get("remedy") or "")]
    resume = incident.get("resume") or {}
    if resume:
        source = str(resume.get("source") or "")
        lines.append(
            f"resumed at step {resume.get('step')}, from {state_in_full(source)}"
            f"{_taken_by(resume.get('generation'), incident.get('generation'))}"
            if source != "none"
            else _from_the_beginning(incident)
        )
    lost = incident.get("lost_steps")
    if lost is not None:
        lines.append(lost_in_words(incident, int(lost)))
    elif is_cost_unknown(incident) and not incident.get("own_state"):
        lines.append("steps lost: unknown, because all processes that knew the step died")
    return [line for line in lines if line]


def _taken_by(generation: object, failed: object) -> str:
    """Return a clause that says whether the failed group or an earlier one took the state."""
    if generation == failed:
        return f", taken by the group that failed (generation {failed})"
    return f", taken by an earlier group (generation {generation}; generation {failed} failed)"


def _from_the_beginning(incident: Mapping[str, Any]) -> str:
    if not incident.get("own_state"):
        return f"resumed from {state_in_full('none')}"
    again = "; the number of steps to repeat is unknown" if is_cost_unknown(incident) else ""
    return f"restarted the script from its first line, because it keeps its own state{again}"


def _timeline(incident: Mapping[str, Any], style: Style) -> list[str]:
    """Return a line for each stage of the recovery, with its time and a bar for its duration."""
    stages = [
        (str(each.get("what")), float(each.get("at_s") or 0.0))
        for each in incident.get("timeline") or []
        # Holdfast secures nothing for a script that keeps its own state.
        if not (incident.get("own_state") and each.get("what") == "secured")
    ]
    stages.sort(key=lambda each: each[1])  # the sort is stable, so stages with equal times remain in order
    if not stages:
        return []
    whole_s = max(stages[-1][1], 1e-9)
    names = [_MEANING.get(name, name) for name, _ in stages]
    width = max(map(len, names))
    lines, before_s = [], 0.0
    for name, (_, at_s) in zip(names, stages, strict=True):
        begin, end = round(before_s / whole_s * _BAR), round(at_s / whole_s * _BAR)
        bar = " " * begin + style.sign("bar") * (end - begin)
        lines.append(f"{name:{width}}  {at_s * 1000:9,.1f} ms  {style.paint(bar, CYAN)}".rstrip())
        before_s = at_s
    return lines


def _stacks(incident: Mapping[str, Any], style: Style) -> list[list[str]]:
    """Return a section for each group of ranks with the same stack."""
    sections = []
    for group in incident.get("stacks") or []:
        ranks = list(group.get("ranks") or [])
        stack = str(group.get("stack") or "no stack").splitlines()
        title = (
            f"Where rank {_ranges(ranks)} was" if len(ranks) == 1 else f"Where ranks {_ranges(ranks)} were"
        )
        sections.append(_section(title, stack, style))
    return sections


def _title_of_message(incident: Mapping[str, Any]) -> str:
    """Return a title for the message, which is the rank's error or only the end of its output."""
    is_end_of_log = incident.get("kind") in _ENDS_OF_LOG
    is_error = HEADER in str(incident.get("message") or "")
    return "Last output of the rank" if is_end_of_log and not is_error else "Message of the rank"


def _message(incident: Mapping[str, Any]) -> list[str]:
    return str(incident.get("message") or "").strip("\n").splitlines()


def _one_line(value: object) -> str:
    return " ".join(str(value or "").split())


def _ranges(ranks: list[int]) -> str:
    """Return numbers as ranges, such as "0-3, 7" for 0, 1, 2, 3, 7."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
