from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from functools import partial
from pathlib import Path

import pytest

from holdfast.fileio.storage_thread import StorageThread, Superseded, Unresponsive
from tests.local.waiting import until

SOON_S = 0.05
WAIT_S = 30.0


@pytest.fixture
def storage() -> Iterator[threading.Event]:
    """Storage that answers once this is set."""
    answers = threading.Event()
    yield answers
    answers.set()


@pytest.fixture
def files() -> StorageThread:
    return StorageThread("files")


def test_the_result_or_exception_of_the_work_reaches_the_caller(files: StorageThread) -> None:
    assert files.do(lambda: 7, WAIT_S) == 7
    with pytest.raises(FileNotFoundError):
        files.do(Path("/no/such/file").stat, WAIT_S)
    assert files.do(threading.current_thread, WAIT_S).daemon


def test_work_is_done_in_order(files: StorageThread) -> None:
    done: list[int] = []
    for number in range(50):
        files.submit(partial(done.append, number))
    files.do(lambda: None, WAIT_S)
    assert done == list(range(50))


def test_storage_that_hangs_is_waited_for_only_once(files: StorageThread, storage: threading.Event) -> None:
    with pytest.raises(Unresponsive, match=r"has not responded for 0.05 s"):
        files.do(storage.wait, SOON_S)
    until(lambda: files.busy_s > SOON_S or None, "it began a moment after it was asked for", WAIT_S)
    with pytest.raises(Unresponsive):
        files.do(lambda: None, SOON_S)  # at once
    assert not files._waiting
    storage.set()
    assert files.do(lambda: 1, WAIT_S) == 1


def test_only_the_newest_of_the_waiting_tasks_of_one_kind_is_done(
    files: StorageThread, storage: threading.Event
) -> None:
    files.submit(storage.wait)
    done: list[int] = []
    older, other = files.submit(lambda: done.append(1), "status"), files.submit(lambda: done.append(2), "log")
    newer = files.submit(lambda: done.append(3), "status")
    with pytest.raises(Superseded):
        older.result(WAIT_S)
    storage.set()
    newer.result(WAIT_S)
    other.result(WAIT_S)
    assert done == [2, 3]


def test_a_forked_child_gets_a_thread_of_its_own(files: StorageThread, storage: threading.Event) -> None:
    files.submit(storage.wait)
    child = os.fork()
    if child == 0:
        os._exit(files.do(lambda: 7, WAIT_S))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_thread_without_work_ends_and_the_next_work_starts_another() -> None:
    files = StorageThread("idle", idle_s=0.0)
    used = [files.do(threading.current_thread, WAIT_S) for _ in range(50)]
    for each in used:
        each.join(WAIT_S)
        assert not each.is_alive()
    assert files.do(lambda: 5, WAIT_S) == 5


def test_no_work_is_lost_while_threads_end() -> None:
    files = StorageThread("idle", idle_s=0.0)
    done: list[int] = []
    futures = [files.submit(partial(done.append, number)) for number in range(2000)]
    wait(futures, WAIT_S)
    assert done == list(range(2000))
