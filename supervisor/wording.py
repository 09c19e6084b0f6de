"""The wording of numbers, incidents and the end of a run, shared by all displays and commands. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from holdfast.protocol import foreign_text
from supervisor.fault_kinds import UNKNOWN, kind_of

FINISHED = "all ranks have finished"
_MAX_DETAIL = 160
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.MULTILINE)
_STEP = re.compile(r"\bsteps?\b")  # a detail from Holdfast that matches this already names or counts steps
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|/import/holdfast/")


class _StateName(NamedTuple):
    short: str
    in_full: str


# What a group resumed from, by `ResumePoint.source`. A record of another version may have other sources.
_STATES: Mapping[str, _StateName] = MappingProxyType(
    {
        "slot": _StateName("snapshot", "a snapshot in memory"),
        "checkpoint": _StateName("checkpoint", "a checkpoint on storage"),
        "none": _StateName("the beginning", "the beginning, because no usable state was left"),
    }
)


def state_name(source: str) -> str:
    """Return the name of the state that a group resumed from, such as "snapshot"."""
    return _STATES[source].short if source in _STATES else source


def state_in_full(source: str) -> str:
    """Return the name of the state with an article and its place, such as "a snapshot in memory"."""
    return _STATES[source].in_full if source in _STATES else source


def sentence(incident: Mapping[str, Any]) -> str:
    """Return one line that says what happened and how it ended.

    For example: rank 1 was killed by SIGKILL at step 812; back in 0.13 s, 0 steps lost.
    """
    return f"{what(incident)}; {outcome(incident)}"


def what(incident: Mapping[str, Any], *, with_step: bool = True) -> str:
    """Return what failed, and at which step, without the outcome."""
    step = incident.get("step")
    at = f" at {_step(incident, step)}" if with_step and isinstance(step, int) and step >= 0 else ""
    fault = _blamed(incident)
    if fault.get("hung"):
        return f"rank {fault.get('rank')} hung{at}: {_one_line(fault['hung'])}"
    text = detail(incident) or _generic(incident)
    quotes_script = kind_of(incident.get("kind")).quotes_script
    return text if not quotes_script and _STEP.search(text) else text + at


def outcome(incident: Mapping[str, Any]) -> str:
    """Return how an incident ended, or that it is still open."""
    recovered_s, lost_steps = incident.get("recovered_s"), incident.get("lost_steps")
    if recovered_s is not None:
        end = f"back in {seconds(float(recovered_s))}"
        if lost_steps is None:
            return end + ", number of lost steps unknown" * is_cost_unknown(incident)
        return f"{end}, {lost_in_words(incident, int(lost_steps))}{skipped(incident)}"
    if incident.get("remedy") == "stop":
        return "the run stopped" + (f", {lost_in_words(incident, int(lost_steps))}" if lost_steps else "")
    if incident.get("overtaken_by"):
        return f"not recovered before {incident['overtaken_by']} began"
    return "not recovered yet" if incident.get("open", True) else "the run ended"


def skipped(incident: Mapping[str, Any]) -> str:
    """Return a clause about the steps that are skipped because of the incident; "" for none."""
    steps = incident.get("skipped_steps") or []
    if not steps:
        return ""
    named, are = ", ".join(map(str, steps)), "is" if len(steps) == 1 else "are"
    return f"; step{'s' * (len(steps) > 1)} {named} {are} skipped from now on"


def lost_in_words(incident: Mapping[str, Any], lost_steps: int) -> str:
    """Return how many steps must be repeated, and whether that is only a lower bound."""
    if not incident.get("lost_at_least"):
        return f"{count(lost_steps, 'step')} lost"
    return f"at least {count(lost_steps, 'step')} lost" if lost_steps else "number of lost steps unknown"


def is_cost_unknown(incident: Mapping[str, Any]) -> bool:
    """True if the group was restarted and the number of steps that it must repeat is unknown.

    A script that keeps its own state does not report the number. For other scripts, the number is unknown if
    all processes that knew the step have died.
    """
    resumed = incident.get("resume") or {}
    its_own = incident.get("own_state") or resumed.get("source") == "none"
    over = incident.get("recovered_s") is not None
    return bool(resumed and (its_own or over)) and incident.get("lost_steps") is None


def _step(incident: Mapping[str, Any], step: int) -> str:
    generation = int(incident.get("generation") or 0)
    return step_in_words(step, own_state=bool(incident.get("own_state")), generation=generation)


def step_in_words(step: int, *, own_state: bool, generation: int) -> str:
    """Return "step 12", or "optimizer step 12 since the restart" for a script that keeps its own state.

    After each restart, the reported steps of such a script begin at 0, no matter what step the script itself
    resumes from.
    """
    return f"optimizer step {step} since the restart" if own_state and generation > 1 else f"step {step}"


def place(traceback: str) -> str:
    """Return the position of the script in `traceback`, such as " (train.py, line 12)"; "" if it has none."""
    frames = _FRAME.findall(traceback)
    of_script = [each for each in frames if not each[0].startswith("<") and not _LIBRARY.search(each[0])]
    for name, line in (of_script or frames)[-1:]:
        return f" ({name.rpartition('/')[2]}, line {line})"
    return ""


def slowness(rank: Mapping[str, Any]) -> str:
    """Return how slow a rank is and where its time goes, from its entry in the status.

    For example: 84 ms of its own work per step, its peers 31 ms (median), since step 150: data 60 ms, forward
    24 ms.
    """
    own_s, data_s = float(rank.get("own_s") or 0.0), float(rank.get("own_data_s") or 0.0)
    parts = f": data {seconds(data_s)}, forward {seconds(own_s - data_s)}"
    work = f"{seconds(own_s)} of its own work per step"
    own = work if own_s else f"{number(rank['slow'], 2)} times its peers"
    peers = f"its peers {seconds(float(rank.get('peers_s') or 0.0))} (median)"
    return f"{own}, {peers}, since step {int(rank.get('slow_since') or 0):,}" + parts * bool(own_s)


def finish(missing: str, notes: Sequence[str], incidents: int = 0, progress: str = "") -> str:
    """Return the last sentence of a run whose script has finished.

    Args:
        missing: A clause that says why the last state has no checkpoint; "" if it has one.
        notes: Further clauses for the user.
        incidents: The number of incidents of the run.
        progress: A clause that says how far the script got and how much is saved. It begins with a comma.
    """
    after = f" after {count(incidents, 'incident')}" if incidents else ""
    but = f", but {missing}" if missing else ""
    return f"{FINISHED}{after}{progress}{but}" + "".join(f"; {note}" for note in notes)


def detail(incident: Mapping[str, Any]) -> str:
    """Return the detail of the fault that explains the incident, as one line of bounded length."""
    return _one_line(_blamed(incident).get("detail"))


def _blamed(incident: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fault that explains the incident; an empty mapping if the record has none."""
    faults = [each for each in incident.get("faults") or [] if isinstance(each, Mapping)]
    cause = (incident.get("kind"), incident.get("rank"))
    same = [each for each in faults if (each.get("kind"), each.get("rank")) == cause]
    return next(iter(same or faults), {})


