from __future__ import annotations

import json
from pathlib import Path

import pytest

from nodeagent.evaluation.evaluator import Evaluator
from nodeagent.model import GONE, Observation
from nodeagent.policy.loading import shipped
from nodeagent.sysfs import network
from nodeagent.sysfs.network import DOWN, UP, NetworkInterfaces, interface_state
from tests.unit.nodeagent.sysfs.tree import BRIDGES, Tree, realistic

STATE = frozenset({"net_down"})


def states(interfaces: NetworkInterfaces) -> dict[str, float]:
    return {each.entity: each.value for each in interfaces.read(STATE, 0.0)}


@pytest.mark.parametrize(
    ("operstate", "flags", "was_up", "found"),
    [
        ("up", 0x1003, False, UP), ("down", 0x1003, True, DOWN), ("lowerlayerdown", 0x1003, True, DOWN),
        ("down", 0x1003, False, UP), ("down", 0x1002, True, UP), ("unknown", 0x1003, True, UP),
        ("dormant", 0x1003, False, UP),
    ],
)  # fmt: skip
def test_only_an_interface_that_was_up_and_is_administratively_up_can_be_down(
    operstate: str, flags: int, was_up: bool, found: float
) -> None:
    assert interface_state(operstate, flags, was_up) == found


def test_only_physical_interfaces_are_checked_without_virtual_functions(tmp_path: Path) -> None:
    tree = realistic(tmp_path)
    path = tree.pci("0000:3b:00.2", "0x020000", above=BRIDGES[0])
    (tmp_path / path / "physfn").symlink_to(tmp_path / path)
    tree.net("vf0", "0000:3b:00.2")
    tree.net("docker0")
    found = {
        (each.check, each.entity): each.value
        for each in NetworkInterfaces(str(tmp_path), None).read(NetworkInterfaces.checks, 0.0)
    }
    assert found == {
        ("net_carrier", "net/ib0"): 1.0, ("net_carrier", "net/ib1"): 1.0,
        ("net_down", "net/ib0"): UP, ("net_down", "net/ib1"): UP,
    }  # fmt: skip


def test_an_interface_that_goes_down_is_reported_even_after_a_restart(tmp_path: Path) -> None:
    tree = realistic(tmp_path)
    before = NetworkInterfaces(str(tmp_path), None)
    states(before)
    remembered = json.loads(json.dumps(before.remembered()))
    tree.write("class/net/ib0/operstate", "down")
    for each in (before, NetworkInterfaces(str(tmp_path), remembered)):
        assert states(each) == {"net/ib0": DOWN, "net/ib1": UP}
    assert states(NetworkInterfaces(str(tmp_path), None)) == {"net/ib0": UP, "net/ib1": UP}


@pytest.mark.parametrize("entity", ["net/ib0", ""])
def test_forgetting_an_interface_ends_the_finding_that_it_is_down(tmp_path: Path, entity: str) -> None:
    tree, made = realistic(tmp_path), Evaluator(shipped())
    interfaces = NetworkInterfaces(str(tmp_path), None)

    def watch(from_s: float, until_s: float) -> list[str]:
        for at_s in range(int(from_s), int(until_s), 5):
            for each in interfaces.read(STATE, float(at_s)):
                made.add(Observation(float(at_s), each.check, each.entity, "sysfs", each.value))
        return [each.entity for each in made.findings(until_s) if each.check == "net_down"]

    assert watch(0, 100) == []
    tree.write("class/net/ib0/operstate", "down")
    assert watch(100, 200) == ["net/ib0"]
    interfaces.forget(entity)
    remembered = json.loads(json.dumps([interfaces.remembered(), interfaces.known.remembered()]))
    assert watch(200, 300) == []
    interfaces = NetworkInterfaces(str(tmp_path), *remembered)
    assert watch(300, 400) == []
    tree.write("class/net/ib0/operstate", "up")
    assert watch(400, 500) == []
    tree.write("class/net/ib0/operstate", "down")
    assert watch(500, 600) == ["net/ib0"], "it has been up since"


@pytest.mark.parametrize("entity", ["net/ib0", ""])
def test_forgetting_an_interface_that_has_vanished_ends_all_its_findings(tmp_path: Path, entity: str) -> None:
    tree, interfaces = realistic(tmp_path), NetworkInterfaces(str(tmp_path), None)
    states(interfaces)
    tree.write("class/net/ib0/operstate", "down")
    states(interfaces)
    tree.remove("class/net/ib0")
    interfaces.forget(entity)
    found = {(each.check, each.entity) for at_s in (60.0, 120.0) for each in interfaces.read(STATE, at_s)}
    assert found == {(GONE, "net/ib0"), ("net_down", "net/ib1")}


def test_an_interface_that_an_operator_takes_down_is_healthy(tmp_path: Path) -> None:
    tree = realistic(tmp_path)
    tree.set("class/net/ib0", {"operstate": "down", "flags": "0x1002"})
    assert states(NetworkInterfaces(str(tmp_path), ["ib0"]))["net/ib0"] == UP


