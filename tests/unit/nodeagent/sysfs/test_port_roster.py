"""InfiniBand ports that are missing are found, and a healthy change of the node is no fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import Level
from nodeagent.policy.loading import shipped
from nodeagent.sensing.baselines import ForgetRequests, Forgotten
from nodeagent.sensing.sweep import LIST_S
from nodeagent.sysfs.infiniband import ExpectedPorts
from nodeagent.sysfs.sensor import NOTHING_EXPECTED, SysfsSensor
from tests.unit.nodeagent.sysfs.tree import Tree
from tests.unit.nodeagent.ticking import Ticking

ADAPTERS = tuple(f"0000:{n + 16:02x}:00.0" for n in range(8))
SPARE = "0000:40:00.0"
STEP_S = 10.0
LONG_S = 1300.0  # longer than any state must last, and than any check needs to clear
MISSING = {("ib_port_count", "node", Level.UNHEALTHY)}
UNLISTED = {("ib_port_count", "node", Level.DEGRADED)}
EIGHT = ExpectedPorts(ports=8)


class Node:
    """A node with eight adapters, its sensor, and what the evaluator makes of it."""

    def __init__(self, root: Path) -> None:
        self.tree = Tree(root)
        self.clock = Ticking()
        self.periods = {name: shipped().rules[name].period_s for name in ("ib_port", "ib_port_count")}
        self.judged = Evaluator(shipped())
        self.forgets = ForgetRequests()
        self.expected = NOTHING_EXPECTED
        self.remembered: dict[str, object] = {}
        for n, address in enumerate(ADAPTERS):
            self.plug(f"mlx5_{n}", address)
        self.start()

    def plug(self, name: str, address: str, state: str = "4: ACTIVE") -> None:
        """Put an adapter with its driver on the bus."""
        self.tree.pci(address, "0x020700")
        self.list(name, address)
        self.tree.write(f"class/infiniband/{name}/ports/1/state", state)

    def list(self, name: str, address: str) -> None:
        self.tree.infiniband(name, address)
        (self.tree.root / "bus/pci/devices" / address / "infiniband").mkdir()

    def unlist(self, n: int, registered: bool = False) -> None:
        """Take an adapter out of the list; it is `registered` if another namespace has its port."""
        self.tree.remove(f"class/infiniband/mlx5_{n}")
        if not registered:
            self.tree.remove(f"bus/pci/devices/{ADAPTERS[n]}/infiniband")

    def unplug(self, n: int) -> None:
        self.unlist(n)
        self.tree.remove(f"devices/pci0000:00/{ADAPTERS[n]}")
        self.tree.remove(f"bus/pci/devices/{ADAPTERS[n]}")

    def start(self, fresh: bool = False) -> None:
        before = {} if fresh else self.remembered
        self.sensor = SysfsSensor(
            self.clock, self.periods, before, self.tree.root, self.expected, self.forgets
        )

    def stop(self) -> None:
        self.remembered = json.loads(json.dumps(self.sensor.remembered()))

    def restart(self, expected: ExpectedPorts = NOTHING_EXPECTED) -> None:
        self.expected = expected
        self.stop()
        self.start()

    def forget(self, entity: str = "") -> None:
        self.forgets.add(Forgotten("ports", entity))

    def run(self, for_s: float = LONG_S) -> set[tuple[str, str, Level]]:
        """Return the findings after a while."""
        until_s = self.clock.at_s + for_s
        while self.clock.at_s < until_s:
            for each in self.sensor.read():
                self.judged.add(each)
            self.clock.at_s += STEP_S
        found = self.judged.findings(self.clock.at_s)
        return {(each.check, each.entity, each.level) for each in found if each.level > Level.HEALTHY}

    def text(self) -> str:
        return next(each.text for each in self.sensor.read() if each.check == "ib_port_count")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    assert not made.run(2 * LIST_S)
    return made


@pytest.mark.parametrize("left", [7, 1, 0])
def test_adapters_that_are_gone_after_a_reboot_are_a_finding_until_they_are_back(
    node: Node, left: int
) -> None:
    node.stop()
    for n in range(left, 8):
        node.unplug(n)
    node.start()
    assert not node.run(200.0)
    assert node.run() == MISSING
    for n in range(left, 8):
        node.plug(f"mlx5_{n}", ADAPTERS[n])
    assert not node.run()


def test_a_missing_adapter_is_named_even_if_the_others_have_new_names(node: Node) -> None:
    node.stop()
    for n in range(3, 8):
        node.unplug(n)
    for n in range(4, 8):
        node.plug(f"mlx5_{n - 1}", ADAPTERS[n])
    node.start()
    assert node.run() == MISSING
    node.clock.at_s += 30.0
    assert node.text() == f"7 of 8 ports that were up; port/mlx5_3/1: {ADAPTERS[3]} is gone"


def test_an_adapter_that_leaves_the_bus_is_a_finding_about_the_port_and_the_node(node: Node) -> None:
    node.unplug(2)
    found = {("ib_port", "port/mlx5_2/1", Level.UNHEALTHY), *MISSING}
    assert node.run() == found
    node.restart()
    assert node.run() == found


@pytest.mark.parametrize("entity", ["", "port/mlx5_2/1"])
@pytest.mark.parametrize("running", [True, False])
def test_a_card_that_was_removed_on_purpose_is_expected_until_it_is_forgotten(
    node: Node, entity: str, running: bool
) -> None:
    node.stop()
    node.unplug(2)
    if not running:
        node.start()
    assert node.run() >= MISSING
    node.forget(entity)
    assert not node.run()
    node.restart()
    assert not node.run()
    node.unplug(3)
    node.restart()
    assert node.run() == MISSING, "the others are still expected"


def test_a_request_from_before_the_start_is_about_the_ports_of_that_time(node: Node) -> None:
    node.stop()
    node.unplug(2)
    node.forget("port/mlx5_2/1")
    node.start()
    assert not node.run()


def moved(node: Node) -> None:
    node.unplug(7)
    node.tree.pci(SPARE, "0x020700")
    node.list("mlx5_7", SPARE)
    node.tree.write("class/infiniband/mlx5_7/node_guid", f"guid:{ADAPTERS[7]}")


def replaced(node: Node) -> None:
    node.tree.write("class/infiniband/mlx5_7/node_guid", "guid:new")


def replaced_in_another_slot(node: Node) -> None:
    node.unplug(7)
    node.plug("mlx5_7", SPARE)


def in_containers(node: Node) -> None:
    for n in range(4):
        node.unlist(n, registered=True)


def given_to_a_virtual_machine(node: Node) -> None:
    node.unlist(7)
    (node.tree.root / "bus/pci/drivers/vfio-pci").mkdir(parents=True)
    device = node.tree.root / "bus/pci/devices" / ADAPTERS[7]
    (device / "driver").symlink_to(node.tree.root / "bus/pci/drivers/vfio-pci")


CHANGES = (moved, replaced, replaced_in_another_slot, in_containers, given_to_a_virtual_machine)


@pytest.mark.parametrize("change", CHANGES)
def test_a_healthy_change_of_the_adapters_is_no_fault(node: Node, change: Callable[[Node], None]) -> None:
    node.stop()
    change(node)
    node.start()
    assert not node.run()
    node.restart()
    assert not node.run()
    for n in (5, 6):
        node.unplug(n)
    node.restart()
    assert node.run() == MISSING, "it hides no fault of the others"
    node.clock.at_s += 30.0
    assert node.text().startswith("6 of 8")


def test_an_adapter_without_its_driver_is_at_most_degraded_and_one_that_is_reloaded_is_healthy(
    node: Node,
) -> None:
    for n in range(8):
        node.unlist(n)
    assert not node.run(500.0)
    assert node.run() == UNLISTED
    for n in range(8):
        node.list(f"mlx5_{n}", ADAPTERS[n])
    assert not node.run()


def test_a_port_that_is_listed_only_for_a_moment_is_not_expected(tmp_path: Path) -> None:
    """Two ports of a bond have their own names until the bond is made."""
    node = Node(tmp_path)
    node.run(30.0)
    node.unlist(7)
    assert not node.run()


def test_ports_of_virtual_functions_and_of_virtual_devices_come_and_go(node: Node) -> None:
    device = node.tree.root / "bus/pci/devices" / ADAPTERS[0]
    (device / "mlx5_core.sf.4").mkdir()
    node.tree.infiniband("mlx5_9", SPARE)
    link = node.tree.root / "class/infiniband/mlx5_9/device"
    link.unlink()
    link.symlink_to(device / "mlx5_core.sf.4")
    virtual = node.tree.pci("0000:10:00.2", "0x020700")
    (node.tree.root / virtual / "physfn").symlink_to(device)
    node.tree.infiniband("mlx5_8", "0000:10:00.2")
    assert not node.run()
    node.tree.remove("class/infiniband/mlx5_8")
    node.tree.remove("class/infiniband/mlx5_9")
    node.tree.remove(virtual)
    (device / "mlx5_core.sf.4").rmdir()
    assert not node.run()
    node.restart()
    assert not node.run()


def test_ports_that_never_were_up_do_not_replace_those_that_were(node: Node) -> None:
    node.plug("mlx5_8", SPARE, "1: DOWN")
    node.run(2 * LIST_S)
    node.unplug(7)
    node.restart()
    assert node.run() >= MISSING


# -- an operator's number


@pytest.mark.parametrize("left", [7, 1, 0])
def test_an_operators_number_is_required_even_of_a_fresh_agent(tmp_path: Path, left: int) -> None:
    node = Node(tmp_path)
    for n in range(left, 8):
        node.unlist(n)
    node.expected = EIGHT
    node.start(fresh=True)
    assert not node.run(200.0)
    assert node.run() == MISSING
    for n in range(left, 8):
        node.list(f"mlx5_{n}", ADAPTERS[n])
    assert not node.run()


def test_an_operators_number_replaces_what_was_seen(node: Node) -> None:
    node.unplug(7)
    node.restart(ExpectedPorts(ports=7))
    assert not node.run()


@pytest.mark.parametrize("fresh", [True, False])
def test_ports_in_containers_are_neither_missing_nor_called_present(node: Node, fresh: bool) -> None:
    node.stop()
    in_containers(node)
    node.expected = EIGHT
    node.start(fresh)
    assert not node.run()
    assert "ib_port_count" not in {each.check for each in node.sensor.read()}
    assert [each.what for each in node.sensor.left_out()] == ["ib_port"]
    node.unplug(6)
    assert node.run() >= MISSING


# -- a port without a cable


def test_a_port_that_never_had_a_cable_is_at_most_degraded_until_an_operator_accepts_it(node: Node) -> None:
    port = "port/mlx5_8/1"
    node.plug("mlx5_8", SPARE, "1: DOWN")
    assert node.run() == {("ib_port", port, Level.DEGRADED)}
    node.forget(port)
    assert not node.run()
    node.restart()
    assert not node.run()
    node.tree.write("class/infiniband/mlx5_8/ports/1/state", "4: ACTIVE")
    node.run(10.0)
    node.tree.write("class/infiniband/mlx5_8/ports/1/state", "1: DOWN")
    assert node.run() == {("ib_port", port, Level.UNHEALTHY)}, "it was up since"


def test_an_operators_number_ends_the_finding_about_a_port_that_is_not_needed(node: Node) -> None:
    node.tree.write("class/infiniband/mlx5_7/ports/1/state", "1: DOWN")
    assert node.run() == {("ib_port", "port/mlx5_7/1", Level.UNHEALTHY)}
    node.restart(ExpectedPorts(ports=7))
    assert not node.run()
