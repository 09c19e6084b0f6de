"""The table of announcements, and what they mean for pods with and without tolerations."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.cluster.adoption.tolerations import Toleration, tolerations_of
from supervisor.cluster.departures.node_notices import (
    KUBELET_RESTART_S,
    KnownNotice,
    departure_of,
    kept_node,
    known_notices,
    read_conditions,
)
from supervisor.nodes import node_objects
from supervisor.nodes.names import VERDICTS

Json = dict[str, Any]
ALL = (Toleration(operator="Exists"),)
DEFAULT = tuple(
    Toleration(f"node.kubernetes.io/{key}", "Exists", "", "NoExecute", 300.0)
    for key in ("not-ready", "unreachable")
)  # as the API server adds to each pod


def node(*taints: Json, conditions: tuple[Json, ...] = (), **metadata: Any) -> Json:
    healthy = {"type": "Ready", "status": "True", "message": "kubelet is posting ready status"}
    return {
        "metadata": {"name": "n1", "annotations": {"large": "x" * 9_000}, **metadata},
        "spec": {"taints": list(taints), "podCIDR": "10.0.0.0/24"} if taints else {},
        "status": {"conditions": [healthy, *conditions], "images": [{"names": ["x"] * 500}]},
    }


def taint(key: str, effect: str = "NoSchedule", value: str = "") -> Json:
    return {"key": key, "effect": effect, **({"value": value} if value else {})}


def announced(row: KnownNotice) -> Json:
    """Return a node with the announcement of a row of the table."""
    if "/" in row.key or row.effect or "Autoscaler" in row.key:
        return node(taint(row.key, row.effect or "NoSchedule"))
    return node(conditions=({"type": row.key, "status": "True"},))


ROWS = {row.key: row for row in known_notices()}


def test_each_row_has_a_source_and_a_clause_for_users() -> None:
    assert len(ROWS) == len(known_notices()) > 15
    for row in ROWS.values():
        assert row.source.startswith("https://"), row.key
        assert row.what
        assert not row.what.endswith("."), row.key


@pytest.mark.parametrize("key", ROWS)
def test_a_departure_moves_members_and_a_sign_does_not(key: str) -> None:
    row = ROWS[key]
    found = departure_of(announced(row), DEFAULT)
    assert (found is not None) == row.is_departure
    if found is not None:
        assert row.what in found.why
        assert "n1" in found.why


@pytest.mark.parametrize("key", ROWS)
def test_only_a_program_that_honours_tolerations_spares_a_pod_that_tolerates_everything(key: str) -> None:
    row = ROWS[key]
    found = departure_of(announced(row), ALL)
    assert (found is not None) == (row.is_departure and not row.is_tolerable)


def test_the_rows_that_decide_most_are_as_their_programs_mean_them() -> None:
    departures = {key for key, row in ROWS.items() if row.is_departure}
    assert departures >= {
        "ToBeDeletedByClusterAutoscaler",
        "cloud.google.com/impending-node-termination",
        "aws-node-termination-handler/spot-itn",
        "karpenter.sh/disrupted",
        "DrainInProgress",
        "MaintenanceInProgress",
        "GracefulNodeShutdownInProgress",
    }
    assert departures.isdisjoint(
        {
            "node.kubernetes.io/unschedulable",
            "DeletionCandidateOfClusterAutoscaler",
            "aws-node-termination-handler/rebalance-recommendation",
            "MaintenancePlanned",
        }
    )


def test_a_healthy_or_cordoned_node_announces_nothing() -> None:
    assert departure_of(node(), ()) is None
    cordoned = node(taint("node.kubernetes.io/unschedulable"))
    cordoned["spec"]["unschedulable"] = True
    assert departure_of(cordoned, ()) is None
    assert departure_of(node(taint("team", "NoSchedule", "a"), taint("x", "PreferNoSchedule")), ()) is None


@pytest.mark.parametrize("status", ["False", "Unknown", None])
def test_a_condition_that_is_not_true_announces_nothing(status: str | None) -> None:
    assert departure_of(node(conditions=({"type": "DrainInProgress", "status": status},)), ()) is None


@pytest.mark.parametrize(
    ("tolerations", "after_s"),
    [
        ((), 0.0),
        ((Toleration("other", "Exists"),), 0.0),
        ((Toleration("gpu", "Exists", seconds=60.0),), 60.0),
        ((Toleration("gpu", "Equal", "bad", "NoExecute", 60.0),), 60.0),
        ((Toleration("gpu", "Exists", seconds=-5.0),), 0.0),
        ((Toleration("gpu", "Equal", "good"),), 0.0),
        ((Toleration("gpu", "Exists", effect="NoSchedule"),), 0.0),
        ((Toleration("gpu", "Exists"),), None),
        (ALL, None),
        ((Toleration("gpu", "Equal", "bad"),), None),
    ],
)
def test_a_taint_with_no_execute_evicts_pods_that_do_not_tolerate_it_for_ever(
    tolerations: tuple[Toleration, ...], after_s: float | None
) -> None:
    found = departure_of(node(taint("gpu", "NoExecute", "bad")), tolerations)
    assert (found.after_s if found is not None else None) == after_s
    if found is not None:
        assert (found.why, found.patience_s) == ("node n1 has the taint gpu:NoExecute", 0.0)


@pytest.mark.parametrize(("seconds", "patience_s"), [(300.0, KUBELET_RESTART_S), (30.0, 15.0), (0.0, 0.0)])
def test_a_node_that_falls_silent_has_time_to_report_again(seconds: float, patience_s: float) -> None:
    tolerated = (Toleration("node.kubernetes.io/unreachable", "Exists", "", "NoExecute", seconds),)
    found = departure_of(node(taint("node.kubernetes.io/unreachable", "NoExecute")), tolerated)
    assert found is not None
    assert (found.after_s, found.patience_s) == (seconds, patience_s)


def test_the_most_urgent_announcement_counts() -> None:
    both = node(taint("node.kubernetes.io/unreachable", "NoExecute"), taint("gpu", "NoExecute"))
    found = departure_of(both, DEFAULT)
    assert found is not None
    assert found.why == "node n1 has the taint gpu:NoExecute"


def test_a_node_that_shuts_down_or_is_deleted_is_about_to_end() -> None:
    shutdown = {"type": "Ready", "status": "False", "message": "node is shutting down"}
    for each in (node(conditions=(shutdown,)), node(deletionTimestamp="2026-11-26T00:00:00Z")):
        assert departure_of(each, ALL) is not None
    not_ready = {"type": "Ready", "status": "False", "message": "container runtime is down"}
    assert departure_of(node(conditions=(not_ready,)), ()) is None


@pytest.mark.parametrize("kind", VERDICTS)
def test_a_fault_that_the_node_agent_is_sure_of_is_worth_a_planned_swap(kind: str) -> None:
    bad = node(conditions=({"type": kind, "status": "False", "reason": "Xid79", "message": "GPU 3 is lost"},))
    assert departure_of(kept_node(bad), ALL) is None, "the quarantine holds the verdict back"
    found = departure_of(kept_node(bad), ALL, heeds_verdict=True)
    assert found is not None
    assert (found.why, found.is_of_agent) == ("the node agent of n1 reports: GPU 3 is lost", True)
    for status in ("True", "Unknown"):
        good = node(conditions=({"type": kind, "status": status},))
        assert departure_of(good, (), heeds_verdict=True) is None


@pytest.mark.parametrize("key", [*ROWS, ""])
def test_everything_that_counts_is_kept_of_a_node_and_nothing_else(key: str) -> None:
    whole = announced(ROWS[key]) if key else node(deletionTimestamp="2026-11-26T00:00:00Z")
    kept = kept_node(whole)
    assert departure_of(kept, DEFAULT) == departure_of(whole, DEFAULT)
    assert len(str(kept)) < 600
    assert kept_node(kept) == kept
    shared = node_objects.prune(whole, conditions=read_conditions())
    assert kept_node(shared) == kept, "the jobs and the quarantine share one mirror"


def test_tolerations_are_read_as_kubernetes_means_them() -> None:
    spec = {
        "tolerations": [
            {"operator": "Exists"},
            {"key": "a", "value": "b", "effect": "NoExecute", "tolerationSeconds": 30},
        ]
    }
    assert tolerations_of(spec) == (
        Toleration("", "Exists"),
        Toleration("a", "Equal", "b", "NoExecute", 30.0),
    )
    assert tolerations_of({}) == tolerations_of({"tolerations": None}) == ()
    assert not Toleration().tolerates(taint("a")), "an empty key matches everything only with Exists"
