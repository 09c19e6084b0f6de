"""Inspections of real processes determine from outside what each does, without disturbing it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.inspection import process_stats, rank_inspector, thread_waits
from holdfast.inspection.process_stats import ProcessTree, Sample
from holdfast.inspection.rank_inspector import InspectedRank, LastInspection
from holdfast.process import linux
from holdfast.protocol import environment
from holdfast.protocol.launcher_messages import MAX_CALLS, RankInspection
from holdfast.protocol.progress_writer import Page
from supervisor.hangs import evidence

BEGIN = "import os, sys, threading, time, subprocess\nprint(flush=True)\n"
NATIVE = """import ctypes
libc, number = ctypes.CDLL(None), ctypes.c_ulong()
start = ctypes.cast(libc.pause, ctypes.c_void_p)
assert libc.pthread_create(ctypes.byref(number), None, start, None) == 0
libc.pthread_setname_np(number, b"{name}")
threading.Event().wait()
"""
SEMAPHORE = """import ctypes
def wait():
    ctypes.CDLL(None).sem_wait(ctypes.create_string_buffer(64))
"""
BESIDE = "threading.Thread(target={target}, args=(600,), name='{name}').start(); threading.Event().wait()"
# What an idle worker of a torch DataLoader does after it has sent tensors. Its threads wait for the next
# index, for something to send, and for the rank to ask for a file descriptor.
LOADER_WORKER = """import multiprocessing.reduction, multiprocessing.resource_sharer as sharer
import os, queue, select, threading
sharer.DupFd(0)
threading.Thread(target=queue.SimpleQueue().get).start()
while True:
    select.select([os.pipe()[0]], [], [], 5.0)
