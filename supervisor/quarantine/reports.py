"""Read the agents' reports, and refuse reports that may be about another machine. Pure.

A report names its node, but two machines can use one name after a renaming, a clone or a mistake. Their
reports are never merged. The node object contains the boot id of its machine, so a report from another boot
is refused. The reports of two machines are both refused if nothing shows which machine is the node. A machine
that has rebooted, or whose agent was replaced by one that knows the machine's id, is still one machine. A
refusal becomes an alert (`NodeView.refused`).

The times here are never stored, and they must be from a clock that is never set back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.node_report import AGENT, DEGRADED, INJECTED, MAX_WORD, SCHEMA, UNHEALTHY
from supervisor.quarantine import evidence
from supervisor.quarantine.model import NodeFinding, NodePolicy, NodeView, Report, is_usable

_MOST_WHY = 300  # characters of the reason for a refusal
MAX_ITEMS = 10_000  # limit for the entities, findings or sensors of one report


class BadReport(ValueError):
    """A report is invalid. The message says which field, its value, and what was expected."""


@dataclass(frozen=True, slots=True)
class Received:
    """A report in the JSON format of `/v1/health`, and when it arrived."""

    node: str
    raw: Mapping[str, Any]
    at_s: float


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that a node object describes. Outside Kubernetes, unknown fields are ""."""

    boot_id: str = ""  # status.nodeInfo.bootID
    machine_id: str = ""  # status.nodeInfo.machineID
    boot_seen_at_s: float = -math.inf  # when the deciding process first saw this boot id


def heard(
    node: NodeView, machine: Machine, received: Sequence[Received], now_s: float, policy: NodePolicy
) -> NodeView:
    """Return the node with its agent's newest report, or with the reason why reports were refused.

    Args:
        received: The newest reports of all senders. Reports under the names of other nodes are ignored.
    """
    try:
        return _heard(node, machine, received, now_s, policy)
    except Exception as error:  # one unexpected report must not stop the plan for all nodes
        return _refused(node, f"its report is invalid: {error!r}"[:_MOST_WHY])


def _heard(
    node: NodeView, machine: Machine, received: Sequence[Received], now_s: float, policy: NodePolicy
) -> NodeView:
    mine = sorted((each for each in received if each.node == node.name), key=lambda each: each.at_s)
    # A report from before the boot is not a reason to refuse the node's reports, but it is not used, because
    # it describes an earlier boot.
    mine = [each for each in mine if each.at_s >= machine.boot_seen_at_s or _is_of(each, machine)]
    known = [each for each in mine if _is_of(each, machine)]
    strangers = [each for each in mine if not _is_of(each, machine)]
    fresh = [each for each in known if now_s - each.at_s <= policy.stale_s]
    machines = {sender(each) for each in fresh if not _precedes(each, fresh[-1], now_s, policy)}
    if len(machines) > 1:
        return _refused(node, f"{len(machines)} machines report under its name ({_list(machines)})")
    refused = ""
    if any(now_s - each.at_s <= policy.stale_s for each in strangers):
        others = _list({sender(each) for each in strangers})
        expected = " ".join(filter(None, (machine.boot_id, machine.machine_id)))
        refused = f"a report under its name is from another machine or boot ({others}; expected {expected})"
    if not known:
        return _refused(node, refused)
    try:
        report = read_report(known[-1].raw)
    except BadReport as error:
        return _refused(node, f"its report is invalid: {error}")
    return replace(node, report=report, silent_s=max(0.0, now_s - known[-1].at_s), refused=refused)


def _refused(node: NodeView, why: str) -> NodeView:
    return replace(node, report=None, silent_s=math.inf, refused=why)


def _is_of(received: Received, machine: Machine) -> bool:
    """True if the report may be from this machine and boot. An agent omits what it does not know."""
    boot_id, machine_id = sender(received)
    return (not machine.boot_id or boot_id in ("", machine.boot_id)) and (
        not machine.machine_id or machine_id in ("", machine.machine_id)
    )


def _precedes(older: Received, newer: Received, now_s: float, policy: NodePolicy) -> bool:
    """True if the machine of `newer` sent `older` too, in an earlier boot or with an agent that knew less.

    A clone has the machine id of the original, but the original still reports after the clone has booted.
    """
    (boot_id, machine_id), (new_boot_id, new_machine_id) = sender(older), sender(newer)
    if machine_id and new_machine_id and machine_id != new_machine_id:
        return False
    if boot_id == new_boot_id:
        return boot_id != "" and machine_id != new_machine_id
    up_s = _up_s(newer)
    if up_s is not None:
        return older.at_s <= newer.at_s - up_s
    missed_s = policy.stale_s / 2  # in this time, a running machine would have sent two reports
    return machine_id == new_machine_id != "" and now_s - older.at_s > missed_s


def _up_s(received: Received) -> float | None:
    """Return how long the machine had been up; None if the agent does not report it."""
    if received.raw.get("booted_s") is None:
        return None
    try:
        return _number(received.raw, "at_s") - _number(received.raw, "booted_s")
    except BadReport:
        return None  # `read_report` refuses a malformed report


def sender(received: Received) -> tuple[str, str]:
    """Return the boot and the machine that a report comes from; "" if the report does not say so."""
    return str(received.raw.get("boot_id") or ""), str(received.raw.get("machine_id") or "")


