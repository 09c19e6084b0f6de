"""Test whether the node agent finds the important lines in a flood of kernel lines from the real /dev/kmsg.

A `holdfast node serve --test` reads /dev/kmsg while the bench writes --lines lines to it. 20 of them are
Xids, each of a different GPU. The bench shows how many of the 20 became findings, how long this took after
the last line, and how many lines the kernel overwrote before the agent read them. Those lines are lost, and
the agent must report the loss.

The bench needs root. While it runs, it lifts the kernel's rate limit for writers of /dev/kmsg
(kernel.printk_devkmsg).
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.harness import results
from bench.harness.console import make_parser, say
from bench.harness.launchers import Failed
from bench.harness.processes import find_process
from bench.text import Verdict, all_met, at_most, seconds
from nodeagent.kernel import kmsg
from tests.local.nodeagent.serving import Serving, serving

LIMIT = Path("/proc/sys/kernel/printk_devkmsg")
XIDS = (48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158, 160, 167, 171, 172)
MOST_MB = 60.0
PATIENCE_S = 10.0
BATCH = 500  # lines between two readings of the clock


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    found = results.begin("flood")
    with _unlimited():
        figures = _flooded(options.lines, options.seconds)
    say(
        f"{options.lines:,} lines written in {seconds(figures['wrote_s'])}: "
        f"{figures['seen']} of {len(XIDS)} Xids were findings {seconds(figures['seen_s'])} after the end; "
        f"{figures['lost'] or 'no line was lost'}"
    )
    judged = _judged(figures)
    for each in judged:
        say(each.line)
    found |= {"options": vars(options), "figures": figures, "verdicts": [asdict(each) for each in judged]}
    results.write(found)
    return 1 if options.strict and not all_met(judged) else 0


def _flooded(lines: int, over_s: float) -> dict[str, Any]:
    # The kernel log may still contain lines of an earlier run of this bench.
    domain = f"{random.Random().getrandbits(16):04x}"
    with (
        tempfile.TemporaryDirectory(prefix="bench-flood-") as folder,
        serving(Path(folder), None, "--test", "--kernel-log", "kmsg") as agent,
    ):
        agent.until(lambda health: all(each["calls"] for each in health["sensors"]))
        wrote_s = _write(lines, over_s, domain)
        ended = time.monotonic()
        seen = _until_seen(agent, domain, ended)
        seen_s = time.monotonic() - ended
        health, process = agent.get("/v1/health"), find_process(agent.process.pid)
    assert process is not None, "the agent has ended"
    lost = [each for each in _findings(health, "sensor/kmsg") if each["check"] == "observations_dropped"]
    return {
        "wrote_s": wrote_s,
        "seen": seen,
        "seen_s": seen_s,
        "lost": lost[0]["why"] if lost else "",
        "sees": all(each["sees"] for each in health["sensors"] if each["name"] == "kmsg"),
        "rss_mb": process.rss_bytes / 1e6,
    }


def _judged(figures: dict[str, Any]) -> list[Verdict]:
    seen, sees, rss_mb = figures["seen"], figures["sees"], figures["rss_mb"]
    reported = seen == len(XIDS) or bool(figures["lost"])
    return [
        Verdict("every Xid is found, or the loss is reported", f"{seen} of {len(XIDS)}", reported),
        Verdict("the sensor still works", "yes" if sees else "no", sees),
        at_most(f"memory <= {MOST_MB:g} MB", rss_mb, MOST_MB, f"{rss_mb:.1f} MB"),
    ]


@contextmanager
def _unlimited() -> Iterator[None]:
    """Lift the rate limit for writers of /dev/kmsg. Raises Failed if that is not permitted."""
    try:
        before = LIMIT.read_text()
        LIMIT.write_text("on\n")
    except OSError as error:
        raise Failed(f"flood: {LIMIT}: {error.strerror}; run as root, outside of a container") from None
    try:
        yield
    finally:
        LIMIT.write_text(before)


def _write(lines: int, over_s: float, domain: str) -> float:
    """Write the lines evenly over `over_s`, or as fast as possible if it is 0; return the seconds it took."""
    every = lines // len(XIDS)
    began = time.monotonic()
    with kmsg.PATH.open("wb", buffering=0) as log:
        for n in range(lines):
            which, at = divmod(n, every)
            if at == every // 2 and which < len(XIDS):
                log.write(
                    f"<6>NVRM: Xid (PCI:{domain}:{which:02x}:00): {XIDS[which]}, pid=1, a flood\n".encode()
                )
            else:
                log.write(b"<6>eth0: renamed from veth%d %s\n" % (n, b"x" * 60))
            if n % BATCH == 0:
                time.sleep(max(0.0, began + over_s * n / lines - time.monotonic()))
    return time.monotonic() - began


def _until_seen(agent: Serving, domain: str, ended: float) -> int:
    """Wait at most `PATIENCE_S` until all Xids are findings; return how many of them are."""
    while True:
        health = agent.get("/v1/health")
        seen = sum(bool(_findings(health, f"gpu/{domain}:{which:02x}:00.0")) for which in range(len(XIDS)))
        if seen == len(XIDS) or time.monotonic() - ended > PATIENCE_S:
            return seen
        agent.events(after=1 << 50, wait_s=0.05)


def _findings(health: dict[str, Any], entity: str) -> list[dict[str, Any]]:
    return [found for each in health["entities"] if each["entity"] == entity for found in each["findings"]]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("flood", __doc__ or "")
    add = parser.add_argument
    add("--lines", type=int, default=100_000, metavar="N", help="number of lines")
    add(
        "--seconds",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds over which the lines are written; 0 means as fast as possible",
    )
    add("--strict", action="store_true", help="exit with code 1 if a target is missed")
    options = parser.parse_args(argv)
    if not len(XIDS) <= options.lines <= 10_000_000:
        parser.error(f"--lines: {options.lines}; expected {len(XIDS)} to 10000000")
    if not 0 <= options.seconds <= 600:
        parser.error(f"--seconds: {options.seconds:g}; expected 0 to 600")
    return options
