"""Explains one code or check as text or JSON: its meaning, source and action, and what ends it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from nodeagent.model import VERDICT_XID, amount, duration, word
from nodeagent.policy import nvlink
from nodeagent.policy.kernel_lines import KERNEL
from nodeagent.policy.meanings import ACTIONS
from nodeagent.policy.rules import (
    CLEARED_BY,
    CLEARS_IN_WORDS,
    Bound,
    CheckState,
    Clears,
    HealthPolicy,
    Meaning,
    Rule,
)
from nodeagent.policy.validation import listed, near_miss

SUBJECTS = ("xid", "sxid", "check", "kernel")
REASON_BIT = 20  # the first bit of a link-down reason in intrInfo: Xid 149 only
Described = dict[str, Any]
WIDTH = 9  # the width of the labels
MAX_OTHERS = 60  # lines about other meanings of a code

LabelledLines = Iterator[tuple[str, str]]  # label, text


@dataclass(frozen=True, slots=True)
class UnknownCode:
    """Returned for an unknown name. `line` lists the known names."""

    line: str


def look_up(policy: HealthPolicy, subject: str, code: str) -> Described | UnknownCode:
    """Return the policy's entry for a code or a check; `subject` is one of `SUBJECTS`."""
    if subject in ("xid", "sxid"):
        return _code(policy, subject, code)
    if subject not in SUBJECTS:
        return UnknownCode(
            f"unknown subject {subject}{near_miss(subject, SUBJECTS)}; expected {listed(SUBJECTS)}"
        )
    prefix = KERNEL if subject == "kernel" else ""
    names = {
        each.removeprefix(prefix): each for each in policy.rules if each.startswith(KERNEL) == bool(prefix)
    }
    if code not in names:
        return UnknownCode(
            f"{subject} {code[:80]!r} is not known{near_miss(code, names)}; expected {_all(names)}"
        )
    rule = policy.rules[names[code]]
    section = "kernel" if prefix else "checks"
    found: Described = {"subject": subject, "code": code, "what": rule.what, "kind": rule.kind.value}
    found |= _meant(rule.meaning) if rule.meaning else _sampled(rule)
    return found | _operator(policy, f"{section}.{code}") | {"source": rule.source, "policy": policy.version}


def _code(policy: HealthPolicy, subject: str, code: str) -> Described | UnknownCode:
    table = policy.xids if subject == "xid" else policy.sxids
    unknown = policy.unknown_xid if subject == "xid" else policy.unknown_sxid
    if not (code.isascii() and code.isdecimal() and len(code) <= 6):
        known = [str(each) for each in table]
        return UnknownCode(
            f"{subject} {code[:80]!r} is not a code{near_miss(code, known)}; expected {_spans(table)}"
        )
    number = int(code)
    meaning = table.get(number)
    if meaning is None:
        taken = f"{word(unknown.level)} (action: {word(unknown.action)})"
        return UnknownCode(
            f"{subject} {number} is not in the table, which has {_spans(table)}; it is treated as {taken}"
        )
    key = f"{subject}.{number}"
    found: Described = {"subject": subject, "code": number, "what": meaning.name, "kind": "event"}
    if subject == "xid":
        found["class"] = policy.classes.get(number, "")
    found |= _meant(meaning) | _operator(policy, key)
    found |= {"source": meaning.source, "note": policy.notes.get(key, ""), "policy": policy.version}
    return found | {"variants": [] if meaning.overridden else _variants(policy, subject, number)}


def _meant(meaning: Meaning) -> Described:
    recurs = meaning.recurs
    return {
        "name": meaning.name,
        "level": word(meaning.level),
        "action": word(meaning.action),
        "clears": meaning.clears.value,
        "hold_s": meaning.hold_s,
        "recurs": recurs and {**asdict(recurs), "level": word(recurs.level), "action": word(recurs.action)},
        "verdict_since": meaning.verdict_since,
        "overridden": meaning.overridden,
    }


