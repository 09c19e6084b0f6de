"""A pod fits on a node exactly if the scheduler's filters let it."""

from __future__ import annotations

from typing import Any

import pytest

from supervisor.cluster.standbys.node_fit import (
    REQUIRED,
    NodeRoom,
    fits,
    is_kept_away,
    lacking,
    read_node_room,
    read_pod_needs,
)
from tests.unit.supervisor.cluster.standbys.cluster_objects import Json, node, pod


def room(found: Json, *pods: Json) -> NodeRoom:
    return read_node_room(found, [read_pod_needs(each) for each in pods])


@pytest.mark.parametrize(
    ("wanted", "there", "lacks"),
    [
        ("4", (), ()),
        ("4001m", (), ("cpu",)),
        ("1", ("3",), ()),
        ("1001m", ("3",), ("cpu",)),
        ("0", ("1",) * 10, ("pods",)),
    ],
)
def test_a_node_has_the_room_that_its_pods_leave(
    wanted: str, there: tuple[str, ...], lacks: tuple[str, ...]
) -> None:
    found = room(
        node("n1", cpu="10" if len(there) > 1 else "4"),
        *(pod(f"p{number}", cpu, on="n1") for number, cpu in enumerate(there)),
    )
    wants = read_pod_needs(pod("w", wanted))
    assert lacking(wants, found) == lacks
    assert fits(wants, found) is (not lacks)


def test_a_resource_that_the_node_does_not_have_is_lacking() -> None:
    wants = pod("w")
    wants["spec"]["containers"][0]["resources"]["requests"]["nvidia.com/gpu"] = "1"
    assert lacking(read_pod_needs(wants), room(node("n1"))) == ("nvidia.com/gpu",)


def _affinity(**term: object) -> dict[str, Any]:
    return {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [term]}}}}


def _expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return _affinity(matchExpressions=[{"key": key, "operator": operator, "values": list(values)}])


TAINT = {"key": "mine", "value": "x", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("spec", "of_node", "is_away"),
    [
        ({}, {}, False),
        ({"nodeSelector": {"zone": "a"}}, {}, False),
        ({"nodeSelector": {"zone": "b"}}, {}, True),
        (_expression("zone", "In", "b", "a"), {}, False),
        (_expression("zone", "NotIn", "a"), {}, True),
        (_expression("other", "NotIn", "a"), {}, False),
        (_expression("zone", "Exists"), {}, False),
        (_expression("zone", "DoesNotExist"), {}, True),
        (_expression("size", "Gt", "3"), {}, False),
        (_expression("size", "Lt", "4"), {}, True),
        (_expression("zone", "Gt", "3"), {}, True),
        (_affinity(matchFields=[{"key": "metadata.name", "operator": "In", "values": ["n2"]}]), {}, True),
        (_affinity(), {}, True),  # a term without requirements matches no node
        ({}, {"taints": [TAINT]}, True),
        ({}, {"taints": [{**TAINT, "effect": "PreferNoSchedule"}]}, False),
        ({"tolerations": [{"key": "mine", "operator": "Exists"}]}, {"taints": [TAINT]}, False),
        ({"tolerations": [{"key": "mine", "value": "y"}]}, {"taints": [TAINT]}, True),
        ({}, {"unschedulable": True}, True),
        ({"tolerations": [{"operator": "Exists"}]}, {"unschedulable": True}, False),
    ],
)
def test_a_node_keeps_away_what_it_or_the_pod_excludes(
    spec: dict[str, Any], of_node: dict[str, Any], is_away: bool
) -> None:
    found = room(node("n1", **of_node))
    assert is_kept_away(read_pod_needs(pod("w", **spec)), found) is is_away


APART: dict[str, Any] = {
    "affinity": {
        "podAntiAffinity": {
            REQUIRED: [
                {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": "gpt"}}}
            ]
        }
    }
}
GPT = {"app": "gpt"}


@pytest.mark.parametrize(
    ("wants", "there", "is_away"),
    [
        (pod("w", labels=GPT, **APART), pod("p", on="n1", labels=GPT), True),
        (pod("w", labels=GPT, **APART), pod("p", on="n1"), False),
        (pod("w", labels=GPT), pod("p", on="n1", **APART), True),  # the pod that is there excludes it
        (pod("w"), pod("p", on="n1", **APART), False),
    ],
)
def test_pods_that_exclude_each_other_do_not_share_a_node(wants: Json, there: Json, is_away: bool) -> None:
    assert is_kept_away(read_pod_needs(wants), room(node("n1"), there)) is is_away


def test_anti_affinity_counts_in_its_own_namespace_only() -> None:
    other = pod("p", on="n1", labels=GPT)
    other["metadata"]["namespace"] = "other"
    assert not is_kept_away(read_pod_needs(pod("w", **APART)), room(node("n1"), other))


def test_a_port_of_the_node_belongs_to_one_pod() -> None:
    one, other = pod("w"), pod("p", on="n1")
    for each in (one, other):
        each["spec"]["containers"][0]["ports"] = [{"containerPort": 80, "hostPort": 80}]
    assert is_kept_away(read_pod_needs(one), room(node("n1"), other))
    assert not is_kept_away(read_pod_needs(one), room(node("n1"), pod("q", on="n1")))


def test_a_node_without_a_pod_has_its_room() -> None:
    found = room(node("n1"), pod("p", "3", on="n1"), pod("q", "1", on="n1"))
    assert found.used["cpu"] == 4000
    assert found.without({"uid-p"}).used["cpu"] == 1000
    assert found.beside([read_pod_needs(pod("p", "3", on="n1"))]).used["cpu"] == 4000, "counted twice"
