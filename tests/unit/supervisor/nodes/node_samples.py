"""Node objects in the memory of a test, changed by patches as the API server changes them, and by leaders."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.scale.api_server import merged
from holdfast.node_report import REPORT, REPORT_AT
from supervisor.nodes import agent_reports, node_objects, patches
from supervisor.nodes.agent_reports import AgentReports
from supervisor.nodes.names import RECORD, TAINT
from supervisor.nodes.node_objects import KnownNode
from supervisor.nodes.plan import NodePlan, NodeWrite, plan
from supervisor.quarantine.model import NodePolicy, RunFault
from supervisor.quarantine.transition import not_later

NOW_S = 1_800_000_000.0
AT = "2027-01-15T08:00:00Z"
# Others' taints; of which one comes before, and one after Holdfast's in the alphabet
FOREIGN = [{"key": "a/team", "value": "x", "effect": "NoSchedule"}, {"key": "z/soon", "effect": "NoExecute"}]
XID = {
    "check": "xid", "code": 79, "level": "unhealthy", "action": "reboot_node", "lasting": True,
    "sources": ["kmsg", "nvml-events"], "origins": ["driver log", "nvml"], "device": "GPU-1",
}  # fmt: skip


class StaleWrite(Exception):
    """The patch was for another version of the node."""


def node_object(name: str = "a", **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "uid": f"uid-{name}",
            "resourceVersion": "1",
            "annotations": {},
            **metadata,
        },
        "spec": {"taints": copy.deepcopy(FOREIGN)},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "nodeInfo": {"bootID": "b1", "machineID": f"m-{name}"},
        },
    }


def report_text(
    name: str, *findings: Mapping[str, Any], at_s: float = 1000.0, held_s: float = 90.0, **given: Any
) -> str:
    """Return an agent's report. Each finding has been seen once, when it began."""
    made = [{**each, "since_s": at_s - held_s, "last_s": at_s - held_s} for each in findings]
    healthy_s = 0.0 if findings else 9e6
    raw = {
        "schema": 1, "node": name, "boot_id": "b1", "machine_id": f"m-{name}", "version": "0.1.0",
        "at_s": at_s, "booted_s": at_s - 9e6, "clean_s": healthy_s, "quiet_s": healthy_s, "calmed_s": None,
        "gpus": [{"entity": "gpu/0", "uuid": "GPU-1"}], "sensors": [{"name": "kmsg", "sees": True}],
        "entities": [{"entity": "gpu/0", "findings": made}], **given,
    }  # fmt: skip
    return json.dumps(raw)


@dataclass
class NodesInMemory:
    """The API server's nodes, and the time. Each write changes the node's version."""

    now_s: float = NOW_S
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    writes: list[str] = field(default_factory=list)  # the kinds of all writes by leaders
    _version: int = 1

    def add(self, *names: str) -> None:
        for name in names:
            self.objects[name] = node_object(name)
            self.report(name)

    def touch(self, name: str) -> None:
        self._version += 1
        self.objects[name]["metadata"]["resourceVersion"] = str(self._version)

    def report(self, name: str, *findings: Mapping[str, Any], **given: Any) -> None:
        notes = self.objects[name]["metadata"]["annotations"]
        notes[REPORT] = report_text(name, *findings, **{"at_s": self.now_s - 1e9, **given})
        notes[REPORT_AT] = str(self._version)
        self.touch(name)

    def known(self, name: str) -> KnownNode:
        return node_objects.read(node_objects.prune(self.objects[name]))

    def untaint(self, name: str) -> None:
        """Remove the taint as an operator does."""
        spec = self.objects[name]["spec"]
        spec["taints"] = [each for each in spec["taints"] if each["key"] != TAINT]
        self.touch(name)

    def annotate(self, name: str, key: str, value: str) -> None:
        self.objects[name]["metadata"]["annotations"][key] = value
        self.touch(name)

    def record(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.objects[name]["metadata"]["annotations"].get(RECORD, "{}"))
        return found

    def taint(self, name: str) -> dict[str, Any] | None:
        """Return Holdfast's taint; fail if there are several, or if others' taints are not as they were."""
        taints = self.objects[name]["spec"]["taints"]
        assert [each for each in taints if each["key"] != TAINT] == FOREIGN
        ours = [each for each in taints if each["key"] == TAINT]
        assert len(ours) <= 1
        return ours[0] if ours else None

    def condition(self, name: str) -> dict[str, Any] | None:
        found = {each["type"]: each for each in self.objects[name]["status"]["conditions"]}
        return found.get("HoldfastQuarantined")

    # -- writes of leaders

    def patch(self, name: str, body: Mapping[str, Any], kind: str) -> None:
        if body["metadata"]["resourceVersion"] != self.objects[name]["metadata"]["resourceVersion"]:
            raise StaleWrite
        self.objects[name] = merged(self.objects[name], dict(copy.deepcopy(body)))
        self.touch(name)
        self.writes.append(kind)

    def apply_condition(self, name: str, condition: Mapping[str, Any]) -> None:
        status = self.objects[name]["status"]
        kept = [each for each in status["conditions"] if each["type"] != condition["type"]]
        status["conditions"] = [*kept, dict(condition)]
        self.touch(name)
        self.writes.append("condition")


