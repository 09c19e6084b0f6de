from __future__ import annotations

import json

import pytest

from nodeagent.sensing.baselines import MAX_KEPT, ForgetRequests, Forgotten, ForgottenBaselines


def restarted(requests: ForgetRequests) -> ForgetRequests:
    return ForgetRequests(json.loads(json.dumps(requests.dump())))


def test_a_request_takes_effect_once_for_each_sensor_also_across_a_restart() -> None:
    requests = ForgetRequests()
    one, other = ForgottenBaselines(requests), ForgottenBaselines(requests)
    assert list(one.take()) == []
    requests.add(Forgotten("gpus"))
    requests.add(Forgotten("nvlinks", "gpu/a"))
    assert list(one.take()) == [Forgotten("gpus"), Forgotten("nvlinks", "gpu/a")]
    assert list(one.take()) == []
    requests = restarted(requests)
    one, other = (ForgottenBaselines(requests, each.position()) for each in (one, other))
    assert list(one.take()) == []
    assert list(other.take()) == [Forgotten("gpus"), Forgotten("nvlinks", "gpu/a")], "it hung until the end"
    requests.add(Forgotten("gpus"))
    assert list(one.take()) == list(other.take()) == [Forgotten("gpus")]


def test_a_request_that_is_added_again_after_a_crash_takes_no_effect_again() -> None:
    """The sensor saved that it took the request, but the reader's position is older."""
    requests = ForgetRequests()
    before = requests.dump()
    requests.add(Forgotten("gpus"))
    sensor = ForgottenBaselines(requests)
    assert list(sensor.take()) == [Forgotten("gpus")]
    requests = ForgetRequests(before)
    requests.add(Forgotten("gpus"))
    assert list(ForgottenBaselines(requests, sensor.position()).take()) == []


def test_the_newest_requests_wait_for_a_sensor_that_hangs() -> None:
    requests = ForgetRequests()
    for number in range(MAX_KEPT + 5):
        requests.add(Forgotten("nvlinks", f"gpu/{number}"))
        requests.add(Forgotten("gpus"))
    found = list(ForgottenBaselines(restarted(requests)).take())
    assert len(found) == MAX_KEPT
    assert found[-2:] == [Forgotten("nvlinks", f"gpu/{MAX_KEPT + 4}"), Forgotten("gpus")]


@pytest.mark.parametrize("position", [None, -1, "5", True, 2.0])
def test_a_corrupt_position_counts_as_the_start(position: object) -> None:
    requests = ForgetRequests()
    requests.add(Forgotten("gpus"))
    assert list(ForgottenBaselines(requests, position).take()) == [Forgotten("gpus")]


@pytest.mark.parametrize(
    "saved",
    [5, [], {}, {"count": "x", "kept": []}, {"count": 1, "kept": [[1, "gpus"]]}, {"count": 1, "kept": 3}],
)
def test_corrupt_requests_count_as_none(saved: object) -> None:
    assert ForgetRequests(saved).dump() == ForgetRequests().dump()


def test_a_saved_request_that_this_version_does_not_know_is_ignored() -> None:
    requests = ForgetRequests({"count": 2, "kept": [[1, "colours", ""], [2, "gpus", ""]]})
    assert list(requests.after(0)) == [(2, Forgotten("gpus"))]


def test_without_requests_there_is_nothing_to_forget() -> None:
    assert list(ForgottenBaselines(None).take()) == []
