"""Several descriptors are ready at the same time, and the handler of one closes another."""

from __future__ import annotations

import os
import selectors

import pytest

from holdfast.process import selector_loop


@pytest.mark.parametrize("anew", [False, True], ids=["closed", "its number is reused"])
def test_a_descriptor_closed_by_an_earlier_handler_is_not_handled(anew: bool) -> None:
    selector = selectors.DefaultSelector()
    pipes = [os.pipe() for _ in range(4)]
    for reads, writes in pipes:
        selector.register(reads, selectors.EVENT_READ)
        os.write(writes, b"x")
    handled, late = [], []
    for key in selector_loop.ready(selector, 1.0):
        handled.append(key.fd)
        for reads, writes in pipes:
            if reads == key.fd or reads in late:
                continue
            late.append(reads)
            selector.unregister(reads)
            os.close(reads)
            os.close(writes)
            if anew:
                other, _ = os.pipe()
                selector.register(other, selectors.EVENT_READ)
    assert len(handled) == 1
    selector.close()


def test_all_ready_descriptors_are_handled() -> None:
    selector = selectors.DefaultSelector()
    for _ in range(4):
        reads, writes = os.pipe()
        selector.register(reads, selectors.EVENT_READ)
        os.write(writes, b"x")
    assert len(list(selector_loop.ready(selector, 1.0))) == 4
    assert not list(selector_loop.ready(selectors.DefaultSelector(), 0.0))
    selector.close()
