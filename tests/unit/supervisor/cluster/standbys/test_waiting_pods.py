"""A standby yields only to pods that lack room and for which the scheduler makes none."""

from __future__ import annotations

import pytest

from supervisor.admission.pod_layout import STANDBY_OF
from supervisor.cluster.standbys.waiting_pods import by_importance, found_in, kept
from tests.unit.supervisor.cluster.standbys.cluster_objects import Json, pod

LACKS = "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had untolerated taint {a: }."


@pytest.mark.parametrize(
    ("found", "lacks_room", "why"),
    [
        (pod("w", message=LACKS), True, LACKS),
        (pod("w", message="0/1 nodes are available: 1 Too many pods."), True, None),
        (pod("w"), False, ""),  # the scheduler has not tried yet
        (pod("w", message="0/3 nodes are available: 3 node(s) had untolerated taint {a: }."), False, None),
        (pod("w", message=LACKS, status={"nominatedNodeName": "n1"}), False, LACKS),
        (pod("w", message=LACKS, labels={STANDBY_OF: "gpt"}), False, LACKS),
        (
            pod("w", message=LACKS, schedulingGates=[{"name": "kueue.x-k8s.io/admission"}]),
            False,
            "the scheduling gate kueue.x-k8s.io/admission has not been removed",
        ),
    ],
)
def test_what_a_pod_waits_for(found: Json, lacks_room: bool, why: str | None) -> None:
    [waiting] = found_in([kept(found)])
    assert waiting.lacks_room is lacks_room
    assert why is None or waiting.why == why


def test_a_pod_that_is_being_deleted_does_not_count() -> None:
    found = pod("w", message=LACKS)
    found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert not found_in([kept(found)])[0].lacks_room


def test_pods_of_a_high_priority_come_first() -> None:
    pods = [kept(pod("a")), kept(pod("b", priority=5)), kept(pod("c", priority=-5))]
    found = by_importance(found_in(pods))
    assert [each.needs.name for each in found] == ["b", "a", "c"]
