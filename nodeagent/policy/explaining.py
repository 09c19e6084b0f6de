"""What a code or a check means, who says so, what will be done and what ends it, for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from nodeagent.policy.describing import Described

WIDTH = 9  # of the labels
MAX_OTHERS = 60  # lines on what else a code can mean

_ENDS = {
    "time": "",
    "reset": "a reset of the GPU or a reboot",
    "boot": "a reboot",
    "replaced": "holdfast node clear, or another GPU in its place",
}

Lines = Iterator[tuple[str, str]]  # label, text


def text(found: Described) -> str:
    """Return what `look_up` has found, as lines."""
    kind = {"xid": "Xid", "sxid": "SXid"}.get(found["subject"], found["subject"])
    unit = f" ({found['unit']})" if found.get("unit") else ""
    lines = [f"{kind} {found['code']}: {found['what']}{unit}"]
    body = _event(found) if found["kind"] == "event" else _samples(found)
    lines += [f"  {label:{WIDTH}} {each}" for label, each in (*body, *_whose(found))]
    return "\n".join([*lines, *_others(found)])


def _event(found: Mapping[str, Any]) -> Lines:
    if found.get("class"):
        yield "fault", f"{found['class']}"
    if found["name"] != found["what"]:
        yield "means", found["name"]
    yield "level", _level(found["level"])
    yield "action", found["action"]
    hold = f"{span(found['hold_s'])} without another" if found["hold_s"] else ""
    yield "ends", ", then ".join(each for each in (_ENDS[found["clears"]], hold) if each) or "at once"
    recurs = found["recurs"]
    if recurs:
        same = " with the same details" if recurs["same_variant"] else ""
        often = f"{recurs['bursts']} times within {span(recurs['within_s'])}{same}"
        yield "again", f"{often}: {recurs['level']}, {recurs['action']}"
    else:
        yield "again", "changes nothing, however often"
    if found["subject"] == "xid":
        yield "driver", _driver(found)


def _driver(found: Mapping[str, Any]) -> str:
    since = found["verdict_since"]
    if since is None:
        return "sends no verdict of its own with it that is known"
    if found["overridden"]:
        return f"its own verdict (Xid 154, R{since} and later) gives way to the operator's word"
    return f"its own verdict (Xid 154) goes first, on R{since} and later"


def _samples(found: Mapping[str, Any]) -> Lines:
    if found["period_s"]:
        yield "looked", f"every {span(found['period_s'])}"
    if found["kind"] == "state":
        for state in found["states"]:
            held = f" for {span(state['for_s'])}" if state["for_s"] else ""
            why = f": {state['why']}" if state["why"] else ""
            yield "state", f"{state['word']}{held} -> {state['level']}, {state['action']}{why}"
        yield "ends", f"with a better state for {span(found['clear_s'])}"
        return
    for level, action in (("degraded", found["degraded_action"]), ("unhealthy", found["action"])):
        if found[level]:
            yield level, f"{_limit(found, found[level])} -> {action}"
    hold = f"for {span(found['clear_s'])}"
    at = found["clear_at"]
    if at is None:
        yield "ends", f"with samples within the limits {hold}"
    elif found["kind"] == "rate":
        yield "ends", f"with no more than {at:g} in {span(found['window_s'])} {hold}"
    else:
        yield "ends", f"{'above' if found['below'] else 'at or below'} {at:g} {hold}"


def _limit(found: Mapping[str, Any], bound: Mapping[str, Any]) -> str:
    unit = f" {found['unit']}" if found["unit"] else ""
    if found["kind"] == "rate":
        limit = f"more than {bound['at']:g}{unit} in {span(found['window_s'])}"
    else:
        limit = f"{bound['at']:g}{unit} or {'less' if found['below'] else 'more'}"
    counted = f", in {bound['need']} of {bound['of']} samples" if bound["of"] > 1 else ""
    return f"{limit}{counted}" + (f", for {span(bound['for_s'])}" if bound["for_s"] else "")


def _whose(found: Mapping[str, Any]) -> Lines:
    yield "says", found["source"]
    if found.get("note"):
        yield "note", found["note"]
    own = found["operator_set"]
    yield "operator", f"has set {', '.join(own)}" if own else "has changed nothing"
    yield "policy", found["policy"]


def _others(found: Mapping[str, Any]) -> Iterator[str]:
    variants = found.get("variants") or []
    if not variants:
        return
    yield "  by what its line says:"
    key = ("name", "level", "action")
    groups = [
        (list(same), each)
        for each, same in groupby(variants, key=lambda variant: tuple(variant[name] for name in key))
    ]
    for same, (name, level, action) in groups[:MAX_OTHERS]:
        yield f"    {_together([each['variant'] for each in same])} -> {level}, {action}: {name}"


def _together(variants: list[str]) -> str:
    """Return `register 1, bits 0, 23, 30` for bits of one register, and so for statuses of one unit."""
    heads = {each.rpartition(", ")[0] for each in variants}
    if len(variants) == 1 or len(heads) > 1 or "" in heads:
        return "; ".join(variants)
    return f"{heads.pop()}, {', '.join(each.rpartition(', ')[2] for each in variants)}"


def _level(level: str) -> str:
    tells = {"healthy": "reported, no more", "degraded": "reported; the node keeps its work"}
    return f"{level}: {tells.get(level, 'the node gets no new work')}"


def span(seconds: float) -> str:
    """Return seconds as people write them: `10 min`."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
