"""A small sysfs in a folder: bridges, adapters with a port each, a GPU, an NVMe disk, temperatures."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

AER = "RxErr 0\nBadTLP {count}\nTOTAL_ERR_{kind} {count}\n"
KINDS = {"correctable": "COR", "fatal": "FATAL", "nonfatal": "NONFATAL"}

BRIDGES = ("0000:00:01.0", "0000:00:02.0")
ADAPTERS = ("0000:3b:00.0", "0000:5e:00.0")
GPU = "0000:3c:00.0"
DISK = "0000:02:00.0"
CONNECTX7, SAMSUNG, H100 = ("0x15b3", "0x1021"), ("0x144d", "0xa80a"), ("0x10de", "0x2330")
COUNTERS = (
    "link_downed", "excessive_buffer_overrun_errors", "local_link_integrity_errors", "symbol_error",
    "link_error_recovery", "port_rcv_errors", "port_xmit_discards",
)  # fmt: skip
HW_COUNTERS = ("rnr_nak_retry_err", "roce_slow_restart", "local_ack_timeout_err")


class Tree:
    """Writes attributes. `root` is the root that a sensor reads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("bus/pci/devices", "class/infiniband", "class/net", "class/hwmon"):
            (root / name).mkdir(parents=True, exist_ok=True)

    def write(self, name: str, value: object) -> None:
        path, content = self.root / name, value if isinstance(value, bytes) else f"{value}\n".encode()
        try:
            path.write_bytes(content)
        except FileNotFoundError:
            path.parent.mkdir(parents=True)
            path.write_bytes(content)

    def remove(self, name: str) -> None:
        path = self.root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()

    def pci(
        self,
        address: str,
        code: str,
        *,
        above: str = "",
        model: tuple[str, str] = CONNECTX7,
        width: int = 16,
        most: int = 16,
    ) -> str:
        """Create a device below the bridge `above`, and return its path below `root`."""
        bus = self.root / "bus/pci/devices"
        parent = bus.joinpath(above).resolve() if above else self.root / "devices/pci0000:00"
        path = parent / address
        path.mkdir(parents=True, exist_ok=True)
        (bus / address).symlink_to(path)
        name = str(path.relative_to(self.root.resolve() if above else self.root))
        self.set(name, {
            "class": code, "vendor": model[0], "device": model[1], "current_link_width": width,
            "max_link_width": most,
        })  # fmt: skip
        for kind in KINDS:
            self.aer(address, kind, 0)
        return name

    def aer(self, address: str, kind: str, count: int) -> None:
        text = AER.format(count=count, kind=KINDS[kind]).rstrip()
        self.write(f"bus/pci/devices/{address}/aer_dev_{kind}", text)

    def infiniband(self, name: str, address: str, layer: str = "InfiniBand", port: str = "1") -> str:
        """Create an adapter with one port that is up, and return the port's path below `root`."""
        folder = f"class/infiniband/{name}"
        self.set(folder, {"node_guid": f"guid:{address}", "board_id": "MT_0000000838"})
        self._link(f"{folder}/device", address)
        path = f"{folder}/ports/{port}"
        self.set(path, {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)"})
        self.write(f"{path}/link_layer", layer)
        self.set(f"{path}/counters", dict.fromkeys(COUNTERS, 0))
        self.set(f"{path}/hw_counters", dict.fromkeys(HW_COUNTERS, 0))
        return path

    def net(self, name: str, address: str = "") -> str:
        """Create an interface that is up, physical if it has an address. Return its path below `root`."""
        folder = f"class/net/{name}"
        self.set(folder, {"operstate": "up", "flags": "0x1003", "carrier_changes": 1, "dev_port": 0})
        if address:
            self._link(f"{folder}/device", address)
        return folder

    def hwmon(self, name: str, chip: str, below: str, temperatures: Mapping[str, object]) -> str:
        """Create a sensor chip of the device at `below`, a path below `root`. Return the chip's path."""
        folder = f"class/hwmon/{name}"
        self.set(folder, {"name": chip, **temperatures})
        (self.root / below).mkdir(parents=True, exist_ok=True)
        (self.root / folder / "device").symlink_to((self.root / below).resolve())
        return folder

    def set(self, folder: str, values: Mapping[str, object]) -> None:
        for name, value in values.items():
            self.write(f"{folder}/{name}", value)

    def _link(self, name: str, address: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to((self.root / "bus/pci/devices" / address).resolve())


def realistic(root: Path) -> Tree:
    """Return a node with healthy devices of all kinds."""
    tree = Tree(root)
    for bridge in BRIDGES:
        tree.pci(bridge, "0x060400")
    for n, address in enumerate(ADAPTERS):
        tree.pci(address, "0x020700", above=BRIDGES[n])
        tree.infiniband(f"mlx5_{n}", address)
        tree.net(f"ib{n}", address)
    tree.pci(GPU, "0x030200", above=BRIDGES[0], model=H100)
    disk = tree.pci(DISK, "0x010802", above=BRIDGES[1], model=SAMSUNG, width=4, most=4)
    tree.pci("0000:00:1f.0", "0x060100")
    tree.net("lo")
    nvme = f"{disk}/nvme/nvme0"
    tree.hwmon(
        "hwmon0", "nvme", nvme, {"temp1_input": 38850, "temp1_crit": 84850, "temp1_label": "Composite"}
    )
    cores = {
        f"temp{n}_{what}": value for n in range(2, 6) for what, value in (("input", 61000), ("crit", 100000))
    }
    package = {"temp1_input": 60000, "temp1_crit": 100000, "temp1_label": "Package id 0"}
    tree.hwmon("hwmon1", "coretemp", "devices/platform/coretemp.0", {**cores, **package})
    return tree
