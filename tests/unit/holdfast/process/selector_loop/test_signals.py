from __future__ import annotations

import os
import selectors
import signal
import threading
from collections.abc import Iterator

import pytest

from holdfast.process import selector_loop
from holdfast.process.selector_loop import SignalWakeup


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    """Yield a selector. Restore the wake-up descriptor and the handlers afterwards."""
    before = signal.getsignal(signal.SIGUSR1), signal.set_wakeup_fd(-1)
    with selectors.DefaultSelector() as made:
        yield made
    signal.set_wakeup_fd(before[1])
    signal.signal(signal.SIGUSR1, before[0])


def test_a_signal_and_a_wake_from_any_thread_are_events_of_the_loop(
    selector: selectors.BaseSelector,
) -> None:
    received: list[bytes] = []
    wakeup = SignalWakeup(selector, (signal.SIGUSR1,), received.append)
    assert not list(selector_loop.ready(selector, 0.0))
    for act, expected in (
        (lambda: os.kill(os.getpid(), signal.SIGUSR1), bytes([signal.SIGUSR1])),
        (wakeup.wake, b"\0"),
    ):
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
        for key in selector_loop.ready(selector, 30.0):
            key.data()
        assert received.pop() == expected
    wakeup.close()
    wakeup._sender.close()


def test_a_wake_never_blocks(selector: selectors.BaseSelector) -> None:
    received: list[bytes] = []
    wakeup = SignalWakeup(selector, (), received.append)
    for _ in range(100_000):
        wakeup.wake()
    for key in selector_loop.ready(selector, 30.0):
        key.data()
    assert set(received[0]) == {0}
    wakeup.close()
    wakeup._sender.close()


def test_repetitions_within_a_second_count_as_one_request_and_do_not_extend_the_time() -> None:
    repeats = selector_loop.SignalRepeats()
    assert not repeats.is_repeat(0.0), "the clock may begin at 0"
    repeats.counted(100.0)
    assert [repeats.is_repeat(each) for each in (100.0, 100.5, 100.99)] == [True] * 3
    assert not repeats.is_repeat(101.0), "the user keeps pressing Ctrl-C"
