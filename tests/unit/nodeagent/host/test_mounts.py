from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodeagent.host.mounts import MAX_LOCAL, MAX_NAMED, parse, select


def line(
    point: str, kind: str, device: str = "8:1", root: str = "/", source: str = "/dev/x", sb: str = "rw"
) -> bytes:
    return f"36 35 {device} {root} {point} rw,noatime shared:1 - {kind} {source} {sb}\n".encode()


def local(*lines: bytes) -> list[str]:
    return [each.point for each in select(parse(b"".join(lines))).local]


def left_out(*lines: bytes) -> dict[str, str]:
    return {each.what: each.why for each in select(parse(b"".join(lines))).left_out}


def test_local_file_systems_are_checked_and_images_and_pseudo_file_systems_are_not() -> None:
    lines = [line("/", "ext4"), *(line(f"/m{n}", kind, f"0:{n}") for n, kind in enumerate(
        ("squashfs", "iso9660", "overlay", "tmpfs", "proc", "cgroup2", "autofs")
    ))]  # fmt: skip
    assert local(*lines) == ["/"]
    assert left_out(*lines) == {}


def test_network_mounts_and_unknown_types_are_named_and_not_accessed() -> None:
    lines = [line("/", "ext4"), *(line(f"/{kind}", kind, f"0:{n}") for n, kind in enumerate(
        ("nfs4", "lustre", "fuse.gcsfuse", "fancyfs")
    ))]  # fmt: skip
    assert local(*lines) == ["/"]
    assert set(left_out(*lines)) == {"disk//nfs4", "disk//lustre", "disk//fuse.gcsfuse", "disk//fancyfs"}


def test_a_local_mount_below_a_network_mount_is_omitted_because_its_path_may_block() -> None:
    lines = [
        line("/home", "nfs4", "0:9"),
        line("/home/scratch", "xfs", "8:2"),
        line("/homework", "xfs", "8:3"),
    ]
    assert local(*lines) == ["/homework"]
    assert "below /home/" in left_out(*lines)["disk//home/scratch"]


def test_a_node_whose_root_is_on_a_server_still_checks_its_disks() -> None:
    lines = [line("/", "nfs4", "0:9"), line("/scratch", "xfs")]
    assert local(*lines) == ["/scratch"]


def test_a_bind_mount_or_subvolume_is_the_same_file_system_and_checked_once() -> None:
    lines = [
        line("/b", "ext4", root="/var/lib"), line("/data", "ext4"), line("/d", "ext4", root="/x"),
        line("/home", "btrfs", "0:40", "/@home"), line("/var/log", "btrfs", "0:40", "/@log"),
    ]  # fmt: skip
    assert local(*lines) == ["/data", "/home"]


def test_of_two_mounts_at_one_path_the_later_is_checked() -> None:
    assert local(line("/mnt", "ext4", "8:1"), line("/mnt", "xfs", "8:2")) == ["/mnt"]
    assert local(line("/mnt", "ext4", "8:1"), line("/mnt", "tmpfs", "0:2")) == []


def test_file_systems_that_only_upgrades_write_to_are_not_checked() -> None:
    assert local(
        line("/boot", "ext4"), line("/boot/efi", "vfat", "8:2"), line("/bootstrap", "xfs", "8:3")
    ) == ["/bootstrap"]


def test_a_read_only_mount_does_not_make_its_file_system_read_only() -> None:
    (found,) = parse(b"36 35 8:1 / /a ro,noatime - ext4 /dev/x rw,errors=remount-ro\n")
    assert not found.read_only
    for options in ("ro", "ro,relatime", "rw,emergency_ro", "rw,shutdown"):
        (found,) = parse(line("/a", "ext4", sb=options))
        assert found.read_only


def test_escaped_blanks_are_decoded_and_unprintable_characters_replaced() -> None:
    (found,) = parse(b"36 35 8:1 / /a\\040b\\012\\377 rw - ext4 /dev/x rw\n")
    assert found.point == "/a b\n\udcff"
    assert found.entity == "disk//a b?\ufffd"


PODS = "/var/lib/kubelet/pods/0b1/volumes"


