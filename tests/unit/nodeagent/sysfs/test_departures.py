"""What has another name, or belongs to a container, is gone; what may have failed keeps its findings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import GONE, Level
from nodeagent.policy.loading import shipped
from nodeagent.sensing.sweep import LIST_S
from nodeagent.sysfs.sensor import CHECKS, SysfsSensor
from tests.unit.nodeagent.sysfs.tree import ADAPTERS, BRIDGES, CONNECTX7, DISK, Tree, realistic
from tests.unit.nodeagent.ticking import Ticking

PORT, OTHER, NET = "port/mlx5_0/1", "port/mlx5_1/1", "net/ib0"
STATE = "class/infiniband/mlx5_0/ports/1/state"
FOREVER_S = 1000.0  # longer than the checks need to clear


class Node:
    """A node's sysfs, its sensor, and what the evaluator makes of it."""

    def __init__(self, root: Path) -> None:
        self.tree = realistic(root)
        for n, address in enumerate(ADAPTERS):  # the kernel has a directory for each kind of interface
            for kind, name in (("infiniband", f"mlx5_{n}"), ("net", f"ib{n}")):
                (root / "bus/pci/devices" / address / kind / name).mkdir(parents=True)
        self.clock = Ticking()
        self.periods = {name: rule.period_s for name, rule in shipped().rules.items() if name in CHECKS}
        self.sensor = SysfsSensor(self.clock, self.periods, root=root)
        self.judged = Evaluator(shipped())
        self.gone: list[str] = []
        self.run(10.0)

    def restart(self) -> None:
        remembered = json.loads(json.dumps(self.sensor.remembered()))
        self.sensor = SysfsSensor(self.clock, self.periods, remembered, self.tree.root)

    def run(self, for_s: float) -> None:
        until_s = self.clock.at_s + for_s
        while self.clock.at_s < until_s:
            for each in self.sensor.read():
                self.judged.add(each)
                self.gone += [each.entity] if each.check == GONE else []
            self.clock.at_s += 5.0

    def findings(self) -> set[tuple[str, str]]:
        found = self.judged.findings(self.clock.at_s)
        return {(each.check, each.entity) for each in found if each.level > Level.HEALTHY}

    def has_symbol_errors(self) -> None:
        self.tree.write("class/infiniband/mlx5_0/ports/1/counters/symbol_error", 500)
        self.run(5.0)
        assert self.findings() == {("ib_symbol_errors", PORT)}

    def is_down(self) -> None:
        self.tree.write(STATE, "1: DOWN")
        self.run(300.0)
        assert self.findings() == {("ib_port", PORT)}

    def leave_the_class(self, registered: bool) -> None:
        """Take the adapter's port and interface out of the lists, as a move or the driver does."""
        for kind, name in (("infiniband", "mlx5_0"), ("net", "ib0")):
            self.tree.remove(f"class/{kind}/{name}")
            folder = f"bus/pci/devices/{ADAPTERS[0]}/{kind}"
            self.tree.remove(f"{folder}/{name}" if registered else folder)

    def leave_the_bus(self, address: str) -> None:
        where = (self.tree.root / f"bus/pci/devices/{address}").resolve()
        self.tree.remove(str(where.relative_to(self.tree.root.resolve())))
        (self.tree.root / f"bus/pci/devices/{address}").unlink()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_port_and_an_interface_that_move_into_a_pod_have_no_findings(node: Node) -> None:
    node.has_symbol_errors()
    node.leave_the_class(registered=True)
    node.run(LIST_S)
    assert not node.gone, "a listing may miss one that is being renamed"
    node.run(LIST_S + 5.0)
    assert sorted(node.gone) == [NET, PORT]
    assert not node.findings()


def test_a_port_that_leaves_with_its_driver_or_its_device_keeps_its_findings(node: Node) -> None:
    node.has_symbol_errors()
    node.leave_the_class(registered=False)
    node.run(FOREVER_S)
    assert not node.gone
    node.leave_the_bus(ADAPTERS[0])
    node.run(FOREVER_S)
    assert not node.gone
    assert node.findings() == {("ib_symbol_errors", PORT), ("ib_port", PORT)}


