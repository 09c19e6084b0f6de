"""Prints docs/signals.md: every signal that the agent watches, as explained by `holdfast node explain`. Pure.

`python -m nodeagent.cli.signals` prints the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from nodeagent.cli import explanations
from nodeagent.cli.explanations import Described, UnknownCode, look_up
from nodeagent.cli.privileges import NEEDS
from nodeagent.host import sensor as host
from nodeagent.model import GONE, KERNEL_LOGS, STATE_LOST, duration, word
from nodeagent.nvml import events, polling
from nodeagent.policy.kernel_lines import KERNEL
from nodeagent.policy.loading import shipped
from nodeagent.policy.rules import CLEARS_IN_WORDS, HealthPolicy, Meaning, RuleKind
from nodeagent.sysfs import sensor as sysfs

_IN_LOGS = frozenset({"cleared", "observations_dropped"})  # in addition to the checks of kernel lines
_SEES: Mapping[str, frozenset[str]] = {  # `agent`: the agent's observations of itself
    "nvml-events": events.CHECKS,
    "nvml-polling": polling.CHECKS | {"gpu_reset", "replaced", "gpu_unavailable"},
    "host": host.CHECKS | {GONE},
    "sysfs": sysfs.CHECKS | {GONE},
    "agent": frozenset(
        {
            *("boot", "sensor_stuck", "sensor_lost", "sensor_slow", "xids_unseen"),
            *("memory_lost", STATE_LOST, "observations_dropped"),
        }
    ),
    "operator": frozenset({"cleared"}),
    **dict.fromkeys(KERNEL_LOGS, _IN_LOGS),
}
Row = tuple[str, ...]
_WORST_FIRST = ("unhealthy", "degraded", "healthy")
HEAD = """\
# Signals

Printed by `python -m nodeagent.cli.signals` from the tables in `nodeagent/policy/`. To change the page, change the tables and print it again.

This page lists everything that the [node agent](node-agent.md) watches: the conditions for each level, and the conditions
that clear each finding. An operator's file may override them. On a node, `node explain` prints the same for one code
or check, including the operator's settings. The [runbooks](runbooks/node.md) describe the response to each finding.

