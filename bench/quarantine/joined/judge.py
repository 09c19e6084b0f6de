"""The verdicts and figures of the joined year."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from bench.quarantine import report
from bench.quarantine.joined.events import DRIVER_BUG, TWO_LIARS
from bench.quarantine.joined.ground_truth import Truth
from bench.quarantine.joined.node import JoinedNode
from bench.quarantine.joined.repairs import Repairs
from bench.quarantine.simulated_pool import Pool
from bench.quarantine.tally import Case
from bench.text import Verdict, at_most, percentile

HOUR_S, DAY_S = 3600.0, 86400.0
SHOWN = 5  # losses that are printed in full


@dataclass(slots=True)
class Year:
    """A simulated year and all that is known about it."""

    pool: Pool
    nodes: list[JoinedNode]
    truth: Truth
    repairs: Repairs
    days: float

    @property
    def evicted_per_1000_node_years(self) -> float:
        return 1000 * len(self.pool.tally.evicted) / (len(self.nodes) * self.days / 365)


def calm(year: Year) -> list[Case]:
    """Return the cases that were delayed only by their confirmation."""
    return [case for case in year.pool.tally.cases if case.how == "taint" and not case.held]


def judge(year: Year) -> list[Verdict]:
    tally, policy, truth = year.pool.tally, year.pool.policy, year.truth
    prompt = calm(year)
    late = [case for case in prompt if report.took_s(case) > report.limit_s(case)]
    bound_s = policy.alert_s + report.REACTION_S
    buried = [case for case in tally.cases if known_after_s(case) > bound_s]
    active = [f"{node.name}: {fault.key}" for node in year.nodes for fault in node.faults]
    forgotten = [case for case in tally.cases if not case.how]
    odd = {
        cause: count for cause, count in year.repairs.causes.items() if cause not in (TWO_LIARS, DRIVER_BUG)
    }
    still = [node.name for node in year.nodes if node.standing.quarantine is not None]
    return [
        Verdict(
            "every bad node is out of service within its limit",
            f"{len(prompt) - len(late)} of {len(prompt)}",
            not late,
        ),
        Verdict(
            f"every reported fault out, over, or an alert within {bound_s / HOUR_S:.1f} h",
            f"{len(tally.cases) - len(buried)} of {len(tally.cases)}",
            not buried,
        ),
        _none("every visible fault was reported", truth.unreported),
        _none("no report lost a fault before its remedy", truth.losses),
        _none("every node with a sure, lasting fault was drained", year.repairs.undrained),
        _none("no bad node forgotten", [*active, *(f"{c.node}: {c.component}" for c in forgotten)]),
        Verdict(
            "no healthy node evicted unless two witnesses were wrong",
            "; ".join(f"{cause}: {count}" for cause, count in odd.items()) or "0 others",
            not odd,
        ),
        at_most(
            "a taint never takes out more nodes than the breaker allows",
            tally.most_by_us,
            year.pool.allowed,
            f"{tally.most_by_us} of {year.pool.allowed}",
        ),
        _none("all healthy nodes back", still),
    ]


def _none(target: str, found: list[str]) -> Verdict:
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return Verdict(target, "; ".join(found[:SHOWN]) + more if found else "0 exceptions", not found)


def known_after_s(case: Case) -> float:
    """Return the time from the first report to the fault's end, its node's removal, or an alert."""
    known = [each for each in (case.out_s, case.alerted_s, case.ended_s) if each is not None]
    return min(known, default=float("inf")) - case.reported_s


def facts(year: Year) -> dict[str, float]:
    tally, truth = year.pool.tally, year.truth
    how, signs = Counter(case.how for case in tally.cases), truth.first_sign_s or [0.0]
    count = tally.counts.get
    healthy_h = len(year.nodes) * year.days * 24.0
    return {
        "nodes with a complete agent": len(year.nodes),
        "observations given to their evaluators": sum(node.daemon.observations for node in year.nodes),
        "faults that an agent reported as unhealthy": len(tally.cases),
        "  of which the same fault recurred on the same part": truth.repeats,
        "  from the fault to that report, p50 (s)": percentile(signs, 50),
        "  from the fault to that report, worst (h)": max(signs) / HOUR_S,
        "  taken out": how["taint"],
        "  over before they were confirmed, or while held": how["passed"],
        "  on nodes that were out or cordoned already": how["already out"] + how["cordoned"],
        "  alerts": sum(case.alerted_s is not None for case in tally.cases),
        "remedies after which the fault recurred": count("came_again", 0),
        "remedies that only hid the fault": count("hidden_by_a_remedy", 0),
        "  releases while a fault was hidden": year.repairs.hidden,
        "resets that the agent did not see": count("unseen_resets", 0),
        "repaired by an operator after an alert": count("repaired_after_an_alert", 0),
        "cleared by an operator after an alert": count("cleared_by_operators", 0),
        "false alarms of one witness": count("false_alarms", 0),
        "false alarms of two witnesses": count("false_pairs", 0),
        "overruled by operators": count("overruled", 0),
        "nodes lost": count("lost_nodes", 0),
        "drains": count("drain", 0),
        "healthy nodes evicted": len(tally.evicted),
        **{f"  {cause}": found for cause, found in sorted(year.repairs.causes.items())},
        "  per 1,000 node-years": year.evicted_per_1000_node_years,
        "most out at once, for any reason": tally.most_out,
        "  when a taint took one out": tally.most_by_us,
        "healthy node-hours lost, % of all": 100 * (tally.proof_h + tally.false_h) / healthy_h,
    }


def figures(year: Year) -> dict[str, float]:
    """Return the figures that the sweep compares."""
    took = [report.took_s(case) for case in calm(year)] or [0.0]
    tally = year.pool.tally
    return {
        "p99_s": percentile(took, 99),
        "losses": len(year.truth.losses) + len(year.truth.unreported),
        "evicted_per_1000": year.evicted_per_1000_node_years,
        "lost_percent": facts(year)["healthy node-hours lost, % of all"],
        "most_out": tally.most_out,
    }
