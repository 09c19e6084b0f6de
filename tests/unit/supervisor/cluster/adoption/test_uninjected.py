"""Every pod that requests Holdfast and runs without it has a reason."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from supervisor.admission import pod_layout
from supervisor.admission.injection import MAX_WHY, InjectionContext, Refused, inject
from supervisor.cluster.adoption.uninjected import MISSED, NO_ROOM, uninjected, was_missed
from supervisor.kubernetes.events import api_time

NOW = datetime(2026, 11, 26, 5, 10, 48, tzinfo=timezone.utc)
ASKS = {pod_layout.INJECT: "true"}


def pod(annotations: dict[str, str] | None, phase: str = "Running", age_s: float = 0.0) -> dict[str, Any]:
    created = api_time(NOW - timedelta(seconds=age_s))
    metadata = {"name": "p", "namespace": "team", "uid": "u-1", "creationTimestamp": created}
    return {"metadata": {**metadata, "annotations": annotations}, "status": {"phase": phase}}


def why(found: dict[str, Any]) -> str | None:
    made = uninjected(found, api_time(NOW - timedelta(seconds=100)))
    return made.why if made else None


@pytest.mark.parametrize("annotations", [None, {}, {pod_layout.INJECT: "false"}])
def test_a_pod_that_does_not_request_holdfast_has_no_reason(annotations: dict[str, str] | None) -> None:
    assert why(pod(annotations)) is None


def test_the_reason_is_that_of_the_webhook_or_else_that_it_was_not_asked() -> None:
    assert why(pod({**ASKS, pod_layout.NOT_INJECTED: "no command"})) == "no command"
    assert why(pod(ASKS)) == MISSED


def test_the_reason_is_about_the_pod_itself_and_not_longer_than_the_webhook_writes() -> None:
    found = uninjected(pod({**ASKS, pod_layout.NOT_INJECTED: "x" * 200_000}), api_time(NOW))
    assert found is not None
    assert len(found.why) == MAX_WHY
    assert found.pod == {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "team", "uid": "u-1"},
    }


def test_a_pod_whose_annotations_have_no_room_for_the_reason_was_not_missed() -> None:
    full = {**ASKS, "filler": "x" * ((256 << 10) - 50)}
    given = pod(full)
    found = inject({**given, "spec": {}}, InjectionContext("holdfast:dev", "0.1.0"))
    assert isinstance(found, Refused)
    assert not found.patch
    assert why(given) == NO_ROOM


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_has_a_reason_while_it_is_recent(phase: str) -> None:
    assert why(pod(ASKS, phase, age_s=99)) == MISSED
    assert why(pod(ASKS, phase, age_s=101)) is None
    assert why(pod(ASKS, age_s=1_000_000)) == MISSED


def test_a_pod_was_missed_only_if_the_webhook_left_no_trace() -> None:
    assert was_missed(pod(ASKS))
    assert not was_missed(pod({}))
    assert not was_missed(pod({**ASKS, pod_layout.NOT_INJECTED: "no command"}))
    assert not was_missed(pod({**ASKS, pod_layout.INJECTED: "{}"}))
    ended, leaving = pod(ASKS), pod(ASKS)
    ended["status"] = {"phase": "Failed"}
    leaving["metadata"]["deletionTimestamp"] = api_time(NOW)
    assert not was_missed(ended)
    assert not was_missed(leaving)
