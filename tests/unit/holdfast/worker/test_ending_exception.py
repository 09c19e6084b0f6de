"""An exception that nothing will catch is known while `finally` blocks run; one that may be caught is not."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.protocol import rank_channel
from holdfast.protocol.rank_channel import WorkerMessage
from holdfast.worker.ending_exception import ExceptionWatcher, UnwindingException, _may_catch, find_unwinding

WAIT_S = 20.0


class Asked:
    """Queries the exception from the test's thread while the script's thread waits in `here`."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def here(self) -> None:
        self.reached.set()
        self.go_on.wait(WAIT_S)


def seen(source: str, folder: Path) -> UnwindingException | None:
    """Run a script with this source, and return what is known of its exception while it is in `here()`."""
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
        return find_unwinding(thread.ident)
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
            "class torch:\n    no_grad = contextlib.nullcontext\n\n"
            "with torch.no_grad():\n    try:\n        raise ValueError('bad')\n"
            "    finally:\n        here()\n",
            id="with, known to let it pass",
        ),
        pytest.param(
            "try:\n    pass\nexcept ValueError:\n    pass\n"
            "try:\n    raise ValueError('bad')\nfinally:\n    here()\n",
            id="an except elsewhere",
        ),
    ],
)
def test_an_uncaught_exception_is_known_while_it_unwinds(source: str, tmp_path: Path) -> None:
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
        pytest.param(
            "class Tracker:\n    def __enter__(self):\n        return self\n    def __exit__(self, *_):\n"
            "        here()\n        return True\n\nwith Tracker():\n    raise ValueError('bad')\n",
            id="a with that swallows",
        ),
        pytest.param(
            "class Tracker:\n    def __enter__(self):\n        return self\n    def __exit__(self, *_):\n"
            "        return True\n\nwith Tracker():\n    try:\n        raise ValueError\n    finally:\n"
            "        here()\n",
            id="within a with that is not known",
        ),
        pytest.param(
            "def batches():\n    try:\n        while True:\n            yield 1\n    finally:\n"
            "        here()\n\nfor x in batches():\n    break\n",
            id="a generator that is closed",
        ),
        pytest.param(
            "class Epoch:\n    def __iter__(self):\n        return self\n    def __next__(self):\n"
            "        try:\n            raise StopIteration\n        finally:\n            here()\n\n"
            "for x in Epoch():\n    pass\n",
            id="an iterator at its end",
        ),
        pytest.param(
            "def run():\n    try:\n        raise OSError\n    finally:\n"
            "        here()\n        return 3\n\nrun()\n",
            id="a finally that returns",
        ),
        pytest.param(
            "def load():\n    try:\n        raise OSError\n    finally:\n        here()\n\n"
            "def run():\n    for x in (1,):\n        try:\n            load()\n        finally:\n"
            "            break\n\nrun()\n",
            id="a finally further out that breaks",
        ),
        pytest.param(
            "def load():\n    try:\n        raise OSError\n    finally:\n        here()\n\n"
            "code = compile('try:\\n    load()\\nexcept OSError:\\n    pass\\n', '/gone/away.py', 'exec')\n"
            "exec(code, dict(load=load))\n",
            id="no source further out",
        ),
        pytest.param(
            "def load():\n    try:\n        raise OSError\n    finally:\n        here()\n\n"
            "try:\n    load()\nexcept* OSError:\n    pass\n",
            id="except*",
            marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="no except* before"),
        ),
        pytest.param("here()\n", id="nothing"),
    ],
)
def test_an_exception_that_may_be_caught_is_not_reported(source: str, tmp_path: Path) -> None:
    assert seen(source, tmp_path) is None


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[UnwindingException | None]]:
    found: list[UnwindingException | None] = []
    monkeypatch.setattr("holdfast.worker.ending_exception.find_unwinding", lambda: found.pop(0))
    yield found
    assert not found


class Told:
    """The reports of a lookout, in order."""

    def __init__(self) -> None:
        self.all: list[object] = []
        self.place = 0
        self.lookout = ExceptionWatcher(self.tell, lambda: self.all.append("withdrawn"), lambda: self.place)

    def tell(self, found: UnwindingException, since_ns: int, overdue: bool) -> None:
        self.all.append((found.text, since_ns, overdue))


