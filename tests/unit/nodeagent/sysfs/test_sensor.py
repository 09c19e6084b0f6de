from __future__ import annotations

import json
from math import isfinite
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sensing.baselines import ForgetRequests, Forgotten
from nodeagent.sensing.sensor import Unavailable
from nodeagent.sensing.sweep import LIST_S
from nodeagent.sysfs.sensor import CHECKS, SysfsSensor
from tests.unit.nodeagent.sysfs.tree import ADAPTERS, realistic
from tests.unit.nodeagent.ticking import Ticking

PERIODS = {**dict.fromkeys(CHECKS, 5.0), "device_pcie_link": 30.0, "host_temperature_margin": 15.0}


def test_on_a_healthy_node_each_check_is_read_at_its_own_period(tmp_path: Path) -> None:
    realistic(tmp_path)
    clock = Ticking()
    sensor = SysfsSensor(clock, PERIODS, root=tmp_path)
    sensor.open()
    counts: dict[str, set[float]] = {}
    for _ in range(7):
        for each in sensor.read():
            counts.setdefault(each.check, set()).add(each.at_s)
            assert each.source == "sysfs"
        clock.at_s += 5
    assert set(counts) == CHECKS
    assert {check: len(times) for check, times in counts.items()} == {
        **dict.fromkeys(CHECKS, 7), "device_pcie_link": 2, "host_temperature_margin": 3,
    }  # fmt: skip
    assert sensor.left_out() == ()
    sensor.close()
    sensor.close()


def test_without_a_sysfs_the_sensor_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="--sys"):
        SysfsSensor(Ticking(), PERIODS, root=tmp_path).open()


def test_the_remembered_state_is_json_and_is_restored(tmp_path: Path) -> None:
    realistic(tmp_path)
    forgets = ForgetRequests()
    forgets.add(Forgotten("gpus"))
    clock = Ticking()
    sensor = SysfsSensor(clock, PERIODS, root=tmp_path, forgets=forgets)
    for clock.at_s in (0.0, LIST_S):
        sensor.read()
    remembered = json.loads(json.dumps(sensor.remembered()))
    assert all(remembered.values())
    assert SysfsSensor(Ticking(), PERIODS, remembered, tmp_path).remembered() == remembered


@pytest.mark.parametrize(
    "garbage",
    [
        {},
        {"port_gbps": 5, "link_widths": [], "net_up": "x"},
        {"net_up": {"a": 1}},
        {"known_ports": {"a": ["k", 5, True], "b": "x"}, "device_counts": {"m": "two"}, "known_devices": [1]},
        {"port_roster": {"most": 8, "places": {"a": ["e", "x"], "b": [1, 2], "c": 5}, "accepted": [7]}},
        {"port_roster": {"most": "8", "places": {"a": ["e", "/\0/0000:3b:00.0"]}, "accepted": "x"}},
    ],
)
def test_corrupt_remembered_data_is_ignored(tmp_path: Path, garbage: dict[str, object]) -> None:
    nothing: dict[str, object] = {
        "link_widths": {}, "port_gbps": {}, "port_counts": {}, "net_up": [], "forgets_done": 0,
        "boot_id": "boot", "port_roster": {"most": 0, "places": {}, "accepted": []},
        "known_devices": {}, "known_ports": {}, "known_interfaces": {}, "device_counts": {},
    }  # fmt: skip
    assert SysfsSensor(Ticking(), PERIODS, garbage, tmp_path).remembered() == nothing


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Path, bytes]]:
    root = tmp_path_factory.mktemp("sys")
    realistic(root)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return root, {path: path.read_bytes() for path in files}


@given(st.data())
def test_no_content_of_any_file_makes_the_sensor_raise(
    node: tuple[Path, dict[Path, bytes]], data: st.DataObject
) -> None:
    root, files = node
    clock = Ticking()
    sensor = SysfsSensor(clock, PERIODS, root=root)
    changed: set[Path] = set()
    try:
        for _ in range(2):
            for path in data.draw(st.lists(st.sampled_from(list(files)), max_size=8)):
                changed.add(path)
                path.write_bytes(data.draw(st.binary(max_size=24)))
            assert all(isfinite(each.value) for each in sensor.read())
            json.dumps(sensor.remembered(), allow_nan=False)
            clock.at_s += 60
    finally:
        for path in changed:
            path.write_bytes(files[path])


@pytest.mark.parametrize(
    ("baseline", "entity", "changed"),
    [
        ("pcie-widths", f"device/{ADAPTERS[0]}", ("link_widths",)),
        ("ports", "port/mlx5_0/1", ("port_gbps", "port_roster")),
        ("interfaces", "net/ib0", ("net_up",)),
    ],
)
def test_a_baseline_is_forgotten_of_one_entity_or_of_all(
    tmp_path: Path, baseline: str, entity: str, changed: tuple[str, ...]
) -> None:
    other = changed[0]
    realistic(tmp_path / "sys")
    clock = Ticking()
    forgets = ForgetRequests()
    sensor = SysfsSensor(clock, PERIODS, root=tmp_path / "sys", forgets=forgets)
    sensor.read()
    before = sensor.remembered()
    assert len(before[other]) >= 2
    forgets.add(Forgotten(baseline, entity))
    sensor.read()  # nothing is due, so that nothing is learned again
    after = sensor.remembered()
    assert len(after[other]) == len(before[other]) - 1
    assert {k: v for k, v in after.items() if k not in (*changed, "forgets_done")} == {
        k: v for k, v in before.items() if k not in (*changed, "forgets_done")
    }
    forgets.add(Forgotten(baseline))
    sensor.read()
    assert not sensor.remembered()[other]


def test_what_a_port_counts_during_a_boot_is_no_growth(tmp_path: Path) -> None:
    tree = realistic(tmp_path)
    name = "class/infiniband/mlx5_0/ports/1/counters/link_downed"
    sensor = SysfsSensor(Ticking(boot="one"), PERIODS, root=tmp_path)

    def count(sensor: SysfsSensor) -> float:
        found = {(each.check, each.entity): each.value for each in sensor.read()}
        return found["ib_link_downed", "port/mlx5_0/1"]

    before = count(sensor)
    remembered = json.loads(json.dumps(sensor.remembered()))
    tree.write(name, 2)
    assert count(SysfsSensor(Ticking(boot="one"), PERIODS, remembered, tmp_path)) == before + 2
    after, clock = json.loads(json.dumps(remembered)), Ticking(boot="two")
    booted = SysfsSensor(clock, PERIODS, after, tmp_path)
    assert count(booted) == before
    tree.write(name, 3)
    clock.at_s += 5
    assert count(booted) == before + 1
    del remembered["boot_id"]  # by an earlier version
    assert count(SysfsSensor(Ticking(boot="two"), PERIODS, remembered, tmp_path)) == before + 3
