"""`holdfast nodes`, against an API server on this machine."""

from __future__ import annotations

import copy
import json
import threading
import time
from datetime import datetime, timezone
from typing import Any

import pytest

from holdfast.node_report import REPORT_AT
from supervisor.cli.on_cluster import nodes as command
from supervisor.nodes import node_objects
from supervisor.nodes.names import RECORD, REQUEST, REQUESTED_BY
from tests.unit.supervisor.cli.on_cluster.stand_in import ApiStandIn
from tests.unit.supervisor.cli.on_cluster.test_connection import Printed, refused
from tests.unit.supervisor.cli.on_cluster.test_job_source import document, printed
from tests.unit.supervisor.nodes.node_samples import XID, NodesInMemory, healthy_pool

PATH = "/api/v1/nodes"
SYSTEM = "/api/v1/namespaces/holdfast-system"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/holdfast-system/leases/holdfast-supervisor"


def utc(ago_s: float) -> str:
    return datetime.fromtimestamp(time.time() - ago_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def place(server: ApiStandIn, nodes: NodesInMemory) -> None:
    for name, found in nodes.objects.items():
        made = copy.deepcopy(found)
        made["metadata"]["annotations"][REPORT_AT] = utc(3.0)
        server.put(f"{PATH}/{name}", made)
    server.put(LEASE, {"metadata": {"creationTimestamp": utc(7200.0)}})


@pytest.fixture
def pool(server: ApiStandIn) -> NodesInMemory:
    """Return three nodes on the server; gpu-1 is quarantined, and gpu-2 is ill but held."""
    nodes, leader = healthy_pool("gpu-1", "gpu-2", "gpu-3")
    nodes.now_s = time.time()
    nodes.report("gpu-1", XID)
    leader.settle(1.0)
    nodes.report("gpu-2", XID)
    place(server, nodes)
    server.put(f"{PATH}/other", {"spec": {}, "status": {}})
    return nodes


def test_no_text_of_an_agent_looks_like_another_node(
    capsys: Printed, server: ApiStandIn, pool: NodesInMemory
) -> None:
    forged = "gpu-9  quarantined  9d"
    pool.report("gpu-2", {**XID, "device": f"GPU\n{forged}\x1b[2J", "origins": [f"nvml\r\n{forged}"]})
    place(server, pool)
    listed = printed("nodes", capsys)
    assert forged in listed
    explained = printed("nodes explain gpu-2", capsys)
    assert forged in explained
    lines = [*listed.splitlines(), *explained.splitlines()]
    assert not [each for each in lines if each.startswith("gpu-9")]


def test_the_nodes_are_listed_with_their_states_and_the_breaker(
    capsys: Printed, server: ApiStandIn, pool: NodesInMemory
) -> None:
    head, *lines = printed("nodes", capsys).splitlines()
    assert head.split() == ["NODE", "STATE", "SINCE", "FINDING", "NEXT", "WHY"]
    assert [each.split()[:2] for each in lines[:3]] == [
        ["gpu-1", "quarantined"], ["gpu-2", "held"], ["gpu-3", "healthy"],
    ]  # fmt: skip
    assert "1 of 3 nodes are out" in lines[1]
    assert lines[3].startswith("1 of 3 nodes are out; at most 1 may be; the breaker is open")
    assert lines[4:] == ["not listed: 1 node without an agent"]
    for line in ("nodes -o json", "nodes --json"):
        rows = document(line, capsys)
        assert [each["state"] for each in rows] == ["quarantined", "held", "healthy"]


def test_a_dry_run_and_settings_that_cannot_be_used_are_shown(
    capsys: Printed, server: ApiStandIn, pool: NodesInMemory
) -> None:
    server.put(LEASE, {"metadata": {"creationTimestamp": utc(600.0)}})
    assert (
        printed("nodes", capsys).splitlines()[-1].startswith("dry run: actions are only announced for anoth")
    )
    server.put(f"{SYSTEM}/configmaps/holdfast-quarantine", {"data": {"dry-run": "true"}})
    assert printed("nodes", capsys).splitlines()[-1] == "dry run: actions are only announced"
    server.put(f"{SYSTEM}/configmaps/holdfast-quarantine", {"data": {"dry-run": "false", "min-out": "2"}})
    assert "at most 2 may be" in printed("nodes", capsys)
    server.put(f"{SYSTEM}/configmaps/holdfast-quarantine", {"data": {"dry": "x"}})
    assert "warning: the ConfigMap holdfast-quarantine is invalid: dry: unknown" in printed("nodes", capsys)
    server.denied.add(("get", "configmaps"))
    assert "note: computed with the default settings, because forbidden: 'eva' may not get" in printed(
        "nodes", capsys
    )
    del server.objects[LEASE]
    assert "note: no supervisor has led in this cluster yet" in printed("nodes", capsys)


def test_one_node_is_explained(capsys: Printed, server: ApiStandIn, pool: NodesInMemory) -> None:
    text = printed("nodes explain gpu-1", capsys)
    assert text.startswith("gpu-1: quarantined")
    assert "seen by driver log, nvml (corroborated)" in text
    assert "release      when its unhealthy findings end" in text
    assert "history" in text
    assert document("nodes explain gpu-1 -o json", capsys)["evidence"] == ["GPU-1 xid 79 reboot_node"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nodes explain gpu-9", "no node 'gpu-9': did you mean 'gpu-"),
        ("nodes explain other", "no agent has ever reported on node 'other'"),
        ("nodes release gpu-3", "node 'gpu-3' is not quarantined, so there is nothing to release"),
        ("nodes release", "missing NODE for nodes release"),
        ("nodes quarantine gpu-3", "missing --why for nodes quarantine"),
        ("nodes release gpu-1 --drain", "--drain is only for `holdfast nodes quarantine NODE`"),
        ("nodes --why x", "--why is only for"),
        ("nodes relaese gpu-1", "invalid value 'relaese' for ACTION: did you mean 'release'?"),
    ],
)
def test_a_mistake_is_answered_with_what_to_do(
    capsys: Printed, server: ApiStandIn, pool: NodesInMemory, line: str, said: str
) -> None:
    assert said in refused(line, capsys)


