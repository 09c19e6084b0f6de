"""`python -m bench scale`: 2,000 simulated members in 250 jobs, supervised by one process of a cluster.

The bench runs the real supervisor (`supervisor.cluster.main`) in a separate process. A second process
simulates the members. Each has a real WebSocket over TLS with a token that is reviewed, reports once a second
in the size and form of a real sidecar, obeys its orders, and trains in steps of half a second. A third
process is a small API server (bench/scale/api_server.py), so its CPU time does not count as the supervisor's.
On a machine with few cores, these processes disturb the supervisor, so the bench also prints their CPU time
and the load. With other options, the same members can form a few large jobs.

The bench has four phases: the start, until all jobs train; rest; random crashes of ranks; and the time from
SIGKILL of the supervisor until its successor supervises all members. The members time each decision. The
clock starts before the report of the crash is sent, and stops when the last member of the job has received
the order to secure its state. The time includes writing the decision to the API server and both directions on
the sockets.

The limit for the supervisor's CPU applies at rest, that is, while members only train and report.
Four crashes per second amount to 345,600 faults a day, far more than a cluster of this size has. This phase
only serves to measure decisions, because a 99th percentile needs hundreds of them, so its CPU has no limit.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench import text
from bench.harness import results
from bench.harness.console import make_parser, say
from bench.scale import cluster_objects, report
from bench.scale.cluster_processes import ScaleProcesses, usage
from supervisor.observability import short_status

ADOPT_S = 300.0
RECOVER_S = 60.0
SETTLE_S = 10.0  # before the measurement at rest


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    found = results.begin("scale")
    say(
        f"{options.members} members in {options.jobs} jobs, each with {options.nproc} ranks and"
        f" {options.rate:g} reports a second; API server and members are simulated in separate processes\n"
    )
    processes = ScaleProcesses(options.jobs, options.members, options.nproc, options.rate, options.complete)
    try:
        figures = measure(processes, options)
    finally:
        processes.close()
    say(text.table(("what", ""), report.rows(figures)))
    judged = report.judge(figures)
    say()
    for each in judged:
        say(each.line)
    found |= {"options": vars(options), "figures": figures, "verdicts": [asdict(each) for each in judged]}
    results.write(found)
    return 1 if options.strict and not text.all_met(judged) else 0


def measure(processes: ScaleProcesses, options: argparse.Namespace) -> dict[str, Any]:
    count = options.members
    started_s = processes.start_supervisor()
    processes.start_members()
    connected_s = processes.until(lambda found: found["connected"] == count, ADOPT_S)
    settled_s = processes.until(lambda found: found["settled"] == count, ADOPT_S)
    figures: dict[str, Any] = {
        "faults_per_s": options.faults,
        "connected_s": connected_s - started_s,
        "adopted_s": settled_s - started_s,
    }
    say(f"all jobs train after {figures['adopted_s']:.1f} s")
    time.sleep(min(SETTLE_S, options.seconds))
    figures["rest"] = _phase(processes, options.seconds)
    say(f"at rest: {text.percent(figures['rest']['cpu'])} of a core")
    processes.ask(forget=True, faults_per_s=options.faults)
    figures["faults"] = _phase(processes, options.seconds)
    processes.ask(faults_per_s=0)
    processes.until(lambda found: not found["open"] and found["settled"] == count, RECOVER_S)
    figures["decisions"] = processes.ask(details=True)["faults"]
    say(
        f"{report.phase_words('faults', options.faults)}: {text.percent(figures['faults']['cpu'])} of a core,"
        f" {len(figures['decisions'])} faults"
    )
    figures["lag"] = _lag(processes)
    figures["restart"] = _restart(processes, count)
    return figures


def _phase(processes: ScaleProcesses, seconds: float) -> dict[str, Any]:
    """Measure all processes for `seconds`, and scrape the metrics once a second."""
    assert processes.supervisor is not None
    assert processes.members is not None
    pids = {
        "cpu": processes.supervisor.pid,
        "members_cpu": processes.members.pid,
        "api_cpu": processes.api.pid,
    }
    before = {name: usage(pid) for name, pid in pids.items()}
    sent, writes = processes.ask(), processes.read("/bench/writes") or {}
    began_s = time.monotonic()
    scrapes: list[float] = []
    most = size = 0
    while time.monotonic() - began_s < seconds:
        took_s, size = processes.scrape()
        scrapes.append(took_s)
        most = max(most, usage(pids["cpu"]).rss_bytes)
        time.sleep(max(0.0, 1.0 - took_s))
    passed_s = time.monotonic() - began_s
    after = {name: usage(pid) for name, pid in pids.items()}
    now, written = processes.ask(), processes.read("/bench/writes") or {}
    reports = now["reports"] - sent["reports"]
    return {
        "seconds": passed_s,
        **{name: (after[name].cpu_s - before[name].cpu_s) / passed_s for name in pids},
        "rss_bytes": most,
        "peak_bytes": after["cpu"].peak_bytes,
        "threads": after["cpu"].threads,
        "reports_per_s": reports / passed_s,
        "report_bytes": (now["bytes"] - sent["bytes"]) / max(1, reports),
        "writes_per_s": {
            name: (count - writes.get(name, 0)) / passed_s for name, count in sorted(written.items())
        },
        "scrapes_s": scrapes,
        "scrape_bytes": size,
        "settled": now["settled"],
        "members_late_s": now["late_s"],
        "members_lag_s": now["lag_s"],
        "load": os.getloadavg()[0],
    }


def _lag(processes: ScaleProcesses) -> dict[str, float]:
    """Return the lag of the supervisor's event loop, from the newest status of any job."""
    found: dict[str, float] = {}
    for each in processes.supervisions():
        view = short_status.decode((each.get("status") or {}).get("view")) or {}
        lag = (view.get("lag") or {}).get("supervisor") or {}
        found = {name: max(value, found.get(name, 0.0)) for name, value in lag.items()}
    return found


