"""An exception that nothing will catch is known while `finally` blocks run; one that may be caught is not."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast import channel
from holdfast.channel import Say
from holdfast.unwinding import Lookout, Unwinding, unwinding

WAIT_S = 20.0


class Asked:
    """Asks, from the test's thread, while the script's thread waits in `here`."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def here(self) -> None:
        self.reached.set()
        self.go_on.wait(WAIT_S)


def seen(source: str, folder: Path) -> Unwinding | None:
    """Return what is known of the exception in a script of this source, while it is in `here()`."""
    path = folder / "train.py"
    path.write_text(source)
    asked = Asked()

    def _run_main() -> None:
        with contextlib.suppress(BaseException):
            exec(compile(source, str(path), "exec"), {"here": asked.here, "contextlib": contextlib})

    thread = threading.Thread(target=_run_main)
    thread.start()
    try:
        assert asked.reached.wait(WAIT_S)
        return unwinding(thread.ident)
    finally:
        asked.go_on.set()
        thread.join()


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("try:\n    raise ValueError('bad')\nfinally:\n    here()\n", id="finally"),
        pytest.param(
            "def step():\n    raise ValueError('bad')\n\ntry:\n    step()\nfinally:\n    here()\n",
            id="called",
        ),
        pytest.param(
            "def run():\n    try:\n        raise ValueError('bad')\n    finally:\n        here()\n\nrun()\n",
            id="in a function",
        ),
        pytest.param(
            "try:\n    raise ValueError('bad')\nexcept KeyError:\n    pass\nfinally:\n    here()\n",
            id="another except",
        ),
        pytest.param(
            "class Tracker:\n    def __enter__(self):\n        return self\n    def __exit__(self, *_):\n"
            "        here()\n\nwith Tracker():\n    raise ValueError('bad')\n",
            id="with",
        ),
        pytest.param(
            "try:\n    pass\nexcept ValueError:\n    pass\n"
            "try:\n    raise ValueError('bad')\nfinally:\n    here()\n",
            id="an except elsewhere",
        ),
    ],
)
def test_what_nothing_catches_is_known_while_it_is_on_its_way_out(source: str, tmp_path: Path) -> None:
    found = seen(source, tmp_path)
    assert found is not None
    assert isinstance(found.error, ValueError)
    assert found.text.startswith("Traceback (most recent call last):")
    assert found.text.endswith("ValueError: bad\n")
    assert str(tmp_path / "train.py") in found.text


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("try:\n    raise ValueError\nexcept ValueError:\n    here()\n", id="caught here"),
        pytest.param(
            "def step():\n    try:\n        raise ValueError\n    finally:\n        here()\n\n"
            "try:\n    step()\nexcept ValueError:\n    pass\n",
            id="caught further out",
        ),
        pytest.param(
            "try:\n    try:\n        raise ValueError\n    finally:\n        here()\n"
            "except ValueError:\n    pass\n",
            id="caught around it",
        ),
        pytest.param(
            "with contextlib.suppress(ValueError):\n    try:\n        raise ValueError\n"
            "    finally:\n        here()\n",
            id="suppressed",
        ),
        pytest.param(
            "try:\n    raise ValueError\nexcept ValueError:\n"
            "    try:\n        pass\n    finally:\n        here()\n",
            id="a finally within an except",
        ),
        pytest.param("try:\n    pass\nfinally:\n    here()\n", id="no exception"),
        pytest.param("here()\n", id="nothing"),
    ],
)
def test_what_may_be_caught_is_not_told(source: str, tmp_path: Path) -> None:
    assert seen(source, tmp_path) is None


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Unwinding | None]]:
    found: list[Unwinding | None] = []
    monkeypatch.setattr("holdfast.unwinding.unwinding", lambda: found.pop(0))
    yield found
    assert not found


def test_it_is_told_at_the_second_look_with_the_time_of_the_first(looks: list[Unwinding | None]) -> None:
    told: list[tuple[Unwinding, int]] = []
    lookout = Lookout(lambda found, since: told.append((found, since)))
    first, second = Unwinding(ValueError(), "a"), Unwinding(KeyError(), "b")
    looks += [None, first, None, second, second]
    assert [lookout.look(at) for at in range(5)] == [False, False, False, False, True]
    assert told == [(second, 3)]


def test_what_cannot_be_looked_at_is_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError

    monkeypatch.setattr("holdfast.unwinding.unwinding", broken)
    tell: Callable[[Unwinding, int], None] = lambda *_: pytest.fail("told")  # noqa: E731
    assert not Lookout(tell).look(0)


RANK = """
import sys, socket
from pathlib import Path
from holdfast import ending, runtime, session
from holdfast.command import Program
from holdfast.launcher_messages import Launch, RankStart
from holdfast import channel
from holdfast.channel import Say
from holdfast.unwinding import Lookout

mine = runtime.Runtime(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), 0, 1)
joined = session.Session(Launch(1, 1, 1, "", 0, 0, 0.0), RankStart(0, 0), mine)
Lookout(joined._tell_unwinding, 0.01).start()
sys.exit(ending.run(Program("script", sys.executable, (), sys.argv[3], (), ()), mine))
"""
SCRIPT = """
def step():
    raise RuntimeError("the batch cannot be read")

def main():
    try:
        step()
    finally:
        input()

if __name__ == "__main__":
    main()
"""


def test_a_rank_tells_its_launcher_before_it_has_unwound_and_again_at_its_end(tmp_path: Path) -> None:
    ours, theirs = channel.pair()
    ours.settimeout(WAIT_S)
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-c", RANK, str(theirs.fileno()), str(tmp_path), str(tmp_path / "train.py")]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(theirs.fileno(),)
    ) as rank:
        theirs.close()
        early, _ = channel.receive(ours, Say)
        assert early.ending is not None
        assert (early.what, early.ending.unwinding, early.ending.fail) == ("failing", True, "exception")
        _, said = rank.communicate(b"\n", WAIT_S)
        late, _ = channel.receive(ours, Say)
    assert late.ending is not None
    assert (late.what, late.ending.unwinding, late.ending.message) == ("failing", False, early.ending.message)
    assert early.ending.failed_ns < late.ending.failed_ns
    assert late.ending.message == said.decode()
    assert rank.returncode == 1
    ours.close()
