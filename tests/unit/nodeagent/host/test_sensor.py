from __future__ import annotations

import json
from pathlib import Path

import pytest

from nodeagent.host.sensor import CHECKS, HostSensor
from nodeagent.sensing.sensor import Unavailable
from tests.unit.nodeagent.host.procs import Procs
from tests.unit.nodeagent.ticking import Ticking

PERIODS = {**dict.fromkeys(CHECKS, 15.0), "load": 5.0, "disk_used": 30.0}


def test_each_check_is_read_at_its_own_period(tmp_path: Path) -> None:
    Procs(tmp_path)
    clock = Ticking()
    sensor = HostSensor(clock, PERIODS, proc=tmp_path)
    sensor.open()
    counts: dict[str, int] = {}
    for _ in range(7):
        for each in sensor.read():
            counts[each.check] = counts.get(each.check, 0) + 1
            assert (each.source, each.at_s) == ("host", clock.at_s)
        clock.at_s += 5
    assert (counts["load"], counts["memory_used"], counts["uninterruptible"]) == (7, 3, 3)
    sensor.close()
    sensor.close()


def test_without_a_procfs_the_sensor_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="--proc"):
        HostSensor(Ticking(), PERIODS, proc=tmp_path).open()


def test_a_check_without_a_period_is_not_read(tmp_path: Path) -> None:
    Procs(tmp_path)
    sensor = HostSensor(Ticking(), {"memory_used": 15.0}, proc=tmp_path)
    assert [each.check for each in sensor.read()] == ["memory_used"]
    assert sensor.left_out() == ()


def test_the_remembered_state_is_json_and_is_restored(tmp_path: Path) -> None:
    Procs(tmp_path)
    sensor = HostSensor(Ticking(), PERIODS, proc=tmp_path)
    sensor.read()
    remembered = json.loads(json.dumps(sensor.remembered()))
    assert remembered["writable"]
    assert HostSensor(Ticking(), PERIODS, remembered, tmp_path).remembered() == remembered