def _restart(processes: ScaleProcesses, count: int) -> dict[str, Any]:
    """Kill the supervisor, start another one, and measure until it supervises all members."""
    before = processes.ask(generations=True)
    (epoch,) = before["by_epoch"]
    processes.kill_supervisor()
    killed_s = processes.start_supervisor()

    def is_taken_over(found: dict[str, Any]) -> bool:
        newer = sum(n for each, n in found["by_epoch"].items() if int(each) > int(epoch))
        return bool(newer == count and found["obeying"] == count and found["connected"] == count)

    processes.until(lambda found: found["connected"] < count, ADOPT_S)  # the members have noticed the kill
    connected_s = processes.until(lambda found: found["connected"] == count, ADOPT_S)
    supervised_s = processes.until(is_taken_over, ADOPT_S)
    after = processes.ask(generations=True)
    pairs = zip(before["generations"], after["generations"], strict=True)
    assert processes.supervisor is not None
    return {
        "connected_s": connected_s - killed_s,
        "supervised_s": supervised_s - killed_s,
        "changed": sum(one != other for one, other in pairs),
        "peak_bytes": usage(processes.supervisor.pid).peak_bytes,
    }


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser(
        "scale",
        __doc__ or "",
        "quick: python -m bench scale --jobs 10 --members 80 --seconds 10\n"
        "two large jobs: python -m bench scale --jobs 2 --members 1024 --nproc 8 --faults 0.2",
    )
    add = parser.add_argument
    add("--jobs", type=int, default=250, metavar="N", help="number of jobs")
    add("--members", type=int, default=2000, metavar="N", help="number of members in all jobs together")
    add("--nproc", type=int, default=4, metavar="N", help="ranks of each member")
    add("--rate", type=float, default=1.0, metavar="HZ", help="reports of each member per second")
    add(
        "--seconds", type=float, default=60.0, metavar="S", help="how long each of the two phases is measured"
    )
    add(
        "--faults",
        type=float,
        default=4.0,
        metavar="HZ",
        help="crashes of ranks per second in the second phase",
    )
    add(
        "--complete",
        action="store_true",
        help="send complete reports, as sidecars do that are older than updates of reports",
    )
    add("--strict", action="store_true", help="exit with code 1 if a target is missed")
    options = parser.parse_args(argv)
    if not 1 <= options.jobs <= options.members <= cluster_objects.MAX_MEMBERS * options.jobs:
        parser.error(f"--jobs, --members: expected 1 to {cluster_objects.MAX_MEMBERS} members for each job")
    if not 1 <= options.nproc <= 64 or min(options.rate, options.seconds, options.faults) <= 0:
        parser.error("--nproc: expected 1 to 64; --rate, --seconds, --faults: more than 0")
    return options
