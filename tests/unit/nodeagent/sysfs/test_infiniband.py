from __future__ import annotations

import json
from pathlib import Path

import pytest

from nodeagent.sensing.sweep import LIST_S, Reading
from nodeagent.sysfs.infiniband import COUNTERS, DOWN, SLOW, UP, ExpectedPorts, InfiniBandPorts
from nodeagent.sysfs.port_roster import COMPLETE
from tests.unit.nodeagent.sysfs.tree import ADAPTERS, BRIDGES, Tree, realistic

PORT = "class/infiniband/mlx5_0/ports/1"
STATE = frozenset({"ib_port"})


def seeing(root: Path, remembered: object = None, counts: dict[str, object] | None = None) -> InfiniBandPorts:
    before = remembered if isinstance(remembered, dict) else {}
    return InfiniBandPorts(str(root), ExpectedPorts(), before, counts or {})


def states(infiniband: InfiniBandPorts, now_s: float = 0.0) -> dict[str, float]:
    return {each.entity: each.value for each in infiniband.read(STATE, now_s)}


def test_all_ports_and_all_their_counters_are_read(tmp_path: Path) -> None:
    realistic(tmp_path)
    found = {
        (each.check, each.entity): each.value for each in seeing(tmp_path).read(InfiniBandPorts.checks, 0.0)
    }
    ports = {(check, f"port/mlx5_{n}/1"): 0.0 for check in ("ib_port", *COUNTERS) for n in range(2)}
    assert found == ports | {("ib_port_count", "node"): COMPLETE}


@pytest.mark.parametrize(("check", "files"), COUNTERS.items())
def test_each_counter_is_the_sum_of_its_files(tmp_path: Path, check: str, files: tuple[str, ...]) -> None:
    tree = realistic(tmp_path)
    for n, name in enumerate(files):
        tree.write(f"{PORT}/{name}", n + 2)
    found = {each.entity: each.value for each in seeing(tmp_path).read(frozenset({check}), 0.0)}
    assert found["port/mlx5_0/1"] == sum(n + 2 for n in range(len(files)))


def test_a_receiver_that_ends_is_no_fault_of_the_senders_port(tmp_path: Path) -> None:
    tree, infiniband = realistic(tmp_path), seeing(tmp_path)
    due = frozenset({"ib_integrity"})
    before = {each.entity: each.value for each in infiniband.read(due, 0.0)}
    tree.write(f"{PORT}/hw_counters/rnr_nak_retry_err", 7)
    assert {each.entity: each.value for each in infiniband.read(due, 5.0)} == before


def test_counters_grow_by_their_growth_across_a_restart_of_the_agent_and_of_the_adapter(
    tmp_path: Path,
) -> None:
    tree, before = realistic(tmp_path), seeing(tmp_path)
    due, name = frozenset({"ib_integrity"}), f"{PORT}/counters/local_link_integrity_errors"

    def value(infiniband: InfiniBandPorts, now_s: float) -> float:
        return next(e.value for e in infiniband.read(due, now_s) if e.entity == "port/mlx5_0/1")

    tree.write(name, 20)
    assert value(before, 0.0) == 20
    tree.write(name, 0)  # its driver was reloaded
    assert value(before, 5.0) == 20
    after = seeing(tmp_path, counts=json.loads(json.dumps(before.remembered_counts())))
    tree.write(name, 1)
    assert value(after, 10.0) == 21


def test_corrupt_remembered_counts_are_ignored(tmp_path: Path) -> None:
    realistic(tmp_path)
    garbage: dict[str, object] = {f"ib_integrity guid:{ADAPTERS[0]}/1": {"total": "many", "last": 3}}
    found = seeing(tmp_path, counts=garbage).read(frozenset({"ib_integrity"}), 0.0)
    assert {each.value for each in found} == {0.0}


