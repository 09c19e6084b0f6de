"""A thread that works alongside the steps is named, because a restart or a stop cuts off its work."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.worker.thread_frames import BackgroundThreads


@pytest.mark.parametrize("pool", [False, True], ids=["a thread", "a pool"])
def test_a_thread_that_works_alongside_the_steps_is_named_once(pool: bool) -> None:
    said: list[str] = []
    threads = BackgroundThreads(said.append)
    entered, over = threading.Event(), threading.Event()

    def save() -> None:
        entered.set()
        over.wait()

    with ThreadPoolExecutor(1) as executor:
        threads.check()
        if pool:
            executor.submit(int).result()
            threads.check()
            assert said == [], "the thread waits for work"
            executor.submit(save)
        else:
            thread = threading.Thread(target=save)
            thread.start()
        entered.wait()
        threads.check()
        threads.check()
        over.set()
    if not pool:
        thread.join()
    (text,) = said
    assert text.startswith("save (test_background_threads.py, line ")
    assert "not repeated" in text


@pytest.mark.parametrize("daemon", [False, True], ids=["it was there before", "a daemon"])
def test_a_thread_that_does_no_work_of_a_step_is_not_named(daemon: bool) -> None:
    said: list[str] = []
    threads = BackgroundThreads(said.append)
    over = threading.Event()
    entered = threading.Event()

    def work() -> None:
        entered.set()
        over.wait()

    thread = threading.Thread(target=work, daemon=daemon)
    if daemon:
        threads.check()
    thread.start()
    entered.wait()
    threads.check()
    threads.check()
    over.set()
    thread.join()
    threads.check()
    assert said == []
