from __future__ import annotations

from holdfast.node_report import REPORT, REPORT_AT
from nodeagent.publishing.conditions import GPU, TRAINING, NodeCondition, starting
from nodeagent.publishing.node_patch import Transitions, microseconds, node_patch

HEALTHY = tuple(NodeCondition(each, "True", "Healthy", "Well.") for each in (GPU, TRAINING))


def test_a_transition_keeps_its_time_until_the_status_changes() -> None:
    first = Transitions().after(HEALTHY, 1000.0)
    later = first.after(HEALTHY, 2000.0)
    assert later == first
    assert later.after(starting(), 3000.0).since_s[GPU] == ("Unknown", 3000.0)


def test_the_patch_has_both_conditions_and_the_annotations() -> None:
    transitions = Transitions().after(HEALTHY, 1000.0)
    patch = node_patch(HEALTHY, transitions, 1795270041.25, '{"schema":1}')
    assert patch["metadata"] == {
        "annotations": {REPORT: '{"schema":1}', REPORT_AT: "2026-11-21T14:07:21.250000Z"}
    }
    assert patch["status"]["conditions"][0] == {
        "type": GPU, "status": "True", "reason": "Healthy", "message": "Well.",
        "lastHeartbeatTime": "2026-11-21T14:07:21Z", "lastTransitionTime": "1970-01-01T00:16:40Z",
    }  # fmt: skip
    assert [each["type"] for each in patch["status"]["conditions"]] == [GPU, TRAINING]


def test_without_a_report_the_published_one_ages() -> None:
    patch = node_patch(starting(), Transitions().after(starting(), 1.0), 1.0, None)
    assert patch.keys() == {"status"}


def test_the_time_has_microseconds() -> None:
    assert microseconds(0.0) == "1970-01-01T00:00:00.000000Z"
