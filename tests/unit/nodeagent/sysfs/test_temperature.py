from __future__ import annotations

from math import isfinite
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nodeagent.sysfs.temperature import Temperatures, critical_c, list_inputs, margin_c
from tests.unit.nodeagent.sysfs.tree import DISK, realistic

CPU = "device/coretemp.0"


def margins(heat: Temperatures, now_s: float = 0.0) -> dict[str, float]:
    return {each.entity: each.value for each in heat.read(Temperatures.checks, now_s)}


def test_each_device_reports_its_margin_to_the_critical_temperature(tmp_path: Path) -> None:
    realistic(tmp_path)
    heat = Temperatures(str(tmp_path))
    assert margins(heat) == {f"device/{DISK}": 46.0, CPU: 40.0}
    assert heat.left_out() == ()


def test_only_the_package_temperature_is_read_and_not_that_of_every_core(tmp_path: Path) -> None:
    realistic(tmp_path)
    assert [each.label for each in list_inputs(str(tmp_path)) if each.entity == CPU] == [
        "coretemp Package id 0"
    ]


def test_the_hottest_part_of_a_device_counts(tmp_path: Path) -> None:
    tree = realistic(tmp_path)
    tree.set("class/hwmon/hwmon0", {"temp2_input": 80000, "temp2_crit": 85000, "temp2_label": "Sensor 1"})
    (found,) = [
        each for each in Temperatures(str(tmp_path)).read(Temperatures.checks, 0.0) if each.entity != CPU
    ]
    assert (found.value, found.text) == (5.0, "nvme Sensor 1: 80 of 85 °C")


def test_malformed_and_missing_files_are_ignored(tmp_path: Path) -> None:
    tree, heat = realistic(tmp_path), Temperatures(str(tmp_path))
    margins(heat)
    tree.write("class/hwmon/hwmon0/temp1_input", "N/A")
    tree.remove("class/hwmon/hwmon1")
    assert margins(heat, 15.0) == {}


def test_a_node_without_critical_temperatures_reports_that(tmp_path: Path) -> None:
    heat = Temperatures(str(tmp_path))
    assert margins(heat) == {}
    assert [each.what for each in heat.left_out()] == ["host_temperature_margin"]


def test_implausible_critical_temperatures_are_ignored() -> None:
    for raw in (b"0", b"255000", b"65261850", b"-1000", b"N/A", None):
        assert critical_c(raw) is None
    assert critical_c(b"84850\n") == 84.85
    assert margin_c(b"-274000", 85.0) is None


@given(st.binary(max_size=20))
def test_no_bytes_make_the_parsers_of_temperatures_raise(raw: bytes) -> None:
    for found in (critical_c(raw), margin_c(raw, 85.0)):
        assert found is None or isfinite(found)
