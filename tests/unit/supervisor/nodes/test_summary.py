from __future__ import annotations

import json
import math

from supervisor.nodes import summary
from supervisor.nodes.names import REQUEST
from supervisor.nodes.settings import QuarantineSettings
from supervisor.nodes.summary import NodePool, explained, pool_of, row_of, state_of
from supervisor.quarantine.model import NodePolicy
from tests.unit.supervisor.nodes.node_samples import NOW_S, XID, NodesInMemory, healthy_pool

HOUR_S = 3600.0


def seen(nodes: NodesInMemory, age_s: float = 5.0) -> NodePool:
    known = [(nodes.known(name), age_s) for name in nodes.objects]
    return pool_of(known, QuarantineSettings(NodePolicy()), nodes.now_s)


def test_each_state_is_named() -> None:
    nodes, leader = healthy_pool("bad", "early", "held", "ill", "silent", "waived", "well")
    nodes.report("bad", XID)
    leader.settle(1.0)
    nodes.report("waived", XID)
    nodes.annotate("waived", REQUEST, "quarantine: x")
    leader.settle(2.0)
    nodes.annotate("waived", REQUEST, "release")
    leader.settle(3.0)
    record = nodes.record("waived")
    record["waiver"]["evidence"] = ["GPU-1 xid 79 reboot_node"]
    nodes.annotate("waived", "holdfast.dev/quarantine", json.dumps(record))
    nodes.report("held", XID)
    nodes.report("early", XID, held_s=1.0)
    nodes.report("ill", {**XID, "level": "degraded"})
    pool = seen(nodes)
    states = {name: state_of(pool, name) for name in nodes.objects}
    assert states == {
        "bad": "quarantined", "early": "suspect", "held": "held", "ill": "degraded", "silent": "healthy",
        "waived": "waived", "well": "healthy",
    }  # fmt: skip
    assert {*states.values(), "unknown"} == {*summary.STATES}
    assert state_of(seen(nodes, 200.0), "silent") == "unknown"
    assert state_of(seen(nodes, math.inf), "silent") == "unknown"


def test_a_row_says_what_is_due_and_why_it_is_not_done() -> None:
    nodes, leader = healthy_pool("a", "b", "c")
    nodes.report("a", XID)
    row = row_of(seen(nodes), "a")
    assert (row["state"], row["next"], row["finding"]) == ("held", "taint", "GPU-1 xid 79 reboot_node")
    assert abs(row["since"] - (NOW_S - 95.0)) < 1e-6
    leader.settle(1.0)
    nodes.report("b", XID)
    pool = seen(nodes)
    row = row_of(pool, "b")
    assert (row["next"], row["state"], row["alert"]) == (None, "held", False)
    assert "1 of 3 nodes are out; at most 1 may be" in row["why"]
    assert pool.breaker_line == (
        "1 of 3 nodes are out; at most 1 may be; the breaker is open: no other node is taken out"
    )
    assert row_of(pool, "a")["next"] == "drain"
    json.dumps([row_of(pool, name) for name in nodes.objects], allow_nan=False)


def test_an_explanation_has_the_evidence_and_what_must_happen_before_the_release() -> None:
    nodes, leader = healthy_pool("a", "b", "c")
    nodes.report("a", XID)
    leader.settle(1.0)
    found = explained(seen(nodes), "a")
    json.dumps(found, allow_nan=False)
    [finding] = found["findings"]
    assert (finding["origins"], finding["corroborated"]) == (["driver log", "nvml"], True)
    assert found["evidence"] == ["GPU-1 xid 79 reboot_node"]
    assert [each["action"] for each in found["history"]] == ["reboot_node"]
    assert found["release_needs"] == [
        "the node boots; without a boot, it must be healthy for four times as long",
        "its unhealthy findings end",
        "its sensors report it as healthy for 14400 s (so far 0 s)",
    ]
    nodes.now_s += HOUR_S / 2
    nodes.objects["a"]["status"]["nodeInfo"]["bootID"] = "b2"
    nodes.report("a", boot_id="b2")
    assert explained(seen(nodes), "a")["release_needs"] == [
        "its sensors report it as healthy for 3600 s (so far 1800 s)"
    ]
    assert explained(seen(nodes, math.inf), "a")["release_needs"][-1] == "its agent reports again"


def test_only_an_operator_releases_what_an_operator_has_taken_out() -> None:
    nodes, leader = healthy_pool("a", "b")
    nodes.annotate("a", REQUEST, "quarantine: smell")
    assert row_of(seen(nodes), "a")["request"] == "quarantine"
    leader.settle(1.0)
    found = explained(seen(nodes), "a")
    assert found["release_needs"] == ["an operator releases it, because an operator has taken it out"]
    assert (found["by"], found["state"]) == ("operator", "quarantined")
    assert found["decided"] == "an operator has taken it out: smell"


def test_a_report_that_cannot_be_read_is_the_reason_why_a_node_is_unknown() -> None:
    nodes, _ = healthy_pool("a", "b")
    nodes.annotate("a", "holdfast.dev/node-health", "{")
    row = row_of(seen(nodes), "a")
    assert (row["state"], row["alert"]) == ("unknown", True)
    assert row["why"] == "unknown: its report is invalid: '{' is not JSON"


def test_a_number_that_nobody_can_compute_with_is_no_reason_to_describe_no_node() -> None:
    nodes, _ = healthy_pool("a", "b")
    report = nodes.objects["a"]["metadata"]["annotations"]["holdfast.dev/node-health"]
    nodes.annotate(
        "a", "holdfast.dev/node-health", report.replace('"calmed_s": null', f'"calmed_s": {"9" * 400}')
    )
    pool = seen(nodes)
    assert row_of(pool, "a")["why"].startswith("unknown: its report is invalid: it has an integer of ")
    assert row_of(pool, "b")["state"] == "healthy"