def test_an_exception_is_reported_at_the_second_look_with_the_time_of_the_first(
    looks: list[UnwindingException | None],
) -> None:
    told = Told()
    first, second = UnwindingException(ValueError(), "a"), UnwindingException(KeyError(), "b")
    looks += [None, first, None, second, second, second]
    for at in range(6):
        told.lookout.sample(at)
    assert told.all == [("b", 3, False)]


def test_the_report_is_withdrawn_once_the_exception_has_been_handled(
    looks: list[UnwindingException | None],
) -> None:
    told = Told()
    found = UnwindingException(ValueError(), "a")
    looks += [found, found, None, None]
    for at in range(4):
        told.lookout.sample(at)
    assert told.all == [("a", 0, False), "withdrawn"]


def test_the_report_is_withdrawn_when_another_exception_is_raised_or_the_script_continues(
    looks: list[UnwindingException | None],
) -> None:
    told = Told()
    first, second = UnwindingException(ValueError(), "a"), UnwindingException(KeyError(), "b")
    looks += [first, first, second, second, second]
    for at in range(4):
        told.lookout.sample(at)
    told.place = 1
    told.lookout.sample(4)
    assert told.all == [("a", 0, False), "withdrawn", ("b", 2, False), "withdrawn"]


def test_the_same_exception_is_reported_again_after_its_time(looks: list[UnwindingException | None]) -> None:
    told = Told()
    found = UnwindingException(ValueError(), "a")
    looks += [found] * 5
    for at_s in (0, 1, 29, 31, 60):
        told.lookout.sample(at_s * 1_000_000_000)
    assert told.all == [("a", 0, False), ("a", 0, True)]


def test_a_relative_name_is_not_used_once_the_working_directory_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").write_text("pass\n")
    assert _may_catch("here.py", 1)
    monkeypatch.setattr("holdfast.worker.ending_exception._START_DIRECTORY", str(tmp_path))
    assert not _may_catch("here.py", 1)


def test_frames_that_cannot_be_inspected_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError

    monkeypatch.setattr("holdfast.worker.ending_exception.find_unwinding", broken)
    told = Told()
    told.lookout.sample(0)
    assert told.all == []


RANK = """
import sys, socket
from pathlib import Path
from holdfast.worker import script as ending
from holdfast.worker import launcher_channel as runtime
from holdfast.training import session
from holdfast.worker.program import Program
from holdfast.protocol.launcher_messages import Launch, RankStart
from holdfast.protocol import rank_channel as channel
from holdfast.protocol.rank_channel import WorkerMessage
from holdfast.worker.ending_exception import ExceptionWatcher

mine = runtime.LauncherChannel(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), 0, 1)
joined = session.Session(Launch(1, 1, 1, "", 0, 0, 0.0), RankStart(0, 0), mine)
ExceptionWatcher(joined._report_unwinding, joined._withdraw_unwinding, tick_s=0.01).start()
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


def test_a_rank_reports_its_exception_before_it_has_unwound_and_again_at_its_end(tmp_path: Path) -> None:
    ours, theirs = rank_channel.pair()
    ours.settimeout(WAIT_S)
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-c", RANK, str(theirs.fileno()), str(tmp_path), str(tmp_path / "train.py")]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(theirs.fileno(),)
    ) as rank:
        theirs.close()
        early, _ = rank_channel.receive(ours, WorkerMessage)
        assert early.ending is not None
        assert (early.what, early.ending.unwinding, early.ending.fail) == ("failing", True, "exception")
        _, said = rank.communicate(b"\n", WAIT_S)
        late, _ = rank_channel.receive(ours, WorkerMessage)
        if late.what == "withdrawn":  # a check found the exception between the blocks and the end
            late, _ = rank_channel.receive(ours, WorkerMessage)
    assert late.ending is not None
    assert (late.what, late.ending.unwinding, late.ending.message) == ("failing", False, early.ending.message)
    assert early.ending.failed_ns < late.ending.failed_ns
    assert late.ending.message == said.decode()
    assert rank.returncode == 1
    ours.close()
