from __future__ import annotations

import json
from pathlib import Path

from nodeagent.sysfs.pci import PciDevices
from tests.unit.nodeagent.sysfs.tree import ADAPTERS, BRIDGES, DISK, GPU, realistic

LINK = frozenset({"device_pcie_link"})


def values(devices: PciDevices, due: frozenset[str], now_s: float = 0.0) -> dict[tuple[str, str], float]:
    return {(each.check, each.entity): each.value for each in devices.read(due, now_s)}


def test_every_device_has_its_counters_and_network_adapters_and_drives_have_their_link(
    tmp_path: Path,
) -> None:
    realistic(tmp_path)
    found = values(PciDevices(str(tmp_path), {}), PciDevices.checks)
    every = {f"device/{each}" for each in (*ADAPTERS, *BRIDGES, GPU, DISK)}
    for check in ("aer_fatal", "aer_nonfatal", "aer_correctable"):
        assert {entity: value for (name, entity), value in found.items() if name == check} == dict.fromkeys(
            every, 0.0
        )
    links = {entity: value for (name, entity), value in found.items() if name == "device_pcie_link"}
    assert links == {f"device/{each}": 1.0 for each in (*ADAPTERS, DISK)}


def test_a_counter_that_falls_is_reported_unchanged(tmp_path: Path) -> None:
    tree, devices = realistic(tmp_path), PciDevices(str(tmp_path), {})
    for n, count in enumerate((0, 7, 2)):
        tree.aer(GPU, "correctable", count)
        found = values(devices, frozenset({"aer_correctable"}), 5.0 * n)
        assert found["aer_correctable", f"device/{GPU}"] == count


def test_a_link_that_loses_lanes_is_reported_even_after_a_restart(tmp_path: Path) -> None:
    tree, devices = realistic(tmp_path), PciDevices(str(tmp_path), {})
    values(devices, LINK)
    remembered = json.loads(json.dumps(devices.remembered()))
    tree.write(f"bus/pci/devices/{DISK}/current_link_width", 1)
    for each in (devices, PciDevices(str(tmp_path), remembered)):
        assert values(each, LINK, 5.0)["device_pcie_link", f"device/{DISK}"] == 0.25


def test_another_device_in_the_same_slot_is_not_compared_with_the_old_one(tmp_path: Path) -> None:
    tree, devices = realistic(tmp_path), PciDevices(str(tmp_path), {})
    values(devices, LINK)
    tree.write(f"bus/pci/devices/{DISK}/current_link_width", 2)
    tree.write(f"bus/pci/devices/{DISK}/device", "0x9999")
    found = values(PciDevices(str(tmp_path), devices.remembered()), LINK)
    assert found["device_pcie_link", f"device/{DISK}"] == 1.0


def test_an_adapter_with_fewer_lanes_than_its_twin_is_reported_at_the_first_read(tmp_path: Path) -> None:
    tree = realistic(tmp_path)
    tree.write(f"bus/pci/devices/{ADAPTERS[1]}/current_link_width", 8)
    found = values(PciDevices(str(tmp_path), {}), LINK)
    assert found["device_pcie_link", f"device/{ADAPTERS[1]}"] == 0.5
    assert found["device_pcie_link", f"device/{ADAPTERS[0]}"] == 1.0


def test_a_device_that_vanishes_between_two_reads_is_ignored(tmp_path: Path) -> None:
    tree, devices = realistic(tmp_path), PciDevices(str(tmp_path), {})
    values(devices, PciDevices.checks)
    where = (tmp_path / f"bus/pci/devices/{GPU}").resolve()
    tree.remove(str(where.relative_to(tmp_path.resolve())))
    found = values(devices, PciDevices.checks, 5.0)
    assert f"device/{GPU}" not in {entity for _, entity in found}
    assert f"device/{DISK}" in {entity for _, entity in found}


def test_a_node_without_error_counters_reports_that(tmp_path: Path) -> None:
    tree = realistic(tmp_path)
    devices = PciDevices(str(tmp_path), {})
    values(devices, PciDevices.checks)
    assert devices.left_out() == ()
    for path in tmp_path.rglob("aer_dev_*"):
        tree.remove(str(path.relative_to(tmp_path)))
    bare = PciDevices(str(tmp_path), {})
    values(bare, PciDevices.checks)
    assert [each.what for each in bare.left_out()] == ["aer"]
