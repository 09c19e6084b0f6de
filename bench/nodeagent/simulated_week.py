"""Measure the memory and time that the real evaluator needs for a simulated week of one node."""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.text import Verdict
from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.evaluation.retention import FORGET_S
from nodeagent.model import Observation
from nodeagent.policy.loading import load
from nodeagent.policy.rules import HealthPolicy, Rule, RuleKind

DAY_S = 86400.0
ENTITIES = {
    "gpu": [f"gpu/0000:{16 * n + 11:02x}:00.0" for n in range(8)],
    "port": [f"port/mlx5_{n}/1" for n in range(4)],
    "node": ["node"],
    "driver": ["driver"],
    "disk": ["disk//", "disk//var"],
    "device": [f"device/0000:{n:02x}:00.0" for n in range(4)],
    "net": ["net/eth0"],
}
# Growth from the end of the first day to the end of the last day; less may be due to the allocator.
GROWTH_MB = 2.0


def measure(days: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the memory after each day, the number of observations, and the total seconds that they took."""
    policy = load()
    evaluator = Evaluator(policy, 575)
    rss_mb, count, began = [], 0, time.monotonic()
    day = 1
    for seen in observations(policy, days * DAY_S):
        if seen.at_s >= day * DAY_S:
            evaluator.findings(seen.at_s)
            evaluator.forget(seen.at_s - FORGET_S)
            rss_mb.append(_rss_mb())
            say(f"day {day}: {count:,} observations, {rss_mb[-1]:.1f} MB, {len(evaluator.entities)} entities")
            day += 1
        evaluator.add(seen)
        count += 1
    rss_mb.append(_rss_mb())
    return {"rss_mb": rss_mb, "observations": count, "took_s": time.monotonic() - began}


def verdict(found: dict[str, Any]) -> Verdict:
    """Evaluate whether the memory stayed flat after the first day."""
    grown = found["rss_mb"][-1] - found["rss_mb"][0]
    each_us = found["took_s"] / max(1, found["observations"]) * 1e6
    shown = f"{grown:+.1f} MB from the first day to the last, {each_us:.1f} us per observation"
    return Verdict(f"no growth over {len(found['rss_mb'])} simulated days", shown, grown <= GROWTH_MB)


def observations(policy: HealthPolicy, until_s: float) -> Iterator[Observation]:
    """Yield the observations of a healthy node in chronological order, with a few temporary faults."""
    due: list[tuple[float, str, str]] = []
    for name, rule in policy.rules.items():
        if rule.period_s:
            due += [(0.0, name, entity) for entity in _of(name)]
    heapq.heapify(due)
    while due[0][0] < until_s:
        at_s, name, entity = heapq.heappop(due)
        rule = policy.rules[name]
        yield Observation(at_s, name, entity, "simulated", _value(rule, at_s))
        heapq.heappush(due, (at_s + rule.period_s, name, entity))
        if name == "nvml" and at_s % (DAY_S / 4) < rule.period_s:
            yield from _faults(at_s)


def _of(name: str) -> list[str]:
    if name == "ib_port_count":
        return ENTITIES["node"]
    if name.startswith(("ib_", "port_", "roce_", "local_ack")):
        return ENTITIES["port"]
    if name.startswith("net_"):
        return ENTITIES["net"]
    if name.startswith(("aer_", "device_", "host_temperature")):
        return ENTITIES["device"]
    if name.startswith(("disk_", "inodes_")):
        return ENTITIES["disk"]
    if name == "nvml":
        return ENTITIES["driver"]
    nodes = (
        "memory_used",
        "files_used",
        "pids_used",
        "load",
        "uninterruptible",
        "gpu_process_stuck",
        "gpu_count",
    )
    if name in nodes or name.startswith("clock_"):
        return ENTITIES["node"]
    return ENTITIES["gpu"]


def _value(rule: Rule, at_s: float) -> float:
    """Return a simulated value: healthy, except that a level is bad for ten minutes each day."""
    if rule.kind is RuleKind.STATE:
        return 0.0
    if rule.kind is RuleKind.RATE:
        return float(int(at_s // 7200))
    bad = at_s % DAY_S < 600
    bound = rule.degraded or rule.unhealthy
    if bad and bound is not None:
        return bound.at
    wander = (at_s // 60 * 7919 % 13) / 100
    return 30.0 + wander if rule.below else wander


def _faults(at_s: float) -> Iterator[Observation]:
    for number, entity in enumerate(ENTITIES["gpu"]):
        code = (13, 31, 43, 48, 63, 79, 94, 119)[number]
        yield Observation(at_s, "xid", entity, "kmsg", float(code), text=f"at {at_s}")
        yield Observation(at_s + 60, "gpu_reset", entity, "simulated")
    yield Observation(at_s + 90, "boot", "node", "simulated")


def _rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
