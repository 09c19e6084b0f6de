"""One code or one check as the policy has it, as values for JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nodeagent.policy import nvlink
from nodeagent.policy.overriding import KERNEL
from nodeagent.policy.rules import VERDICT_XID, Bound, Meaning, Policy, Rule, State
from nodeagent.policy.validation import listed, near_miss
from nodeagent.verdict import word

SUBJECTS = ("xid", "sxid", "check", "kernel")
REASON_BIT = 20  # of intrInfo, from which it tells why a link went down: Xid 149 only

Described = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nothing is called so; `line` says what is."""

    line: str


def look_up(policy: Policy, subject: str, code: str) -> Described | Unknown:
    """Return what the policy has on a code or a check; `subject` is one of `SUBJECTS`."""
    if subject in ("xid", "sxid"):
        return _code(policy, subject, code)
    if subject not in SUBJECTS:
        return Unknown(
            f"unknown subject {subject}{near_miss(subject, SUBJECTS)}; expected {listed(SUBJECTS)}"
        )
    prefix = KERNEL if subject == "kernel" else ""
    names = {
        each.removeprefix(prefix): each for each in policy.rules if each.startswith(KERNEL) == bool(prefix)
    }
    if code not in names:
        return Unknown(
            f"{subject} {code[:80]!r} is not known{near_miss(code, names)}; expected {_all(names)}"
        )
    rule = policy.rules[names[code]]
    section = "kernel" if prefix else "checks"
    found: Described = {"subject": subject, "code": code, "what": rule.what, "kind": rule.kind.value}
    found |= _meant(rule.meaning) if rule.meaning else _sampled(rule)
    return found | _operator(policy, f"{section}.{code}") | {"source": rule.source, "policy": policy.version}


def _code(policy: Policy, subject: str, code: str) -> Described | Unknown:
    table = policy.xids if subject == "xid" else policy.sxids
    unknown = policy.unknown_xid if subject == "xid" else policy.unknown_sxid
    if not (code.isascii() and code.isdecimal() and len(code) <= 6):
        known = [str(each) for each in table]
        return Unknown(
            f"{subject} {code[:80]!r} is not a code{near_miss(code, known)}; expected {_spans(table)}"
        )
    number = int(code)
    meaning = table.get(number)
    if meaning is None:
        taken = f"{word(unknown.level)}, {word(unknown.action)}"
        return Unknown(
            f"{subject} {number} is not in the table, which has {_spans(table)}; it is taken as {taken}"
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
        "states": [_state(value, state) for value, state in sorted(rule.states.items())],
    }


def _bound(bound: Bound | None) -> Described | None:
    return asdict(bound) if bound else None


def _state(value: int, state: State) -> Described:
    return {**asdict(state), "value": value, "level": word(state.level), "action": word(state.action)}


def _operator(policy: Policy, key: str) -> Described:
    """Return which fields of a table the operator has set."""
    own = [each.removeprefix(f"{key}.") for each in policy.overrides if each.startswith(f"{key}.")]
    return {"operator_set": own}


def _variants(policy: Policy, subject: str, code: int) -> list[Described]:
    """Return what a code means by what else its line says."""
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


def _words(policy: Policy, table: str) -> list[tuple[str, str]]:
    return [each for each in policy.words if each[0] == table]


def _pattern(row: nvlink.NvlinkPattern) -> str:
    reason = row.since.bits >> REASON_BIT
    which = [f"reason {reason}"] if reason else []
    which += ["/".join(f"0x{each:08x}" for each in sorted(row.statuses))] if row.statuses else []
    return ", ".join(["/".join(sorted(row.units)), *(which or ["any"])])


def _all(names: Mapping[str, str]) -> str:
    return ", ".join(sorted(names))


def _spans(codes: Iterable[int]) -> str:
    """Return numbers as `1-178, 185`."""
    spans: list[list[int]] = []
    for code in sorted(codes):
        if spans and code == spans[-1][1] + 1:
            spans[-1][1] = code
        else:
            spans.append([code, code])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