The action follows the arrow. Unhealthy: the node should get no new work. Degraded: the finding is reported, and the
node keeps its work. Healthy: the finding is only recorded, or the application needs a restart.
"""  # noqa: E501 (a paragraph of Markdown has lines of 120)

_ABOUT_XIDS = """\
The sensor nvml-events reports Xids within milliseconds, and kmsg or journal adds their details.
If a row names a branch of the driver, the driver's verdict (Xid 154) takes precedence over the table
on that branch and later ones.
"""


def sensors_of(check: str) -> tuple[str, ...]:
    """Return the names of the sensors that observe a check; none for an unknown name."""
    if check.startswith(KERNEL):
        return KERNEL_LOGS
    return tuple(name for name, checks in _SEES.items() if check in checks)


def page(policy: HealthPolicy) -> str:
    """Return the whole page."""
    checks = [name for name in policy.rules if not name.startswith(KERNEL)]
    lines = [name.removeprefix(KERNEL) for name in policy.rules if name.startswith(KERNEL)]
    sampled = [each for each in checks if policy.rules[each].kind is not RuleKind.EVENT]
    events = [each for each in checks if policy.rules[each].kind is RuleKind.EVENT]
    logs = " or ".join(KERNEL_LOGS)
    parts = [
        HEAD,
        "## Checks that are sampled\n",
        _table(
            ("check", "what", "sensor", "every", "degraded", "unhealthy", "ends", "source"),
            (_sampled(_looked_up(policy, "check", each)) for each in sampled),
        ),
        "## Events\n",
        _table(
            ("check", "what", "sensor", "level", "ends", "source"),
            (_event(_looked_up(policy, "check", each)) for each in events),
        ),
        f"## Kernel lines\n\nSeen by {logs}. In findings their names begin with `{KERNEL}`.\n",
        _kernel([_looked_up(policy, "kernel", each) for each in lines]),
        f"## Xids\n\n{_ABOUT_XIDS}",
        _table(("Xid", "name", "level", "ends", "again", "driver", "source", "note"), _xids(policy)),
        f"Any other Xid: {_meant(policy.unknown_xid)}. The meanings of 74 and 144 to 150 depend on their\n"
        "details: `node explain xid 74` lists them.\n",
        "## The verdicts of Xid 154\n",
        _table(("word", "name", "level", "ends"), _verdicts(policy)),
        f"## SXids\n\nErrors of NVSwitches, seen by {logs}.\n",
        _table(("SXid", "name", "level", "source"), _sxids(policy)),
        "## What a sensor needs\n",
        _table(
            ("sensor", "needs", "how to grant it", "lost without it"),
            ((each.sensor, f"{each.kind}: {each.what}", each.how, each.lost) for each in NEEDS),
        ),
    ]  # fmt: skip
    return "\n".join(parts)


def _looked_up(policy: HealthPolicy, subject: str, code: str) -> Described:
    found = look_up(policy, subject, code)
    assert not isinstance(found, UnknownCode)  # the name comes from the policy
    return found


def _said(found: Described) -> Mapping[str, str]:
    """Return the labelled lines of `node explain`, by label."""
    start = 2 + explanations.WIDTH
    lines = explanations.explanation(found).splitlines()[1:]
    return {line[2:start].strip(): line[start + 1 :] for line in lines if line[2:start].strip()}


def _sampled(found: Described) -> Row:
    name, said = found["code"], _said(found)
    looked = duration(found["period_s"]) if found["period_s"] else "as it happens"
    degraded, unhealthy = (
        _states(found, level) if found["states"] else said.get(level, "")
        for level in ("degraded", "unhealthy")
    )
    by = ", ".join(sensors_of(name))
    return f"`{name}`", found["what"], by, looked, degraded, unhealthy, said["ends"], found["source"]


def _states(found: Described, level: str) -> str:
    return "; ".join(
        f"{each['word']}{' for ' + duration(each['for_s']) if each['for_s'] else ''} -> {each['action']}"
        for each in found["states"]
        if each["level"] == level
    )


def _event(found: Described) -> Row:
    name = found["code"]
    return (
        f"`{name}`",
        found["name"],
        ", ".join(sensors_of(name)),
        _level(found),
        _said(found)["ends"],
        found["source"],
    )


def _kernel(found: Sequence[Described]) -> str:
    rows = [
        (
            f"`{each['code']}`", each["what"], _level(each), _said(each)["ends"],
            _said(each)["again"] if each["recurs"] else "", each["source"],
        )
        for level in _WORST_FIRST
        for each in found
        if each["level"] == level
    ]  # fmt: skip
    return _table(("line", "what", "level", "ends", "again", "source"), rows)


def _xids(policy: HealthPolicy) -> Iterator[Row]:
    for code in sorted(policy.xids):
        found = _looked_up(policy, "xid", str(code))
        said = _said(found)
        again = said["again"] if found["recurs"] else ""
        since = f"R{found['verdict_since']}" if found["verdict_since"] else ""
        name, source, note = found["what"], found["source"], found["note"]
        yield str(code), name, _level(found), said["ends"], again, since, source, note


def _verdicts(policy: HealthPolicy) -> Iterator[Row]:
    for (table, said), meaning in policy.words.items():
        if table == "xid154":
            ends = (CLEARS_IN_WORDS[meaning.clears], f"{duration(meaning.hold_s)} without another")
            yield said, meaning.name, _meant(meaning), ", then ".join(filter(None, ends))


def _sxids(policy: HealthPolicy) -> Iterator[Row]:
    for first, last in _spans(policy.sxids):
        meaning = policy.sxids[first]
        name = str(first) if first == last else f"{first} to {last}"
        yield name, meaning.name, _meant(meaning), meaning.source
    for (table, said), meaning in policy.words.items():
        if table == "sxid":
            yield f"any, called {said}", meaning.name, _meant(meaning), meaning.source
    other = policy.unknown_sxid
    yield "any other", other.name, _meant(other), other.source


def _spans(meanings: Mapping[int, Meaning]) -> list[list[int]]:
    """Return the first and last code of each run of consecutive codes with the same meaning."""
    spans: list[list[int]] = []
    for code in sorted(meanings):
        if spans and code == spans[-1][1] + 1 and meanings[code] == meanings[spans[-1][0]]:
            spans[-1][1] = code
        else:
            spans.append([code, code])
    return spans


def _level(found: Mapping[str, str]) -> str:
    return f"{found['level']} -> {found['action']}"


def _meant(meaning: Meaning) -> str:
    return f"{word(meaning.level)} -> {word(meaning.action)}"


def _table(head: Row, rows: Iterable[Row]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(each.replace('|', ':') for each in line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(page(shipped()))
