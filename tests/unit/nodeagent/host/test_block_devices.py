"""Which devices are the node's own, and what kernel lines about the others amount to."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import pytest

from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.host.block_devices import MAX_DEVICES, OF_NODE, OF_VOLUME, NodeDevices, below_by_name
from nodeagent.host.mounts import parse
from nodeagent.model import Level, Observation
from nodeagent.policy.loading import shipped
from tests.unit.nodeagent.kernel.world import LINES

POD = "/var/lib/kubelet/pods/0b1/volumes/kubernetes.io~csi/pvc/mount"
STAGED = "/var/lib/kubelet/plugins/kubernetes.io/csi/block/globalmount"
ROOT = "1 0 259:1 / / rw - ext4 /dev/nvme0n1p1 rw"
NODES_DISK = "2 1 259:9 / /data rw - xfs /dev/nvme1n1 rw"
USERS_DISK = f"3 1 259:9 / {POD} rw - xfs /dev/nvme1n1 rw"


class Tree:
    """A sysfs of block devices, and the procfs that belongs to it."""

    def __init__(self, root: Path) -> None:
        self.root, self.sys, self.proc = root, root / "sys", root / "proc"
        self.made = 0

    def add(self, path: str, number: str = "") -> Path:
        """Add the device at a path below /sys/devices, in place of one of the same name."""
        self.made += 1
        folder = self.sys / "devices" / str(self.made) / path
        folder.mkdir(parents=True)
        self._links(self.sys / "class" / ("block" if number else "nvme") / folder.name, folder)
        if number:
            self._links(self.sys / "dev/block" / number, folder)
        return folder

    def remove(self, name: str) -> None:
        for link in (*self.sys.glob("class/*/*"), *self.sys.glob("dev/block/*")):
            if link.readlink().name == name:
                link.unlink()

    def on(self, name: str, *slaves: str) -> None:
        for each in slaves:
            (self.sys / "class/block" / name / "slaves" / each).mkdir(parents=True)

    def _links(self, link: Path, folder: Path) -> None:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(folder)

    def devices(self, remembered: object = None, boot: str = "boot") -> NodeDevices:
        before = remembered if isinstance(remembered, dict) else {}
        return NodeDevices(str(self.sys), str(self.proc), boot, before)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def uses(seen: NodeDevices, *lines: str) -> dict[str, float]:
    found = seen.uses(parse("".join(f"{each}\n" for each in lines).encode()))
    return {each.entity.removeprefix("disk/"): each.value for each in found}


def own(seen: NodeDevices, *lines: str) -> set[str]:
    return {name for name, value in uses(seen, *lines).items() if value == OF_NODE}


# -- what the node's own file systems depend on


def test_the_disk_and_the_controller_of_a_partition_are_the_nodes_too(tree: Tree) -> None:
    tree.add("pci/nvme/nvme4")
    tree.add("pci/nvme/nvme4/nvme0n1", "259:0")
    tree.add("pci/nvme/nvme4/nvme0n1/nvme0n1p1", "259:1")
    assert own(tree.devices(), ROOT) == {"nvme0n1p1", "nvme0n1", "nvme4"}


def test_the_paths_of_an_nvme_device_and_their_controllers_are_the_nodes_too(tree: Tree) -> None:
    """With several paths, the number of the device is not that of its controller."""
    tree.add("virtual/nvme-subsystem/nvme-subsys0/nvme0n1", "259:1")
    tree.add("pci/nvme/nvme3/nvme0c3n1", "259:2")
    tree.add("pci/nvme/nvme5/nvme0c5n1", "259:3")
    tree.add("pci/nvme/nvme0/nvme2c0n1", "259:4")
    line = "1 0 259:1 / / rw - ext4 /dev/nvme0n1 rw"
    assert own(tree.devices(), line) == {"nvme0n1", "nvme0c3n1", "nvme3", "nvme0c5n1", "nvme5"}


def test_the_disks_below_lvm_and_the_members_of_an_array_are_the_nodes_too(tree: Tree) -> None:
    for name, number in (("sda", "8:0"), ("sdb", "8:16"), ("sdc", "8:32")):
        tree.add(f"pci/block/{name}", number)
    tree.add("pci/block/sda/sda2", "8:2")
    tree.add("virtual/block/md0", "9:0")
    tree.add("virtual/block/dm-0", "253:0")
    tree.add("virtual/block/dm-1", "253:1")
    tree.on("dm-0", "md0")
    tree.on("dm-1", "sdc")
    tree.on("md0", "sda2", "sdb")
    found = uses(
        tree.devices(),
        "1 0 253:0 / / rw - ext4 /dev/mapper/vg-root rw",
        f"2 1 253:1 / {POD} rw - ext4 /dev/mapper/luks-pvc rw",
    )
    assert {name for name, value in found.items() if value == OF_NODE} == {
        "dm-0",
        "md0",
        "sda2",
        "sda",
        "sdb",
    }
    assert {name for name, value in found.items() if value == OF_VOLUME} == {"dm-1"}


def test_all_disks_of_a_btrfs_are_the_nodes(tree: Tree) -> None:
    for name, number in (("sda", "8:0"), ("sdb", "8:16")):
        tree.add(f"pci/block/{name}", number)
        (tree.sys / "fs/btrfs/6a0e/devices" / name).mkdir(parents=True)
    assert own(tree.devices(), "1 0 0:40 /@ / rw - btrfs /dev/sda rw") == {"sda", "sdb"}


def test_a_root_whose_source_is_not_its_name_is_found_by_its_number(tree: Tree) -> None:
    tree.add("pci/block/vda", "254:0")
    assert own(tree.devices(), "1 0 254:0 / / rw - ext4 /dev/root rw") == {"vda"}


@pytest.mark.parametrize(
    "point", ["/boot/efi", "/var/lib/kubelet", "/var/lib/containerd", "/mnt/disks/a", "/run/image"]
)
def test_whatever_is_mounted_outside_the_pods_folders_is_the_nodes(tree: Tree, point: str) -> None:
    kind = "squashfs" if point == "/run/image" else "vfat"
    assert own(tree.devices(), f"1 0 8:1 / {point} rw - {kind} /dev/sda1 rw") == {"sda1", "sda"}


def test_swap_is_the_nodes(tree: Tree) -> None:
    tree.add("pci/block/sdb", "8:16")
    tree.add("virtual/block/dm-5", "253:5")
    tree.on("dm-5", "sdb")
    (tree.sys / "class/block/dm-5/dm").mkdir()
    (tree.sys / "class/block/dm-5/dm/name").write_text("vg-swap\n")
    tree.proc.mkdir()
    (tree.proc / "swaps").write_text(
        "Filename Type Size Used Priority\n/dev/mapper/vg-swap partition 8 0 -2\n"
        "/dev/sdc3 partition 8 0 -3\n/swap\\040file file 8 0 -4\n"
    )
    assert own(tree.devices()) == {"dm-5", "sdb", "sdc3", "sdc"}


def test_file_systems_without_a_block_device_name_none(tree: Tree) -> None:
    lines = (
        "1 0 0:50 / /proc rw - proc proc rw",
        "2 0 0:51 / /mnt rw - fuse.gcsfuse /dev/fuse rw",
        "3 0 0:52 / /pool rw - zfs tank/data rw",
    )
    assert uses(tree.devices(), *lines) == {}


def test_a_disk_that_the_node_and_pods_mount_is_the_nodes_in_either_order(tree: Tree) -> None:
    for lines in permutations((NODES_DISK, USERS_DISK)):
        assert own(tree.devices(), *lines) == {"nvme1n1", "nvme1"}


@pytest.mark.parametrize(
    ("name", "below"),
    [
        ("sda", []), ("sdaa12", ["sdaa"]), ("xvdf1", ["xvdf"]), ("mmcblk0p2", ["mmcblk0"]),
        ("md127p1", ["md127"]),
        ("md127", []), ("dm-3", []), ("nvme3n1p2", ["nvme3n1"]), ("nvme3n1", ["nvme3"]), ("nvme3", []),
        ("nvme0c5n1", ["nvme5"]), ("vda", []), ("vda1", ["vda"]),
    ],
)  # fmt: skip
def test_without_sysfs_a_name_shows_the_disk_and_the_controller(name: str, below: list[str]) -> None:
    assert below_by_name(name) == below


# -- what the agent remembers


def test_a_disk_remains_the_nodes_when_it_dies_and_also_after_a_restart_but_not_after_a_boot(
    tree: Tree,
) -> None:
    tree.add("pci/nvme/nvme7")
    tree.add("pci/nvme/nvme7/nvme1n1", "259:9")
    seen = tree.devices()
    everything = {"nvme1n1", "nvme7"}
    assert own(seen, NODES_DISK) == everything
    tree.remove("nvme1n1")
    tree.remove("nvme7")
    assert own(seen, NODES_DISK) >= everything, "it is still mounted"
    remembered = {"own": json.loads(json.dumps(seen.remembered())), "boot_id": "boot"}
    assert own(seen) >= everything, "systemd has unmounted it"
    assert own(seen, USERS_DISK) >= everything, "a pod still has it mounted"
    assert own(tree.devices(remembered)) >= everything
    assert own(tree.devices(remembered, boot="next")) == set()


def test_another_device_of_the_same_name_is_not_the_nodes(tree: Tree) -> None:
    tree.add("pci/nvme/nvme1")
    tree.add("pci/nvme/nvme1/nvme1n1", "259:9")
    seen = tree.devices()
    assert own(seen, NODES_DISK) == {"nvme1n1", "nvme1"}
    tree.add("pci/nvme/nvme1")
    tree.add("pci/nvme/nvme1/nvme1n1", "259:9")
    assert uses(seen) == {"nvme1n1": OF_VOLUME, "nvme1": OF_VOLUME}
    assert uses(seen) == {}, "it is reported once"
    assert uses(seen, USERS_DISK) == {"nvme1n1": OF_VOLUME}


def test_without_sysfs_the_newest_mount_of_a_name_counts(tree: Tree) -> None:
    seen = tree.devices()
    assert own(seen, NODES_DISK) == {"nvme1n1", "nvme1"}
    assert uses(seen, USERS_DISK)["nvme1n1"] == OF_VOLUME
    assert own(seen, NODES_DISK) == {"nvme1n1", "nvme1"}


def test_thousands_of_devices_are_bounded_and_the_nodes_come_first(tree: Tree) -> None:
    lines = [f"{n} 1 8:{n} / {POD}{n} rw - ext4 /dev/sd{n}x rw" for n in range(MAX_DEVICES + 99)]
    seen = tree.devices()
    found = uses(seen, *lines, ROOT)
    assert list(found.values()).count(OF_VOLUME) == MAX_DEVICES
    assert own(seen, *lines, ROOT) == {"nvme0n1p1", "nvme0n1", "nvme0"}
    for n in range(MAX_DEVICES):
        own(seen, f"{n} 1 8:{n} / /m{n} rw - ext4 /dev/sd{n}x rw", ROOT)
    assert len(seen.remembered()) == MAX_DEVICES
    assert "nvme0" in seen.remembered()


# -- what the lines amount to, in every order

LOST = {
    "nvme1": "nvme nvme1: Disabling device after reset failure: -19",
    "nvme1n1": "XFS (nvme1n1): Log I/O Error (0x2) detected at x+0x1/0x2.  Shutting down filesystem.",
    "sdb": "XFS (sdb): Corruption of in-memory data (0x8) detected at x+0x1/0x2.  Shutting down filesystem.",
    "nvme7n1": "block nvme7n1: no available path - failing I/O",
}


@pytest.mark.parametrize("device", LOST)
@pytest.mark.parametrize("order", [*permutations(("line", "look", "restart"))])
@pytest.mark.parametrize("mount", [NODES_DISK, USERS_DISK, ""])
def test_only_a_line_about_the_nodes_own_device_is_unhealthy_in_whatever_order_it_is_learnt(
    tree: Tree, device: str, order: tuple[str, ...], mount: str
) -> None:
    tree.add("pci/nvme/nvme1")
    tree.add("pci/nvme/nvme1/nvme1n1", "259:9")
    policy = shipped()
    made, seen, at_s = Evaluator(policy), tree.devices(), 10.0
    made.add(Observation(0.0, "boot", "node", "agent"))
    [line] = LINES.read(LOST[device])
    for each in order:
        at_s += 1.0
        if each == "line":
            made.add(line.at(5.0, "kmsg"))
        elif each == "look":
            for use in seen.uses(parse(f"{ROOT}\n{mount}\n".encode())):
                made.add(Observation(at_s, use.check, use.entity, "host", use.value))
        else:
            saved = json.loads(json.dumps(made.dump()))
            made = Evaluator(policy)
            made.load(saved)
            seen = tree.devices({"own": seen.remembered(), "boot_id": "boot"})
    [found] = made.findings(at_s)
    is_nodes = mount == NODES_DISK and device.startswith("nvme1")
    assert found.level is (Level.UNHEALTHY if is_nodes else Level.DEGRADED)


def test_a_device_of_the_boot_before_is_not_the_nodes_in_this_one() -> None:
    """A boot may give its name to a user's volume, which no mount shows if it fails while being mounted."""
    made = Evaluator(shipped())
    use = Observation(10.0, "user_volume", "disk/sdb", "host", OF_NODE)
    [line] = LINES.read(LOST["sdb"])
    for each in (use, Observation(100.0, "boot", "node", "agent"), line.at(101.0, "kmsg")):
        made.add(each)
    assert [each.level for each in made.findings(102.0)] == [Level.DEGRADED]
    made.add(Observation(130.0, "user_volume", "disk/sdb", "host", OF_NODE))
    assert [each.level for each in made.findings(131.0)] == [Level.UNHEALTHY]