def test_a_missing_right_is_named(capsys: Printed, server: ApiStandIn, pool: NodesInMemory) -> None:
    server.denied.add(("patch", "nodes"))
    assert "forbidden: 'eva' may not patch nodes" in refused("nodes release gpu-1", capsys)
    server.denied.add(("list", "nodes"))
    assert "forbidden: 'eva' may not list nodes" in refused("nodes", capsys)


def test_a_request_is_written_and_the_command_waits_for_the_supervisor(
    capsys: Printed, server: ApiStandIn, pool: NodesInMemory
) -> None:
    asked: list[str] = []

    def carry_out(found: dict[str, Any]) -> None:
        """Carry the request out a moment later, as the supervisor does."""
        asked.append(found["metadata"]["annotations"][REQUEST])

        def change() -> None:
            del found["metadata"]["annotations"][REQUEST]
            server.touch(found)

        threading.Timer(0.1, change).start()

    server.changed = carry_out
    assert printed("nodes release gpu-1", capsys) == "node gpu-1: quarantined\n"  # the record is as before
    found = document("nodes quarantine gpu-3 --why loud --drain -o json", capsys)
    assert (found["name"], found["carried_out"]) == ("gpu-3", True)
    assert asked == ["release", "quarantine+drain: loud"]
    assert [node_objects.read_request(each).kind for each in asked] == ["release", "quarantine"]


def test_without_a_supervisor_the_request_remains_and_the_exit_code_is_1(
    capsys: Printed, server: ApiStandIn, pool: NodesInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "CARRY_OUT_S", 0.3)
    said = printed("nodes release gpu-1", capsys, code=1)
    assert "no supervisor has carried out the request within 0.3 s" in said
    notes = server.objects[f"{PATH}/gpu-1"]["metadata"]["annotations"]
    assert (notes[REQUEST], notes[REQUESTED_BY]) == ("release", "eva")


def test_a_request_names_nobody_if_the_api_server_does_not_say_who_asks(
    capsys: Printed, server: ApiStandIn, pool: NodesInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "CARRY_OUT_S", 0.0)
    for server.denied, server.unknown in (
        ({("create", "selfsubjectreviews")}, set[str]()),
        (set[tuple[str, str]](), {"selfsubjectreviews"}),
    ):
        printed("nodes release gpu-1", capsys, code=1)
        assert REQUESTED_BY not in server.objects[f"{PATH}/gpu-1"]["metadata"]["annotations"]


def test_the_explanation_shows_the_verdict_and_what_runs_have_seen(
    capsys: Printed, server: ApiStandIn, pool: NodesInMemory
) -> None:
    found = server.objects[f"{PATH}/gpu-3"]
    verdict = {"type": "GpuHealthy", "status": "False", "message": "GPU 0 is lost"}
    found["status"]["conditions"].append(verdict)
    runs = [{"at_s": time.time() - 60.2, "why": "team/llama i-0001: an ECC error of rank 0"}]
    found["metadata"]["annotations"][RECORD] = json.dumps({"runs": runs})
    said = printed("nodes explain gpu-3", capsys)
    assert "  verdict      GPU 0 is lost\n" in said
    assert "  seen by run  60 s ago team/llama i-0001: an ECC error of rank 0\n" in said
