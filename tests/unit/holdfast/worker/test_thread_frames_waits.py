from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest

from holdfast.worker.thread_frames import whereabouts

WAITS = "def all_reduce(then):\n    return then()\n"


def asked_while(file: str) -> str:
    """Return the result in another thread while the main thread is in a function of `file`."""
    names: dict[str, Callable[[Callable[[], str]], str]] = {}
    exec(compile(WAITS, file, "exec"), names)
    return names["all_reduce"](from_another_thread)


def from_another_thread() -> str:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(whereabouts()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(
    "called", ["/x/torch/distributed/distributed_c10d.py", "/x/torch/nn/parallel/distributed.py"]
)
def test_a_rank_within_a_collective_waits(called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Here, Python's own wait calls this. In a rank, C++ code below torch's frame calls it.
    monkeypatch.setattr(sys, "_current_frames", frames_at(called))
    assert whereabouts() == "collective"


@pytest.mark.parametrize("called", ["/home/me/train.py", "/x/torch/serialization.py"])
def test_all_other_code_counts_as_work(called: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_current_frames", frames_at(called))
    assert whereabouts() == "work"


def frames_at(file: str) -> Callable[[], dict[int, object]]:
    names: dict[str, object] = {"sys": sys}
    exec(compile("def here():\n    return sys._getframe()\nframe = here()\n", file, "exec"), names)
    ident = threading.main_thread().ident
    assert ident is not None
    return lambda: {ident: names["frame"]}


def test_the_main_thread_of_this_process_is_at_work() -> None:
    assert asked_while("/x/train.py") == "work"