class PlayedLeader:
    """One leader: what it has heard, and what it does next. It can be left at any point of `steps`."""

    def __init__(
        self, nodes: NodesInMemory, policy: NodePolicy | None = None, *, is_dry: bool = False
    ) -> None:
        self._nodes, self.policy, self._is_dry = nodes, policy or NodePolicy(), is_dry
        self.reports = AgentReports()
        self.runs: dict[str, tuple[RunFault, ...]] = {}

    def hear(self, mono_s: float) -> None:
        """Observe all nodes at a time on this process's own clock."""
        for name in self._nodes.objects:
            self.reports.note(self._nodes.known(name), mono_s)

    def plan(self, mono_s: float) -> NodePlan:
        known = {name: self._nodes.known(name) for name in self._nodes.objects}
        views = agent_reports.views(known.values(), self.reports, mono_s, self.policy)
        self.runs = {name: not_later(faults, self._nodes.now_s) for name, faults in self.runs.items()}
        return plan(known, views, self.runs, self.policy, self._nodes.now_s, is_dry=self._is_dry)

    def steps(self, mono_s: float) -> Iterator[str]:
        """Carry out one write after another, and yield after each. Ends when nothing is due."""
        for _ in range(50):
            self.hear(mono_s)
            write = next(iter(self.plan(mono_s).writes), None)
            if write is None:
                break
            self.write(write)
            yield write.kind
        else:
            raise AssertionError("the plan does not converge")
        for name in self._nodes.objects:
            node = self._nodes.known(name)
            condition = patches.condition_of(node)
            if condition is not None:
                [applied] = patches.status_apply(node, condition)["status"]["conditions"]
                self._nodes.apply_condition(name, applied)
                yield "condition"

    def write(self, write: NodeWrite) -> None:
        node = self._nodes.known(write.node)
        self._nodes.patch(write.node, patches.main_patch(node, write.after, write.note, AT), write.kind)

    def settle(self, mono_s: float) -> list[str]:
        return list(self.steps(mono_s))


def healthy_pool(*names: str) -> tuple[NodesInMemory, PlayedLeader]:
    """Return nodes whose agents a leader has heard."""
    nodes = NodesInMemory()
    nodes.add(*names)
    return nodes, heard_by(PlayedLeader(nodes), nodes)


def heard_by(leader: PlayedLeader, nodes: NodesInMemory, mono_s: float = 0.0) -> PlayedLeader:
    """Let the leader see each agent's report change, and so believe it."""
    leader.hear(mono_s)
    for name in nodes.objects:
        notes = nodes.objects[name]["metadata"]["annotations"]
        notes[REPORT_AT] = f"{notes[REPORT_AT]}+"
        nodes.touch(name)
    leader.hear(mono_s)
    return leader
