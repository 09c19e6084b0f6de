from __future__ import annotations

from supervisor.metrics import Metrics
from tests.unit.supervisor.room import rank, status


def test_slow_ranks_have_a_ratio_and_all_have_their_own_time() -> None:
    metrics = Metrics()

    def value(name: str, number: int) -> float | None:
        return metrics.registry.get_sample_value(name, {"rank": str(number)})

    slow = rank(1, "m-1", own_s=0.084, slow=2.71)
    metrics.take(status(ranks=[rank(0, "m-0"), slow]))
    assert [value("holdfast_rank_own_seconds", number) for number in (0, 1)] == [0.031, 0.084]
    assert [value("holdfast_rank_slow_ratio", number) for number in (0, 1)] == [None, 2.71]
    metrics.take(status(ranks=[rank(0, "m-0"), rank(1, "m-1", own_s=None)]))
    assert [value("holdfast_rank_own_seconds", number) for number in (0, 1)] == [0.031, None]
    assert [value("holdfast_rank_slow_ratio", number) for number in (0, 1)] == [None, None]
