"""What standbys reserve is charged while they have a node."""

from __future__ import annotations

from dataclasses import replace

from supervisor.cluster.standbys.account import StandbyAccount
from tests.unit.supervisor.cluster.standbys.test_plan import standby

HOUR_S = 3600.0
REQUESTS = {"cpu": 1500, "nvidia.com/gpu": 8, "memory": 1 << 30, "pods": 1}


def test_only_a_standby_with_a_node_is_charged() -> None:
    account, one = StandbyAccount(), standby(1)
    account.learn(one.uid, REQUESTS)
    account.note([one], 100.0)
    account.note([one], 100.0 + HOUR_S)
    account.note([replace(one, node="")], 100.0 + 2 * HOUR_S)
    account.note([replace(one, has_ended=True)], 100.0 + 3 * HOUR_S)
    shown = account.shown([one], (), 1, "")
    assert (shown["gpus"], shown["cores"]) == (8, "1.5")
    assert (shown["gpuHours"], shown["coreHours"]) == ("8", "1.5")


def test_the_state_of_each_standby_is_shown() -> None:
    pods = [
        standby(1),
        standby(2, is_running=False),
        replace(standby(3, is_running=False), node=""),
        standby(4, is_leaving=True),
        standby(5),
        standby(6, has_ended=True),
    ]
    shown = StandbyAccount().shown(pods, {standby(5).member}, 2, "quota")
    states = [each["state"] for each in shown["pods"]]
    assert states == ["idle", "starting", "unscheduled", "leaving", "has ranks"]
    assert (shown["wanted"], shown["problem"]) == (2, "quota")


def test_a_job_that_never_had_a_standby_shows_nothing() -> None:
    assert StandbyAccount().shown([], (), 0, "") == {}


def test_a_later_leader_goes_on_and_ignores_what_is_invalid() -> None:
    account = StandbyAccount()
    account.restore({"gpuHours": "2.5", "coreHours": "nan"})
    assert account.shown([], (), 0, "")["gpuHours"] == "2.5"
    account.restore({"gpuHours": "1", "coreHours": -1})
    shown = account.shown([], (), 0, "")
    assert (shown["gpuHours"], shown["coreHours"]) == ("2.5", "0")