def _list(senders: set[tuple[str, str]]) -> str:
    return ", ".join(sorted("boot " + " ".join(filter(None, each))[:MAX_WORD] for each in senders))


def read_report(raw: Mapping[str, Any]) -> Report:
    """Read a report from an agent of any version with this schema. Raises `BadReport` if it is malformed.

    Fields that an older agent does not report count as unknown; new fields of a newer agent are ignored.
    """
    if raw.get("schema") != SCHEMA:
        raise BadReport(f"schema is {raw.get('schema')!r}; expected {SCHEMA}")
    at_s = _number(raw, "at_s")
    booted_s = -math.inf if raw.get("booted_s") is None else _number(raw, "booted_s")
    gpus = [_table(each, "gpus") for each in _items(raw, "gpus")]
    same = {_word(gpu, "serial"): _device(gpu) for gpu in gpus if _word(gpu, "serial")}
    found = [
        _finding(_word(entity, "entity"), _table(each, "findings"), at_s, same, booted_s)
        for entity in (_table(each, "entities") for each in _items(raw, "entities"))
        for each in _items(entity, "findings")
    ]
    found = [each for each in found if each.level in (DEGRADED, UNHEALTHY)]
    found.sort(key=lambda each: (each.level == UNHEALTHY, evidence.severity((each,))), reverse=True)
    sensors = [_table(each, "sensors") for each in _items(raw, "sensors")]
    # Every agent pauses its clean time while the GPUs are released.
    released = tuple(_word(each, "name") for each in sensors) if raw.get("released") else ()
    return Report(
        tuple(found),
        _number(raw, "clean_s", 0.0),
        _number(raw, "quiet_s", 0.0),
        math.inf if raw.get("calmed_s") is None else _number(raw, "calmed_s"),
        _word(raw, "boot_id"),
        _word(raw, "version"),
        (*(_word(each, "name") for each in sensors if each.get("sees") is False), *_missing(raw, sensors)),
        tuple(sorted({_device(gpu) for gpu in gpus} - {""})),
        (*_words(raw, "clean_needs"), *released),
        (*_words(raw, "quiet_needs"), *released),
        _word(raw, "state_id"),
        max(0, int(_number(raw, "left_out", 0.0))),
        _number(raw, "unsteady_s", 0.0),
    )


def _missing(raw: Mapping[str, Any], sensors: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the sensors that the agent needs to see the end of its findings but no longer has, sorted."""
    needed = {*_words(raw, "clean_needs"), *_words(raw, "quiet_needs")}
    return sorted(needed - {AGENT, INJECTED, *(_word(each, "name") for each in sensors)}) if sensors else []


def _finding(
    entity: str, raw: Mapping[str, Any], at_s: float, same: Mapping[str, str], booted_s: float
) -> NodeFinding:
    code = raw.get("code")
    action, device = _word(raw, "action"), _word(raw, "device")
    device = same.get(device, device)
    sign_s = _sign_s(raw)
    remedy, recent_s = _word(raw, "remedy"), _number(raw, "recent_s", 0.0)
    held_s = max(0.0, at_s - _number(raw, "since_s"))
    name = _word(raw, "check") if code is None else f"{_word(raw, 'check')} {code}"[:MAX_WORD]
    return NodeFinding(
        f"{device or entity} {name} {action}",
        _word(raw, "level"),
        action,
        held_s,
        _words(raw, "sources"),
        _word(raw, "overridden"),
        raw.get("lasting") is True,
        entity,
        name,
        _words(raw, "origins"),
        device,
        f"{entity} {name} {action}",
        None if sign_s is None else max(0.0, at_s - sign_s),
        raw.get("last_s") is not None and _number(raw, "last_s") < booted_s,
        reported_remedy=remedy if remedy not in ("none", action) else "",
        recent_s=recent_s if recent_s > held_s else 0.0,  # the age of a fault that persists says enough
    )


def _sign_s(raw: Mapping[str, Any]) -> float | None:
    """Return the time of the newest sign of an event or of a counter's growth; None for samples.

    A sample's newest sign is just the newest sample, not new evidence. The agent reports which findings are
    about events. An older agent does not, but its findings with a code are about events.
    """
    if "sign_s" in raw:
        return None if raw["sign_s"] is None else _number(raw, "sign_s")
    return None if raw.get("code") is None else _number(raw, "last_s")


def _device(gpu: Mapping[str, Any]) -> str:
    return _word(gpu, "uuid") or _word(gpu, "serial")


def _items(raw: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = raw.get(name)
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or len(value) > MAX_ITEMS:
        raise BadReport(f"{name} is {_brief(value)}; expected a list of at most {MAX_ITEMS} items")
    return value


def _table(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadReport(f"an item of {name} is {_brief(value)}; expected an object")
    return value


def _word(raw: Mapping[str, Any], name: str) -> str:
    value = raw.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise BadReport(f"{name} is {_brief(value)}; expected text")
    return value[:MAX_WORD]


def _words(raw: Mapping[str, Any], name: str) -> tuple[str, ...]:
    return tuple(_word({name: each}, name) for each in _items(raw, name))


def _number(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_usable(value):
        raise BadReport(f"{name} is {_brief(value)}; expected a number")
    return float(value)


def _brief(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of too many digits, or nested too deeply
        text = f"a {type(value).__name__}"
    return text if len(text) <= MAX_WORD else f"{text[:MAX_WORD]}..."