def test_a_port_that_is_down_and_moves_out_of_sight_stays_down(node: Node) -> None:
    node.is_down()
    node.leave_the_class(registered=True)
    node.restart()
    node.run(FOREVER_S)
    assert PORT not in node.gone
    assert node.findings() == {("ib_port", PORT)}


def renamed(node: Node, state: str) -> None:
    node.leave_the_class(registered=True)
    path = node.tree.infiniband("mlx5_9", ADAPTERS[0])
    node.tree.write(f"{path}/state", state)


def test_a_port_that_is_down_is_gone_only_once_it_is_up_under_its_new_name(node: Node) -> None:
    node.is_down()
    renamed(node, "1: DOWN")
    node.run(FOREVER_S)
    assert PORT not in node.gone
    assert node.findings() == {("ib_port", PORT), ("ib_port", "port/mlx5_9/1")}
    node.tree.write("class/infiniband/mlx5_9/ports/1/state", "4: ACTIVE")
    node.run(FOREVER_S)
    assert PORT in node.gone
    assert not node.findings()


def test_a_port_that_has_another_name_after_a_restart_is_gone(node: Node) -> None:
    node.has_symbol_errors()
    renamed(node, "4: ACTIVE")
    node.restart()
    node.run(2 * LIST_S + 5.0)
    assert PORT in node.gone
    assert not node.findings()


def test_a_name_that_another_adapter_has_taken_starts_without_the_findings_of_the_first(node: Node) -> None:
    node.has_symbol_errors()
    for n, address in enumerate(reversed(ADAPTERS)):
        node.tree.write(f"class/infiniband/mlx5_{n}/node_guid", f"guid:{address}")
    node.restart()
    node.run(5.0)
    assert node.gone == [PORT, OTHER]
    assert not node.findings()


@pytest.mark.parametrize("guid", ["", "0000:0000:0000:0000"])
def test_an_adapter_without_its_guid_is_not_another_one(node: Node, guid: str) -> None:
    node.has_symbol_errors()
    node.tree.write("class/infiniband/mlx5_0/node_guid", guid)
    for _ in range(2):
        node.run(3 * LIST_S)
        assert not node.gone
        assert node.findings() == {("ib_symbol_errors", PORT)}
        node.tree.write("class/infiniband/mlx5_0/node_guid", f"guid:{ADAPTERS[0]}")


def test_a_renamed_interface_is_gone_and_one_that_is_down_is_not(node: Node) -> None:
    node.tree.write("class/net/ib1/operstate", "down")
    node.run(100.0)
    assert node.findings() == {("net_down", "net/ib1")}
    for n, address in enumerate(ADAPTERS):
        node.tree.remove(f"class/net/ib{n}")
        node.tree.net(f"renamed{n}", address)
    node.tree.write("class/net/renamed1/operstate", "down")
    node.run(FOREVER_S)
    assert node.gone == [NET]
    assert node.findings() == {("net_down", "net/ib1")}


def narrowed(tree: Tree) -> None:
    tree.write(f"bus/pci/devices/{ADAPTERS[0]}/current_link_width", 4)


def test_a_pci_device_at_another_address_is_gone_and_one_that_left_the_bus_is_not(node: Node) -> None:
    narrowed(node.tree)
    node.run(100.0)
    old = ("device_pcie_link", f"device/{ADAPTERS[0]}")
    assert node.findings() == {old}
    node.leave_the_class(registered=False)
    node.leave_the_bus(ADAPTERS[0])
    node.leave_the_bus(DISK)
    node.run(FOREVER_S)
    assert not node.gone
    assert old in node.findings()
    node.restart()
    node.tree.pci("0000:4b:00.0", "0x020700", above=BRIDGES[0], model=CONNECTX7)
    node.run(FOREVER_S)
    assert node.gone == [old[1]], "both adapters are there, but not the disk"
    assert old not in node.findings()


def test_what_left_before_a_restart_is_still_known_after_it(node: Node) -> None:
    node.leave_the_class(registered=False)
    node.run(FOREVER_S)
    node.restart()
    before = node.sensor.remembered()
    assert {PORT, OTHER} == before["known_ports"].keys()
    node.run(5.0)
    assert node.sensor.remembered()["known_ports"].keys() == {PORT, OTHER}