def test_a_carrier_counter_that_falls_is_reported_unchanged(tmp_path: Path) -> None:
    tree, interfaces = realistic(tmp_path), NetworkInterfaces(str(tmp_path), None)
    for count in (1, 9, 3):
        tree.write("class/net/ib0/carrier_changes", count)
        found = {each.entity: each.value for each in interfaces.read(frozenset({"net_carrier"}), 0.0)}
        assert found["net/ib0"] == count


def test_malformed_and_missing_files_are_ignored(tmp_path: Path) -> None:
    tree, interfaces = realistic(tmp_path), NetworkInterfaces(str(tmp_path), {"ib0": True})
    assert interfaces.remembered() == []
    states(interfaces)
    tree.set("class/net/ib0", {"carrier_changes": "N/A", "flags": b"\xff"})
    tree.remove("class/net/ib1")
    assert list(interfaces.read(NetworkInterfaces.checks, 5.0)) == []


def test_an_interface_that_is_down_is_remembered_however_many_others_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "MAX_REMEMBERED", 3)
    tree = realistic(tmp_path)
    interfaces = NetworkInterfaces(str(tmp_path), None)
    states(interfaces)
    tree.write("class/net/ib0/operstate", "down")
    assert states(interfaces)["net/ib0"] == DOWN
    for number in range(8):
        path = tmp_path / "class/net/ib1"
        path.rename(tmp_path / f"class/net/up{number}")
        interfaces = NetworkInterfaces(
            str(tmp_path), interfaces.remembered(), interfaces.known.remembered()
        )  # which lists again
        assert states(interfaces)["net/ib0"] == DOWN
        (tmp_path / f"class/net/up{number}").rename(path)
    assert len(interfaces.remembered()) == 3


def many(root: Path, count: int) -> None:
    """Create a node with this many interfaces, of which the last in the order of names has RDMA."""
    tree = Tree(root)
    for number in range(count):
        path = tree.pci(f"0000:{number:02x}:00.0", "0x020000")
        tree.net(f"eth{number}", f"0000:{number:02x}:00.0")
        if number == count - 1:
            (root / path / "infiniband").mkdir()


@pytest.mark.parametrize("check", sorted(NetworkInterfaces.checks))
def test_of_too_many_interfaces_half_are_read_every_time_and_all_others_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    monkeypatch.setattr(network, "MAX_INTERFACES", 4)
    many(tmp_path, 9)
    for number in range(7):
        (tmp_path / f"class/net/eth{number}/operstate").write_text("down\n")
    interfaces = NetworkInterfaces(str(tmp_path), ["eth7"])
    sweeps = [{each.entity for each in interfaces.read(frozenset({check}), 5.0 * n)} for n in range(9)]
    assert all(len(each) == 4 for each in sweeps)
    assert set.intersection(*sweeps) == {"net/eth7", "net/eth8"}
    for n in range(6):  # the other seven take four sweeps, at two a sweep
        assert set.union(*sweeps[n : n + 4]) == {f"net/eth{number}" for number in range(9)}


def test_a_failure_of_any_of_very_many_interfaces_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "MAX_INTERFACES", 4)
    many(tmp_path, 9)
    evaluator, interfaces = Evaluator(shipped()), NetworkInterfaces(str(tmp_path), None)

    def watch(from_s: float, until_s: float) -> None:
        for at_s in range(int(from_s), int(until_s), 5):
            for each in interfaces.read(STATE, float(at_s)):
                evaluator.add(Observation(float(at_s), each.check, each.entity, "sysfs", each.value))

    watch(0.0, 60.0)
    for number in range(9):
        (tmp_path / f"class/net/eth{number}/operstate").write_text("down\n")
    watch(60.0, 240.0)
    down = {each.entity for each in evaluator.findings(240.0) if each.check == "net_down"}
    assert down == {f"net/eth{number}" for number in range(9)}


def test_interfaces_that_have_not_been_read_yet_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "MAX_INTERFACES", 4)
    many(tmp_path, 9)
    interfaces = NetworkInterfaces(str(tmp_path), None)
    unread = []
    for at_s in (0.0, 5.0, 10.0, 15.0):
        interfaces.read(STATE, at_s)
        unread.append([each.why.split()[0] for each in interfaces.left_out()])
    assert unread == [["5"], ["3"], ["1"], []]


def test_a_request_to_forget_does_not_wait_for_a_later_failure_on_a_node_with_many_interfaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    realistic(tmp_path)
    interfaces = NetworkInterfaces(str(tmp_path), None)
    states(interfaces)
    monkeypatch.setattr(network, "MAX_INTERFACES", 1)
    interfaces.read(STATE, 100.0)
    interfaces.forget("net/ib0")
    interfaces.read(STATE, 200.0)
    monkeypatch.undo()  # the others have left
    (tmp_path / "class/net/ib0").rename(tmp_path / "class/net/ib9")  # much later
    found = interfaces.read(STATE, 1000.0)
    assert "an operator had it forgotten" not in {each.text for each in found}
