"""Waits are recognized from system calls as the kernel shows them."""

from __future__ import annotations

import signal

import pytest

from holdfast.inspection import thread_waits


@pytest.mark.parametrize(
    ("line", "machine", "expected"),
    [
        ("202 0x565137fb9070 0x189 0x0 0x0 0x0 0xffffffff 0x7ffd 0x7f80\n", "x86_64", thread_waits.LOCK),
        (
            "202 0x7f8054001450 0x89 0x0 0x7f80617d69f0 0x0 0xffff 0x7f80 0x7f8\n",
            "x86_64",
            thread_waits.TIMED_LOCK,
        ),
        (
            "202 0x7f8054001450 0x189 0x0 0x7f80617d69f0 0x0 0xffffffff 0x7f80 0x7f8\n",
            "x86_64",
            thread_waits.TIMED_LOCK,
        ),
        (
            "128 0x7f80 0x7f80 0x0 0x8 0x0 0x0 0x7f80 0x7f8\n",
            "x86_64",
            thread_waits.OTHER,
        ),  # sigwaitinfo, sigtimedwait
        ("202 0x7f8054001450 0x0 0x2 0x0 0x0 0x0 0x7f80 0x7f8\n", "x86_64", thread_waits.SHARED_LOCK),
        ("98 0x565137fb9070 0x189 0x0 0x0 0x0 0xffffffff 0x7ffd 0x7f80\n", "aarch64", thread_waits.LOCK),
        ("230 0x1 0x1 0x7f 0x0 0x0 0x7f 0x7f 0x7f\n", "x86_64", thread_waits.SLEEP),
        ("0 0x5 0x7f 0x1000 0x0 0x0 0x0 0x7f 0x7f\n", "x86_64", thread_waits.FILE),
        ("7 0x7f 0x1 0x1388 0x0 0x0 0x0 0x7f 0x7f\n", "x86_64", thread_waits.POLL),
        ("23 0x0 0x0 0x0 0x0 0x7ffd 0x0 0x7f 0x7f\n", "x86_64", thread_waits.SLEEP),
        ("23 0x0 0x0 0x0 0x0 0x0 0x0 0x7f 0x7f\n", "x86_64", thread_waits.POLL),
        ("270 0x4 0x7f 0x0 0x0 0x7ffd 0x0 0x7f 0x7f\n", "x86_64", thread_waits.POLL),
        ("45 0x5 0x7f 0x1000 0x0 0x0 0x0 0x7f 0x7f\n", "x86_64", thread_waits.NETWORK),
        ("288 0x26 0x7f 0x7f 0x80000 0x0 0x0 0x7f 0x7f\n", "x86_64", thread_waits.ACCEPT),
        ("202 0x26 0x7f 0x7f 0x0 0x0 0x0 0x7f 0x7f\n", "aarch64", thread_waits.ACCEPT),
        ("61 0x5 0x7f 0x0 0x0 0x0 0x0 0x7f 0x7f\n", "x86_64", thread_waits.CHILD),
        ("999 0x5 0x7f 0x0 0x0 0x0 0x0 0x7f 0x7f\n", "x86_64", thread_waits.OTHER),
        ("0 0x5 0x7f 0x0 0x0 0x0 0x0 0x7f 0x7f\n", "riscv64", thread_waits.UNKNOWN),
        ("running\n", "x86_64", thread_waits.RUNS),
        ("", "x86_64", thread_waits.UNKNOWN),
        ("202\n", "x86_64", thread_waits.OTHER),
        ("nonsense 0x\n", "x86_64", thread_waits.UNKNOWN),
    ],
)
def test_a_wait_is_recognized_by_its_system_call(line: str, machine: str, expected: str) -> None:
    assert thread_waits.of(line, machine) == expected


@pytest.mark.parametrize(
    ("caught", "children", "expected"),
    [
        ((), True, False),
        ((signal.SIGINT, 32, 33), True, False),  # the mappings of a plain Python and its C library
        ((signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGILL), True, False),
        ((signal.SIGTERM, signal.SIGPROF, signal.SIGWINCH), True, False),
        ((signal.SIGALRM,), False, True),
        ((signal.SIGINT, signal.SIGUSR1), False, True),
        ((signal.SIGUSR2,), False, True),
        ((signal.SIGIO,), False, True),
        ((signal.SIGRTMIN,), False, True),
        ((64,), False, True),
        ((signal.SIGCHLD,), False, False),
        ((signal.SIGCHLD,), True, True),
    ],
)
def test_only_a_handler_that_may_release_the_main_thread_counts(
    caught: tuple[int, ...], children: bool, expected: bool
) -> None:
    mask = sum(1 << (number - 1) for number in caught)
    assert thread_waits.may_be_ended(mask, children) is expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("202 0x7f1 0x189 0x0 0x7f80617d69f0 0x0 0xffffffff 0x7f80 0x7f8\n", (0x7F80617D69F0, True)),
        ("202 0x7f1 0x89 0x0 0x7f80617d69f0 0x0 0xffffffff 0x7f80 0x7f8\n", (0x7F80617D69F0, False)),
        ("202 0x7f1 0x80 0x0 0x7f80617d69f0 0x0 0xffffffff 0x7f80 0x7f8\n", None),  # a length, not an end
        ("202 0x7f1 0x189 0x0 0x0 0x0 0xffffffff 0x7f80 0x7f8\n", None),
        ("202 0x7f1 0x9 0x0 0x7f80617d69f0 0x0 0xffffffff 0x7f80 0x7f8\n", None),  # shared
        ("230 0x1 0x1 0x7f 0x7f80617d69f0 0x0 0x7f 0x7f 0x7f\n", None),
        ("running\n", None),
        ("", None),
    ],
)
def test_the_time_limit_of_a_wait_is_read_from_its_call(line: str, expected: tuple[int, bool] | None) -> None:
    assert thread_waits.deadline(line, "x86_64") == expected
