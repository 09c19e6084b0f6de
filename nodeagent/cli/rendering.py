"""Formats a node's health for a terminal: entities, findings, blind sensors and omissions. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = {"healthy": "32", "degraded": "33", "unhealthy": "31", "unknown": "33"}
_DIM, _BOLD = "2", "1"


def paint(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text


def render_health(report: Mapping[str, Any], *, colour: bool = False) -> list[str]:
    """Return the lines of `holdfast node check` for a `health_report`."""
    lines = [_headline(report, colour)]
    bad = [each for each in report["entities"] if each["findings"]]
    good = [each["entity"] for each in report["entities"] if not each["findings"]]
    width = max((len(each["entity"]) for each in bad), default=0)
    for each in bad:
        level = paint(f"{each['level']:9}", COLOURS[each["level"]], colour)
        lines.append(f"{level}  {each['entity']:{width}}  {_action(each['action'])}")
        for found in each["findings"]:
            lines += _finding(found, colour)
    if good:
        lines.append(f"{paint('healthy  ', COLOURS['healthy'], colour)}  {_grouped(good)}")
    lines += _undecided(report, colour)
    if (released := report.get("released")) is not None:
        closed = "NVML is closed" if released["closed"] else "NVML is not closed yet"
        left_s = max(0.0, released["until_s"] - report["at_s"])
        lines.append(f"! an operator has released the GPUs for another {left_s:.0f} s: {closed}")
    lines += [f"! {each}" for each in report["problems"]]
    blind = [each for each in report["sensors"] if not each["sees"]]
    seeing = [each["name"] for each in report["sensors"] if each["sees"]]
    lines.append(paint(f"sensors: {', '.join(seeing) or 'nothing'}", _DIM, colour))
    lines += [
        f"{paint('blind    ', COLOURS['degraded'], colour)}  {each['name']}: {each['why']}" for each in blind
    ]
    for each in report["sensors"]:
        lines += [paint(f"left out   {one['what']}: {one['why']}", _DIM, colour) for one in each["left_out"]]
    return lines


def _undecided(report: Mapping[str, Any], colour: bool) -> list[str]:
    """Return a table of the checks that were not evaluated, in the given time if there was one."""
    undecided = report.get("undecided", ())
    if not undecided:
        return []
    names = [" ".join(filter(None, (each["entity"], each["check"]))) for each in undecided]
    width = max(map(len, names))
    mark = paint("unknown  ", COLOURS["unknown"], colour)
    within = f" within {report['looked_s']:g} s" if "looked_s" in report else ""
    return [
        f"not evaluated{within}:",
        *(f"{mark}  {name:{width}}  {each['why']}" for name, each in zip(names, undecided, strict=True)),
    ]


def _headline(report: Mapping[str, Any], colour: bool) -> str:
    level = paint(report["level"], f"{_BOLD};{COLOURS[report['level']]}", colour)
    version = report["driver"].get("driver")
    models: dict[str, int] = {}
    for each in report["gpus"]:
        models[each.get("name", "GPU")] = models.get(each.get("name", "GPU"), 0) + 1
    counted = [f"{count} x {name}" for name, count in models.items()]
    about = ", ".join([*counted, *([f"driver {version}"] if version else [])])
    test = "  TEST: observations may be injected" if report.get("test") else ""
    todo = _action(report["action"])
    if report.get("undecided"):
        count = len(report["undecided"])
        which = f"{count} check{'s' if count > 1 else ''} could not be evaluated"
        todo = which if report["level"] == "unknown" else f"{todo}; {which}"
    return f"{report.get('node', 'node')}: {level}, {todo}" + (f"  ({about})" if about else "") + test


def _finding(found: Mapping[str, Any], colour: bool) -> list[str]:
    by = f"; by {', '.join(found['sources'])}"
    whose = f" (set by the {found['overridden']})" if found["overridden"] else ""
    lines = [f"           {found['why']}{whose}{paint(by, _DIM, colour)}"]
    lines += [paint(f"             | {text}", _DIM, colour) for text in found["evidence"]]
    lines.append(f"           clears by {found['clears']}")
    return lines


def _action(name: str) -> str:
    return {
        "none": "nothing to do",
        "restart_app": "restart the application",
        "reset_gpu": "reset the GPU",
        "reboot_node": "reboot the node",
        "replace": "replace the hardware",
        "contact_support": "contact support",
    }[name]


def _grouped(entities: Sequence[str]) -> str:
    """Name single entities and count the rest: `node, driver, 8 gpus, 12 devices`."""
    kinds: dict[str, list[str]] = {}
    for each in entities:
        kinds.setdefault(each.partition("/")[0], []).append(each)
    return ", ".join(
        found[0] if len(found) == 1 else f"{len(found)} {kind}s" for kind, found in kinds.items()
    )


def render_change(each: Mapping[str, Any], *, colour: bool = False) -> str:
    """Return one change of the history as a line."""
    when = datetime.datetime.fromtimestamp(each["at_s"], datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    level = paint(f"{each['level']:9}", COLOURS.get(each["level"], "0"), colour)
    todo = "" if each["action"] == "none" else f" -> {_action(each['action'])}"
    return f"{when}  {each['kind']:7}  {level}  {each['entity']}  {_title(each)}{each['why']}{todo}"


def _title(each: Mapping[str, Any]) -> str:
    """Return the check's name, unless the reason starts with it: `Xid 79: ...`."""
    if each["code"] is None:
        return f"{each['check']}: "
    title = f"{each['check'].replace('xid', 'Xid')} {each['code']}: "
    return "" if each["why"].lower().startswith(title.lower()) else title
