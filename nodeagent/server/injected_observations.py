"""Injects observations into an agent started with `--test`, as if its sensors had reported them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.node_report import INJECTED
from nodeagent.agent.inbox import Inbox
from nodeagent.kernel.line_reader import LinePatterns
from nodeagent.model import Observation
from nodeagent.policy.rules import HealthPolicy, RuleKind

MAX_LINE = 8192


def observation_injector(
    inbox: Inbox, policy: HealthPolicy, lines: LinePatterns, now_s: Callable[[], float]
) -> Callable[[Mapping[str, Any]], str]:
    """Return the handler of `POST /v1/inject`, which returns the injected text or raises ValueError."""

    def inject(asked: Mapping[str, Any]) -> str:
        seen = parse_injected(asked, policy, lines, now_s())
        inbox.put(seen)
        return ", ".join(f"{each.check} {each.value:g} of {each.entity}" for each in seen)

    return inject


def parse_injected(
    asked: Mapping[str, Any], policy: HealthPolicy, lines: LinePatterns, at_s: float
) -> tuple[Observation, ...]:
    """Return the observations that a request describes. Raises ValueError with a one-line message."""
    what, value = asked.get("what"), str(asked.get("value", ""))[:MAX_LINE]
    entity = str(asked.get("entity", ""))[:200]
    if what == "xid":
        if not value.isdigit() or int(value) > 100_000:
            raise ValueError(f"Xid {value[:40]!r}, expected a number")
        return (Observation(at_s, "xid", entity, INJECTED, float(value)),)
    if what == "sample":
        check, _, number = value.partition("=")
        rule = policy.rules.get(check)
        if rule is None or rule.kind is RuleKind.EVENT:
            raise ValueError(f"check {check[:40]!r}, expected a sampled check: see docs/signals.md")
        try:
            return (Observation(at_s, check, entity, INJECTED, float(number)),)
        except ValueError:
            raise ValueError(f"{check}={number[:40]!r}, expected a number") from None
    if what == "kernel":
        found = lines.read(value)
        if not found:
            raise ValueError("the line matches no known pattern")
        return tuple(each.at(at_s, INJECTED) for each in found)
    raise ValueError(f"what: {str(what)[:40]!r}, expected xid, kernel, sample")