def _sampled(rule: Rule) -> Described:
    return {
        "unit": rule.unit,
        "period_s": rule.period_s,
        "below": rule.below,
        "window_s": rule.window_s,
        "degraded": _bound(rule.degraded),
        "unhealthy": _bound(rule.unhealthy),
        "action": word(rule.action),
        "degraded_action": word(rule.degraded_action),
        "clear_at": rule.clear_at,
        "clear_s": rule.clear_s,
        "lasts": rule.lasts,
        "restarts_at_boot": rule.restarts_at_boot,
        "states": [_state(value, state) for value, state in sorted(rule.states.items())],
    }


def _bound(bound: Bound | None) -> Described | None:
    return asdict(bound) if bound else None


def _state(value: int, state: CheckState) -> Described:
    return {**asdict(state), "value": value, "level": word(state.level), "action": word(state.action)}


def _operator(policy: HealthPolicy, key: str) -> Described:
    """Return the fields of a table entry that the operator has set."""
    own = [each.removeprefix(f"{key}.") for each in policy.overrides if each.startswith(f"{key}.")]
    return {"operator_set": own}


def _variants(policy: HealthPolicy, subject: str, code: int) -> list[Described]:
    """Return the meanings of a code for the variants that its line can name."""
    found: Iterable[tuple[str, Meaning]] = ()
    if subject == "sxid":
        judged = (
            policy.sxids[code].overridden or policy.meaning("sxid", code, "non-fatal") is policy.sxids[code]
        )
        found = () if judged else ((each, policy.words["sxid", each]) for _, each in _words(policy, "sxid"))
    elif code == VERDICT_XID:
        found = ((each, policy.words["xid154", each]) for _, each in _words(policy, "xid154"))
    elif code == nvlink.NVLINK4_XID:
        found = (
            (f"register {register}, bit {bit}", each) for (register, bit), each in policy.nvlink4_bits.items()
        )
    elif code in nvlink.NVLINK5_XIDS:
        found = ((_pattern(row), each) for row, each in policy.nvlink5_rows.items() if row.xid == code)
    return [
        {"variant": name, "name": each.name, "level": word(each.level), "action": word(each.action)}
        for name, each in found
    ]


def _words(policy: HealthPolicy, table: str) -> list[tuple[str, str]]:
    return [each for each in policy.words if each[0] == table]


def _pattern(row: nvlink.NvlinkPattern) -> str:
    reason = row.since.bits >> REASON_BIT
    which = [f"reason {reason}"] if reason else []
    which += ["/".join(f"0x{each:08x}" for each in sorted(row.statuses))] if row.statuses else []
    return ", ".join(["/".join(sorted(row.units)), *(which or ["any"])])


def _all(names: Mapping[str, str]) -> str:
    return ", ".join(sorted(names))


def _spans(codes: Iterable[int]) -> str:
    """Return numbers as ranges: `1-178, 185`."""
    spans: list[list[int]] = []
    for code in sorted(codes):
        if spans and code == spans[-1][1] + 1:
            spans[-1][1] = code
        else:
            spans.append([code, code])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def explanation(found: Described) -> str:
    """Return the result of `look_up` as lines."""
    kind = {"xid": "Xid", "sxid": "SXid"}.get(found["subject"], found["subject"])
    unit = f" ({found['unit']})" if found.get("unit") else ""
    lines = [f"{kind} {found['code']}: {found['what']}{unit}"]
    body = _event(found) if found["kind"] == "event" else _samples(found)
    lines += [f"  {label:{WIDTH}} {each}" for label, each in (*body, *_whose(found))]
    return "\n".join([*lines, *_others(found)])


def _event(found: Mapping[str, Any]) -> LabelledLines:
    if found.get("class"):
        yield "fault", f"{found['class']}"
    if found["name"] != found["what"]:
        yield "means", found["name"]
    yield "level", _level(found["level"])
    yield "action", found["action"]
    hold = f"{duration(found['hold_s'])} without another" if found["hold_s"] else ""
    condition = CLEARS_IN_WORDS[Clears(found["clears"])]
    yield "ends", ", then ".join(each for each in (condition, hold) if each) or "immediately"
    recurs = found["recurs"]
    if recurs:
        same = " with the same details" if recurs["same_variant"] else ""
        often = f"{recurs['bursts']} times within {duration(recurs['within_s'])}{same}"
        yield "again", f"{often}: {recurs['level']}, {recurs['action']}"
    else:
        yield "again", "a repetition changes nothing"
    if found["subject"] == "xid":
        yield "driver", _driver(found)