def _one_line(text: object) -> str:
    """Return `text` as one line of bounded length."""
    words = " ".join(str(text or "").split())
    return words if len(words) <= _MAX_DETAIL else words[: _MAX_DETAIL - 3] + "..."


def _generic(incident: Mapping[str, Any]) -> str:
    """Describe the fault from its kind alone, for a record without a detail."""
    name, rank, member = incident.get("kind"), incident.get("rank"), incident.get("member")
    kind = kind_of(name)
    text = kind.sentence.format(
        rank=f"rank {rank}" if isinstance(rank, int) and rank >= 0 else "a rank",
        member=f"member {member}" if member else "a member",
    )
    return f"{text} ({name})" if kind is UNKNOWN and name else text


def seconds(value: float) -> str:
    """Return a duration as text: 4 ms, 0.13 s, 2.5 s, 41 s, 3 min 20 s, 2 h 5 min."""
    if value < 0.0995:
        return f"{value * 1000:.0f} ms"
    if value < 9.95:
        return f"{value:.2f} s" if value < 0.995 else f"{value:.1f} s"
    whole = round(value)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    if whole < 172_800:
        return f"{whole // 3600} h" + (f" {whole % 3600 // 60} min" if whole % 3600 // 60 else "")
    return f"{whole // 86_400} d" + (f" {whole % 86_400 // 3600} h" * bool(whole % 86_400 // 3600))


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(number: int) -> str:
    """Return a number of bytes in the unit that leaves one to three digits before the decimal point."""
    value, units = float(number), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{number} {units[0]}" if units[0] == "bytes" else f"{value:.3g} {units[0]}"


def percent(share: float) -> str:
    """Return a share with enough digits for an ETTR close to 1; "100.00 %" only if it is at least 1."""
    value = share * 100
    digits = 1 if value < 99 else 2
    rounded = f"{value:.{digits}f}"
    if value < 100 and float(rounded) >= 100:
        rounded = f"99.{'9' * digits}"
    return f"{rounded} %"


def ettr(share: float | None) -> str:
    """Return an ETTR, as every display shows it; "unknown" if an unknown number of steps was repeated."""
    return "unknown" if share is None else percent(float(share))


def part(share: float) -> str:
    """Return a share with one decimal, for a table."""
    return "< 0.1 %" if 0 < share < 0.0005 else f"{share * 100:.1f} %"


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with `digits` significant digits; a dash for None."""
    if value is None:
        return "-"
    size_of = abs(value)
    if size_of and not 1e-4 <= size_of < 1e7:
        return f"{value:.{digits - 1}e}"
    if size_of >= 1000:
        return f"{value:,.0f}"
    whole = len(str(int(size_of))) if size_of >= 1 else 0
    return f"{value:.{max(0, digits - whole)}f}"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: frozenset[int]) -> list[str]:
    """Return the lines of a table, exactly one for each row, even if its cells contain untrusted text.

    The columns in `right` are right-aligned, all others left-aligned.
    """
    rows = [tuple(map(foreign_text.one_line, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        cells = [
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