def test_an_unreadable_counter_does_not_affect_the_others(tmp_path: Path) -> None:
    tree, infiniband = realistic(tmp_path), seeing(tmp_path)
    list(infiniband.read(InfiniBandPorts.checks, 0.0))
    tree.write(f"{PORT}/counters/symbol_error", "N/A (no PMA)")
    tree.remove(f"{PORT}/counters/local_link_integrity_errors")
    found = {
        each.check for each in infiniband.read(InfiniBandPorts.checks, 5.0) if each.entity == "port/mlx5_0/1"
    }
    assert found == InfiniBandPorts.checks - {"ib_symbol_errors", "ib_integrity", "ib_port_count"}


@pytest.mark.parametrize("layer", ["InfiniBand", "Ethernet"])
def test_a_port_that_goes_down_is_reported_with_its_state_even_after_a_restart(
    tmp_path: Path, layer: str
) -> None:
    tree = Tree(tmp_path)
    tree.pci(ADAPTERS[0], "0x020700")
    path = tree.infiniband("mlx5_0", ADAPTERS[0], layer)
    before = seeing(tmp_path)
    assert states(before) == {"port/mlx5_0/1": UP}
    tree.set(path, {"state": "1: DOWN", "phys_state": "3: Disabled"})
    remembered = json.loads(json.dumps(before.remembered()))
    for each in (before, seeing(tmp_path, remembered)):
        (found,) = each.read(STATE, 5.0)
        assert found.value == DOWN
        assert found.text == "1: DOWN, 3: Disabled, 400 Gb/sec (4X NDR); it was up before"


def test_a_port_is_slow_compared_with_the_best_remembered_rate_of_its_adapter(tmp_path: Path) -> None:
    tree = realistic(tmp_path)
    tree.write(f"{PORT}/rate", "100 Gb/sec (4X EDR)")
    remembered = {f"guid:{ADAPTERS[0]}/1": 400.0}
    assert states(seeing(tmp_path, remembered))["port/mlx5_0/1"] == SLOW
    assert states(seeing(tmp_path))["port/mlx5_0/1"] == UP


def test_another_adapter_of_the_same_name_is_not_the_one_that_was_up(tmp_path: Path) -> None:
    tree = realistic(tmp_path)
    tree.remove("class/infiniband/mlx5_1")
    before = seeing(tmp_path)
    states(before)
    tree.set("class/infiniband/mlx5_0", {"node_guid": "another"})
    tree.write(f"{PORT}/state", "1: DOWN")
    assert states(seeing(tmp_path, before.remembered())) == {}


def test_an_adapter_that_leaves_the_bus_is_down_and_one_that_only_leaves_the_list_is_not(
    tmp_path: Path,
) -> None:
    tree, infiniband = realistic(tmp_path), seeing(tmp_path)
    states(infiniband)
    tree.remove("class/infiniband/mlx5_0")
    assert states(infiniband, LIST_S) == {"port/mlx5_1/1": UP}
    tree.remove(str((tmp_path / f"bus/pci/devices/{ADAPTERS[0]}").resolve().relative_to(tmp_path.resolve())))
    found = {each.entity: each for each in infiniband.read(STATE, LIST_S + 5)}
    assert found["port/mlx5_0/1"].value == DOWN
    assert ADAPTERS[0] in found["port/mlx5_0/1"].text


def test_virtual_functions_are_ignored(tmp_path: Path) -> None:
    tree = realistic(tmp_path)
    path = tree.pci("0000:3b:00.2", "0x020700", above=BRIDGES[0])
    (tmp_path / path / "physfn").symlink_to(tmp_path / path)
    tree.infiniband("mlx5_2", "0000:3b:00.2")
    assert "port/mlx5_2/1" not in states(seeing(tmp_path))


def test_corrupt_remembered_data_is_ignored(tmp_path: Path) -> None:
    realistic(tmp_path)
    garbage = {"a": "fast", 5: 400.0, "b": None, "c": float("nan"), "d": -1, "e": 1e300, "f": 100.0}
    assert seeing(tmp_path, garbage).remembered() == {"f": 100.0}


def test_a_node_without_adapters_misses_none(tmp_path: Path) -> None:
    found = seeing(tmp_path).read(InfiniBandPorts.checks, 0.0)
    assert list(found) == [Reading("ib_port_count", "node", COMPLETE)]
