"""Render the status of a run as a frame for a terminal or as single lines for a log. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from supervisor.display.ansi import BOLD, CYAN, DIM, GREEN, RED, YELLOW, Style, clip, join, width_of
from supervisor.view.model import ENDING_PHASES, PHASES
from supervisor.wording import count, ettr, number, outcome, seconds, state_name, what

RECOVERING = frozenset({PHASES["forming"], "starting", "restarting", PHASES["looking"], PHASES["securing"]})
STILL_S = 2.0  # shorter times without a step are not shown
SILENT_S = 3.0  # if a status is older than this, its age is shown
MAX_WIDTH = 120  # a wider frame would be harder to read without showing more
_STATES = {"running": "on", "starting": "half", "failing": "bad", "exited": "bad"}
_COLOURS = {"on": GREEN, "half": YELLOW, "bad": RED, "off": DIM}
StatusDocument = Mapping[str, Any]


def frame(status: StatusDocument, width: int, style: Style, silent_s: float = 0.0) -> list[str]:
    """Return the lines of the live display. No line is wider than `width`."""
    width = max(1, min(width, MAX_WIDTH))
    lines = [
        style.paint(style.sign("rule") * width, DIM),
        _headline(status, width, style, silent_s),
        _numbers(status, width, style),
        *([] if status.get("phase") == "ended" else [_members(status, width, style)]),
        _last(status, width, style),
    ]
    # If the terminal is too narrow for any word, the line is empty.
    return [line if width_of(line) <= width else "" for line in lines if line]


def phase(status: StatusDocument) -> str:
    """Return, in words, what the run is doing."""
    name = str(status.get("phase") or "forming")
    if name == "running":
        if status.get("open_incident"):
            return "restarting"
        if status.get("step") is None:
            return "starting"
    if name == "securing" and status.get("own_state"):  # there is nothing to secure
        return "restarting" if status.get("open_incident") else PHASES["stopping"]
    return PHASES.get(name, name)


def progress(status: StatusDocument) -> str:
    """Return the periodic line of a log, with the step, loss, rate and ETTR."""
    parts = [_step(status) or phase(status)]
    if status.get("loss") is not None:
        parts.append(f"loss {number(status['loss'])}")
    if status.get("rate"):
        parts.append(f"{number(status['rate'], 3)} steps/s")
    parts += [_remaining(status)] * bool(_remaining(status))
    if stalled(status):
        parts.append(f"{stalled(status)}: {_held_up(status)}")
    parts.append(f"generation {status.get('generation', 0)}")
    parts.append(_ettr(status))
    return "  ".join(parts)


def recovering(status: StatusDocument, since_s: float) -> str:
    """Return the periodic line of a log during a recovery that takes long.

    It says since when, and in which phase or what the group waits for.
    """
    now = phase(status)
    if now != "restarting":
        return f"not recovered for {seconds(since_s)}: {now}"
    if _held_up(status):
        return f"not recovered for {seconds(since_s)}: {stalled(status)}: {_held_up(status)}"
    number = status.get("generation", 0)
    return (
        f"not recovered for {seconds(since_s)}: generation {number} has completed no step yet"
        " (its limit is --first-step-timeout)"
    )


def is_ettr_unknown(status: StatusDocument) -> bool:
    """True if an unknown number of steps was repeated.

    This is the case for a script that keeps its own state, or after all processes that knew the step have
    died.
    """
    return "ettr" in status and status["ettr"] is None


def _ettr(status: StatusDocument) -> str:
    return f"ETTR {ettr(None if is_ettr_unknown(status) else status.get('ettr') or 0.0)}"


def _step(status: StatusDocument) -> str:
    """Return the step, and the total if the script has declared it; "" if the step is unknown."""
    if status.get("step") is None:
        return ""
    total = status.get("total_steps")
    if status.get("own_state") and int(status.get("generation") or 0) > 1:
        return f"optimizer step {status['step']:,} since the restart"
    return f"step {status['step']:,}" + (f" of {total:,}" if total and total >= status["step"] else "")


def _remaining(status: StatusDocument) -> str:
    """Return how long the remaining steps will take at the current rate; "" if that is unknown."""
    total, rate, step = status.get("total_steps"), status.get("rate"), status.get("step")
    if not total or not rate or step is None or total <= step:
        return ""
    return f"{seconds((total - step) / float(rate))} left"


def stalled(status: StatusDocument) -> str:
    """Return, in words, the time since the last step ended, with the limit; "" while steps end regularly."""
    still_s = float(status.get("no_step_s") or 0.0)
    if still_s < STILL_S or status.get("phase") != "running":
        return ""
    limit_s = status.get("hang_limit_s")
    return f"no step for {seconds(still_s)}" + (f" (limit {seconds(float(limit_s))})" if limit_s else "")


def _held_up(status: StatusDocument) -> str:
    """While no step ends, return what the group is waiting for; otherwise return ""."""
    return " ".join(str(status.get("waiting_for") or "").split()) if stalled(status) else ""


def generation(status: StatusDocument) -> str:
    """Return a line that says which group runs and which step it started from."""
    ranks = int(status.get("world_size") or 0)
    members = len([each for each in status.get("members") or [] if each.get("ranks")])
    full = int((status.get("group") or {}).get("of") or 0)
    where = f" on {count(members, 'member')}" if members else ""
    if 0 < members < full:
        where = f" on {members} of {count(full, 'member')}"
    since = status.get("resumed")
    start = f", from step {since['step']:,} ({state_name(since['source'])})" if since else ""
    return f"generation {status.get('generation', 0)} runs: {count(ranks, 'rank')}{where}{start}"


def has_run(status: StatusDocument) -> bool:
    """True if the run is ending and its last group ran, even if too briefly for a status to show it."""
    name = status.get("phase")
    if name not in ENDING_PHASES:
        return False
    failed = (status.get("last_incident") or {}).get("generation") == status.get("generation")
    there = name != "ended" and any(each.get("step") is not None for each in status.get("ranks") or ())
    return (there and not failed) or bool(status.get("finished"))


def station(status: StatusDocument) -> str:
    """Return the line about the current phase. A log shows it when the phase changes."""
    name = phase(status)
    if name == "running":
        return generation(status)
    message = " ".join(str(status.get("message") or "").split())
    is_elsewhere = name in (
        "restarting",
        "stopping",
    )  # the incident's line or the run's last line shows the message
    return f"{name}: {message}" if message and not is_elsewhere else name


def _headline(status: StatusDocument, width: int, style: Style, silent_s: float) -> str:
    name = phase(status)
    calm = name == "running" and not stalled(status)
    sign = style.sign("on" if calm or name == "ended" else "half")
    colour = GREEN if calm else DIM if name == "ended" else YELLOW
    cells: list[tuple[str, tuple[str, ...]]] = [(f"{sign} {name}", (BOLD, colour))]
    if silent_s > SILENT_S:
        cells.append((f"no update from the supervisor for {seconds(silent_s)}", (YELLOW,)))
    if status.get("step") is not None:
        cells.append((_step(status), (BOLD,)))
    if status.get("loss") is not None:
        cells.append((f"loss {number(status['loss'])}", ()))
    if status.get("rate"):
        cells.append((f"{number(status['rate'], 3)} steps/s", ()))
        cells.append((_remaining(status), ()))
    if stalled(status):
        cells.append((stalled(status), (YELLOW,)))
    if status.get("total_s"):
        cells.append((_ettr(status), (CYAN,)))
    return join(cells, width, style, "   ")


def _numbers(status: StatusDocument, width: int, style: Style) -> str:
    """Return the second line, with the secured step, the checkpoint and the rate in units of the data."""
    cells: list[tuple[str, tuple[str, ...]]] = []
    if status.get("generation"):
        cells.append((f"generation {status['generation']}", (DIM,)))
    saved = status.get("checkpoint") or {}
    if saved.get("error"):
        cells.append((clip(f"storage: {saved['error']}", max(20, width - 20), style), (RED,)))
    if status.get("secured_step") is not None:
        cells.append((f"secured {status['secured_step']:,}", (DIM,)))
    if saved.get("step") is not None:
        cells.append((f"checkpoint {saved['step']:,}", (DIM,)))
    for name, unit in (("tokens_per_s", "tokens/s"), ("samples_per_s", "samples/s")):
        if status.get(name):
            cells.append((f"{number(status[name], 3)} {unit}", (DIM,)))
            break
    if status.get("total_s"):
        cells.append((f"up {seconds(float(status['total_s']))}", (DIM,)))
    return "  " + join(cells, width - 2, style, "   ") if cells else ""


def _members(status: StatusDocument, width: int, style: Style) -> str:
    states = {each.get("rank"): str(each.get("state")) for each in status.get("ranks") or []}
    shown = [(m, _signs(m, states)) for m in status.get("members") or []]
    if not shown:
        return style.paint("  no members yet", DIM)
    plain = "  " + "   ".join(f"{m.get('name')} {' ' * len(signs)}{_role(m)}" for m, signs in shown)
    if width_of(plain) > width:
        return _tally(shown, width, style)
    cells = [
        style.paint(str(member.get("name")), DIM)
        + " "
        + "".join(style.paint(style.sign(sign), _COLOURS[sign]) for sign in signs)
        + style.paint(_role(member), DIM)
        for member, signs in shown
    ]
    return "  " + "   ".join(cells)


def _role(member: Mapping[str, Any]) -> str:
    return f" {member['role']}" if member.get("role") in ("standby", "lost") else ""


def _signs(member: Mapping[str, Any], states: Mapping[Any, str]) -> list[str]:
    """Return a sign for each rank of the member, or for each warm process if it has no ranks."""
    if member.get("role") == "lost" or (member.get("ranks") and not member.get("connected")):
        return ["bad"] * max(1, len(member.get("ranks") or []))
    if member.get("ranks"):
        return [_STATES.get(states.get(rank, "starting"), "half") for rank in member["ranks"]]
    return ["off"] * int(member.get("parked") or 0) or ["half"]


def _tally(shown: list[tuple[Mapping[str, Any], list[str]]], width: int, style: Style) -> str:
    """Return a summary of the members. It is used if there are too many to list."""
    signs = [sign for _, each in shown for sign in each]
    words = (("on", "running"), ("half", "starting"), ("bad", "down"), ("off", "in reserve"))
    cells: list[tuple[str, tuple[str, ...]]] = [(f"  {count(len(shown), 'member')}", (DIM,))]
    cells += [
        (f"{style.sign(sign)} {signs.count(sign):,} {word}", (_COLOURS[sign],))
        for sign, word in words
        if sign in signs
    ]
    return join(cells, width, style, "   ")


def _last(status: StatusDocument, width: int, style: Style) -> str:
    opened, last = status.get("open_incident"), status.get("last_incident")
    if opened:
        return "  " + style.paint(clip(what(opened), width - 2, style), YELLOW)
    if phase(status) not in ("running", "restarting"):
        message = " ".join(str(status.get("message") or "").split())
        if message:
            return "  " + clip(message, width - 2, style)
    if _held_up(status):
        return "  " + style.paint(clip(_held_up(status), width - 2, style), YELLOW)
    if not last:
        return style.paint(clip("  no incidents", width, style), DIM)
    total = int(status.get("incidents") or 0)
    more = f"  ({count(total, 'incident')})" if total > 1 and width >= 60 else ""
    line = f"{outcome(last)}: {what(last)}"  # the outcome first, because a narrow terminal cuts off the end
    return "  " + clip(line, width - 2 - len(more), style) + style.paint(more, DIM)
