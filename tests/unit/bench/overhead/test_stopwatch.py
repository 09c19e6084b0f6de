from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from bench.overhead.stopwatch import INSIDE, WHOLE, Stopwatch, cpu_of_threads


class Work:
    def outer(self) -> str:
        return self.inner() + self.inner()

    def inner(self) -> str:
        return "x"

    def fails(self) -> None:
        raise ValueError("no")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    for name in ("outer", "inner", "fails"):
        monkeypatch.setattr(Work, name, Work.__dict__[name])  # put back after the test
    watch = Stopwatch()
    for name in ("outer", "inner", "fails"):
        watch.wrap(Work, name, name)
    return watch


def test_a_nested_call_counts_once_in_the_total(watch: Stopwatch) -> None:
    assert Work().outer() == "xx"
    assert watch.spent["inner"].calls == 2
    assert watch.spent["outer"].calls == watch.outer.calls == 1
    assert watch.spent["inner"].wall_s <= watch.spent["outer"].wall_s == watch.outer.wall_s


def test_a_call_that_raises_is_counted_and_its_exception_propagates(watch: Stopwatch) -> None:
    with pytest.raises(ValueError, match="no"):
        Work().fails()
    Work().inner()
    assert watch.spent["fails"].calls == 1
    assert watch.outer.calls == 2


def test_a_reset_clears_the_measurements_but_keeps_the_names(watch: Stopwatch, tmp_path: Path) -> None:
    Work().outer()
    watch.reset()
    Work().inner()
    watch.write(tmp_path / "spent.json")
    found = json.loads((tmp_path / "spent.json").read_text())
    assert found["outer"]["calls"] == found["spent"]["inner"]["calls"] == 1
    assert found["spent"]["outer"]["calls"] == 0
    assert [each.name for each in tmp_path.iterdir()] == ["spent.json"]


def test_steps_alternate_between_timing_whole_calls_and_nested_calls(
    watch: Stopwatch, tmp_path: Path
) -> None:
    watch.turn(WHOLE)
    Work().outer()
    assert (watch.outer.calls, watch.spent["outer"].calls, watch.spent["inner"].calls) == (1, 0, 0)
    watch.turn(INSIDE)
    Work().outer()
    assert (watch.outer.calls, watch.spent["outer"].calls, watch.spent["inner"].calls) == (1, 1, 2)
    watch.write(tmp_path / "spent.json")
    assert json.loads((tmp_path / "spent.json").read_text())["steps"] == {"inside": 1, "whole": 1}


def burn(begun: threading.Event, end: threading.Event) -> None:
    while not begun.is_set():
        if time.thread_time() > 0.02:
            begun.set()
    end.wait()


@pytest.mark.parametrize(("name", "counted"), [("holdfast-copy-0", True), ("somebody else's", False)])
def test_cpu_time_of_holdfasts_threads_in_a_rank_is_counted_separately(
    watch: Stopwatch, tmp_path: Path, name: str, counted: bool
) -> None:
    watch.reset()
    begun, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=burn, args=(begun, end), name=name)
    thread.start()
    begun.wait()
    watch.write(tmp_path / "spent.json")
    used_s = cpu_of_threads()
    end.set()
    thread.join()
    assert (json.loads((tmp_path / "spent.json").read_text())["threads_cpu_s"] >= 0.02) is counted
    assert (used_s >= 0.02) is counted
