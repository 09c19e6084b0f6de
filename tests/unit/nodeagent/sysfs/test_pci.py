from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.sysfs import pci
from tests.unit.nodeagent.sysfs.tree import ADAPTERS, BRIDGES, DISK, GPU, Tree, realistic


def test_network_adapters_nvme_drives_and_gpus_are_checked_with_the_bridges_above_them(
    tmp_path: Path,
) -> None:
    realistic(tmp_path)
    found = {each.address: each.kind for each in pci.list_devices(str(tmp_path))}
    assert found == {
        **dict.fromkeys(ADAPTERS, pci.NETWORK), **dict.fromkeys(BRIDGES, pci.BRIDGE),
        GPU: pci.GPU, DISK: pci.NVME,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (0x020000, pci.NETWORK), (0x020700, pci.NETWORK), (0x010802, pci.NVME), (0x030200, pci.GPU),
        (0x120000, pci.GPU), (0x12FF00, pci.GPU), (0x010601, ""), (0x060400, ""), (0x068000, ""),
        (0x0C0330, ""), (None, ""), (0x02000000, ""), (-1, ""),
    ],
)  # fmt: skip
def test_the_class_determines_the_kind_of_a_device(code: int | None, what: str) -> None:
    assert pci.device_kind(code) == what


def test_virtual_functions_are_ignored(tmp_path: Path) -> None:
    tree = realistic(tmp_path)
    path = tree.pci("0000:3b:00.2", "0x020700", above=BRIDGES[0])
    (tmp_path / path / "physfn").symlink_to(tmp_path / path)
    assert "0000:3b:00.2" not in {each.address for each in pci.list_devices(str(tmp_path))}


def test_the_full_width_is_the_smaller_maximum_of_device_and_port(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.pci("0000:00:01.0", "0x060400", most=8)
    tree.pci("0000:01:00.0", "0x020000", above="0000:00:01.0", most=16)
    found = {each.address: each.width for each in pci.list_devices(str(tmp_path))}
    assert found["0000:01:00.0"] == 8


def test_malformed_content_in_the_tree_is_ignored(tmp_path: Path) -> None:
    tree = realistic(tmp_path)
    (tmp_path / "bus/pci/devices/dangling").symlink_to(tmp_path / "nowhere")
    tree.write("bus/pci/devices/0000:99:00.0/class", b"\xff\xfe")
    tree.write(f"bus/pci/devices/{DISK}/class", b"N/A")
    tree.write(f"bus/pci/devices/{GPU}/max_link_width", b"")
    found = {each.address for each in pci.list_devices(str(tmp_path))}
    assert found == {*ADAPTERS, *BRIDGES, GPU}


def test_a_path_belongs_to_the_nearest_pci_device() -> None:
    path = "/sys/devices/pci0000:00/0000:00:01.0/0000:02:00.0/nvme/nvme0"
    assert pci.nearest_address(path) == "0000:02:00.0"
    assert pci.bridges_above("/sys/devices/pci0000:00/0000:00:01.0/0000:02:00.0") == [
        "/sys/devices/pci0000:00/0000:00:01.0"
    ]
    assert pci.nearest_address("/sys/devices/platform/coretemp.0") == ""