"""
POLLS = "import os, time\nwhile not os.path.exists('/nonexistent'): time.sleep(0.2)"
HABITS = {
    "loader worker": f"subprocess.Popen([sys.executable, '-c', {LOADER_WORKER!r}]); threading.Event().wait()",
    "lock": "threading.Event().wait()",
    "bare lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "locks": "lock, queue = threading.Lock(), __import__('queue').SimpleQueue(); lock.acquire();"
    "[threading.Thread(target=each).start() for each in (lock.acquire, queue.get)]; lock.acquire()",
    "extension": SEMAPHORE + "wait()",
    "lock and extension": SEMAPHORE
    + "lock = threading.Lock(); lock.acquire(); threading.Thread(target=wait).start(); lock.acquire()",
    "sleep": "time.sleep(600)",
    "backs off": BESIDE.format(target="threading.Event().wait", name="upload"),
    "native": NATIVE.format(name="helper"),
    "loop": NATIVE.format(name="gloo_tcp_loop"),
    "ours": BESIDE.format(target="time.sleep", name="holdfast"),
    "handler": "import signal; signal.signal(signal.SIGALRM, print); threading.Event().wait()",
    "asked to stop": "import signal; signal.signal(signal.SIGTERM, print); threading.Event().wait()",
    "crashes": "import faulthandler; faulthandler.enable(); threading.Event().wait()",
    "pipe": "os.read(os.pipe()[0], 1)",
    "spin": "while True: pass",
    "child": "subprocess.run([sys.executable, '-c', 'while True: pass'])",
    "polling child": f"subprocess.Popen([sys.executable, '-c', {POLLS!r}]); threading.Event().wait()",
    "quiet child": "subprocess.Popen(['cat'], stdin=subprocess.PIPE); threading.Event().wait()",
    "writes": "while True: os.write(os.open('/dev/null', 1), b'x' * 99); time.sleep(0.01)",
}


@pytest.fixture(autouse=True)
def _py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.PY_SPY, str(Path(sys.executable).with_name("py-spy")))


@pytest.fixture(scope="module")
def pids() -> Iterator[dict[str, int]]:
    made = {
        name: subprocess.Popen(
            [sys.executable, "-c", BEGIN + habit], stdout=subprocess.PIPE, start_new_session=True
        )
        for name, habit in HABITS.items()
    }
    for each in made.values():
        assert each.stdout is not None
        each.stdout.readline()
    yield {name: each.pid for name, each in made.items()}
    for each in made.values():
        linux.kill_group(each.pid)
        each.wait()
        assert each.stdout is not None
        each.stdout.close()


def look_at(pid: int, page: Path = Path("/nonexistent")) -> RankInspection:
    [found] = rank_inspector.inspect_ranks(3, (InspectedRank(1, pid, page),))
    assert (found.rank, found.number) == (1, 3)
    assert found.window_s >= rank_inspector.WINDOW_S
    return found


@pytest.mark.parametrize(
    ("habit", "call", "children"),
    [
        ("lock", thread_waits.LOCK, 0),
        ("sleep", thread_waits.SLEEP, 0),
        ("pipe", thread_waits.POLL, 0),
        ("spin", thread_waits.RUNS, 0),
        ("quiet child", thread_waits.LOCK, 0),
    ],
)
def test_the_wait_of_a_process_is_detected(
    pids: dict[str, int], habit: str, call: str, children: int
) -> None:
    found = look_at(pids[habit])
    if found.calls[:1] != (call,) and habit == "spin":  # not on a core at this moment
        assert found.process_state == "R"
    else:
        assert found.calls[:1] == (call,)
    assert (found.children, found.traced, found.moved) == (children, False, False)
    assert "<module>" in found.where or "<module>" in found.stack


@pytest.mark.parametrize(
    ("habit", "calls"),
    [
        ("lock", (thread_waits.LOCK,)),
        ("backs off", (thread_waits.LOCK, thread_waits.TIMED_LOCK)),
        ("native", (thread_waits.LOCK, thread_waits.OTHER)),
        ("loop", (thread_waits.LOCK,)),
        ("ours", (thread_waits.LOCK,)),
        ("handler", (thread_waits.SIGNALLED_LOCK,)),
        ("asked to stop", (thread_waits.LOCK,)),
        ("crashes", (thread_waits.LOCK,)),
    ],
)
def test_all_threads_are_seen_except_holdfasts_and_the_loops_of_libraries(
    pids: dict[str, int], habit: str, calls: tuple[str, ...]
) -> None:
    found = look_at(pids[habit])
    while found.calls[:1] != calls[:1]:  # the last thing that each process does
        found = look_at(pids[habit])
    assert found.calls == calls
    assert (evidence.findings(found).role == evidence.LOCKED) is (set(calls) == {thread_waits.LOCK})


def test_a_process_with_a_device_or_a_communication_library_may_wait_undetected(
    pids: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert look_at(pids["sleep"]).meets_unseen is False
    monkeypatch.setattr(process_stats, "_DEVICES", ("/dev/null",))
    assert look_at(pids["writes"]).meets_unseen is True
    monkeypatch.undo()
    monkeypatch.setattr(process_stats, "_LIBRARIES", (b"/libc.",))
    assert look_at(pids["sleep"]).meets_unseen is True
    assert process_stats.may_wait_unseen(2**22 + 1) is True, (
        "a process that does not exist cannot be ruled out"
    )


def test_the_work_of_child_processes_is_included(pids: dict[str, int]) -> None:
    found = look_at(pids["child"])
    while found.children_cpu_s == 0:  # on a busy machine it may get no core within the window
        assert found.children == 1
        found = look_at(pids["child"])
    assert found.children == 1


def test_a_child_process_that_only_sleeps_is_told_from_one_that_works(pids: dict[str, int]) -> None:
    last, target = LastInspection(), InspectedRank(1, pids["polling child"], Path("/nonexistent"))
    [first] = rank_inspector.inspect_ranks(1, (target,), last=last)
    assert (first.children, first.sleeping) == (1, 0), "the first inspection cannot tell"
    while True:  # it does work while it starts
        [found] = rank_inspector.inspect_ranks(2, (target,), last=last)
        assert found.children == 1
        if found.sleeping:
            break
    assert evidence.findings(found).shows_progress is False
    assert evidence.findings(first).shows_progress is True


@pytest.mark.parametrize(
    ("waits", "earlier_io", "age_s", "sleeping"),
    [
        (("sleep",), 7, 5.0, 1),
        (("sleep", "lock"), 7, 5.0, 1),
        (("sleep",), 6, 5.0, 0),  # it has read since the last inspection
        (("sleep",), None, 5.0, 0),
        (("sleep",), 7, 31.0, 0),
        (("sleep", "network"), 7, 5.0, 0),
        (("run",), 7, 5.0, 0),
        (("lock",), 7, 5.0, 0),
    ],
)
def test_a_child_process_sleeps_only_if_it_has_done_nothing_since_the_last_inspection(
    monkeypatch: pytest.MonkeyPatch,
    waits: tuple[str, ...],
    earlier_io: int | None,
    age_s: float,
    sleeping: int,
) -> None:
    monkeypatch.setattr(process_stats, "waits_of", lambda _: waits)
    now = ProcessTree(Sample("S", False, 1.0, 0, 0), {9: Sample("S", False, 1.0, 99, 7)})
    last = LastInspection()
    if earlier_io is not None:
        last.exchange(1, replace(now, below={9: Sample("S", False, 1.0, 99, earlier_io)}), 100.0)
    found = rank_inspector._below(now, now, last.exchange(1, now, 100.0 + age_s))
    assert found == (int(waits != ("lock",)), sleeping, 0.0)


def test_an_idle_worker_of_a_data_loader_is_not_at_work(pids: dict[str, int]) -> None:
    while look_at(pids["loader worker"]).children:  # while it starts, it is
        pass


def test_written_bytes_and_computing_time_are_counted(pids: dict[str, int]) -> None:
    assert look_at(pids["writes"]).io_bytes > 0
    assert look_at(pids["spin"]).cpu_s > 0
    assert look_at(pids["lock"]).cpu_s < 0.01
    assert look_at(pids["lock"]).io_bytes == 0


def test_an_inspection_contains_step_and_phase_of_the_page(pids: dict[str, int], tmp_path: Path) -> None:
    page = Page.create(tmp_path / "page-0.bin")
    page.begin(1, 1, 0, pids["lock"], 17)
    assert look_at(pids["lock"], tmp_path / "page-0.bin").step == 17
    page.close()


def test_without_a_process_or_py_spy_an_inspection_contains_what_is_known(
    monkeypatch: pytest.MonkeyPatch, pids: dict[str, int]
) -> None:
    gone = look_at(1 << 30)
    assert (gone.process_state, gone.calls) == ("X", ())
    monkeypatch.setattr(rank_inspector, "_py_spy", lambda: "")
    blind = look_at(pids["lock"])
    assert (blind.process_state, blind.stack) == ("S", "no stack: py-spy is not installed")


def test_waits_beyond_what_a_report_lists_count_as_unknown() -> None:
    waits = tuple(f"wait {n}" for n in range(MAX_CALLS))
    assert rank_inspector.listed((*waits, *waits)) == waits
    assert rank_inspector.listed((*waits, "one more")) == (*waits[:-1], thread_waits.UNKNOWN)


@pytest.mark.parametrize(
    ("habit", "certain"),
    [("bare lock", True), ("locks", True), ("extension", False), ("lock and extension", False)],
)
def test_a_lock_of_python_is_told_from_a_wait_of_an_extension(
    pids: dict[str, int], habit: str, certain: bool
) -> None:
    """The kernel and Python's stack show the same for both."""
    found = look_at(pids[habit])
    assert found.calls == (thread_waits.LOCK,)
    assert found.at == ("acquire (_thread)" if certain else found.at)
    assert (evidence.findings(found).role == evidence.LOCKED) is certain
    assert process_stats.sample(pids[habit]).state == "S", "it was not left stopped"
