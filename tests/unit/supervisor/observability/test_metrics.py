from __future__ import annotations

import pytest

from supervisor.fault_kinds import FAULT_KINDS
from supervisor.observability.metrics import Metrics
from tests.unit.supervisor.status_samples import incident, rank, status


def test_slow_ranks_have_a_ratio_and_all_ranks_have_their_own_time() -> None:
    metrics = Metrics()

    def value(name: str, number: int) -> float | None:
        return metrics.registry.get_sample_value(name, {"rank": str(number)})

    slow = rank(1, "m-1", own_s=0.084, slow=2.71)
    metrics.update(status(ranks=[rank(0, "m-0"), slow]))
    assert [value("holdfast_rank_own_seconds", number) for number in (0, 1)] == [0.031, 0.084]
    assert [value("holdfast_rank_slow_ratio", number) for number in (0, 1)] == [None, 2.71]
    metrics.update(status(ranks=[rank(0, "m-0"), rank(1, "m-1", own_s=None)]))
    assert [value("holdfast_rank_own_seconds", number) for number in (0, 1)] == [0.031, None]
    assert [value("holdfast_rank_slow_ratio", number) for number in (0, 1)] == [None, None]


@pytest.mark.parametrize("kind", FAULT_KINDS)
def test_every_kind_of_fault_is_counted_as_itself(kind: str) -> None:
    metrics = Metrics()
    metrics.incident(incident(1, kind=kind))
    counted = {
        sample.labels["kind"]: sample.value
        for metric in metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "holdfast_incidents_total"
    }
    assert counted == {each: float(each == kind) for each in FAULT_KINDS}


def test_an_unknown_kind_is_not_counted_as_a_crash() -> None:
    metrics = Metrics()
    metrics.incident(incident(1, kind="of a later version"))
    assert metrics.registry.get_sample_value("holdfast_incidents_total", {"kind": "crash"}) == 0
    assert metrics.registry.get_sample_value("holdfast_incidents_total", {"kind": "unknown"}) == 1


@pytest.mark.parametrize("key", ["loss", "step", "step_s"])
def test_unknown_progress_is_absent_rather_than_0(key: str) -> None:
    metrics = Metrics()
    name = {"step_s": "holdfast_step_seconds"}.get(key, f"holdfast_{key}")
    for value in (None, 0.25, None, 0.0):
        metrics.update(status(**{key: value}))
        assert metrics.registry.get_sample_value(name) == value


def test_a_missing_checkpoint_has_no_step() -> None:
    metrics = Metrics()
    for saved, step in (
        (None, None),
        ({"step": 12, "error": ""}, 12),
        ({"step": None, "error": "full"}, None),
    ):
        metrics.update(status(checkpoint=saved))
        assert metrics.registry.get_sample_value("holdfast_checkpoint_step") == step
    assert metrics.registry.get_sample_value("holdfast_checkpoint_failing") == 1


def test_an_unknown_ratio_is_absent_rather_than_0() -> None:
    metrics = Metrics()

    def ratio() -> float | None:
        return metrics.registry.get_sample_value("holdfast_ettr_ratio")

    for value in (0.9, None, None, 0.5):
        metrics.update(status(ettr=value))
        assert ratio() == value


@pytest.mark.parametrize(("members", "of", "missing"), [(3, 3, 0), (2, 3, 1), (0, 3, 0)])
def test_members_that_the_group_trains_without_are_counted(members: int, of: int, missing: int) -> None:
    metrics = Metrics()
    metrics.update(status(group={"members": members, "of": of}))
    assert metrics.registry.get_sample_value("holdfast_missing_members") == missing
