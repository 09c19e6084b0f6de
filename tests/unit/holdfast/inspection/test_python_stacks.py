"""Dumps of py-spy: the frames that are omitted, shown and compared."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.inspection import python_stacks


def frame(name: str, path: str, line: int, short: str | None = None) -> dict[str, Any]:
    return {"name": name, "filename": path, "short_filename": short, "line": line, "module": None}


def thread(name: str, *frames: dict[str, Any], tid: int | None = 7, active: bool = False) -> dict[str, Any]:
    return {"thread_name": name, "os_thread_id": tid, "active": active, "frames": list(frames)}


WAIT = frame("Condition.wait", "/usr/lib/python3.11/threading.py", 327, "threading.py")
DRILL = frame(
    "Session.drill_point", "/x/import/holdfast/training/session.py", 150, "holdfast/training/session.py"
)
EVALUATE = frame("evaluate", "/home/me/train.py", 42, "train.py")
SCRIPT = frame("<module>", "/home/me/train.py", 99, "train.py")
RUN = frame("run_path", "<frozen runpy>", 291, "<frozen runpy>")
BOOT = frame("<module>", "<string>", 1)
OURS = frame("run", "/x/import/holdfast/worker/script.py", 60, "holdfast/worker/script.py")
MODEL = frame("Linear.forward", "/v/lib/python3.11/site-packages/torch/nn/linear.py", 5, "torch/nn/linear.py")


def parsed(*threads: dict[str, Any]) -> tuple[python_stacks.Thread, ...]:
    return python_stacks.of_the_rank(python_stacks.parse(json.dumps(threads).encode()))


def test_the_main_thread_is_first_and_frames_of_holdfast_and_of_the_start_are_omitted() -> None:
    found = parsed(
        thread("loader", WAIT, tid=9),
        thread("holdfast-copy-1", WAIT),
        thread("holdfast", WAIT),
        thread("MainThread", MODEL, EVALUATE, SCRIPT, RUN, OURS, OURS, BOOT, active=True),
    )
    assert python_stacks.text(found) == (
        'Thread 7 (active): "MainThread"\n    Linear.forward (torch/nn/linear.py:5)\n'
        "    evaluate (train.py:42)\n    <module> (train.py:99)\n"
        'Thread 9 (idle): "loader"\n    Condition.wait (threading.py:327)'
    )
    assert python_stacks.where(found) == "evaluate (train.py:42)"
    assert python_stacks.innermost(found) == "Linear.forward (torch/nn/linear.py:5)"


def test_for_a_rank_in_holdfasts_code_the_line_of_the_script_is_shown() -> None:
    found = parsed(thread("MainThread", WAIT, DRILL, SCRIPT, OURS))
    assert python_stacks.where(found) == "<module> (train.py:99)"
    assert "drill_point" in python_stacks.text(found)


def test_a_script_that_holdfast_did_not_start_is_shown_whole() -> None:
    assert python_stacks.text(parsed(thread("MainThread", WAIT, BOOT))).endswith("<module> (<string>:1)")


def test_a_loop_within_one_function_does_not_count_as_movement() -> None:
    here, there = (parsed(thread("MainThread", frame("spin", "/t.py", line), SCRIPT)) for line in (4, 5))
    assert python_stacks.functions(here) == python_stacks.functions(there)
    assert python_stacks.functions(here) != python_stacks.functions(parsed(thread("MainThread", SCRIPT)))


def test_without_threads_all_texts_are_empty() -> None:
    assert (python_stacks.text(()), python_stacks.where(()), python_stacks.innermost(())) == ("", "", "")


@pytest.mark.parametrize("dump", [b"", b"{}", b"[1]", b'[{"frames": 3}]', b'[{"frames": [{"name": 1}]}]'])
def test_text_that_is_not_a_dump_is_refused(dump: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        python_stacks.parse(dump)


def test_a_thread_is_read_with_all_that_its_dump_states_and_without_missing_parts() -> None:
    full = thread("MainThread", EVALUATE, tid=11, active=True)
    bare = {"frames": [{"name": "f", "filename": "/a/b.py"}]}
    found = python_stacks.parse(json.dumps([bare, full, {}]).encode())
    assert found == (
        python_stacks.Thread(
            11, "MainThread", True, (python_stacks.Frame("evaluate", "train.py", "/home/me/train.py", 42),)
        ),
        python_stacks.Thread(0, "", False, (python_stacks.Frame("f", "/a/b.py", "/a/b.py", 0),)),
        python_stacks.Thread(0, "", False, ()),
    )
    assert [str(each) for each in (found[0].frames[0], found[1].frames[0])] == [
        "evaluate (train.py:42)",
        "f (/a/b.py)",
    ]


@pytest.mark.parametrize(
    ("frames", "shown"),
    [
        ((MODEL, EVALUATE, SCRIPT, RUN, OURS, BOOT), 3),
        ((EVALUATE, SCRIPT, frame("_run_code", "/usr/lib/python3.10/runpy.py", 86, "runpy.py"), OURS), 2),
        ((EVALUATE, SCRIPT, RUN, BOOT), 4),
        ((EVALUATE, SCRIPT), 2),
        ((WAIT, OURS, EVALUATE, SCRIPT, OURS), 4),
        ((OURS, OURS, BOOT), 3),
        ((RUN, OURS), 2),
        ((), 0),
    ],
)
def test_the_frames_that_started_the_script_are_omitted_if_holdfast_started_it(
    frames: tuple[dict[str, Any], ...], shown: int
) -> None:
    [found] = parsed(thread("loader", *frames))
    assert [each.function for each in found.frames] == [each["name"] for each in frames[:shown]]


def test_the_functions_are_those_of_the_main_thread_with_their_paths() -> None:
    found = parsed(thread("other", WAIT), thread("MainThread", MODEL, EVALUATE))
    assert python_stacks.functions(found) == (
        ("Linear.forward", "/v/lib/python3.11/site-packages/torch/nn/linear.py"),
        ("evaluate", "/home/me/train.py"),
    )
    assert python_stacks.functions(()) == ()
    assert python_stacks.innermost(parsed(thread("MainThread"))) == ""
    assert python_stacks.where(parsed(thread("MainThread", MODEL, WAIT, OURS))) == ""


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/me/lib/util.py", True),
        ("/v/lib64/python3.11/random.py", False),
        ("/usr/lib/python3/dist-packages/numpy/core.py", False),
        ("<frozen importlib._bootstrap>", False),
        ("<stdin>", True),
    ],
)
def test_a_line_of_a_library_is_not_the_scripts_own(path: str, shown: bool) -> None:
    found = parsed(thread("MainThread", frame("f", path, 1, "f.py")))
    assert python_stacks.where(found) == ("f (f.py:1)" if shown else "")


def test_long_stacks_are_cut_to_the_limit() -> None:
    found = parsed(thread("MainThread", *[EVALUATE] * 1000))
    assert len(python_stacks.text(found)) == python_stacks.MAX_TEXT == 8000


@pytest.mark.parametrize(
    ("dump", "why"),
    [
        (b"{}", "not a dump of threads"),
        (b"[1]", "not a dump of threads"),
        (b'[{"frames": 3}]', "not a dump of threads: TypeError('frames')"),
        (b'[{"frames": [{"name": 1}]}]', "not a dump of threads: KeyError('filename')"),
    ],
)
def test_a_refusal_states_what_is_wrong_with_the_dump(dump: bytes, why: str) -> None:
    with pytest.raises(ValueError, match="not a dump") as caught:
        python_stacks.parse(dump)
    assert str(caught.value) == why


PYTHON, LIBC, TORCH = "/usr/lib/libpython3.11.so.1.0", "/usr/lib/libc.so.6", "/x/torch/lib/libtorch_cpu.so"


def native(name: str, path: str) -> dict[str, Any]:
    short = path.rpartition("/")[2]
    return {"name": name, "filename": path, "short_filename": short, "line": 0, "module": path}


FUTEX = native("0x7f4fb8ca3e96", LIBC)
LOCK = (FUTEX, native("PyThread_acquire_lock_timed", PYTHON), native("lock_PyThread_acquire_lock", PYTHON))
GLOO = (FUTEX, native("pthread_cond_wait", LIBC), native("c10d::Work::wait", TORCH))


@pytest.mark.parametrize(
    ("threads", "locked"),
    [
        ([(*LOCK, SCRIPT)], True),
        ([(*LOCK, SCRIPT), (*LOCK, EVALUATE)], True),
        ([(*LOCK, SCRIPT), GLOO], True),  # a thread that runs no Python code cannot release a lock of Python
        ([(*LOCK, SCRIPT), (*GLOO, EVALUATE)], False),  # it may release the lock after its collective
        ([(*GLOO, SCRIPT)], False),
        ([(*LOCK, native("callback", TORCH), SCRIPT)], False),  # the extension may have its own rules
        ([(native("PyThread_acquire_lock_timed", PYTHON), native("do", TORCH), SCRIPT)], False),
        ([(FUTEX, SCRIPT)], False),
        ([(SCRIPT,)], False),
        ([GLOO], False),
        ([], False),
    ],
)
def test_a_wait_for_a_lock_of_python_is_told_from_a_wait_of_an_extension(
    threads: list[tuple[dict[str, Any], ...]], locked: bool
) -> None:
    found = parsed(*(thread("MainThread", *frames) for frames in threads))
    assert python_stacks.all_wait_for_python_locks(found) is locked
