from __future__ import annotations

from pathlib import Path

import pytest

from nodeagent.nvml.driver import branch_of
from nodeagent.nvml.inventory import driver_load, gpus_on_bus


def device(sysfs: Path, address: str, vendor: str, kind: str) -> None:
    folder = sysfs / "bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


def test_gpus_are_display_devices_of_nvidia(tmp_path: Path) -> None:
    device(tmp_path, "0000:3b:00.0", "0x10de", "0x030200")
    device(tmp_path, "0000:01:00.0", "0x10de", "0x030000")
    device(tmp_path, "0000:05:00.0", "0x10de", "0x068000")  # an NVSwitch
    device(tmp_path, "0000:01:00.1", "0x10de", "0x040300")  # a GPU's audio
    device(tmp_path, "0000:00:02.0", "0x8086", "0x030000")
    (tmp_path / "bus/pci/devices/0000:09:00.0").mkdir()
    assert gpus_on_bus(tmp_path) == ("0000:01:00.0", "0000:3b:00.0")


def test_a_machine_without_pci_has_no_gpus(tmp_path: Path) -> None:
    assert gpus_on_bus(tmp_path) == ()


def test_a_reloaded_module_has_another_load_id(tmp_path: Path) -> None:
    module = tmp_path / "module/nvidia"
    assert driver_load(tmp_path) == ""
    module.mkdir(parents=True)
    first = driver_load(tmp_path)
    assert first == driver_load(tmp_path) != ""
    module.rename(tmp_path / "before")  # keeps the inode number in use
    module.mkdir()
    assert driver_load(tmp_path) not in ("", first)


@pytest.mark.parametrize(
    ("version", "branch"),
    [("575.57.08", 575), ("610", 610), ("", None), ("r575.1", None), ("²75.1", None), ("9" * 5000, None)],
)
def test_the_branch_is_the_first_number_of_the_version(version: str, branch: int | None) -> None:
    assert branch_of(version) == branch
