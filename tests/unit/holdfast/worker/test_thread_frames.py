"""Reading other threads' frames must not start the garbage collector under the runtime lock (gh-106883)."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable

import pytest

from holdfast.worker import thread_frames


@pytest.mark.parametrize("look", [thread_frames.thread_frames, thread_frames.exceptions])
def test_no_garbage_collection_runs_while_the_threads_are_listed(
    look: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real calls allocate some hundred objects. With a threshold of one, each starts a collection."""
    runs: list[str] = []

    def ran(phase: str, _info: object) -> None:
        if phase == "start" and inside:
            runs.append(phase)

    inside: list[bool] = []
    names = ("_current_frames", "_current_exceptions")
    for name in names:
        real = getattr(sys, name)

        def asked(real: Callable[[], object] = real) -> object:
            inside.append(True)
            try:
                kept = [[number] for number in range(100)]
                assert len(kept) == 100
                return real()
            finally:
                inside.clear()

        monkeypatch.setattr(sys, name, asked)
    monkeypatch.setattr(thread_frames, "_COLLECTS_WITHIN", True)
    thresholds = gc.get_threshold()
    gc.callbacks.append(ran)
    gc.set_threshold(1, 1, 1)
    try:
        look()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(ran)
    assert runs == []
    assert gc.isenabled()


def test_a_collector_that_the_script_has_disabled_stays_disabled() -> None:
    gc.disable()
    try:
        assert threading.get_ident() in thread_frames.thread_frames()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_two_threads_that_list_frames_at_once_do_so_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that finished first once enabled the collector while the other was still listing."""
    inside, seen = threading.Event(), threading.Event()
    looks: list[bool] = []

    def ask() -> dict[int, object]:
        looks.append(gc.isenabled())
        if len(looks) == 1:
            inside.set()
            assert not seen.wait(0.2), "the second entered while the first was inside"
        else:
            seen.set()
        looks.append(gc.isenabled())
        return {}

    monkeypatch.setattr(thread_frames, "_COLLECTS_WITHIN", True)
    threads = [threading.Thread(target=thread_frames._without_collection, args=(ask,)) for _ in range(2)]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    for each in threads:
        each.join(30)
    assert looks == [False] * 4
    assert gc.isenabled()
