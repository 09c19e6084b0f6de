from __future__ import annotations

from dataclasses import replace

from nodeagent.agent.agent import Published
from nodeagent.agent.sensor_threads import NOT_YET, SensorStatus
from nodeagent.cli import rendering
from nodeagent.evaluation.evaluator import verdicts
from nodeagent.sensing.sensor import Omission
from nodeagent.server import report

OPERATOR = SensorStatus("operator", True, "", 9, 0, 0.0, False)
HOST = SensorStatus("host", True, "", 3, 20, 0.0, False)
BLIND = SensorStatus("sysfs", False, "it is not mounted", 1, 0, 0.0, False)
NO_GPU = SensorStatus("nvml-polling", False, "no driver", 1, 0, 0.0, False, nothing_there=True)
SLOW = SensorStatus("host", False, NOT_YET, 0, 0, 2.0, True)


def checked(
    *sensors: SensorStatus, questions: tuple[tuple[str, str, str], ...] = (), allow_blind: bool = False
) -> tuple[str, list[str]]:
    published = Published(1.0, verdicts([], ["node"]), sensors)
    found = report.check_report(published, {"node": "n"}, questions, 2.0, allow_blind=allow_blind)
    assert found["level"] in rendering.render_health(found)[0]
    return found["level"], [each["why"] for each in found["undecided"]]


def test_a_node_that_was_observed_is_healthy() -> None:
    assert checked(HOST, NO_GPU, OPERATOR) == ("healthy", [])


def test_a_node_on_which_nothing_was_observed_is_unknown_unless_that_is_allowed() -> None:
    assert checked(NO_GPU, OPERATOR) == ("unknown", ["no sensor has observed anything in 2 s"])
    level, whys = checked(BLIND, OPERATOR)
    assert (level, whys[0]) == ("unknown", "it is not mounted")
    assert checked(BLIND, OPERATOR, allow_blind=True)[0] == "healthy"


def test_a_check_that_could_not_be_judged_is_unknown_even_if_blind_sensors_are_allowed() -> None:
    question = ("driver", "nvml", "not for 60 s yet")
    assert checked(HOST, questions=(question,), allow_blind=True) == ("unknown", ["not for 60 s yet"])


def test_a_state_that_could_not_be_read_is_undecided_even_if_blind_sensors_are_allowed() -> None:
    published = Published(1.0, verdicts([], ["node"]), (HOST,))
    for allow_blind in (False, True):
        found = report.check_report(published, {}, (), 2.0, unread=["it is torn"], allow_blind=allow_blind)
        assert found["level"] == "unknown"
        assert found["undecided"] == [{"entity": "sensor/memory", "check": "", "why": "it is torn"}]


def test_without_the_saved_state_a_node_that_is_watched_is_not_called_healthy() -> None:
    published = Published(1.0, verdicts([], ["node"]), (HOST,), problems=("it is torn",))
    found = report.watch_report(published, {"node": "n"}, ["it is torn"])
    lines = rendering.render_health(found)
    assert lines[0] == "n: unknown, 1 check could not be evaluated"
    assert lines[lines.index("not evaluated:") + 1] == "unknown    sensor/memory  it is torn"
    assert rendering.render_health(report.watch_report(published, {"node": "n"}, []))[0] == (
        "n: healthy, nothing to do"
    )


def test_a_sensor_that_has_not_answered_is_listed_with_the_time_given() -> None:
    assert "it has not answered in 2 s" in checked(SLOW, OPERATOR)[1]


def test_what_was_not_judged_is_a_table() -> None:
    published = Published(1.0, verdicts([], ["node"]), (HOST, BLIND))
    found = report.check_report(published, {}, (("driver", "nvml", "not yet"),), 2.0)
    lines = rendering.render_health(found)
    at = lines.index("not evaluated within 2 s:")
    assert lines[at + 1 : at + 3] == [
        "unknown    driver nvml   not yet",
        "unknown    sensor/sysfs  it is not mounted",
    ]


def test_what_a_sensor_may_still_see_is_undecided_and_what_it_never_sees_is_only_left_out() -> None:
    asleep = Omission("uninterruptible", "a thread is asleep", is_open=True)
    busy = Omission("gpu/0000:3b:00.0", "its Xids are not reported: TIMEOUT", is_open=True)
    never = Omission("aer", "the kernel has no counters")
    sensor = replace(HOST, left_out=(asleep, busy, never))
    assert checked(replace(HOST, left_out=(never,))) == ("healthy", [])
    for allow_blind in (False, True):
        assert checked(sensor, allow_blind=allow_blind) == ("unknown", [asleep.why, busy.why])
    found = report.check_report(Published(1.0, verdicts([], ["node"]), (sensor,)), {}, (), 2.0)
    assert [(each["entity"], each["check"]) for each in found["undecided"]] == [
        ("node", "uninterruptible"),
        ("gpu/0000:3b:00.0", ""),
    ]
