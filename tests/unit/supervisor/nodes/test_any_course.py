"""Whatever happens, and wherever leaders die: the Nodes agree with the records, and others' fields remain."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.nodes.names import REQUEST, TAINT
from supervisor.quarantine.model import NO_NEW_WORK, NodePolicy, RunFault
from tests.unit.supervisor.nodes.node_samples import XID, NodesInMemory, PlayedLeader, heard_by

NAMES = ("a", "b", "c", "d", "e", "f")
QUICK = NodePolicy(
    confirm_s=1.0, confirm_alone_s=2.0, storm_window_s=5.0, cooldown_s=5.0, clean_s=20.0, max_clean_s=1e4,
    alert_s=100.0, repair_s=1e4, max_share=0.34,
)  # fmt: skip
_EVENTS = st.sampled_from(
    ["ill", "ill", "well", "boot", "untaint", "taint", "release", "quarantine", "odd", "ahead", "behind",
     "run", "delete", "wait"]
)  # fmt: skip
_COURSE = st.lists(st.tuples(_EVENTS, st.sampled_from(NAMES), st.integers(0, 3)), max_size=25)
_REQUESTS = {"release": "release", "quarantine": "quarantine+drain: smell", "odd": "relaese"}


def happen(nodes: NodesInMemory, leader: PlayedLeader, event: str, name: str) -> None:
    nodes.now_s += 3.0
    info = nodes.objects[name]["status"]["nodeInfo"]
    if event == "ill":
        nodes.report(name, XID, boot_id=info["bootID"])
    elif event in ("well", "boot"):
        if event == "boot":
            info["bootID"] += "+"
        nodes.report(name, boot_id=info["bootID"])
    elif event == "untaint":
        nodes.untaint(name)
    elif event == "taint":
        nodes.untaint(name)
        nodes.objects[name]["spec"]["taints"].insert(1, {"key": TAINT, "value": "x", "effect": "NoSchedule"})
        nodes.touch(name)
    elif event in _REQUESTS:
        nodes.annotate(name, REQUEST, _REQUESTS[event])
    elif event in ("ahead", "behind"):
        nodes.now_s += 1e5 if event == "ahead" else -1e5
    elif event == "run":
        leader.runs[name] = (RunFault(nodes.now_s - 1.0, "GPU-1"),)
    elif event == "delete":
        del nodes.objects[name]
        nodes.add(name)
        nodes.objects[name]["metadata"]["uid"] = f"uid-{nodes.now_s}"
    else:
        nodes.now_s += 60.0


def agrees(nodes: NodesInMemory, name: str) -> bool:
    """True if record, taint and condition say the same. Fails if others' taints have changed."""
    held, taint, condition = nodes.record(name).get("quarantine"), nodes.taint(name), nodes.condition(name)
    is_out = held is not None and held.get("effect", NO_NEW_WORK) == NO_NEW_WORK
    said = condition is not None and condition["status"] == "True"
    return (held is not None) == (taint is not None) and is_out == said


@settings(max_examples=150, deadline=None)
@given(_COURSE)
def test_any_course_with_any_deaths_of_leaders_settles(course: list[tuple[str, str, int]]) -> None:
    nodes = NodesInMemory()
    nodes.add(*NAMES)
    leader = heard_by(PlayedLeader(nodes, QUICK), nodes)
    for at, (event, name, writes) in enumerate(course):
        happen(nodes, leader, event, name)
        mono_s = float(at + 1)
        done = list(itertools.islice(leader.steps(mono_s), writes))
        if writes == 3:
            leader.settle(mono_s)
        elif len(done) == writes:  # it dies here
            leader = heard_by(PlayedLeader(nodes, QUICK), nodes, mono_s)
    leader.settle(100.0)
    assert all(agrees(nodes, name) for name in NAMES)
    assert leader.settle(100.0) == []
    assert PlayedLeader(nodes, QUICK).settle(0.0) == []
    assert all(REQUEST not in nodes.objects[name]["metadata"]["annotations"] for name in NAMES)
