"""When evictions are blocked, and how often this is reported."""

from __future__ import annotations

from unittest.mock import Mock

from supervisor.cluster.adoption.job_membership import JobKey
from supervisor.cluster.departures.evictions import JobEvictions
from supervisor.cluster.supervision.job_events import JobEvents
from supervisor.kubernetes.events import EventRecorder

KEY = JobKey("team", "llama", "uid-1", "PyTorchJob", "kubeflow.org/v1", "llama")


def test_evictions_are_blocked_until_a_member_has_connected_and_while_the_supervisor_may_be_cut_off() -> None:
    heard, cut_off = False, True
    events = JobEvents(Mock(spec=EventRecorder), KEY)
    evictions = JobEvictions(lambda _: None, lambda: heard, lambda: cut_off, events)
    assert "none of the job's members has connected" in evictions.why_blocked()
    heard = True
    assert "its network may be at fault" in evictions.why_blocked()
    cut_off = False
    assert evictions.why_blocked() == ""


def test_each_reason_becomes_one_event_until_evictions_are_possible_again() -> None:
    recorder = Mock(spec=EventRecorder)
    evictions = JobEvictions(lambda _: None, lambda: True, lambda: False, JobEvents(recorder, KEY))
    for why in ("cut off", "cut off", "", "cut off"):
        evictions.report_blocked(why)
    assert [call.args[1:] for call in recorder.record.call_args_list] == [
        ("EvictionBlocked", "cut off", "Warning")
    ] * 2