def _driver(found: Mapping[str, Any]) -> str:
    since = found["verdict_since"]
    if since is None:
        return "is not known to send a verdict with this code"
    if found["overridden"]:
        return f"its own verdict (Xid 154, R{since} and later) is overridden by the operator"
    return f"its own verdict (Xid 154) takes precedence, on R{since} and later"


def _samples(found: Mapping[str, Any]) -> LabelledLines:
    if found["period_s"]:
        yield "sampled", f"every {duration(found['period_s'])}"
    if found["kind"] == "state":
        for state in found["states"]:
            held = f" for {duration(state['for_s'])}" if state["for_s"] else ""
            why = f": {state['why']}" if state["why"] else ""
            yield "state", f"{state['word']}{held} -> {state['level']}, {state['action']}{why}"
        held = f"after {duration(found['clear_s'])} in a better state"
        yield "ends", held if found["clear_s"] else "as soon as the state is better"
        return
    if found["restarts_at_boot"]:
        yield "counted", "from the first reading after a boot"
    for level, action in (("degraded", found["degraded_action"]), ("unhealthy", found["action"])):
        if found[level]:
            yield level, f"{_limit(found, found[level])} -> {action}"
    held = f"after {duration(found['clear_s'])}"
    at = found["clear_at"]
    ended_by = CLEARED_BY.get(ACTIONS[found["action"]])
    if found["lasts"] and found["unhealthy"] and ended_by is not None:
        yield "ends", f"{CLEARS_IN_WORDS[ended_by]}, then {duration(found['clear_s'])} without another"
    elif at is None:
        yield "ends", f"{held} within the limits"
    elif found["kind"] == "rate":
        yield "ends", f"{held} with no more than {at:g} in {duration(found['window_s'])}"
    else:
        yield "ends", f"{held} {'above' if found['below'] else 'at or below'} {at:g}"


def _limit(found: Mapping[str, Any], bound: Mapping[str, Any]) -> str:
    limit = amount(bound["at"], found["unit"])
    if found["kind"] == "rate":
        limit = f"more than {limit} in {duration(found['window_s'])}"
    else:
        limit = f"{limit} or {'less' if found['below'] else 'more'}"
    counted = f", in {bound['need']} of {bound['of']} samples" if bound["of"] > 1 else ""
    return f"{limit}{counted}" + (f", for {duration(bound['for_s'])}" if bound["for_s"] else "")


def _whose(found: Mapping[str, Any]) -> LabelledLines:
    yield "source", found["source"]
    if found.get("note"):
        yield "note", found["note"]
    own = found["operator_set"]
    yield "operator", f"sets {', '.join(own)}" if own else "sets nothing here"
    yield "policy", found["policy"]


def _others(found: Mapping[str, Any]) -> Iterator[str]:
    variants = found.get("variants") or []
    if not variants:
        return
    yield "  depending on the details in its line:"
    key = ("name", "level", "action")
    groups = [
        (list(same), each)
        for each, same in groupby(variants, key=lambda variant: tuple(variant[name] for name in key))
    ]
    for same, (name, level, action) in groups[:MAX_OTHERS]:
        yield f"    {_together([each['variant'] for each in same])} -> {level}, {action}: {name}"


def _together(variants: list[str]) -> str:
    """Join variants, writing a common first part once: `register 1, bit 0, bit 23`."""
    heads = {each.rpartition(", ")[0] for each in variants}
    if len(variants) == 1 or len(heads) > 1 or "" in heads:
        return "; ".join(variants)
    return f"{heads.pop()}, {', '.join(each.rpartition(', ')[2] for each in variants)}"


def _level(level: str) -> str:
    tells = {"healthy": "only reported", "degraded": "reported; the node keeps its work"}
    return f"{level}: {tells.get(level, 'the node gets no new work')}"