@pytest.mark.parametrize(
    ("point", "source", "volume", "device"),
    [
        ("/data", "/dev/nvme0n1p2", False, "disk/nvme0n1p2"),
        ("/var/lib/kubelet", "/dev/sda1", False, "disk/sda1"),
        (f"{PODS}/kubernetes.io~csi/pvc/mount", "/dev/nvme5n1", True, "disk/nvme5n1"),
        ("/var/lib/kubelet/plugins/kubernetes.io/csi/x/globalmount", "/dev/mapper/a-b", True, "disk/dm-1"),
        ("/data/kubelet/pods/0b1/volumes/kubernetes.io~csi/pvc/mount", "/dev/sdb", True, "disk/sdb"),
        ("/data/kubelet/plugins/kubernetes.io/csi/x/globalmount", "/dev/dm-1", True, "disk/dm-1"),
        ("/images/a", "/dev/loop7", True, "disk/loop7"),
        ("/scratch", "/dev/rbd0", True, "disk/rbd0"),
        ("/", "/dev/rbd0", False, "disk/rbd0"),
        ("/pool", "tank/data", False, ""),
    ],
)
def test_volumes_of_pods_and_devices_of_servers_are_recognised(
    point: str, source: str, volume: bool, device: str
) -> None:
    (found,) = parse(line(point, "ext4", "8:1", source=source))
    assert (found.is_volume, found.device_entity) == (volume, device)


def test_a_disk_of_the_node_that_pods_also_mount_is_the_nodes() -> None:
    point = f"{PODS}/kubernetes.io~local-volume/pv"
    lines = [
        line(point, "xfs", "8:9"),
        line("/mnt/disks/a/path/that/is/much/longer/than/the/one/of/the/pod/x/y/z", "xfs", "8:9"),
    ]
    assert local(*lines) == ["/mnt/disks/a/path/that/is/much/longer/than/the/one/of/the/pod/x/y/z"]


def test_thousands_of_mounts_are_bounded() -> None:
    lines = [line(f"/d{n:04}", "ext4", f"8:{n}") for n in range(MAX_LOCAL + 500)]
    found = select(parse(b"".join(lines)))
    assert len(found.local) == MAX_LOCAL
    assert len(found.left_out) == MAX_NAMED + 1
    assert "468 more" in found.left_out[-1].why


FIELD = st.sampled_from(
    [b"36", b"8:1", b"/", b"/a", b"\\000", b"rw", b"-", b"ext4", b"nfs", b"ro", b"\xff", b""]
)


@given(st.one_of(st.binary(max_size=200), st.lists(FIELD, max_size=16).map(b" ".join)))
def test_no_bytes_make_the_parser_of_mountinfo_raise(raw: bytes) -> None:
    for mount in select(parse(raw)).local:
        assert mount.point.startswith("/")
        assert "\0" not in mount.point
        mount.entity.encode()


def test_the_nodes_own_subvolumes_are_checked_however_many_volumes_and_file_systems_there_are() -> None:
    own = [line("/", "btrfs", "0:30", "/@"), line("/var/lib/kubelet", "btrfs", "0:31", "/@kubelet")]
    pods = "/var/lib/kubelet/pods"
    volumes = [
        line(f"{pods}/u{n}/volumes/kubernetes.io~csi/p/mount", "ext4", f"8:{n}") for n in range(MAX_LOCAL)
    ]
    found = select(parse(b"".join([*volumes, *own])))
    assert [each.point for each in found.local[:2]] == ["/", "/var/lib/kubelet"]
    assert len(found.local) == MAX_LOCAL
    assert all("/volumes/" in each.what for each in found.left_out)
    others = [line(f"/d{n}", "ext4", f"8:{n}") for n in range(MAX_LOCAL)]
    assert local(*others, *own)[0] == "/"


def test_a_file_system_that_the_node_also_mounts_in_part_is_not_a_volume() -> None:
    volume = line("/var/lib/kubelet/pods/u/volumes/kubernetes.io~local-volume/p", "xfs")
    assert [each.is_volume for each in select(parse(volume)).local] == [True]
    for order in ((0, 1), (1, 0)):
        lines = volume, line("/var/log", "xfs", root="/log")
        [found] = select(parse(b"".join(lines[n] for n in order))).local
        assert (found.point, found.is_volume) == ("/var/log", False)
