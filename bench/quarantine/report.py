"""The results of the quarantine bench: latencies, facts, verdicts. Pure."""

from __future__ import annotations

from collections import Counter

from bench.quarantine.scenarios import LONGEST_S
from bench.quarantine.simulated_node import DAY_S, REPORT_S
from bench.quarantine.simulated_pool import TICK_S, Pool
from bench.quarantine.tally import SILENT, Case, Tally
from bench.text import Verdict, at_most, number, percentile

REACTION_S = REPORT_S + 4 * TICK_S  # time for the next report, the next tick and two refused patches
BREAKER = "the breaker was full"
HOLDS = {  # words in the `why` of a hold, and the table row that counts these holds
    "a storm": "a storm",
    "is suspect": "its agent's version was suspect",
    "an operator must investigate": "too many at once for the breaker",
    "may be": BREAKER,
    "must be left": BREAKER,
    "unknown:": SILENT,
}


def reason(case: Case) -> str:
    """Return why a node with a confirmed fault was not taken out immediately; "" if it was."""
    return next((name for word, name in HOLDS.items() if word in case.held), case.held)


def limit_s(case: Case) -> float:
    return case.due_s - case.reported_s + REACTION_S


def judge(pool: Pool) -> list[Verdict]:
    tally, policy = pool.tally, pool.policy
    answered = [case for case in tally.cases if case.how == "taint"]
    calm = [case for case in answered if not case.held]
    late = [case for case in calm if took_s(case) > limit_s(case)]
    open_now = [case for case in tally.cases if not case.how]
    shared = [case for case in answered if case.held and reason(case) not in (BREAKER, SILENT)]
    longest_s = max(map(took_s, shared), default=0.0)
    bound_s = LONGEST_S + policy.cooldown_s + policy.storm_window_s + policy.confirm_alone_s + REACTION_S
    still = [node.name for node in pool.nodes if node.standing.quarantine is not None]
    return [
        Verdict(
            "every bad node is out of service within its limit",
            f"{len(calm) - len(late)} of {len(calm)}",
            not late,
        ),
        at_most(
            "nodes held because of a larger event: out once it and the cool-down were over",
            longest_s,
            bound_s,
            f"{longest_s / 3600:.1f} of {bound_s / 3600:.1f} h, {len(shared)} nodes",
        ),
        Verdict("no bad node forgotten", f"{len(open_now)} left", not open_now),
        Verdict("no healthy node evicted", str(len(tally.evicted)), not tally.evicted),
        at_most(
            "a taint never takes out more nodes than the breaker allows",
            tally.most_by_us,
            pool.allowed,
            f"{tally.most_by_us} of {pool.allowed}",
        ),
        Verdict("all healthy nodes back", f"{len(still)} of {tally.nodes} still out", not still),
        at_most(
            "released at the latest after the longest proof of health",
            max(tally.back_s, default=0.0),
            policy.max_clean_s + REACTION_S,
            f"{max(tally.back_s, default=0.0) / DAY_S:.2f} days",
        ),
    ]


def took_s(case: Case) -> float:
    assert case.out_s is not None
    return case.out_s - case.reported_s


def latencies(tally: Tally) -> list[tuple[str, list[Case]]]:
    """Return the faults that led to a taint, grouped by the reason that delayed the taint."""
    answered = [case for case in tally.cases if case.how == "taint"]
    found = [
        ("two witnesses", [case for case in answered if case.sure and not case.held]),
        ("one witness", [case for case in answered if not case.sure and not case.held]),
    ]
    names = sorted({reason(case) for case in answered if case.held})
    return found + [
        (f"held: {name}", [c for c in answered if c.held and reason(c) == name]) for name in names
    ]


def table_of(tally: Tally) -> tuple[list[tuple[str, ...]], dict[str, dict[str, float]]]:
    """Return the times from the first report to the taint, as rows of a table and as figures."""
    rows: list[tuple[str, ...]] = []
    figures: dict[str, dict[str, float]] = {}
    for name, cases in latencies(tally):
        if cases:
            took = [took_s(case) for case in cases]
            times = {"p50_s": percentile(took, 50), "p99_s": percentile(took, 99), "worst_s": max(took)}
            figures[name] = {"count": len(took), **times}
            limit = "" if name.startswith("held") else f"{limit_s(cases[0]):.0f} s"
            rows.append((name, str(len(took)), *(f"{each:.0f} s" for each in times.values()), limit))
    return rows, figures


def facts(pool: Pool, days: float) -> dict[str, float]:
    tally = pool.tally
    how = Counter(case.how for case in tally.cases)
    whole_h = tally.nodes * days * 24.0
    return {
        "faults that an agent reported as unhealthy": len(tally.cases),
        "  over before they were confirmed, or while held": how["passed"],
        "  on nodes that were out already": how["already out"],
        "  on nodes cordoned by others": how["cordoned"],
        "false alarms of single sensors": tally.counts.get("false_alarms", 0),
        "nodes lost, with silent agents": tally.counts.get("lost_nodes", 0),
        "silent agents on healthy nodes": tally.counts.get("silent_agents", 0),
        "taints": tally.counts.get("taint", 0),
        "drains": tally.counts.get("drain", 0),
        "releases": tally.counts.get("release", 0),
        "overruled by operators": tally.counts.get("overruled", 0),
        "healthy nodes evicted": len(tally.evicted),
        "most out at once, for any reason": tally.most_out,
        "  when a taint took one out": tally.most_by_us,
        "  allowed": pool.allowed,
        "node-hours out while bad": round(tally.bad_h),
        "node-hours out to prove health after a fault": round(tally.proof_h),
        "node-hours out for a false alarm": round(tally.false_h),
        "healthy node-hours lost, % of all": 100 * (tally.proof_h + tally.false_h) / whole_h,
    }


def shown(value: float) -> str:
    return str(value) if isinstance(value, int) else number(value, 3)
