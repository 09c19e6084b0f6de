"""Which incidents of a run are evidence against a node, and what the quarantine makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from supervisor.cluster.hardware import repeats
from supervisor.cluster.hardware.repeats import WITHIN_S, HardwareHistory, HardwareIncident, counted
from supervisor.quarantine.decide import decide
from supervisor.quarantine.model import Drain, RunFault, Taint
from supervisor.view.model import Fault, OpenIncident
from tests.unit.supervisor.job_views import fault
from tests.unit.supervisor.node_views import NOW_S, POLICY, bad, finding, pool, well

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
ILLEGAL = "RuntimeError: CUDA error: an illegal memory access was encountered"
LOST_PEER = "NCCL WARN NET/IB : Got completion from peer 10.2.0.5<33092> with error 12, opcode 0"
RANKS = 4


def incident(*faults: Fault, number: int = 1, cause: Fault | None = None, **given: Any) -> OpenIncident:
    made = OpenIncident(number, 1, 0, 0, 1000.0, faults, cause=cause or faults[0])
    return replace(made, **given)


def read(found: OpenIncident, nodes: str = "nm0 nm1 nm2 nm3") -> HardwareIncident | None:
    """Each member m0, m1, ... is on one of the nodes; the pod of m1 has the address 10.2.0.5."""
    names = nodes.split()
    node_at = {"10.2.0.5": names[1]}
    return repeats.of_incident(
        found, RANKS, lambda member: names[int(member[1:])], lambda address: node_at.get(address, "")
    )


def illegal(number: int = 1, step: int = 5) -> Fault:
    return fault("exception", number, step, message=ILLEGAL, signature="exception RuntimeError at t.py:9")


def seen(
    number: int, node: str = "a", at_s: float = 0.0, rank: int = 0, step: int = -1, *, sure: bool = False
) -> HardwareIncident:
    return HardwareIncident(
        f"i-{number:04d}", at_s, node, "SIGBUS", sure, rank, step if step >= 0 else number
    )


# -- one incident


def test_a_sign_on_one_node_accuses_it() -> None:
    ecc = fault("exception", 1, message=ECC)
    found = read(incident(ecc, fault("victim", 0), fault("victim", 2)))
    assert found == HardwareIncident("i-0001", 1000.0, "nm1", "an ECC error", True, 1, 5)


def test_signs_on_several_nodes_accuse_none() -> None:
    assert read(incident(illegal(1), illegal(2))) is None
    assert read(incident(illegal(1), illegal(2)), "a b b c") is not None, "both are on one node"


def test_the_same_crash_of_all_ranks_is_the_scripts() -> None:
    everywhere = [illegal(number) for number in range(RANKS)]
    assert read(incident(*everywhere), "a a a a") is None
    assert read(incident(*everywhere[:3]), "a a a a") is not None


def test_a_sign_that_another_fault_explains_accuses_none() -> None:
    own = fault("exception", 0, message="ValueError: no")
    assert read(incident(own, illegal(1), cause=own)) is None
    assert read(incident(own)) is None


def test_an_unknown_node_or_cause_accuses_none() -> None:
    assert repeats.of_incident(incident(illegal()), RANKS, lambda _: "", lambda _: "") is None
    assert read(incident(illegal(), number=3, faults=(), cause=None)) is None


def test_nccl_accuses_the_node_that_all_have_lost_if_nobody_crashed() -> None:
    victims = [fault("victim", number, message=LOST_PEER) for number in (0, 2)]
    found = read(incident(*victims))
    assert found is not None
    assert (found.node, found.what, found.is_sure) == ("nm1", "NCCL lost this node", False)
    crashed = fault("crash", 1, signal=11)
    assert read(incident(crashed, *victims)) is None, "a peer that crashed is lost too"


# -- several incidents


def test_a_sure_sign_counts_at_once_and_any_other_only_if_it_recurs() -> None:
    assert counted([seen(1, sure=True)]) == (seen(1, sure=True),)
    assert counted([seen(1)]) == ()
    assert counted([seen(1), seen(2)]) == (seen(1), seen(2))
    assert counted([seen(1), seen(2, at_s=WITHIN_S + 1)]) == ()


def test_a_fault_at_the_same_step_of_the_same_rank_comes_from_the_data() -> None:
    assert counted([seen(1, step=7), seen(2, step=7), seen(3, step=7)]) == ()
    assert counted([seen(1, step=7), seen(2, step=7, rank=1)]) != ()


def test_faults_that_strike_any_node_accuse_none() -> None:
    everywhere = [seen(1), seen(2, "b"), seen(3), seen(4, "c")]
    assert counted(everywhere) == ()
    assert {each.node for each in counted([*everywhere, seen(5)])} == {"a"}


def test_an_incident_that_a_successor_reports_again_is_the_same_evidence() -> None:
    history = HardwareHistory()
    assert history.note(seen(1, sure=True))
    assert not history.note(seen(1, sure=True))
    record = json.loads(json.dumps(history.with_hardware({"id": "i-0001", "kind": "crash"})))
    assert history.with_hardware({"id": "i-0002"}) == {"id": "i-0002"}
    successor = HardwareHistory([record])
    assert not successor.note(seen(1, sure=True))
    once, again = (each.counted[0].fault("team/llama") for each in (history, successor))
    assert once == again == RunFault(0.0, "", "team/llama i-0001: SIGBUS of rank 0")


def test_a_record_that_somebody_has_changed_is_ignored() -> None:
    good = HardwareHistory()
    good.note(seen(1, sure=True))
    stored = dict(good.with_hardware({"id": "i-0001"})["hardware"])
    for broken in ("x", {}, {**stored, "node": 7}, {**stored, "rank": True}):
        assert HardwareHistory([{"id": "i-0001", "hardware": broken}]).counted == ()
    assert HardwareHistory([{"id": "i-0001", "hardware": {**stored, "newer": 1}}]).counted != ()


def test_only_the_newest_incidents_are_kept() -> None:
    history = HardwareHistory()
    for number in range(3 * repeats.MAX_KEPT):
        history.note(seen(number, sure=True))
    assert len(history.counted) == repeats.MAX_KEPT


# -- what the quarantine makes of it


def runs(count: int) -> tuple[RunFault, ...]:
    return tuple(
        replace(seen(number, sure=True), at_s=NOW_S - 30.0).fault("team/llama") for number in range(count)
    )


def test_runs_alone_never_take_a_node_out() -> None:
    assert decide(pool(well("a", runs=runs(16))), POLICY) == ()


def test_many_faults_of_runs_are_one_witness() -> None:
    """Two sensors of one origin are one witness, and the runs are the second, however many there are."""
    alone = finding(origins=("driver log",), entity="gpu/0", device="GPU-1")
    without = decide(pool(bad("a", alone)), POLICY)
    assert not any(isinstance(each, (Taint, Drain)) for each in without), "not confirmed yet"
    once, often = (decide(pool(bad("a", alone, runs=runs(count))), POLICY) for count in (1, 16))
    assert [type(each) for each in once] == [type(each) for each in often] == [Taint]
    assert "backed by run" in once[0].why
    other = finding(origins=("run",), entity="gpu/0", device="GPU-1")
    found = decide(pool(bad("a", other, runs=runs(16))), POLICY)
    assert not any(isinstance(each, (Taint, Drain)) for each in found), (
        "the run is no second witness of itself"
    )
