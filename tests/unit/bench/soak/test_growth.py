from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.harness.watch import ProcessReading
from bench.soak.growth import growths

MB = 1_000_000


def series(
    rss: Callable[[int], float], files: Callable[[int], int] = lambda _: 10, key: str = "1", count: int = 40
) -> list[ProcessReading]:
    return [ProcessReading("sidecar", key, 100 * at, int(rss(at)), files(at)) for at in range(count)]


def test_a_constant_series_does_not_grow() -> None:
    [found] = growths(series(lambda at: 40 * MB + (at % 3) * MB))
    assert not found.grows()
    assert found.readings == 40


def test_a_leak_is_detected_and_measured_per_step() -> None:
    [found] = growths(series(lambda at: 40 * MB + at * MB))
    assert found.grows()
    assert found.bytes_per_100k_steps == pytest.approx(1000 * MB)


def test_one_additional_open_file_is_growth() -> None:
    [found] = growths(series(lambda _: 40 * MB, lambda at: 10 + at // 30))
    assert found.grows()


def test_growth_during_warm_up_does_not_count() -> None:
    [found] = growths(series(lambda at: 40 * MB + min(at, 7) * 10 * MB))
    assert not found.grows()


def test_each_kind_is_represented_by_the_process_that_grows_most() -> None:
    small = series(lambda _: 10 * MB, key="1")
    large = series(lambda at: 90 * MB + at * MB, key="2")
    mixed = [each for pair in zip(small, large, strict=True) for each in pair]
    [found] = growths(mixed)
    assert found.grows()
    assert found.first_bytes > 90 * MB


def test_too_few_readings_are_not_judged() -> None:
    assert growths(series(lambda _: MB, count=5)) == []


def test_growth_that_ends_within_the_warm_up_does_not_count() -> None:
    settled = series(lambda at: 40 * MB + min(at, 15) * 10 * MB)
    assert growths(settled)[0].grows()
    assert not growths(settled, 0.5)[0].grows()
